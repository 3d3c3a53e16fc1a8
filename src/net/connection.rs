//! From a socket to a connection: both greetings, then TLS, within a limit of time and of 4 KiB. Until TLS has
//! proved the token, a peer gets only our greeting.

use super::error::NetError;
use super::frame::{FrameReader, FrameWriter};
use super::greeting::{self, Greeting, Means, PROTOCOL};
use super::party::Party;
use super::tls::{self, Identity};
use super::token::{Fingerprint, Token};
use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;

/// The byte that a listener sends inside TLS when it admits a dialler.
const ADMITTED: u8 = 1;

/// Most bytes that are read from a peer before it is authenticated.
const BEFORE_AUTHENTICATION: usize = 4 << 10;

/// Bytes that are read ahead from an authenticated peer, and that TLS may buffer for the socket: several records, to
/// make few system calls.
const AHEAD: usize = 256 << 10;

/// This side's role and security. No kind of security falls back to a weaker one.
#[derive(Clone)]
pub struct Security {
    party: Party,
    means: Means,
    identity: Option<Identity>,
}

impl Security {
    /// Mutual TLS with this token.
    pub fn with_token(party: Party, token: &Token) -> Result<Self, NetError> {
        let identity = Identity::new(token, PROTOCOL)
            .map_err(|e| NetError::Local { what: "the token's key", cause: e.to_string() })?;
        Ok(Security { party, means: Means::Token(token.fingerprint()), identity: Some(identity) })
    }

    /// Plain TCP, for this machine alone.
    pub fn plain(party: Party) -> Self {
        Security { party, means: Means::Plain, identity: None }
    }

    /// No token was found: dialling never succeeds, but reports the fingerprint of the needed token.
    pub fn without_token(party: Party) -> Self {
        Security { party, means: Means::None, identity: None }
    }

    /// The fingerprint of the token, if there is one.
    pub fn fingerprint(&self) -> Option<Fingerprint> {
        match self.means {
            Means::Token(fingerprint) => Some(fingerprint),
            Means::Plain | Means::None => None,
        }
    }

    /// Whether nothing is encrypted; then no connection leaves this machine.
    pub fn is_plain(&self) -> bool {
        self.means == Means::Plain
    }

    /// The role of this side.
    pub fn party(&self) -> Party {
        self.party
    }

    /// The same means for connections between the seats of a line.
    #[must_use]
    pub fn of_a_seat(&self) -> Self {
        Security { party: Party::Seat, ..self.clone() }
    }

    fn greeting(&self) -> Greeting {
        Greeting { protocol: PROTOCOL, party: self.party, means: self.means }
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A connection to a peer that holds the same token (or is on this machine, with `--insecure`).
pub struct Connection {
    stream: Box<dyn Stream>,
    peer: SocketAddr,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "Connection({})", self.peer)
    }
}

impl Connection {
    /// The address of the peer.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Both directions, for frames of at most `limit` bytes.
    pub fn split(self, limit: usize) -> (FrameReader, FrameWriter) {
        let (input, output) = tokio::io::split(self.stream);
        (
            FrameReader::new(Box::new(input), limit, self.peer),
            FrameWriter::new(Box::new(output), limit, self.peer),
        )
    }

    /// The handshake of the dialling side. `label` is the address as it was typed.
    pub(super) async fn dialled(
        mut socket: TcpStream,
        peer: SocketAddr,
        security: &Security,
        label: &str,
    ) -> Result<Connection, NetError> {
        let (ours, mute) = (security.greeting(), |how| NetError::Mute { peer: label.into(), how });
        // A peer that has closed already may have sent something first.
        let _ = socket.write_all(&ours.bytes()).await;
        let theirs = hear(&mut socket, label).await?.ok_or(mute("closed it without a word"))?;
        ours.fits(&Greeting::read(&theirs, label)?, label)?;
        let mut stream: Box<dyn Stream> = Box::new(socket);
        if let Some(identity) = &security.identity {
            let connector = tokio_rustls::TlsConnector::from(identity.client.clone());
            let bounded = Bounded::new(stream);
            let mut tls =
                connector.connect(tls::placeholder_name(), bounded).await.map_err(|e| unproven(label, &e))?;
            let (bounded, session) = tls.get_mut();
            bounded.release();
            session.set_buffer_limit(Some(AHEAD));
            stream = Box::new(tls);
        }
        match stream.read_u8().await {
            Ok(ADMITTED) => Ok(Connection { stream, peer }),
            Ok(byte) => Err(NetError::NotFinetune { peer: label.into(), heard: greeting::shown(&[byte]) }),
            Err(e) => Err(unproven(label, &e)),
        }
    }

    /// The handshake of the listening side; [`Connection::admit`] completes it. `welcome` is called when the peer
    /// has named our token.
    pub(super) async fn accepted(
        mut socket: TcpStream,
        peer: SocketAddr,
        security: &Security,
        welcome: impl FnOnce(),
    ) -> Result<Connection, NetError> {
        let label = peer.to_string();
        let mute = |how| NetError::Mute { peer: label.clone(), how };
        let ours = security.greeting();
        let theirs = hear(&mut socket, &label).await?.ok_or(mute("closed it without a word"))?;
        let fits = Greeting::read(&theirs, &label).and_then(|theirs| ours.fits(&theirs, &label));
        if fits.is_ok() {
            welcome();
        }
        socket.write_all(&ours.bytes()).await.map_err(|_| mute("closed it at once"))?;
        if let Err(e) = fits {
            // Otherwise the greeting may be lost in a reset.
            let _ = socket.shutdown().await;
            return Err(e);
        }
        let Some(identity) = &security.identity else {
            return Ok(Connection { stream: Box::new(socket), peer });
        };
        let acceptor = tokio_rustls::TlsAcceptor::from(identity.server.clone());
        let bounded = Bounded::new(socket);
        let mut tls = acceptor.accept(bounded).await.map_err(|e| unproven(&label, &e))?;
        let (bounded, session) = tls.get_mut();
        bounded.release();
        session.set_buffer_limit(Some(AHEAD));
        Ok(Connection { stream: Box::new(tls), peer })
    }

    /// Tells the dialler that it is admitted.
    pub(super) async fn admit(&mut self) -> Result<(), NetError> {
        let gone = |_| NetError::Mute { peer: self.peer.to_string(), how: "closed it during the handshake" };
        self.stream.write_all(&[ADMITTED]).await.map_err(gone)?;
        self.stream.flush().await.map_err(gone)
    }
}

/// Reads a peer's greeting; `None` if it closed before the first byte. Bytes that cannot become one are refused at
/// once.
async fn hear(socket: &mut TcpStream, label: &str) -> Result<Option<[u8; greeting::LENGTH]>, NetError> {
    let mut bytes = [0; greeting::LENGTH];
    let mut have = 0;
    while have < bytes.len() {
        let read = socket.read(&mut bytes[have..]).await;
        have += match read {
            Ok(0) | Err(_) if have == 0 => return Ok(None),
            Ok(0) | Err(_) => {
                return Err(NetError::NotFinetune {
                    peer: label.into(),
                    heard: greeting::shown(&bytes[..have]),
                });
            }
            Ok(n) => n,
        };
        if !greeting::begins(&bytes[..have]) {
            return Err(NetError::NotFinetune { peer: label.into(), heard: greeting::shown(&bytes[..have]) });
        }
    }
    Ok(Some(bytes))
}

/// Why TLS failed. A peer that merely disconnected has proved nothing, but has not failed a proof either.
fn unproven(label: &str, e: &io::Error) -> NetError {
    match e.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>()) {
        Some(tls) => NetError::Unproven { peer: label.into(), cause: tls.to_string() },
        None if e.kind() == io::ErrorKind::InvalidData => {
            NetError::Unproven { peer: label.into(), cause: e.to_string() }
        }
        None => NetError::Mute { peer: label.into(), how: "closed it during the handshake" },
    }
}

/// Reads no more than `left` bytes from an unauthenticated peer, and large parts from an authenticated one: TLS asks
/// for 4 KiB at a time, which would be one system call each.
struct Bounded<S> {
    inner: S,
    left: usize,
    /// The read-ahead bytes at `have` are still unread; empty until the peer is authenticated.
    ahead: Vec<u8>,
    have: Range<usize>,
}

impl<S> Bounded<S> {
    fn new(inner: S) -> Self {
        Bounded { inner, left: BEFORE_AUTHENTICATION, ahead: Vec::new(), have: 0..0 }
    }

    /// The peer is authenticated.
    fn release(&mut self) {
        self.left = usize::MAX;
        self.ahead = vec![0; AHEAD];
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Bounded<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context, buf: &mut ReadBuf) -> Poll<io::Result<()>> {
        if self.left == usize::MAX {
            let this = &mut *self;
            if this.have.is_empty() {
                let mut whole = ReadBuf::new(&mut this.ahead);
                std::task::ready!(Pin::new(&mut this.inner).poll_read(cx, &mut whole))?;
                this.have = 0..whole.filled().len();
            }
            let n = this.have.len().min(buf.remaining());
            buf.put_slice(&this.ahead[this.have.start..this.have.start + n]);
            this.have.start += n;
            return Poll::Ready(Ok(()));
        }
        let most = self.left.min(buf.remaining());
        if most == 0 && buf.remaining() > 0 {
            let why = format!("more than {BEFORE_AUTHENTICATION} bytes before it has proved anything");
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, why)));
        }
        let mut part = ReadBuf::new(buf.initialize_unfilled_to(most));
        std::task::ready!(Pin::new(&mut self.inner).poll_read(cx, &mut part))?;
        let n = part.filled().len();
        buf.advance(n);
        self.left -= n;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Bounded<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context,
        bufs: &[io::IoSlice],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests;
