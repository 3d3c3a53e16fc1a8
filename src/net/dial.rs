//! Dialling: a name, its addresses one after the other, a connection, the handshake; all of it within one time.

use super::address::Endpoint;
use super::connection::{Connection, Security};
use super::error::{NetError, words};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::{TcpSocket, TcpStream, lookup_host};
use tokio::time::{Instant, timeout_at};

/// Time for one attempt: whoever waits for it hears why not within five seconds.
pub const DIAL_TIMEOUT: Duration = Duration::from_millis(4500);

/// Part of the time that is kept for the handshake, once the other side has taken the connection.
const HANDSHAKE_SHARE: f64 = 0.25;

/// Connects to `target` and proves and checks who both are, within `time`.
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
    let mut failure = unresolved("it has no address".into());
    let connecting = end - time.mul_f64(HANDSHAKE_SHARE);
    let many = addresses.len() as u32;
    for (tried, address) in (0..).zip(addresses) {
        // An address that is dead must not eat the time of the others.
        let share = connecting.saturating_duration_since(Instant::now()) / (many - tried).max(1);
        match timeout_at(Instant::now() + share, connect(address)).await {
            Ok(Ok(socket)) => return shake(socket, address, target, security, end).await,
            Ok(Err(e)) => failure = heavier(failure, refused(target, &e)),
            Err(_) => {
                failure = NetError::TimedOut { target: target.clone(), seeks: security.party().other() }
            }
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

/// Of two addresses' failures the one that says more: a port that is closed over one that has no route (the
/// IPv6 address of a machine without IPv6).
fn heavier(before: NetError, now: NetError) -> NetError {
    match (&before, &now) {
        (NetError::Refused { .. } | NetError::TimedOut { .. }, NetError::Unreachable { .. }) => before,
        _ => now,
    }
}
