//! `finetune serve`: OpenAI's interface over HTTP. Connections are on threads of their own; the thread that called owns
//! the model.

mod answer;
mod engine;
mod http;
mod reading;
mod request;
mod text;

use super::invocation::Invocation;
use super::listening::{self, Ends, connections};
use super::speaker::{self, Named, Speaker, model_name};
use crate::config::Settings;
use crate::config::groups::whole;
use crate::config::refusal::{self, Refusal};
use crate::config::values::duration;
use crate::run::{base_model, watch};
use crate::support::stderr::say;
use engine::{Engine, Order};
use http::Service;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch as news};

const PORT: u16 = 8000;
/// Tokens of a prompt and its answer, where --context is not given and the model sees more.
const CONTEXT: usize = 8192;
/// How long connections may take to end once the last text has ended.
const ENDING: Duration = Duration::from_secs(5);

/// Bounds of requests.
struct Bounds {
    context: Option<usize>,
    sessions: usize,
    waiting: usize,
    timeout: Duration,
}

/// Serves until a signal ends it.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let s = &inv.settings;
    let bounds = Bounds {
        context: whole(s, "context", 2)?,
        sessions: whole(s, "max-sessions", 1)?.unwrap_or(8),
        waiting: whole(s, "max-waiting", 0)?.unwrap_or(64),
        timeout: duration(s, "request-timeout")?.unwrap_or(Duration::from_secs(600)),
    };
    let endpoint = listening::endpoint(s, PORT)?;
    let address = listening::resolved(&endpoint)?;
    let (key, made) = key(s, address)?;
    let adapters = speaker::adapters(s)?;
    let models = names(s, &adapters)?;
    // The address is taken before the model is read, which may take long.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(2)
        .thread_name("serve")
        .enable_all()
        .build()
        .map_err(|e| Refusal::failure(format!("threads for connections: {e}")))?;
    let listener =
        runtime.block_on(TcpListener::bind(address)).map_err(|e| listening::in_use(&endpoint, &e))?;
    let address = listener.local_addr().map_err(|e| listening::in_use(&endpoint, &e))?;
    let speaker = Speaker::open(s, &adapters)?;
    let (orders, given) = channel();
    let (closing, closed) = news::channel(false);
    let service = service(&speaker, models, (key, orders.clone()), &bounds)?;
    let ends = runtime.block_on(async { Ends::new() });
    let ends = ends.map_err(|e| Refusal::failure(format!("signals: {e}")))?;
    say!("serve    http://{}/v1", listening::shown(address));
    say!("models   {}", service.models.join(", "));
    made.iter().for_each(|key| say!("key      {key}"));
    let connections = runtime.spawn(connections::listen(listener, service, closed));
    runtime.spawn(close(ends, closing.clone(), orders));
    let outcome = Engine::new(speaker, bounds.sessions).run(&given);
    closing.send_replace(true);
    drop(given);
    let _ = runtime.block_on(async { tokio::time::timeout(ENDING, connections).await });
    runtime.shutdown_background();
    outcome
}

/// What requests are answered from.
fn service(
    speaker: &Speaker,
    models: Vec<String>,
    (key, orders): (Option<String>, Sender<Order>),
    bounds: &Bounds,
) -> Result<Arc<Service>, Refusal> {
    // Texts from short prompts, the usual ones, end there.
    let longest = speaker.base.config.longest_text(1);
    let context = bounds.context.unwrap_or(CONTEXT.min(longest));
    if context > longest {
        return Err(Refusal::configuration(format!(
            "--context: the model sees {longest} tokens, {context} are more"
        )));
    }
    let most = bounds.sessions.saturating_add(bounds.waiting).min(Semaphore::MAX_PERMITS);
    Ok(Arc::new(Service {
        models,
        created: answer::now(),
        key,
        tokenizer: speaker.tokenizer.clone(),
        ends: speaker.base.stop_ids(&speaker.tokenizer),
        vocab: speaker.base.config.vocab,
        context,
        timeout: bounds.timeout,
        orders,
        places: Arc::new(Semaphore::new(most)),
        most,
    }))
}

/// The key of clients, and the same if it is made here and must be shown.
fn key(s: &Settings, address: SocketAddr) -> Result<(Option<String>, Option<String>), Refusal> {
    let given = match s.text("api-key-file")? {
        Some(file) => {
            let text = std::fs::read_to_string(file).map_err(refusal::at(Path::new(file)))?;
            Some((text.trim().to_string(), file.to_string()))
        }
        // A key that is not UTF-8 is refused below.
        None => std::env::var_os("FINETUNE_API_KEY")
            .map(|key| (key.to_string_lossy().into_owned(), "FINETUNE_API_KEY".into())),
    };
    if let Some((key, place)) = given {
        if key.is_empty() || !key.chars().all(|c| c.is_ascii_graphic()) {
            let why = "a key is one word of letters, digits and signs";
            return Err(Refusal::configuration(format!("{place}: {why}")));
        }
        return Ok((Some(key), None));
    }
    if address.ip().is_loopback() {
        return Ok((None, None));
    }
    let made = watch::key(s.text("token-file")?.map(Path::new), b"finetune serve")?;
    Ok((Some(made.clone()), Some(made)))
}

/// The names under which clients find the base and its adapters.
fn names(s: &Settings, adapters: &[Named]) -> Result<Vec<String>, Refusal> {
    let typed = model_name(s, adapters.first().map(|a| a.dir.as_path()))?;
    let base = match base_model::named(&typed)? {
        base_model::Named::Path(path) => {
            let whole = path.canonicalize().unwrap_or(path);
            whole.file_name().map_or(typed.clone(), |name| name.to_string_lossy().into_owned())
        }
        _ => typed,
    };
    if adapters.iter().any(|a| a.name == base) {
        let why = format!("{base} is the name of the model: give NAME=DIR");
        return Err(s.refuse("adapter", why));
    }
    Ok(std::iter::once(base).chain(adapters.iter().map(|a| a.name.clone())).collect())
}

/// Asks the engine to end, and the connections to end after their present request.
async fn close(mut ends: Ends, closing: news::Sender<bool>, orders: Sender<Order>) {
    ends.next().await;
    say!("ending: open requests have ten seconds; once more ends at once");
    let _ = orders.send(Order::Close);
    closing.send_replace(true);
    ends.next().await;
    crate::support::end::leave(130);
}
