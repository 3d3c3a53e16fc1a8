//! The thread that owns the model. Texts wait in order; those in work get one token after the other in turn, so that a
//! long answer does not block a short one. A text ends where its reader is gone.

use crate::cli::speaker::Speaker;
use crate::config::refusal::Refusal;
use crate::model::generate::{choose, score};
use crate::model::stage::{Fault, IGNORE, Microbatch, Output, Sampling, Session, Targets, TokenScore, Want};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::UnboundedSender;

/// How long texts in work may go on after the server was asked to end.
const GRACE: Duration = Duration::from_secs(10);

/// What a text asks of the model.
pub struct Job {
    /// Number of the text in its request.
    pub index: usize,
    /// Number of the voice that answers.
    pub voice: usize,
    /// Not empty; within the context.
    pub prompt: Vec<u32>,
    /// The choice of tokens; no new token is possible.
    pub sampling: Sampling,
    /// Most probable tokens to report with each new token; `None`: no scores.
    pub scores: Option<usize>,
    /// Whether the tokens of the prompt get scores too.
    pub prompt_scores: bool,
    /// When the answer ends at the latest.
    pub deadline: Instant,
    /// Receives what is computed.
    pub out: UnboundedSender<(usize, News)>,
    /// Set by the reader once it needs no more of this text.
    pub enough: Arc<AtomicBool>,
    /// Its request's place, which is free again once all texts of the request have ended.
    pub place: Option<Arc<OwnedSemaphorePermit>>,
}

/// What the reader of a text hears.
pub enum News {
    /// The scores of all tokens of the prompt but the first one.
    Prompt(Vec<TokenScore>),
    /// A new token.
    Token(u32, Option<TokenScore>),
    /// The last word: after a token of `Sampling::stop` or not.
    End,
    /// The last word of a text that was not computed.
    Closed,
    /// The last word of a text that could not be computed.
    Failed(String),
}

/// What reaches the thread.
pub enum Order {
    /// A new text.
    Job(Job),
    /// Ends the thread once all texts in work have ended.
    Close,
}

/// The texts in work, and those that wait.
pub struct Engine {
    speaker: Speaker,
    /// Most texts in work.
    most: usize,
    waiting: VecDeque<Job>,
    running: Vec<Running>,
    /// Number of sessions so far.
    begun: u64,
    /// When the last text ends, once the server was asked to end.
    end: Option<Instant>,
    /// A fault after which the device computes nothing.
    lost: Option<Fault>,
}

struct Running {
    job: Job,
    session: Session,
    /// Number of new tokens.
    made: usize,
    /// The last new token.
    last: u32,
    /// Whether this token is the first one, of the present round.
    fresh: bool,
    done: bool,
}

impl Running {
    fn say(&self, news: News) {
        let _ = self.job.out.send((self.job.index, news));
    }

    fn end(&mut self, news: News) {
        self.done = true;
        // A client that hears the end finds the place free.
        drop(self.job.place.take());
        self.say(news);
    }

    /// The tokens that the model has not seen.
    fn next(&self) -> &[u32] {
        if self.made == 0 { &self.job.prompt } else { std::slice::from_ref(&self.last) }
    }

    /// Chooses the next token.
    fn take(&mut self, logits: &[f32]) {
        let sampling = &self.job.sampling;
        let token = choose(logits, sampling, self.made as u64);
        let ended = self.made + 1 == sampling.max_new_tokens || sampling.stop.contains(&token);
        self.say(News::Token(token, self.job.scores.map(|top| score(logits, token, top))));
        (self.fresh, self.made, self.last) = (self.made == 0, self.made + 1, token);
        if ended {
            self.end(News::End);
        }
    }
}

impl Job {
    /// Whether its reader needs no more.
    fn is_left(&self) -> bool {
        self.out.is_closed() || self.enough.load(Ordering::Relaxed)
    }
}

impl Engine {
    /// An engine with at most `most` texts in work.
    pub fn new(speaker: Speaker, most: usize) -> Self {
        let (waiting, running) = (VecDeque::new(), Vec::new());
        Engine { speaker, most, waiting, running, begun: 0, end: None, lost: None }
    }

    /// Works until [`Order::Close`], or until no sender of orders is left.
    pub fn run(mut self, orders: &Receiver<Order>) -> Result<(), Refusal> {
        loop {
            if self.running.is_empty() && self.waiting.is_empty() {
                if self.end.is_some() {
                    return Ok(());
                }
                match orders.recv() {
                    Ok(order) => self.take(order),
                    Err(_) => return Ok(()),
                }
            }
            orders.try_iter().for_each(|order| self.take(order));
            self.admit();
            self.round();
            if let Some(fault) = self.lost.take() {
                return Err(fault.into());
            }
        }
    }

    fn take(&mut self, order: Order) {
        match order {
            Order::Job(job) if self.end.is_some() => drop(job.out.send((job.index, News::Closed))),
            Order::Job(job) => self.waiting.push_back(job),
            Order::Close => {
                self.end.get_or_insert_with(|| Instant::now() + GRACE);
                for job in self.waiting.drain(..) {
                    let _ = job.out.send((job.index, News::Closed));
                }
            }
        }
    }

    /// Begins waiting texts while there is room.
    fn admit(&mut self) {
        self.waiting.retain(|job| !job.is_left());
        while self.running.len() < self.most
            && let Some(job) = self.waiting.pop_front()
        {
            if job.deadline <= Instant::now() {
                let _ = job.out.send((job.index, News::Closed));
                continue;
            }
            let session = Session(self.begun);
            self.begun += 1;
            self.running.push(Running { job, session, made: 0, last: 0, fresh: false, done: false });
        }
    }

    /// Gives every text in work its next token.
    fn round(&mut self) {
        let late = self.end.is_some_and(|end| Instant::now() > end);
        let mut running = std::mem::take(&mut self.running);
        // Texts of one voice follow each other, because a change of the voice copies its values.
        running.sort_by_key(|text| text.job.voice);
        for text in &mut running {
            match late {
                true => text.end(News::Closed),
                false => self.check(text),
            }
        }
        // A prompt has many tokens: it is computed alone, so that memory is bounded.
        for text in running.iter_mut().filter(|text| !text.done && text.made == 0) {
            self.advance(&mut [text]);
        }
        let mut grown: Vec<&mut Running> =
            running.iter_mut().filter(|text| !text.done && text.made > 0).collect();
        // A text whose prompt was computed in this round gets no second token in it.
        grown.retain_mut(|text| !std::mem::replace(&mut text.fresh, false));
        grown.chunk_by_mut(|a, b| a.job.voice == b.job.voice).for_each(|texts| self.advance(texts));
        running.retain(|text| {
            if text.done {
                self.speaker.model.end(text.session);
            }
            !text.done
        });
        self.running = running;
    }

    /// Ends a text that gets no further token, and scores a new prompt.
    fn check(&mut self, text: &mut Running) {
        if text.job.is_left() {
            text.done = true;
            return;
        }
        if text.made == 0 && text.job.prompt_scores {
            let scores = self.speaker.speak_as(text.job.voice);
            let top = text.job.scores.unwrap_or(0);
            match scores.and_then(|()| self.prompt_scores(&text.job.prompt, top)) {
                Ok(scores) => text.say(News::Prompt(scores)),
                Err(fault) => return self.fail(&mut [text], fault),
            }
        }
        if text.made >= text.job.sampling.max_new_tokens || Instant::now() >= text.job.deadline {
            text.end(News::End);
        }
    }

    /// One token of each of these texts of one voice.
    fn advance(&mut self, texts: &mut [&mut Running]) {
        let Some(first) = texts.first() else { return };
        let voice = first.job.voice;
        let ids: Vec<(Session, &[u32])> = texts.iter().map(|text| (text.session, text.next())).collect();
        let model = &mut self.speaker;
        let made = model.speak_as(voice).and_then(|()| model.model.extend_all(&ids, None));
        let logits = match made {
            Ok(Output::Logits(logits)) => logits,
            Ok(_) => return self.fail(texts, self.fault("only a whole model can answer")),
            Err(fault) => return self.fail(texts, fault),
        };
        let each = logits.chunks_exact(logits.len() / texts.len());
        texts.iter_mut().zip(each).for_each(|(text, logits)| text.take(logits));
    }

    /// Ends texts that could not be computed.
    fn fail(&mut self, texts: &mut [&mut Running], fault: Fault) {
        texts.iter_mut().for_each(|text| text.end(News::Failed(fault.to_string())));
        // The first fault tells why.
        if matches!(fault, Fault::Device { .. }) {
            self.lost.get_or_insert(fault);
        }
    }

    /// The scores of all tokens of a prompt but the first one.
    fn prompt_scores(&mut self, prompt: &[u32], top: usize) -> Result<Vec<TokenScore>, Fault> {
        let targets = prompt[1..].iter().copied().chain([IGNORE]).collect();
        let (ids, bounds) = (prompt.to_vec(), vec![0, prompt.len() as u32]);
        let batch = Microbatch { step: 1, rows: vec![0], ids, bounds, targets: Targets::Tokens(targets) };
        match self.speaker.model.forward(&batch, None, Want::Scores(top))? {
            Output::Scores(scores) => Ok(scores),
            _ => Err(self.fault("only a whole model has scores")),
        }
    }

    fn fault(&self, reason: &str) -> Fault {
        Fault::Device { device: self.speaker.model.class(), reason: reason.into() }
    }
}
