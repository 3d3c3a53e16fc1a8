//! Dialling: name resolution, one address after the other, the connection and the handshake, all within one time
//! limit.

use super::address::Endpoint;
use super::connection::{Connection, Security};
use super::error::{NetError, words};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::{TcpSocket, TcpStream, lookup_host};
use tokio::time::{Instant, timeout_at};

/// Time limit of one attempt: a user gets the reason of a failure within five seconds.
pub const DIAL_TIMEOUT: Duration = Duration::from_millis(4500);

/// Fraction of the time that is reserved for the handshake after the connection is made.
const HANDSHAKE_SHARE: f64 = 0.25;

/// Connects to `target` and authenticates both sides, within `time`.
pub async fn dial(target: &Endpoint, security: &Security, time: Duration) -> Result<Connection, NetError> {
    let end = Instant::now() + time;
    let unresolved = |cause| NetError::Unresolved { target: target.clone(), cause };
    let host = if target.host.is_empty() { "localhost" } else { &target.host };
    let addresses: Vec<SocketAddr> = match timeout_at(end, lookup_host((host, target.port))).await {
        Ok(Ok(found)) => found.collect(),
        Ok(Err(e)) => {
            return Err(unresolved(words(&e).replace("failed to lookup address information: ", "")));
        }
        Err(_) => return Err(unresolved("the resolver does not answer".into())),
    };
    if security.is_plain() && addresses.iter().any(|a| !a.ip().to_canonical().is_loopback()) {
        return Err(NetError::PlainFar { at: target.clone() });
    }
    if addresses.is_empty() {
        return Err(unresolved("it has no address".into()));
    }
    dial_one_of(&addresses, target, security, (time, end)).await
}

/// Connects to the first address that works; a name may stand for several machines, or for IPv4 and IPv6 of one
/// machine.
async fn dial_one_of(
    addresses: &[SocketAddr],
    target: &Endpoint,
    security: &Security,
    (time, end): (Duration, Instant),
) -> Result<Connection, NetError> {
    let mut failure = NetError::TimedOut { target: target.clone(), seeks: security.party().other() };
    for (tried, address) in addresses.iter().enumerate() {
        // A dead address must not use up the time of the others.
        let begin = Instant::now();
        let share = end.saturating_duration_since(begin) / (addresses.len() - tried) as u32;
        let connecting = share.saturating_sub(time.mul_f64(HANDSHAKE_SHARE)).max(share / 2);
        let now = match timeout_at(begin + connecting, connect(*address)).await {
            Ok(Ok(socket)) => match shake(socket, *address, target, security, begin + share).await {
                Ok(connection) => return Ok(connection),
                Err(e) => e,
            },
            Ok(Err(e)) => refused(target, &e),
            Err(_) => NetError::TimedOut { target: target.clone(), seeks: security.party().other() },
        };
        if tried == 0 || weight(&now) >= weight(&failure) {
            failure = now;
        }
    }
    Err(failure)
}

async fn connect(address: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_nodelay(true)?;
    socket.set_keepalive(true)?;
    socket.connect(address).await
}

async fn shake(
    socket: TcpStream,
    address: SocketAddr,
    target: &Endpoint,
    security: &Security,
    end: Instant,
) -> Result<Connection, NetError> {
    let label = target.to_string();
    match timeout_at(end, Connection::dialled(socket, address, security, &label)).await {
        Ok(outcome) => outcome,
        Err(_) => Err(NetError::Mute { peer: label, how: "says nothing" }),
    }
}

fn refused(target: &Endpoint, e: &std::io::Error) -> NetError {
    match e.kind() {
        ErrorKind::ConnectionRefused => NetError::Refused { target: target.clone() },
        ErrorKind::ConnectionReset => {
            NetError::Mute { peer: target.to_string(), how: "closed it without a word" }
        }
        _ => NetError::Unreachable { target: target.clone(), cause: words(e) },
    }
}

/// Ranks the failures of two addresses by their information: a received answer over a closed port, and a closed port
/// over a missing route (the IPv6 address on a machine without IPv6).
fn weight(e: &NetError) -> u8 {
    match e {
        NetError::Unreachable { .. } => 0,
        NetError::TimedOut { .. } => 1,
        NetError::Refused { .. } => 2,
        NetError::Mute { .. } => 3,
        _ => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Listener, Party, Token};
    use super::*;
    use std::io::Write;
    use tokio::runtime::Runtime;

    /// A stranger, a closed port and the right listener behind one name.
    #[test]
    fn first_working_address_of_a_name_is_used() {
        let token = Token::random().unwrap();
        let with = |party| Security::with_token(party, &token).unwrap();
        let runtime = Runtime::new().unwrap();
        let stranger = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let [there, closed] = [&stranger, &std::net::TcpListener::bind("127.0.0.1:0").unwrap()]
            .map(|socket| socket.local_addr().unwrap());
        std::thread::spawn(move || {
            stranger
                .incoming()
                .flatten()
                .for_each(|mut s| drop(s.write_all(b"HTTP/1.1 400 Bad Request\r\n")));
        });
        let at = Endpoint::loopback(0);
        let listener = runtime.block_on(Listener::bind(&at, with(Party::Coordinator), |_| ())).unwrap();
        let right = listener.address();
        let dial = |addresses: &[SocketAddr]| {
            let end = Instant::now() + DIAL_TIMEOUT;
            runtime.block_on(dial_one_of(addresses, &at, &with(Party::Worker), (DIAL_TIMEOUT, end)))
        };
        for addresses in
            [vec![right], vec![closed, right], vec![there, right], vec![closed, there, right, there]]
        {
            assert_eq!(dial(&addresses).unwrap().peer(), right, "{addresses:?}");
        }
        for addresses in [vec![there, closed], vec![closed, there]] {
            assert!(
                matches!(dial(&addresses), Err(NetError::NotFinetune { .. })),
                "the error of the open port is reported"
            );
        }
        assert!(matches!(dial(&[closed]), Err(NetError::Refused { .. })));
    }
}
