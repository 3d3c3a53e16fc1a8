//! Listening among strangers. An unauthenticated peer costs one socket, a few kilobytes and at most five seconds.
//! There are at most [`HALF_OPEN`] of them; a new one displaces the oldest that has not named our token, of the
//! address that has most. So a flood displaces itself, and a real worker gets in. Every refusal is counted; the
//! first refusals of a minute are reported with their address and the others as a number, so that a flood does not
//! fill a log.

use super::address::{Endpoint, canonical};
use super::connection::{Connection, Security};
use super::discovery::{Announced, announce};
use super::error::{NetError, words};
use super::token::Fingerprint;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket, TcpStream, lookup_host};
use tokio::sync::{Notify, mpsc};
use tokio::task::{AbortHandle, JoinError, JoinSet};
use tokio::time::{Instant, timeout};

/// Time limit for a peer to authenticate.
const PATIENCE: Duration = Duration::from_secs(5);

/// Most unauthenticated peers at a time.
const HALF_OPEN: usize = 256;

/// Authenticated connections that may wait for [`Listener::accept`].
const READY: usize = 256;

/// How long a closing port waits for another connection that the system has accepted already.
const GLANCE: Duration = Duration::from_millis(20);

/// Refusals that are reported one by one in each [`QUIET`].
const REPORTED: u32 = 20;

/// The period of [`REPORTED`].
const QUIET: Duration = Duration::from_secs(60);

/// A refused connection.
#[derive(Debug, Clone)]
pub struct Refusal {
    /// Address of the peer.
    pub peer: SocketAddr,
    /// Why it was refused.
    pub reason: NetError,
    /// Number of refusals so far, this one included.
    pub total: u64,
    /// Number of unreported refusals since the last reported one.
    pub unreported: u64,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "refused: {}", self.reason)?;
        match self.unreported {
            0 => Ok(()),
            n => write!(f, " (and {n} more that were not shown)"),
        }
    }
}

/// An open port. Dropping it closes the port; accepted connections continue.
pub struct Listener {
    address: SocketAddr,
    ready: mpsc::Receiver<Connection>,
    refused: Arc<AtomicU64>,
    task: AbortHandle,
    closing: Arc<Notify>,
    fingerprint: Option<Fingerprint>,
    shown: Option<Announced>,
}

/// Closes a [`Listener`] from which another task accepts.
#[derive(Debug, Clone)]
pub struct Closer(Arc<Notify>);

impl Closer {
    /// Closes the port. Peers that have connected by then finish their handshakes. [`Listener::accept`] returns the
    /// authenticated ones, then an error.
    pub fn close(&self) {
        self.0.notify_one();
    }
}

impl Listener {
    /// Opens the port; `tell` receives refusals, on the runtime's threads.
    pub async fn bind(
        at: &Endpoint,
        security: Security,
        tell: impl Fn(Refusal) + Send + 'static,
    ) -> Result<Listener, NetError> {
        let socket = open(at, &security).await?;
        let address = socket.local_addr().map_err(|e| cannot(at, &e))?;
        let (send, ready) = mpsc::channel(READY);
        let refused = Arc::new(AtomicU64::new(0));
        let fingerprint = security.fingerprint();
        let closing = Arc::new(Notify::new());
        let door = Door {
            security,
            send,
            handshakes: JoinSet::new(),
            waiting: VecDeque::new(),
            crowd: HashMap::new(),
            book: Book {
                tell: Box::new(tell),
                refused: refused.clone(),
                since: Instant::now(),
                reported: 0,
                unreported: 0,
            },
        };
        let task = tokio::spawn(door.keep(socket, closing.clone())).abort_handle();
        Ok(Listener { address: canonical(address), ready, refused, task, closing, fingerprint, shown: None })
    }

    /// The next authenticated connection. Cancel safe.
    pub async fn accept(&mut self) -> Result<Connection, NetError> {
        let gone = || NetError::Local { what: "listening", cause: "its task has ended".into() };
        self.ready.recv().await.ok_or_else(gone)
    }

    /// Announces the port to the local network while it is open, for `--coordinator auto`. A port on loopback or
    /// without a token is not announced.
    pub fn show(&mut self) -> Result<(), NetError> {
        if let Some(fingerprint) = self.fingerprint.filter(|_| !self.address.ip().is_loopback()) {
            self.shown = Some(announce(self.address.port(), fingerprint)?);
        }
        Ok(())
    }

    /// A handle that closes the port from any task.
    pub fn closer(&self) -> Closer {
        Closer(self.closing.clone())
    }

    /// The address that it listens on, with the port that the system chose for port 0.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The live counter of refused connections.
    pub fn counter(&self) -> Arc<AtomicU64> {
        self.refused.clone()
    }

    /// Number of refused connections so far.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Binds all interfaces, over IPv6 and IPv4 if there is IPv6, or the first address of the name that is ours.
async fn open(at: &Endpoint, security: &Security) -> Result<TcpListener, NetError> {
    let everywhere = [IpAddr::from(Ipv6Addr::UNSPECIFIED), IpAddr::from(Ipv4Addr::UNSPECIFIED)];
    let addresses: Vec<SocketAddr> = match at.host.is_empty() {
        true => everywhere.map(|ip| SocketAddr::new(ip, at.port)).to_vec(),
        false => match lookup_host((at.host.as_str(), at.port)).await {
            Ok(found) => found.collect(),
            Err(_) => return Err(NetError::CannotListen { at: at.clone(), cause: "unknown name".into() }),
        },
    };
    if security.is_plain() && addresses.iter().any(|a| !a.ip().to_canonical().is_loopback()) {
        return Err(NetError::PlainFar { at: at.clone() });
    }
    let mut failure = NetError::CannotListen { at: at.clone(), cause: "it has no address".into() };
    for address in addresses {
        match listen(address) {
            Ok(socket) => return Ok(socket),
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                return Err(NetError::PortInUse { at: at.clone() });
            }
            Err(e) => failure = cannot(at, &e),
        }
    }
    Err(failure)
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // On Windows this option would let two processes share the port.
    #[cfg(unix)]
    socket.set_reuseaddr(true)?;
    socket.set_keepalive(true)?;
    socket.bind(address)?;
    socket.listen(1024)
}

fn cannot(at: &Endpoint, e: &io::Error) -> NetError {
    NetError::CannotListen { at: at.clone(), cause: words(e) }
}

/// The task behind a [`Listener`].
struct Door {
    security: Security,
    send: mpsc::Sender<Connection>,
    handshakes: JoinSet<Result<(), NetError>>,
    /// Unauthenticated peers in the order of their arrival.
    waiting: VecDeque<Waiting>,
    /// Number of unauthenticated peers of each address.
    crowd: HashMap<IpAddr, usize>,
    book: Book,
}

struct Waiting {
    peer: SocketAddr,
    /// Whether it has named our token (or, in the clear, that it has none); this is not yet a proof.
    named: Arc<AtomicBool>,
    handshake: AbortHandle,
}

impl Door {
    async fn keep(mut self, socket: TcpListener, closing: Arc<Notify>) {
        loop {
            tokio::select! {
                Some(done) = self.handshakes.join_next_with_id() => self.settle(done),
                () = closing.notified() => break,
                came = socket.accept() => match came {
                    Ok((socket, peer)) => {
                        self.admit(socket, canonical(peer));
                        // In a flood, each new peer is served before the next one may displace it.
                        tokio::task::yield_now().await;
                    }
                    Err(_) => {
                        // For example, out of file descriptors: displace one peer and pause.
                        self.push_out();
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                },
            }
        }
        // Connections that the system has accepted would be reset if the socket closed before they are taken.
        while let Ok(Ok((socket, peer))) = timeout(GLANCE, socket.accept()).await
            && self.waiting.len() < HALF_OPEN
        {
            self.admit(socket, canonical(peer));
        }
        drop(socket);
        while let Some(done) = self.handshakes.join_next_with_id().await {
            self.settle(done);
        }
    }

    fn admit(&mut self, socket: TcpStream, peer: SocketAddr) {
        if self.waiting.len() >= HALF_OPEN {
            self.push_out();
        }
        let (security, send) = (self.security.clone(), self.send.clone());
        let named = Arc::new(AtomicBool::new(false));
        let note = named.clone();
        let handshake = self.handshakes.spawn(async move {
            let _ = socket.set_nodelay(true);
            let welcome = || note.store(true, Ordering::Relaxed);
            let shaken = async {
                let mut connection = Connection::accepted(socket, peer, &security, welcome).await?;
                // The place is reserved first, so that an admitted dialler is never dropped.
                let crowded = |_| NetError::Crowded { peer: peer.to_string(), limit: READY };
                let place = send.try_reserve_owned().map_err(crowded)?;
                connection.admit().await?;
                place.send(connection);
                Ok(())
            };
            let late = NetError::Mute { peer: peer.to_string(), how: "did not say who it is for 5 s" };
            timeout(PATIENCE, shaken).await.unwrap_or(Err(late))
        });
        *self.crowd.entry(network(peer)).or_insert(0) += 1;
        self.waiting.push_back(Waiting { peer, named, handshake });
    }

    /// Displaces one unauthenticated peer.
    fn push_out(&mut self) {
        let named = |w: &Waiting| w.named.load(Ordering::Relaxed);
        let all = self.waiting.iter().all(named);
        let size = |w: &Waiting| self.crowd.get(&network(w.peer)).copied().unwrap_or(0);
        let most = self.waiting.iter().filter(|w| all || !named(w)).map(size).max();
        let oldest = self.waiting.iter().position(|w| (all || !named(w)) && Some(size(w)) == most);
        if let Some(gone) = oldest.and_then(|at| self.leave(at)) {
            gone.handshake.abort();
            let peer = gone.peer.to_string();
            self.book.enter(gone.peer, NetError::Crowded { peer, limit: HALF_OPEN });
        }
    }

    fn settle(&mut self, done: Result<(tokio::task::Id, Result<(), NetError>), JoinError>) {
        let (id, outcome) = match done {
            Ok((id, outcome)) => (id, Some(outcome)),
            Err(e) => (e.id(), None),
        };
        let at = self.waiting.iter().position(|w| w.handshake.id() == id);
        // A displaced peer is no longer listed, and has been counted.
        let Some(gone) = at.and_then(|at| self.leave(at)) else { return };
        match outcome {
            Some(Ok(())) => {}
            Some(Err(reason)) => self.book.enter(gone.peer, reason),
            None => {
                let peer = gone.peer.to_string();
                self.book.enter(gone.peer, NetError::Mute { peer, how: "broke its handshake" });
            }
        }
    }

    fn leave(&mut self, at: usize) -> Option<Waiting> {
        let gone = self.waiting.remove(at)?;
        let place = network(gone.peer);
        match self.crowd.get_mut(&place) {
            Some(n) if *n > 1 => *n -= 1,
            _ => drop(self.crowd.remove(&place)),
        }
        Some(gone)
    }
}

/// The owner of an address: an owner of IPv6 addresses has a /64 network.
fn network(peer: SocketAddr) -> IpAddr {
    match peer.ip() {
        IpAddr::V4(ip) => ip.into(),
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & !u128::from(u64::MAX)).into(),
    }
}

/// Counts refusals and reports some of them.
struct Book {
    tell: Box<dyn Fn(Refusal) + Send>,
    refused: Arc<AtomicU64>,
    since: Instant,
    reported: u32,
    unreported: u64,
}

impl Book {
    fn enter(&mut self, peer: SocketAddr, reason: NetError) {
        let total = self.refused.fetch_add(1, Ordering::Relaxed) + 1;
        if self.since.elapsed() > QUIET {
            (self.since, self.reported) = (Instant::now(), 0);
        }
        if self.reported >= REPORTED {
            self.unreported += 1;
            return;
        }
        self.reported += 1;
        let unreported = std::mem::take(&mut self.unreported);
        (self.tell)(Refusal { peer, reason, total, unreported });
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Party, Token};
    use super::*;

    #[test]
    fn handshakes_under_way_finish_when_the_port_closes() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let token = Token::random().unwrap();
        let with = |party| Security::with_token(party, &token).unwrap();
        runtime.block_on(async {
            let bind = Endpoint::loopback(0);
            let bound = Listener::bind(&bind, with(Party::Coordinator), |_| ());
            let mut listener = bound.await.unwrap();
            let at = listener.address();
            let before = TcpStream::connect(at).await.unwrap();
            listener.closer().close();
            // The second accept waits for the end of the first handshake, when the port is closed.
            let dialler = with(Party::Worker);
            let (dialled, accepted) =
                tokio::join!(Connection::dialled(before, at, &dialler, "it"), listener.accept());
            dialled.unwrap();
            accepted.unwrap();
            assert!(listener.accept().await.is_err());
            assert!(TcpStream::connect(at).await.is_err());
        });
    }
}
