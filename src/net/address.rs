//! Addresses as people type them: `host`, `host:port`, `:port`, `[::1]:port`. Nothing is resolved here, so that a
//! name which does not exist yet is a matter of dialling, which is tried again.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::str::FromStr;

/// Where `finetune` listens unless told otherwise.
pub const DEFAULT_PORT: u16 = 9000;

/// A host (empty: all interfaces of this machine) and a port.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// A name or an address without brackets; empty for all interfaces.
    pub host: String,
    /// 0 lets the system choose, for listening.
    pub port: u16,
}

/// Why a text is no endpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The part behind the last colon.
    #[error("{0:?} is not a port (0 .. 65535)")]
    Port(String),
    /// A name with characters that no name has.
    #[error("{0:?} is not a host (write host:port, or [address]:port for IPv6)")]
    Host(String),
}

impl Endpoint {
    /// All interfaces, on that port.
    pub fn everywhere(port: u16) -> Self {
        Endpoint { host: String::new(), port }
    }

    /// This machine alone, on that port.
    pub fn loopback(port: u16) -> Self {
        Endpoint { host: Ipv4Addr::LOCALHOST.to_string(), port }
    }

    /// True where it can only mean this machine. A name other than `localhost` is not looked up.
    pub fn is_loopback(&self) -> bool {
        match self.host.parse::<IpAddr>() {
            Ok(ip) => ip.to_canonical().is_loopback(),
            Err(_) => self.host.eq_ignore_ascii_case("localhost"),
        }
    }
}

impl FromStr for Endpoint {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        Endpoint::parse(text, DEFAULT_PORT)
    }
}

impl Endpoint {
    /// `host:port`, or a host alone, whose port is `default`.
    pub fn parse(text: &str, default: u16) -> Result<Self, AddressError> {
        let text = text.trim();
        if text.contains('/') {
            return Err(AddressError::Host(text.into()));
        }
        let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((host, "")) => (host, None),
            Some((host, rest)) => {
                (host, Some(rest.strip_prefix(':').ok_or(AddressError::Host(text.into()))?))
            }
            // Two colons without brackets: an IPv6 address alone.
            None if text.parse::<Ipv6Addr>().is_ok() => (text, None),
            None => text.rsplit_once(':').map_or((text, None), |(h, p)| (h, Some(p))),
        };
        let port = match port {
            None if host.is_empty() => return Err(AddressError::Host(text.into())),
            None => default,
            Some(p) if p.starts_with('+') => return Err(AddressError::Port(p.into())),
            Some(p) => p.parse().map_err(|_| AddressError::Port(p.into()))?,
        };
        let host = if host == "*" { "" } else { host };
        let name = |c: char| c.is_alphanumeric() || "-_.".contains(c);
        // A link-local address carries its interface behind a percent sign.
        let (ip, interface) = host.split_once('%').unwrap_or((host, ""));
        let address = ip.parse::<Ipv6Addr>().is_ok() && interface.chars().all(name);
        match address || (host.chars().all(name) && host.len() <= 253) {
            true => Ok(Endpoint { host: host.into(), port }),
            false => Err(AddressError::Host(text.into())),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// The address under which other machines most likely reach this one: that of the default route. No packet is
/// sent: connecting a UDP socket only asks the routing table.
pub fn default_route() -> Option<IpAddr> {
    let ask = |own: SocketAddr, far: SocketAddr| {
        let socket = UdpSocket::bind(own).ok()?;
        socket.connect(far).ok()?;
        let ip = socket.local_addr().ok()?.ip();
        (!ip.is_unspecified() && !ip.is_loopback()).then_some(ip)
    };
    // Addresses of documentation and benchmarking networks: routed by default, owned by nobody.
    let v4 = SocketAddr::from((Ipv4Addr::new(198, 51, 100, 1), 9));
    let v6 = SocketAddr::from((Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 9));
    ask(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)), v4)
        .or_else(|| ask(SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)), v6))
}

/// As people know it: an IPv4 address that came in over an IPv6 socket is an IPv4 address.
pub fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `host|port`, or the error.
    fn check(text: &str, expected: &str) {
        let got = match text.parse::<Endpoint>() {
            Ok(e) => format!("{}|{}", e.host, e.port),
            Err(e) => e.to_string(),
        };
        assert_eq!(got, expected, "{text:?}");
    }

    #[test]
    fn typed_endpoints_are_parsed_or_refused() {
        check("host:9001", "host|9001");
        check("host", "host|9000");
        check(" a.b-c.local:1 ", "a.b-c.local|1");
        check(":9001", "|9001");
        check("*:9001", "|9001");
        check("0.0.0.0:0", "0.0.0.0|0");
        check("::1", "::1|9000");
        check("[::1]:7", "::1|7");
        check("[fe80::1%eth0]", "fe80::1%eth0|9000");
        check("", "\"\" is not a host (write host:port, or [address]:port for IPv6)");
        check("host:", "\"\" is not a port (0 .. 65535)");
        check("host:+1", "\"+1\" is not a port (0 .. 65535)");
        check("host:65536", "\"65536\" is not a port (0 .. 65535)");
        check("a b:1", "\"a b:1\" is not a host (write host:port, or [address]:port for IPv6)");
        check(
            "http://host:1",
            "\"http://host:1\" is not a host (write host:port, or [address]:port for IPv6)",
        );
        check("[::1]7", "\"[::1]7\" is not a host (write host:port, or [address]:port for IPv6)");
    }

    #[test]
    fn printed_endpoint_is_parsed_back() {
        for text in ["host:9001", "[::1]:7", ":9000", "127.0.0.1:0"] {
            let e: Endpoint = text.parse().unwrap();
            assert_eq!(e.to_string(), text);
        }
    }

    #[test]
    fn loopback_is_this_machine() {
        let cases =
            [("localhost:1", true), ("127.0.0.2:1", true), ("[::1]:1", true), ("[::ffff:127.0.0.1]:1", true)];
        let others =
            [(":1", false), ("0.0.0.0:1", false), ("localhost.example:1", false), ("10.0.0.1:1", false)];
        for (text, expected) in cases.into_iter().chain(others) {
            assert_eq!(text.parse::<Endpoint>().unwrap().is_loopback(), expected, "{text}");
        }
    }
}
