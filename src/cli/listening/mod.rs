//! What the HTTP servers of the command line share: address, connections, bodies, the key, errors, and the signals that
//! end them.

pub mod connections;
mod failure;

use crate::config::Settings;
use crate::config::refusal::Refusal;
use crate::net::{Endpoint, default_route};
use crate::report::{self, same};
#[cfg(unix)]
use crate::run::signals;
use bytes::Bytes;
use connections::Answer;
pub use failure::Failure;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::StatusCode;
use hyper::body::{Body, Incoming};
use hyper::header::{self, HeaderMap, HeaderValue};
use serde_json::Value;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

/// Most bytes of the body of a request.
const BODY: usize = 8 << 20;
/// Time limit for the body of a request.
const PATIENCE: Duration = Duration::from_secs(30);

/// --bind: an address, or a port of this machine alone; `port` is the default.
pub fn endpoint(s: &Settings, port: u16) -> Result<Endpoint, Refusal> {
    let Some(text) = s.text("bind")? else { return Ok(Endpoint::loopback(port)) };
    match text.parse() {
        Ok(own) => Ok(Endpoint::loopback(own)),
        Err(_) => Endpoint::parse(text, port).map_err(|e| s.malformed("bind", e.to_string())),
    }
}

/// The address to listen on.
pub fn resolved(at: &Endpoint) -> Result<SocketAddr, Refusal> {
    let host = if at.host.is_empty() { "0.0.0.0" } else { &at.host };
    let mut addresses = (host, at.port).to_socket_addrs().map_err(|e| in_use(at, &e))?;
    addresses.next().ok_or_else(|| in_use(at, &std::io::ErrorKind::NotFound.into()))
}

/// Why the address cannot be listened on.
pub fn in_use(at: &Endpoint, e: &std::io::Error) -> Refusal {
    Refusal::failure(format!("--bind {}:{}: {e}: name another with --bind HOST:PORT", at.host, at.port))
}

/// The address under which other machines reach this one.
pub fn shown(address: SocketAddr) -> SocketAddr {
    match address.ip().is_unspecified() {
        true => SocketAddr::new(default_route().unwrap_or(address.ip()), address.port()),
        false => address,
    }
}

/// Refuses a request without `Authorization: Bearer KEY`.
pub fn has_key(headers: &HeaderMap, key: &str) -> Result<(), Failure> {
    let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()?.split_once(' '));
    match given
        .is_some_and(|(scheme, given)| scheme.eq_ignore_ascii_case("bearer") && same(given.trim(), key))
    {
        true => Ok(()),
        false => {
            let line = "the key is missing or wrong: send `Authorization: Bearer KEY`";
            Err(Failure::of(StatusCode::UNAUTHORIZED, line).coded("invalid_api_key"))
        }
    }
}

/// The body of a request.
pub async fn read(incoming: Incoming) -> Result<Bytes, Failure> {
    let large = || {
        let line = format!("the body has more than {BODY} bytes");
        Failure::of(StatusCode::PAYLOAD_TOO_LARGE, line)
    };
    if incoming.size_hint().lower() > BODY as u64 {
        return Err(large());
    }
    let read = tokio::time::timeout(PATIENCE, Limited::new(incoming, BODY).collect()).await;
    let late = |_| Failure::of(StatusCode::REQUEST_TIMEOUT, "the body came too slowly");
    match read.map_err(late)? {
        Ok(body) => Ok(body.to_bytes()),
        Err(e) if e.is::<LengthLimitError>() => Err(large()),
        Err(e) => Err(Failure::of(StatusCode::BAD_REQUEST, e)),
    }
}

/// The response to a request that failed.
pub fn failed(failure: &Failure) -> Answer {
    let mut answer = with_json(failure.status, &failure.body());
    let more = match failure.status {
        StatusCode::UNAUTHORIZED => Some((header::WWW_AUTHENTICATE, "Bearer")),
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Some((header::RETRY_AFTER, "1")),
        // What is left of such a body is not read.
        StatusCode::PAYLOAD_TOO_LARGE | StatusCode::REQUEST_TIMEOUT => Some((header::CONNECTION, "close")),
        _ => None,
    };
    let more = more.map(|(name, value)| (name, HeaderValue::from_static(value)));
    answer.headers_mut().extend(more.map(|(name, value)| (Some(name), value)));
    answer
}

/// A response with a JSON value.
pub fn with_json(status: StatusCode, value: &Value) -> Answer {
    report::respond("application/json", status, Full::new(Bytes::from(value.to_string())).boxed())
}

/// Requests of the system or of a user to end.
#[cfg(unix)]
pub struct Ends {
    term: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    /// The terminal was closed; none where the process was started by nohup.
    hangup: Option<tokio::signal::unix::Signal>,
}

#[cfg(unix)]
impl Ends {
    /// Begins to listen for signals.
    pub fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        let (hangup, ignored) = (SignalKind::hangup(), signals::ignored(SignalKind::hangup().as_raw_value()));
        let ends = Ends {
            term: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: (!ignored).then(|| signal(hangup)).transpose()?,
        };
        signals::taken_over();
        Ok(ends)
    }

    /// Waits for the next one.
    pub async fn next(&mut self) {
        let closed = async {
            match &mut self.hangup {
                Some(hangup) => drop(hangup.recv().await),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.interrupt.recv() => {}
            () = closed => {}
        }
    }
}

/// Ctrl-C.
#[cfg(not(unix))]
pub struct Ends;

#[cfg(not(unix))]
impl Ends {
    /// Begins to listen for signals.
    pub fn new() -> std::io::Result<Self> {
        Ok(Ends)
    }

    /// Waits for the next one.
    pub async fn next(&mut self) {
        let _ = tokio::signal::ctrl_c().await;
    }
}
