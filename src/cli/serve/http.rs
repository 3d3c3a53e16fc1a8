//! Connections and requests. A request must name this host by an address or `localhost` (a DNS name that a foreign page
//! points here is refused), and come from no foreign page, or have the key.

use super::answer::{Delta, Heading, now};
use super::engine::{Job, Order};
use super::reading::{Begun, Reading, Shared};
use super::request::{Ask, Form, Prompt, random};
use crate::cli::listening::connections::{Answer, Answers, Work};
use crate::cli::listening::{Failure, failed, has_key, read, with_json};
use crate::data::template::Ending;
use crate::data::tokenizer::{Skip, Special, Tokenizer};
use crate::model::stage::Sampling;
use crate::report::{self, is_literal};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming};
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::{Method, Request, StatusCode};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::mpsc::Sender;
use std::sync::{Arc, atomic::AtomicBool};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, mpsc};

/// What requests are answered from.
pub struct Service {
    /// Names of the base and of its adapters.
    pub models: Vec<String>,
    /// When the server began, in seconds since 1970.
    pub created: u64,
    /// The key that clients send; with None, every client that reaches the port is answered.
    pub key: Option<String>,
    /// Tokenizer of the model.
    pub tokenizer: Arc<Tokenizer>,
    /// Tokens that end an answer.
    pub ends: Vec<u32>,
    /// Number of tokens that the model knows.
    pub vocab: usize,
    /// Most tokens of a prompt and its answer.
    pub context: usize,
    /// Time limit of a request.
    pub timeout: Duration,
    /// Leads to the model.
    pub orders: Sender<Order>,
    /// One permit for each text that may be in work or wait.
    pub places: Arc<Semaphore>,
    /// Permits of an idle server.
    pub most: usize,
}

impl Answers for Service {
    fn timeout(&self) -> Duration {
        self.timeout
    }

    async fn answer(self: Arc<Self>, request: Request<Incoming>) -> Answer {
        respond(request, self).await.unwrap_or_else(|failure| failed(&failure))
    }
}

async fn respond(request: Request<Incoming>, service: Arc<Service>) -> Result<Answer, Failure> {
    allowed(request.headers(), service.key.as_deref())?;
    let path = request.uri().path().to_string();
    let form = match path.as_str() {
        "/v1/chat/completions" => Some(Form::Chat),
        "/v1/completions" => Some(Form::Text),
        _ => None,
    };
    let wanted = if form.is_some() { Method::POST } else { Method::GET };
    let model = path.strip_prefix("/v1/models/").map(decoded);
    if form.is_none() && path != "/v1/models" && model.is_none() {
        return Err(Failure::of(StatusCode::NOT_FOUND, format!("there is no {path} here")));
    }
    if request.method() != wanted {
        return Err(Failure::of(StatusCode::METHOD_NOT_ALLOWED, format!("{path} is for {wanted}")));
    }
    match (form, model) {
        (Some(form), _) => complete(form, request, service).await,
        (None, Some(name)) => {
            service.voice(&name).map(|which| with_json(StatusCode::OK, &service.model(which)))
        }
        (None, None) => {
            let all: Vec<Value> = (0..service.models.len()).map(|which| service.model(which)).collect();
            Ok(with_json(StatusCode::OK, &json!({ "object": "list", "data": all })))
        }
    }
}

/// Whether a host, which may have a port, is this machine by `localhost` or a loopback address.
fn is_near(host: &str) -> bool {
    let name =
        host.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok()).map_or(host, |(name, _)| name);
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    name == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

/// Refuses requests without the key; without a key, those of foreign pages.
fn allowed(headers: &HeaderMap, key: Option<&str>) -> Result<(), Failure> {
    let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    let Some(key) = key else {
        if !text(header::HOST).is_some_and(is_literal) {
            let line = "this is not the host that was asked for: use its address";
            return Err(Failure::of(StatusCode::MISDIRECTED_REQUEST, line));
        }
        let origin = headers.get(header::ORIGIN).map(|o| o.to_str().unwrap_or_default());
        let own = |host: &str| is_near(host) || text(header::HOST) == Some(host);
        return match origin.is_none_or(|o| o.split_once("://").is_some_and(|(_, host)| own(host))) {
            true => Ok(()),
            false => Err(Failure::of(StatusCode::FORBIDDEN, "a page of another host asks")),
        };
    };
    has_key(headers, key)
}

/// The name in a path, whose slashes may be encoded.
fn decoded(name: &str) -> String {
    percent_encoding::percent_decode_str(name).decode_utf8_lossy().into_owned()
}

impl Service {
    fn model(&self, which: usize) -> Value {
        let parent = (which > 0).then(|| &self.models[0]);
        let (id, created) = (&self.models[which], self.created);
        json!({ "id": id, "object": "model", "created": created, "owned_by": "finetune", "parent": parent })
    }

    /// The number of a model's name.
    fn voice(&self, name: &str) -> Result<usize, Failure> {
        let missing = || {
            let known = self.models.join(", ");
            let failure = Failure::field("model", format!("there is no model {name:?} here: {known}"));
            failure.with(StatusCode::NOT_FOUND).coded("model_not_found")
        };
        self.models.iter().position(|known| known == name).ok_or_else(missing)
    }

    /// The tokens of a prompt, within the context.
    fn tokens(&self, prompt: Prompt, ask: &Ask) -> Result<Vec<u32>, Failure> {
        let param = if ask.form == Form::Chat { "messages" } else { "prompt" };
        let wrong = |e: &dyn std::fmt::Display| Failure::field(param, e);
        let room = self.context - usize::from(ask.most != Some(0));
        let ids = match prompt {
            Prompt::Ids(ids) => Ok(ids),
            Prompt::Text(text) => self.tokenizer.beginning(&text, Special::Add, room),
            Prompt::Turns(turns) => {
                let template = self.tokenizer.template();
                let none = "the model has no chat template: use /v1/completions";
                let template = template.ok_or_else(|| wrong(&none))?;
                let text = template.render(&Value::from(turns), None, Ending::GenerationPrompt);
                text.and_then(|text| self.tokenizer.beginning(&text, Special::Omit, room))
            }
        };
        let ids = ids.map_err(|e| wrong(&e))?;
        if ids.is_empty() {
            return Err(wrong(&"the prompt has no tokens"));
        }
        if let Some(id) = ids.iter().find(|&&id| id as usize >= self.vocab) {
            return Err(wrong(&format!("token id {id} is outside the vocabulary of {}", self.vocab)));
        }
        if ids.len() > room {
            let line = format!("the prompt has more than {room} tokens, for which the context has room");
            return Err(wrong(&line).coded("context_length_exceeded"));
        }
        Ok(ids)
    }

    /// Reads a request and tokenizes its prompts.
    fn prepare(&self, form: Form, body: &[u8]) -> Result<(Ask, Vec<Begun>), Failure> {
        let mut ask = Ask::read(form, body)?;
        self.voice(&ask.model)?;
        let prompts = std::mem::take(&mut ask.prompts);
        if prompts.len() > self.most {
            return Err(Failure::field("prompt", format!("a request has at most {} prompts", self.most)));
        }
        let begin = |prompt: Prompt| {
            let given = if let Prompt::Text(text) = &prompt { Some(text.clone()) } else { None };
            let ids = self.tokens(prompt, &ask)?;
            let text = || self.tokenizer.decode(&ids, Skip::Nothing).unwrap_or_default();
            let echo = ask.echo.then(|| given.unwrap_or_else(text));
            Ok(Begun { ids, echo, enough: Arc::new(AtomicBool::new(false)) })
        };
        let begun = prompts.into_iter().map(begin).collect::<Result<_, Failure>>()?;
        Ok((ask, begun))
    }

    /// Gives the prompts to the model.
    fn begin(&self, ask: &Ask, prompts: Vec<Begun>) -> Result<Reading, Failure> {
        let busy = || {
            Failure::of(StatusCode::TOO_MANY_REQUESTS, "too many requests wait: try again later")
                .coded("rate_limit_exceeded")
        };
        let places = self.places.clone().try_acquire_many_owned(prompts.len() as u32);
        let places = Arc::new(places.map_err(|_| busy())?);
        let voice = self.voice(&ask.model)?;
        let (out, news) = mpsc::unbounded_channel();
        let deadline = Instant::now() + self.timeout;
        for (index, begun) in prompts.iter().enumerate() {
            let room = self.context - begun.ids.len();
            let sampling = Sampling {
                max_new_tokens: ask.most.unwrap_or(room).min(room),
                temperature: ask.temperature,
                top_p: ask.top_p,
                seed: ask.seed.wrapping_add(index as u64),
                stop: self.ends.clone(),
            };
            let job = Job {
                index,
                voice,
                prompt: begun.ids.clone(),
                sampling,
                scores: ask.top,
                prompt_scores: ask.echo && ask.top.is_some(),
                deadline,
                out: out.clone(),
                enough: begun.enough.clone(),
                place: Some(places.clone()),
            };
            self.orders.send(Order::Job(job)).map_err(|_| Failure::closed())?;
        }
        let (ends, stops) = (self.ends.clone(), ask.stops.clone().into());
        let shared = Shared { ends, stops, tokenizer: self.tokenizer.clone() };
        Ok(Reading::new(prompts, news, shared))
    }
}

/// Answers a request for new tokens.
async fn complete(form: Form, request: Request<Incoming>, service: Arc<Service>) -> Result<Answer, Failure> {
    let (head, body) = request.into_parts();
    let body = read(body).await?;
    let own = service.clone();
    // Templates and tokenizers may take long.
    let prepared = tokio::task::spawn_blocking(move || own.prepare(form, &body)).await;
    let (ask, prompts) = prepared.map_err(|e| Failure::of(StatusCode::INTERNAL_SERVER_ERROR, e))??;
    let mut reading = service.begin(&ask, prompts)?;
    reading.work = head.extensions.get::<Work>().cloned();
    let kind = if form == Form::Chat { "chatcmpl" } else { "cmpl" };
    let heading = Heading {
        form,
        id: format!("{kind}-{:016x}", random()),
        created: now(),
        scored: ask.top.is_some(),
        model: ask.model.clone(),
    };
    if ask.stream {
        let body = Events { usage: ask.usage, ..Events::new(heading, reading) }.boxed();
        return Ok(report::respond("text/event-stream", StatusCode::OK, body));
    }
    let mut texts: Vec<Delta> = (0..reading.len()).map(|index| reading.beginning(index)).collect();
    while let Some(part) = std::future::poll_fn(|cx| reading.poll_next(cx)).await {
        let part = part?;
        let text = &mut texts[part.index];
        text.text += &part.text;
        text.scores.extend(part.scores);
        text.finish = part.finish;
    }
    Ok(with_json(StatusCode::OK, &heading.whole(&texts, reading.usage)))
}

/// A stream of server-sent events. The reader ends with it.
struct Events {
    heading: Heading,
    reading: Reading,
    usage: bool,
    lines: VecDeque<Bytes>,
    done: bool,
}

impl Events {
    fn new(heading: Heading, mut reading: Reading) -> Self {
        let mut lines = VecDeque::new();
        for index in 0..reading.len() {
            let echo = reading.beginning(index);
            let echo = (!echo.text.is_empty()).then(|| heading.part(&echo));
            lines.extend(heading.first(index).into_iter().chain(echo).map(|value| event(&value)));
        }
        Events { heading, reading, usage: false, lines, done: false }
    }

    fn end(&mut self) {
        if self.usage {
            self.lines.push_back(event(&self.heading.last(self.reading.usage)));
        }
        self.lines.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
        self.done = true;
    }
}

fn event(value: &Value) -> Bytes {
    Bytes::from(format!("data: {value}\n\n"))
}

impl Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        loop {
            if let Some(line) = this.lines.pop_front() {
                return Poll::Ready(Some(Ok(Frame::data(line))));
            }
            if this.done {
                return Poll::Ready(None);
            }
            match ready!(this.reading.poll_next(cx)) {
                Some(Ok(part)) => this.lines.push_back(event(&this.heading.part(&part))),
                Some(Err(failure)) => {
                    this.lines.push_back(event(&failure.body()));
                    this.done = true;
                }
                None => this.end(),
            }
        }
    }
}
