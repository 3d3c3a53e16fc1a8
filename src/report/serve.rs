//! The page of a run that goes on, over HTTP: `/` (the document), `body` (its changing part), `news` (one event
//! whenever there is more to see) and `metrics` (Prometheus). Read-only: nothing but GET is answered, nothing that
//! is sent is kept. Whoever asks must name this host in its own words (a page of another site cannot, whatever it
//! makes a name resolve to), and off loopback know the key.

use super::history::Live;
use super::packing::Packing;
use super::page::{self, Form, Surroundings};
use super::prometheus;
use bytes::Bytes;
use futures::StreamExt;
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{self, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

/// So many readers at a time; another one waits.
const READERS: usize = 64;
/// A request's head must have arrived by then.
const PATIENCE: Duration = Duration::from_secs(5);
/// And its answer must have been read by then, unless it is the stream of news.
const LONGEST: Duration = Duration::from_secs(30);

const HTML: &str = "text/html; charset=utf-8";
/// Server-sent events.
const NEWS: &str = "/news";

type Answer = Response<BoxBody<Bytes, Infallible>>;

/// What a page needs, shared with the threads that show it.
struct Shown {
    history: Live,
    /// The body as it was drawn last.
    drawn: Mutex<Drawn>,
    around: Surroundings,
    /// None: anybody who reaches the port may look.
    key: Option<String>,
    address: SocketAddr,
    /// Counts events.
    news: watch::Sender<u64>,
}

/// A body that readers share: for how many events, and as bytes of each packing that was asked for.
#[derive(Default)]
struct Drawn {
    events: u64,
    text: Option<Bytes>,
    packed: Option<Bytes>,
}

impl Shown {
    fn body(&self, packing: Packing) -> Bytes {
        let mut drawn = self.drawn.lock().unwrap_or_else(PoisonError::into_inner);
        // Counted before it is drawn: what comes in between is drawn again.
        let events = *self.news.borrow();
        if drawn.events != events {
            *drawn = Drawn { events, ..Drawn::default() };
        }
        let draw = || Bytes::from(page::body(&self.history.now(), &self.around));
        let text = drawn.text.get_or_insert_with(draw).clone();
        match packing {
            Packing::Plain => text,
            Packing::Gzip => drawn.packed.get_or_insert_with(|| packing.pack(text)).clone(),
        }
    }
}

/// A port that shows a run until it is dropped.
pub struct Dashboard {
    shown: Arc<Shown>,
    // Its threads end with it.
    _runtime: tokio::runtime::Runtime,
}

impl Dashboard {
    /// Listens on `address` and shows `history`. Off loopback a `key` has to stand behind `?key=` in every address.
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
            .enable_all()
            .build()?;
        let listener = runtime.block_on(TcpListener::bind(address))?;
        let address = listener.local_addr()?;
        let (drawn, news) = (Mutex::new(Drawn::default()), watch::Sender::new(0));
        let shown = Arc::new(Shown { history, drawn, around, key, address, news });
        runtime.spawn(listen(listener, shown.clone()));
        Ok(Dashboard { shown, _runtime: runtime })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.shown.address
    }

    /// The history has grown by an event.
    pub fn tell(&self) {
        self.shown.news.send_modify(|n| *n += 1);
    }
}

async fn listen(listener: TcpListener, shown: Arc<Shown>) {
    let room = Arc::new(Semaphore::new(READERS));
    loop {
        let Ok(permit) = room.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let shown = shown.clone();
                tokio::spawn(async move {
                    serve(stream, shown).await;
                    drop(permit);
                });
            }
            // Too many open files, or a caller that hung up at once.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// One request a connection: who asks much and reads nothing holds a place for [`LONGEST`] and no longer.
async fn serve(stream: TcpStream, shown: Arc<Shown>) {
    let stays = Arc::new(AtomicBool::new(false));
    let stream_of_news = stays.clone();
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let answer = answer(&request, &shown);
        let news = answer.status() == StatusCode::OK && request.uri().path() == NEWS;
        stream_of_news.store(news, Ordering::Relaxed);
        async move { Ok::<_, Infallible>(answer) }
    });
    let conversation = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .max_buf_size(16 * 1024)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    let mut conversation = std::pin::pin!(conversation);
    // How a conversation with a browser ends is of no consequence.
    if tokio::time::timeout(LONGEST, &mut conversation).await.is_err() && stays.load(Ordering::Relaxed) {
        let _ = conversation.await;
    }
}

fn answer(request: &Request<Incoming>, shown: &Arc<Shown>) -> Answer {
    let host = request.headers().get(header::HOST).and_then(|h| h.to_str().ok());
    // Where a key is asked for, no page of another site can know it, whatever this host is called.
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
    let history = || shown.history.now();
    match request.uri().path() {
        "/" => text(HTML, packing, packing.pack(page::document(&history(), &shown.around, Form::Live))),
        "/body" => text(HTML, packing, shown.body(packing)),
        "/metrics" => text(prometheus::CONTENT_TYPE, packing, packing.pack(prometheus::text(&history()))),
        NEWS => news(shown),
        _ => plain(StatusCode::NOT_FOUND, "there is nothing here"),
    }
}

/// Whether a Host header is a literal address or `localhost`, with any port (a tunnel has its own). A name that
/// somebody else's page made resolve to us is none of these.
fn is_literal(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => name,
        _ => host,
    };
    let name = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

/// Compares in a time that does not tell how much of it was right.
fn same(a: &str, b: &str) -> bool {
    a.len() == b.len() && a.bytes().zip(b.bytes()).fold(0, |all, (x, y)| all | (x ^ y)) == 0
}

/// Server-sent events: the number of events so far, whenever it grew.
fn news(shown: &Arc<Shown>) -> Answer {
    let seen = shown.news.subscribe();
    let lines = futures::stream::unfold(seen, |mut seen| async move {
        seen.changed().await.ok()?;
        let line = format!("data: {}\n\n", *seen.borrow_and_update());
        Some((Ok::<_, Infallible>(Frame::data(Bytes::from(line))), seen))
    });
    // The first line opens the stream, so that a reader that came back is told what it missed.
    let first = futures::stream::once(async { Ok(Frame::data(Bytes::from_static(b"data: 0\n\n"))) });
    with("text/event-stream", StatusCode::OK, BodyExt::boxed(StreamBody::new(first.chain(lines))))
}

fn text(kind: &'static str, packing: Packing, bytes: Bytes) -> Answer {
    let mut answer = with(kind, StatusCode::OK, Full::new(bytes).boxed());
    let headers = answer.headers_mut();
    headers.insert(header::VARY, HeaderValue::from_static("accept-encoding"));
    if packing == Packing::Gzip {
        headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    answer
}

fn plain(status: StatusCode, line: &'static str) -> Answer {
    with("text/plain; charset=utf-8", status, Full::new(Bytes::from_static(line.as_bytes())).boxed())
}

fn with(kind: &'static str, status: StatusCode, body: BoxBody<Bytes, Infallible>) -> Answer {
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
mod tests {
    use super::*;
    use crate::train::event::{Event, RunStart};
    use std::io::{Read, Write};

    /// Status line and body of a request as it goes over the wire.
    fn ask(address: SocketAddr, request: &str) -> (String, String) {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
        (head.lines().next().unwrap_or_default().into(), body.into())
    }

    fn open(key: Option<&str>, history: Live) -> Dashboard {
        let (address, around) = (([127, 0, 0, 1], 0).into(), Surroundings::default());
        Dashboard::open(address, key.map(String::from), around, history).unwrap()
    }

    #[test]
    fn who_may_look_at_what() {
        let free = open(None, Live::default());
        let locked = open(Some("secret"), Live::default());
        for (board, method, target, host, want) in [
            (&free, "GET", "/", "127.0.0.1", "200"),
            (&free, "GET", "/body", "localhost", "200"),
            (&free, "GET", "/metrics", "[::1]", "200"),
            (&free, "GET", "/etc/passwd", "localhost", "404"),
            (&free, "GET", "/../run.yaml", "localhost", "404"),
            (&free, "POST", "/", "localhost", "405"),
            (&free, "GET", "/", "evil.example", "421"),
            (&free, "GET", "/", "127.0.0.1.evil.example", "421"),
            (&locked, "GET", "/", "localhost", "403"),
            (&locked, "GET", "/body?key=secre", "localhost", "403"),
            (&locked, "GET", "/metrics?key=Secret", "localhost", "403"),
            (&locked, "GET", "/?key=secret", "localhost", "200"),
            (&locked, "GET", "/?key=secret", "gpubox", "200"),
            (&locked, "GET", "/", "gpubox", "403"),
        ] {
            let port = board.address().port();
            let request =
                format!("{method} {target} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n");
            let (status, _) = ask(board.address(), &request);
            assert!(status.contains(want), "{method} {target} of {host}: {status}, not {want}");
        }
        // Through a tunnel, whose port is another one; and without being asked to hang up.
        let (status, _) = ask(free.address(), "GET / HTTP/1.1\r\nHost: localhost:8080\r\n\r\n");
        assert!(status.contains("200"), "{status}");
        let (status, _) = ask(free.address(), "GET / HTTP/1.1\r\n\r\n");
        assert!(status.contains("421"), "no host: {status}");
        let (status, _) = ask(free.address(), "\u{1}\u{2} garbage\r\n\r\n");
        assert!(status.contains("400"), "{status}");
    }

    #[test]
    fn whoever_accepts_gzip_gets_it() {
        let history = Live::default();
        let board = open(None, history.clone());
        let fetch = |path: &str, more: &str| {
            let mut stream = std::net::TcpStream::connect(board.address()).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n").unwrap();
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).unwrap();
            let end = answer.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
            let head = String::from_utf8(answer[..end].to_vec()).unwrap().to_lowercase();
            (head, answer[end + 4..].to_vec())
        };
        for path in ["/", "/body", "/metrics"] {
            let (head, plain) = fetch(path, "");
            assert!(!head.contains("content-encoding") && head.contains("vary: accept-encoding"), "{head}");
            let (head, packed) = fetch(path, "Accept-Encoding: br, gzip;q=0.5\r\n");
            assert!(head.contains("content-encoding: gzip"), "{head}");
            assert!(packed.len() < plain.len(), "{path}: {} of {}", packed.len(), plain.len());
            let mut text = Vec::new();
            flate2::read::GzDecoder::new(&packed[..]).read_to_end(&mut text).unwrap();
            assert!(text == plain, "{path}");
        }
        let (head, _) = fetch("/body", "Accept-Encoding: gzip;q=0\r\n");
        assert!(!head.contains("content-encoding"), "{head}");
    }

    #[test]
    fn an_event_is_news_and_stands_in_the_body() {
        let history = Live::default();
        let board = open(None, history.clone());
        let mut stream = std::net::TcpStream::connect(board.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let host = format!("localhost:{}", board.address().port());
        write!(stream, "GET /news HTTP/1.1\r\nHost: {host}\r\n\r\n").unwrap();
        let mut seen = String::new();
        let mut until = |text: &str| {
            let mut piece = [0; 512];
            while !seen.contains(text) {
                let n = stream.read(&mut piece).unwrap();
                assert!(n > 0, "the stream ended: {seen}");
                seen += &String::from_utf8_lossy(&piece[..n]);
            }
        };
        until("data: 0\n\n");
        let notes = vec!["model    demo-model (Llama)".into()];
        let before = ask(board.address(), &format!("GET /body HTTP/1.1\r\nHost: {host}\r\n\r\n")).1;
        assert!(!before.contains("demo-model"));
        history.see(&Event::Run(RunStart { total_steps: 7, notes, ..RunStart::default() }));
        board.tell();
        until("data: 1\n\n");
        let request = format!("GET /body HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        let (_, body) = ask(board.address(), &request);
        assert!(body.contains("demo-model") && body.contains("of 7"), "{body}");
    }
}
