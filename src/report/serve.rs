//! The page of a running run over HTTP: `/` (the document), `body` (its changing part), `news` (a server-sent event for
//! each change) and `metrics` (Prometheus). Read-only: only GET is answered, and no received data is stored. A request
//! must name this host by an address or `localhost` (a DNS name that a foreign page points here is refused) or, off
//! loopback, contain the key.

use super::history::Live;
use super::packing::Packing;
use super::page::{self, Form, Surroundings};
use super::prometheus;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, channel::Channel, combinators::BoxBody};
use hyper::body::Incoming;
use hyper::header::{self, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::AbortHandle;

/// Maximum number of open connections. At the limit a new connection closes the oldest one without a request, else the
/// oldest event stream (a browser reopens it), else the oldest connection.
const READERS: usize = 64;
/// Priority of the dashboard thread, in steps of `nice`: page requests must not slow down training.
#[cfg(target_os = "linux")]
const NICE: i32 = 10;
/// Time limit for the head of a request.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time limit for a request and its response, except for the event stream.
const LONGEST: Duration = Duration::from_secs(30);

const HTML: &str = "text/html; charset=utf-8";
/// Path of the server-sent events.
const NEWS: &str = "/news";

type Answer = Response<BoxBody<Bytes, Infallible>>;

/// State of the page, shared with the threads that serve it.
struct Shown {
    history: Live,
    /// Cached texts.
    drawn: Mutex<Drawn>,
    around: Surroundings,
    /// The access key; with None, every client that reaches the port may read.
    key: Option<String>,
    address: SocketAddr,
    /// Number of events.
    news: watch::Sender<u64>,
}

/// Cached texts: the number of events that they show, and their bytes per encoding.
#[derive(Default)]
struct Drawn {
    events: u64,
    texts: HashMap<(Text, Packing), Bytes>,
}

/// Texts that are drawn from the history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Text {
    Document,
    Body,
    Metrics,
}

impl Shown {
    /// The requested text, drawn once per event for any number of clients.
    fn text(&self, which: Text, packing: Packing) -> Bytes {
        let mut drawn = self.drawn.lock().unwrap_or_else(PoisonError::into_inner);
        // The count is read before drawing: an event that arrives in between causes another drawing.
        let events = *self.news.borrow();
        if drawn.events != events {
            *drawn = Drawn { events, ..Drawn::default() };
        }
        let draw = || {
            Bytes::from(match which {
                Text::Document => page::document(&self.history.now(), &self.around, Form::Live),
                Text::Body => page::body(&self.history.now(), &self.around),
                Text::Metrics => prometheus::text(&self.history.now()),
            })
        };
        let text = drawn.texts.entry((which, Packing::Plain)).or_insert_with(draw).clone();
        drawn.texts.entry((which, packing)).or_insert_with(|| packing.pack(text)).clone()
    }
}

/// A port that serves a run's page until it is dropped.
pub struct Dashboard {
    shown: Arc<Shown>,
    // Dropping the runtime ends its threads.
    _runtime: tokio::runtime::Runtime,
}

impl Dashboard {
    /// Listens on `address` and serves `history`. With a `key`, every URL must contain `?key=` and that key.
    pub fn open(
        address: SocketAddr,
        key: Option<String>,
        around: Surroundings,
        history: Live,
    ) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .max_blocking_threads(1)
            .thread_name("dashboard")
            .on_thread_start(give_way)
            .enable_all()
            .build()?;
        let listener = runtime.block_on(TcpListener::bind(address))?;
        let address = listener.local_addr()?;
        let (drawn, news) = (Mutex::new(Drawn::default()), watch::Sender::new(0));
        let shown = Arc::new(Shown { history, drawn, around, key, address, news });
        runtime.spawn(listen(listener, shown.clone()));
        Ok(Dashboard { shown, _runtime: runtime })
    }

    /// The address of the listener.
    pub fn address(&self) -> SocketAddr {
        self.shown.address
    }

    /// Reports that the history has grown by an event.
    pub fn tell(&self) {
        self.shown.news.send_modify(|n| *n += 1);
    }
}

/// Lowers the priority of the current thread; on Linux each thread has its own priority.
fn give_way() {
    #[cfg(target_os = "linux")]
    let _ = rustix::process::nice(NICE);
}

/// State of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// No request has arrived.
    Silent,
    /// A response is being written.
    Answer,
    /// The event stream, which stays open.
    News,
}

/// Open connections, oldest first.
#[derive(Default)]
struct Readers(VecDeque<Reader>);

struct Reader {
    stage: Arc<Mutex<Stage>>,
    task: AbortHandle,
}

impl Readers {
    /// Closes one connection if the limit is reached.
    fn make_room(&mut self) {
        self.0.retain(|reader| !reader.task.is_finished());
        if self.0.len() < READERS {
            return;
        }
        let oldest = |stage| self.0.iter().position(|reader| *stage_of(&reader.stage) == stage);
        let which = oldest(Stage::Silent).or_else(|| oldest(Stage::News)).unwrap_or(0);
        self.0.remove(which).into_iter().for_each(|reader| reader.task.abort());
    }
}

fn stage_of(stage: &Mutex<Stage>) -> MutexGuard<'_, Stage> {
    stage.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn listen(listener: TcpListener, shown: Arc<Shown>) {
    let mut readers = Readers::default();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                readers.make_room();
                let stage = Arc::new(Mutex::new(Stage::Silent));
                let task = tokio::spawn(serve(stream, shown.clone(), stage.clone())).abort_handle();
                readers.0.push_back(Reader { stage, task });
                // Polls each connection before a later one can replace it.
                tokio::task::yield_now().await;
            }
            // Too many open files, or a client that disconnected at once.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Serves one request per connection; a client that does not read its response is disconnected after [`LONGEST`].
async fn serve(stream: TcpStream, shown: Arc<Shown>, stage: Arc<Mutex<Stage>>) {
    let asked = stage.clone();
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let answer = answer(&request, &shown);
        let news = answer.status() == StatusCode::OK && request.uri().path() == NEWS;
        *stage_of(&asked) = if news { Stage::News } else { Stage::Answer };
        async move { Ok::<_, Infallible>(answer) }
    });
    let conversation = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .max_buf_size(16 * 1024)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    let mut conversation = std::pin::pin!(conversation);
    // Errors of the connection are ignored: the browser has gone.
    let late = tokio::time::timeout(LONGEST, &mut conversation).await.is_err();
    let stays = *stage_of(&stage) == Stage::News;
    if late && stays {
        let _ = conversation.await;
    }
}

fn answer(request: &Request<Incoming>, shown: &Arc<Shown>) -> Answer {
    let host = request.headers().get(header::HOST).and_then(|h| h.to_str().ok());
    // With a key no check of the host is needed: a foreign page cannot know the key.
    if shown.key.is_none() && !host.is_some_and(is_literal) {
        return plain(StatusCode::MISDIRECTED_REQUEST, "this is not the host that was asked for");
    }
    if request.method() != Method::GET {
        return plain(StatusCode::METHOD_NOT_ALLOWED, "this page is for reading");
    }
    let given = request.uri().query().and_then(|q| q.split('&').find_map(|pair| pair.strip_prefix("key=")));
    if let Some(key) = &shown.key
        && !given.is_some_and(|given| same(given, key))
    {
        return plain(
            StatusCode::FORBIDDEN,
            "the address of this page ends in ?key=..., as the run printed it",
        );
    }
    let packing = Packing::of(request.headers());
    match request.uri().path() {
        "/" => text(HTML, packing, shown.text(Text::Document, packing)),
        "/body" => text(HTML, packing, shown.text(Text::Body, packing)),
        "/metrics" => text(prometheus::CONTENT_TYPE, packing, shown.text(Text::Metrics, packing)),
        NEWS => news(shown),
        _ => plain(StatusCode::NOT_FOUND, "there is nothing here"),
    }
}

/// Whether a Host header is a literal address or `localhost`, with any port (a tunnel has its own port). A DNS name
/// that a foreign page resolves to this host is neither.
pub fn is_literal(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => name,
        _ => host,
    };
    let name = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

/// Compares two strings in a time that does not depend on the number of equal characters.
pub fn same(a: &str, b: &str) -> bool {
    a.len() == b.len() && a.bytes().zip(b.bytes()).fold(0, |all, (x, y)| all | (x ^ y)) == 0
}

/// Server-sent events: the number of events so far, after each change.
fn news(shown: &Arc<Shown>) -> Answer {
    let mut seen = shown.news.subscribe();
    let (mut lines, body) = Channel::new(1);
    tokio::spawn(async move {
        // The first line opens the stream, so that a reader that reconnects asks for the current state.
        let mut line = Bytes::from_static(b"data: 0\n\n");
        while lines.send_data(line).await.is_ok() && seen.changed().await.is_ok() {
            line = format!("data: {}\n\n", *seen.borrow_and_update()).into();
        }
    });
    respond("text/event-stream", StatusCode::OK, body.boxed())
}

fn text(kind: &'static str, packing: Packing, bytes: Bytes) -> Answer {
    let mut answer = respond(kind, StatusCode::OK, Full::new(bytes).boxed());
    let headers = answer.headers_mut();
    headers.insert(header::VARY, HeaderValue::from_static("accept-encoding"));
    if packing == Packing::Gzip {
        headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    answer
}

fn plain(status: StatusCode, line: &'static str) -> Answer {
    respond("text/plain; charset=utf-8", status, Full::new(Bytes::from_static(line.as_bytes())).boxed())
}

/// An answer that no cache keeps and no other page frames.
pub fn respond(kind: &'static str, status: StatusCode, body: BoxBody<Bytes, Infallible>) -> Answer {
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    for (name, value) in [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
    ] {
        answer.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    answer
}

#[cfg(test)]
mod tests;
