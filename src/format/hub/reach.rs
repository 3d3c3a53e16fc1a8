//! Whether the Hub can be reached at all, within seconds. The HTTP client below has no limit for a name that
//! does not resolve or a network that swallows packets; this asks first, on a thread that may be left behind.

use std::net::{TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

const CONNECT: Duration = Duration::from_secs(4);
const ALL: Duration = Duration::from_secs(10);

/// Why `endpoint` (or the proxy before it) cannot be reached.
pub(super) fn check(endpoint: &str) -> Result<(), String> {
    let target = proxy(endpoint).unwrap_or_else(|| endpoint.to_owned());
    let (host, port) = host_and_port(&target).ok_or_else(|| format!("'{target}' is not an http address"))?;
    let (send, receive) = mpsc::channel();
    thread::spawn(move || send.send(connect(&host, port)));
    receive.recv_timeout(ALL).unwrap_or_else(|_| Err("no answer".into()))
}

fn connect(host: &str, port: u16) -> Result<(), String> {
    let addresses =
        (host, port).to_socket_addrs().map_err(|_| format!("the name {host} does not resolve"))?;
    let mut last = format!("the name {host} has no address");
    for address in addresses {
        match TcpStream::connect_timeout(&address, CONNECT) {
            Ok(_) => return Ok(()),
            Err(e) => last = format!("{address}: {e}"),
        }
    }
    Err(last)
}

/// The proxy that the environment names for `endpoint`, as the HTTP client will see it.
fn proxy(endpoint: &str) -> Option<String> {
    let var = |key: &str| {
        let value = std::env::var(key).or_else(|_| std::env::var(key.to_lowercase())).ok()?;
        (!value.is_empty()).then_some(value)
    };
    let (host, _) = host_and_port(endpoint)?;
    let direct = var("NO_PROXY").is_some_and(|list| {
        list.split(',')
            .map(str::trim)
            .any(|d| d == "*" || host == d || host.ends_with(&format!(".{}", d.trim_start_matches('.'))))
    });
    let scheme = if endpoint.starts_with("https") { "HTTPS_PROXY" } else { "HTTP_PROXY" };
    let proxy = var(scheme).or_else(|| var("ALL_PROXY"))?;
    (!direct).then_some(proxy)
}

/// Of `scheme://user@host:port/path`.
fn host_and_port(url: &str) -> Option<(String, u16)> {
    let (scheme, rest) = url.split_once("://").unwrap_or(("http", url));
    let default = match scheme {
        "https" => 443,
        "http" => 80,
        "socks5" | "socks5h" | "socks4" => 1080,
        _ => return None,
    };
    let authority = rest.split(['/', '?']).next()?.rsplit('@').next()?;
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, port.parse().ok()?),
        _ => (authority, default),
    };
    let host = host.trim_matches(['[', ']']);
    (!host.is_empty()).then(|| (host.to_owned(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_split_into_host_and_port() {
        let check = |url: &str, expected: Option<(&str, u16)>| {
            assert_eq!(host_and_port(url), expected.map(|(h, p)| (h.to_owned(), p)), "{url}");
        };
        check("https://huggingface.co", Some(("huggingface.co", 443)));
        check("http://user:pw@proxy:3128/", Some(("proxy", 3128)));
        check("http://[::1]:8080/x", Some(("::1", 8080)));
        check("http://[::1]", Some(("::1", 80)));
        check("ftp://host", None);
        check("http://host:port", None);
        check("https://", None);
    }
}
