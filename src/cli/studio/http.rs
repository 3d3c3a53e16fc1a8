//! Requests. The page itself is open to all; everything else needs the key in a header, which no page of another host
//! can send, and changes come as POST. An answer that takes long is a line of JSON for each line of progress, and one at
//! its end.

use super::command::{self, Outcome};
use super::options::{self, Fields};
use super::root::{Root, wrong};
use super::runs::Runs;
use super::talk::Talk;
use crate::cli::listening::connections::{Answer, Answers};
use crate::cli::listening::{Failure, failed, has_key, read, with_json};
use crate::cluster::worker::random;
use crate::config::verb::VERBS;
use crate::format::peft;
use crate::report::{self, is_literal, page};
use crate::run::folder::RUN_FILE;
use crate::train::checkpoint;
use crate::train::stop::Urgency;
use bytes::Bytes;
use http_body_util::channel::Channel;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{self, HeaderMap};
use hyper::{Method, Request, StatusCode};
use serde_json::{Map, Value, json};
use std::io::{BufRead, BufReader};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

/// Commands that run at the same time.
pub const COMMANDS: usize = 4;
/// Rows that are read to show the mask, unless the page says otherwise.
const READ: &str = "1000";

const HTML: &str = "text/html; charset=utf-8";

/// What requests are answered from.
pub struct Studio {
    /// The folder that the page may see.
    pub root: Root,
    /// The key of all requests but that of the page.
    pub key: String,
    /// Whether only this machine can connect.
    pub near: bool,
    /// Runs.
    pub runs: Runs,
    /// The model that talks.
    pub talk: Talk,
    /// Permits of [`COMMANDS`].
    pub places: Arc<Semaphore>,
}

/// Parts of a long answer, to its connection.
type Lines = mpsc::UnboundedSender<Bytes>;

impl Answers for Studio {
    fn timeout(&self) -> Duration {
        Duration::MAX
    }

    async fn answer(self: Arc<Self>, request: Request<Incoming>) -> Answer {
        respond(request, self).await.unwrap_or_else(|failure| failed(&failure))
    }
}

async fn respond(request: Request<Incoming>, studio: Arc<Studio>) -> Result<Answer, Failure> {
    let path = request.uri().path().to_string();
    of_this_host(request.headers(), &studio)?;
    if path == "/" && request.method() == Method::GET {
        let text = page::application("studio · finetune", STYLE, PAGE, SCRIPT);
        return Ok(report::respond(HTML, StatusCode::OK, Full::new(Bytes::from(text)).boxed()));
    }
    has_key(request.headers(), &studio.key)?;
    let posts = POSTS.iter().find(|(name, _)| *name == path);
    let gets = GETS.iter().find(|(name, _)| *name == path);
    match (request.method(), gets, posts) {
        (&Method::GET, Some((_, get)), _) => {
            let query = Query::of(request.uri().query().unwrap_or_default());
            // Files are read and pictures drawn on another thread.
            let value = tokio::task::spawn_blocking(move || get(&studio, &query)).await;
            let value = value.map_err(|e| Failure::of(StatusCode::INTERNAL_SERVER_ERROR, e))??;
            Ok(with_json(StatusCode::OK, &value))
        }
        (&Method::POST, _, Some((_, post))) => {
            let body = read(request.into_body()).await?;
            let value: Value = serde_json::from_slice(&body).map_err(|e| wrong(format!("the body: {e}")))?;
            let value = value.as_object().cloned().ok_or_else(|| wrong("the body is no JSON object"))?;
            let post = *post;
            let answer = tokio::task::spawn_blocking(move || post(studio, value)).await;
            answer.map_err(|e| Failure::of(StatusCode::INTERNAL_SERVER_ERROR, e))?
        }
        (_, None, None) => Err(Failure::of(StatusCode::NOT_FOUND, format!("there is no {path} here"))),
        _ => Err(Failure::of(StatusCode::METHOD_NOT_ALLOWED, format!("{path} is for another method"))),
    }
}

const PAGE: &str = include_str!("page/studio.html");
const STYLE: &str = include_str!("page/studio.css");
const SCRIPT: &str =
    concat!(include_str!("page/form.js"), include_str!("page/run.js"), include_str!("page/main.js"));

/// Refuses requests of pages of other hosts, and, where only this machine can connect, DNS names that lead here.
fn of_this_host(headers: &HeaderMap, studio: &Studio) -> Result<(), Failure> {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    let host = text(header::HOST);
    if studio.near && !host.is_some_and(is_literal) {
        let line = "this is not the host that was asked for: use its address";
        return Err(Failure::of(StatusCode::MISDIRECTED_REQUEST, line));
    }
    let origin = text(header::ORIGIN).map(|origin| origin.split_once("://").map(|(_, host)| host));
    match origin.is_none_or(|origin| origin == host) {
        true => Ok(()),
        false => Err(Failure::of(StatusCode::FORBIDDEN, "a page of another host asks")),
    }
}

/// The fields of a URL, in order.
struct Query(Vec<(String, String)>);

impl Query {
    fn of(text: &str) -> Self {
        let decoded = |text: &str| {
            percent_encoding::percent_decode_str(&text.replace('+', " ")).decode_utf8_lossy().into_owned()
        };
        let pair = |pair: &str| pair.split_once('=').map(|(key, value)| (decoded(key), decoded(value)));
        Query(text.split('&').filter_map(pair).collect())
    }

    fn all(&self, key: &str) -> Vec<String> {
        self.0.iter().filter(|(known, _)| known == key).map(|(_, value)| value.clone()).collect()
    }

    fn get(&self, key: &str) -> String {
        self.all(key).into_iter().next().unwrap_or_default()
    }
}

type Get = fn(&Studio, &Query) -> Result<Value, Failure>;
type Post = fn(Arc<Studio>, Map<String, Value>) -> Result<Answer, Failure>;

const GETS: [(&str, Get); 5] = [
    ("/api/about", |studio, _| Ok(about(studio))),
    ("/api/files", |studio, query| studio.root.list(&query.get("path"))),
    ("/api/runs", |studio, _| Ok(studio.runs.list())),
    ("/api/run", |studio, query| studio.runs.show(&run(studio, &query.get("run"))?, &query.get("seen"))),
    ("/api/compare", |studio, query| {
        let runs = query.all("run").iter().map(|name| run(studio, name)).collect::<Result<Vec<_>, _>>()?;
        Ok(json!({ "html": studio.runs.compare(&runs)? }))
    }),
];

const POSTS: [(&str, Post); 9] = [
    ("/api/mask", mask),
    ("/api/plan", plan),
    ("/api/start", start),
    ("/api/stop", |studio, body| {
        let now = body.get("now") == Some(&json!(true));
        let urgency = if now { Urgency::Now } else { Urgency::AfterStep };
        let name = run(&studio, text(&body, "run")?)?;
        studio.runs.stop(&name, urgency).map(|value| with_json(StatusCode::OK, &value))
    }),
    ("/api/resume", |studio, body| {
        let name = run(&studio, text(&body, "run")?)?;
        let arguments = [format!("--resume={name}")];
        studio.runs.start(&name, &arguments).map(|value| with_json(StatusCode::OK, &value))
    }),
    ("/api/export", export),
    ("/api/talk/open", open),
    ("/api/talk", talk),
    ("/api/talk/close", |studio, _| {
        studio.talk.close();
        Ok(with_json(StatusCode::OK, &json!({})))
    }),
];

fn about(studio: &Studio) -> Value {
    let option =
        |o: &crate::config::table::Opt| json!({ "name": o.name, "help": o.help, "default": o.default });
    json!({
        "root": studio.root.0.display().to_string(), "version": env!("CARGO_PKG_VERSION"),
        "options": options::all().map(option).collect::<Vec<_>>(),
    })
}

/// The folder of a run below the root; a run that was started may not have its folder yet.
fn run(studio: &Studio, name: &str) -> Result<String, Failure> {
    match studio.runs.taken().iter().any(|taken| taken == name) {
        true => Ok(name.into()),
        false => studio.root.inside(name).map(|path| path.display().to_string()),
    }
}

/// The adapter of a run: that of its newest checkpoint, if the run is not complete.
fn adapter(studio: &Studio, run: &str) -> String {
    let dir = studio.root.0.join(run);
    let complete = dir.join(peft::WEIGHTS).exists();
    let newest = (!complete).then(|| checkpoint::newest_adapter(&dir)).flatten();
    let below = newest.and_then(|path| Some(path.strip_prefix(&studio.root.0).ok()?.display().to_string()));
    below.unwrap_or_else(|| run.into())
}

fn text<'a>(body: &'a Map<String, Value>, key: &str) -> Result<&'a str, Failure> {
    body.get(key).and_then(Value::as_str).ok_or_else(|| wrong(format!("{key} is missing")))
}

fn fields(studio: &Studio, body: &Map<String, Value>) -> Result<Fields, Failure> {
    let fields =
        body.get("options").and_then(Value::as_object).ok_or_else(|| wrong("options are missing"))?;
    Fields::read(fields, &studio.root)
}

/// Rows as the model sees them, and which of their tokens are trained on.
fn mask(studio: Arc<Studio>, body: Map<String, Value>) -> Result<Answer, Failure> {
    let fields = fields(&studio, &body)?;
    let rows = fields.get("data").ok_or_else(|| wrong("name a file of rows first"))?;
    if fields.get("model").is_none() {
        return Err(wrong("name a model first"));
    }
    let path = crate::config::values::weighted(rows).0;
    let shown = body.get("rows").and_then(Value::as_u64).unwrap_or(5).min(50);
    let known = VERBS.iter().find(|v| v.name == "inspect").and_then(|v| v.shared).unwrap_or_default();
    let mut arguments: Vec<String> = vec!["inspect".into(), "--json".into(), format!("--rows={shown}")];
    if fields.get("max-rows").is_none() {
        arguments.push(format!("--max-rows={READ}"));
    }
    arguments.extend(fields.arguments(Some(known)));
    arguments.extend(["--".into(), path.to_string()]);
    work(studio, arguments)
}

fn plan(studio: Arc<Studio>, body: Map<String, Value>) -> Result<Answer, Failure> {
    let arguments = fields(&studio, &body)?.arguments(None);
    work(studio, ["plan".into(), "--json".into()].into_iter().chain(arguments).collect())
}

fn start(studio: Arc<Studio>, body: Map<String, Value>) -> Result<Answer, Failure> {
    let mut fields = fields(&studio, &body)?;
    let dir = fields.output(&studio.root, &studio.runs.taken())?;
    if !studio.runs.is_at_work(&dir) && studio.root.0.join(&dir).join(RUN_FILE).exists() {
        let line = format!("{dir}: belongs to another run: choose another folder, or resume that run");
        return Err(Failure::of(StatusCode::CONFLICT, line));
    }
    studio.runs.start(&dir, &fields.arguments(None)).map(|value| with_json(StatusCode::OK, &value))
}

fn export(studio: Arc<Studio>, body: Map<String, Value>) -> Result<Answer, Failure> {
    let name = run(&studio, text(&body, "run")?)?;
    let to = text(&body, "to")?;
    let mut arguments: Vec<String> = vec!["export".into(), "--json".into(), format!("--to={to}")];
    if let Some(outtype) = body.get("outtype").and_then(Value::as_str).filter(|text| !text.is_empty()) {
        arguments.push(format!("--outtype={outtype}"));
    }
    let output = text(&body, "output")?;
    arguments.push(format!("--output={}", studio.root.fresh(output)?.display()));
    arguments.extend(["--".into(), adapter(&studio, &name)]);
    work(studio, arguments)
}

/// Runs a command; its progress and its result are the answer.
fn work(studio: Arc<Studio>, arguments: Vec<String>) -> Result<Answer, Failure> {
    let place = place(&studio)?;
    Ok(long(place, move |hear| {
        let Outcome { value, error } = command::run(&studio.root.0, &arguments, hear);
        json!({ "result": value, "error": error })
    }))
}

fn open(studio: Arc<Studio>, body: Map<String, Value>) -> Result<Answer, Failure> {
    let name = run(&studio, text(&body, "run")?)?;
    let place = place(&studio)?;
    let (adapter, key) = (adapter(&studio, &name), random_key()?);
    Ok(long(place, move |hear| match studio.talk.open(&name, &adapter, key, hear) {
        Ok(value) => json!({ "result": value }),
        Err(failure) => json!({ "error": failure.body()["error"]["message"] }),
    }))
}

fn random_key() -> Result<String, Failure> {
    let bytes = random::<16>("a key").map_err(|e| Failure::of(StatusCode::INTERNAL_SERVER_ERROR, e))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// An answer of the model, as server-sent events.
fn talk(studio: Arc<Studio>, body: Map<String, Value>) -> Result<Answer, Failure> {
    let name = run(&studio, text(&body, "run")?)?;
    let (lines, answer) = stream("text/event-stream");
    let place = place(&studio)?;
    std::thread::spawn(move || {
        let _place = place;
        let error = |line: Value| Bytes::from(format!("data: {}\n\n", json!({ "error": line })));
        match studio.talk.ask(&name, &Value::Object(body)) {
            Ok(events) => {
                for line in BufReader::new(events).split(b'\n').map_while(Result::ok) {
                    if lines.send(Bytes::from([&line[..], b"\n"].concat())).is_err() {
                        return;
                    }
                }
            }
            Err(failure) => drop(lines.send(error(failure.body()["error"].clone()))),
        }
    });
    Ok(answer)
}

fn place(studio: &Studio) -> Result<OwnedSemaphorePermit, Failure> {
    let busy = |_| Failure::of(StatusCode::TOO_MANY_REQUESTS, "other commands are at work: try again later");
    studio.places.clone().try_acquire_owned().map_err(busy)
}

/// An answer in lines of JSON: `{"line": ...}` for each line that `act` hears, then what it returns.
fn long(
    place: OwnedSemaphorePermit,
    act: impl FnOnce(&mut dyn FnMut(&str) -> bool) -> Value + Send + 'static,
) -> Answer {
    let (lines, answer) = stream("application/x-ndjson");
    std::thread::spawn(move || {
        let _place = place;
        let send = |value: Value, lines: &Lines| lines.send(Bytes::from(format!("{value}\n"))).is_ok();
        let value = act(&mut |line| send(json!({ "line": line }), &lines));
        send(value, &lines);
    });
    answer
}

/// An answer whose parts come from another thread, which learns from a failed send that the client is gone.
fn stream(kind: &'static str) -> (Lines, Answer) {
    let (lines, mut parts) = mpsc::unbounded_channel();
    let (mut sender, body) = Channel::new(8);
    tokio::spawn(async move {
        while let Some(part) = parts.recv().await {
            if sender.send_data(part).await.is_err() {
                return;
            }
        }
    });
    (lines, report::respond(kind, StatusCode::OK, body.boxed()))
}
