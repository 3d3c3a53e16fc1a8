//! The listener and its connections.

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use hyper::body::Incoming;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Maximum number of open connections. At the limit a new connection closes the one that asked least recently, of those
/// without a request in work if there are any.
const MOST: usize = 256;
/// Time limit for the head of a request, also of the next one on the same connection.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long after a request's time limit its response may be read.
const READING: Duration = Duration::from_secs(60);

/// A response.
pub type Answer = Response<BoxBody<Bytes, Infallible>>;

/// What connections are answered from.
pub trait Answers: Send + Sync + 'static {
    /// Time limit of a request.
    fn timeout(&self) -> Duration;

    /// The response to a request.
    fn answer(self: Arc<Self>, request: Request<Incoming>) -> impl Future<Output = Answer> + Send;
}

/// A request in work holds a copy of its connection's.
#[derive(Clone, Default)]
pub struct Work(Arc<()>);

impl Work {
    /// Whether a request holds a copy, beside the list of connections and the connection itself.
    pub fn is_held(&self) -> bool {
        Arc::strong_count(&self.0) > 2
    }
}

/// A connection, with the time of its last request.
struct Open {
    asked: Arc<Mutex<Instant>>,
    work: Work,
    task: JoinHandle<()>,
}

fn time_of(asked: &Mutex<Instant>) -> Instant {
    *asked.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Accepts connections until `closing` is true; then waits until all have ended.
pub async fn listen(listener: TcpListener, service: Arc<impl Answers>, mut closing: watch::Receiver<bool>) {
    let mut all: VecDeque<Open> = VecDeque::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = closing.changed() => break,
        };
        let Ok((stream, _)) = accepted else {
            // Too many open files, or a client that disconnected at once.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        all.retain(|one| !one.task.is_finished());
        if all.len() >= MOST
            && let Some(oldest) =
                (0..all.len()).min_by_key(|&i| (all[i].work.is_held(), time_of(&all[i].asked)))
            && let Some(oldest) = all.remove(oldest)
        {
            oldest.task.abort();
        }
        let asked = Arc::new(Mutex::new(Instant::now()));
        let work = Work::default();
        let task = serve(stream, service.clone(), (asked.clone(), work.clone()), closing.clone());
        all.push_back(Open { asked, work, task: tokio::spawn(task) });
    }
    drop(listener);
    for one in all {
        let _ = one.task.await;
    }
}

/// Serves the requests of a connection.
async fn serve(
    stream: TcpStream,
    service: Arc<impl Answers>,
    (asked, work): (Arc<Mutex<Instant>>, Work),
    mut closing: watch::Receiver<bool>,
) {
    // Events of a stream are small.
    let _ = stream.set_nodelay(true);
    let (longest, last) = (service.timeout().saturating_add(READING), asked.clone());
    let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(work.clone());
        *asked.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        let service = service.clone();
        async move { Ok::<_, Infallible>(service.answer(request).await) }
    });
    let conversation = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .max_buf_size(64 * 1024)
        .serve_connection(TokioIo::new(stream), service);
    let mut conversation = std::pin::pin!(conversation);
    let mut ending = *closing.borrow();
    loop {
        if ending {
            conversation.as_mut().graceful_shutdown();
        }
        let end = time_of(&last).checked_add(longest);
        let end = end.unwrap_or_else(|| Instant::now() + Duration::from_secs(1 << 30));
        tokio::select! {
            // Errors of the connection are ignored: the client has gone.
            _ = conversation.as_mut() => return,
            _ = closing.changed(), if !ending => ending = true,
            () = tokio::time::sleep_until(end) => {
                if time_of(&last).elapsed() >= longest {
                    return;
                }
            }
        }
    }
}
