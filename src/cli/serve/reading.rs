//! The texts of one request while the model computes them.

use super::answer::{Delta, Scored, Usage};
use super::engine::News;
use super::text::{Text, within};
use crate::cli::listening::Failure;
use crate::cli::listening::connections::Work;
use crate::data::tokenizer::{Skip, Tokenizer};
use crate::model::stage::TokenScore;
use hyper::StatusCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use tokio::sync::mpsc::UnboundedReceiver;

/// A prompt, and what its answer repeats of it.
pub struct Begun {
    /// Its tokens.
    pub ids: Vec<u32>,
    /// Its text, if the answer begins with it.
    pub echo: Option<String>,
    /// Tells the engine that the reader needs no more.
    pub enough: Arc<AtomicBool>,
}

/// What all texts of a request share.
pub struct Shared {
    /// Tokens that end an answer.
    pub ends: Vec<u32>,
    /// Strings that end an answer.
    pub stops: Arc<[String]>,
    /// Decodes.
    pub tokenizer: Arc<Tokenizer>,
}

/// The texts of a request.
pub struct Reading {
    texts: Vec<Growing>,
    news: UnboundedReceiver<(usize, News)>,
    shared: Shared,
    /// Numbers of tokens so far.
    pub usage: Usage,
    /// Keeps the connection open while texts are in work.
    pub work: Option<Work>,
}

struct Growing {
    begun: Begun,
    text: Text,
    /// Characters so far.
    chars: usize,
    /// Whether the last token was one that ends an answer.
    at_end: bool,
    done: bool,
}

impl Reading {
    /// Reads the texts that answer `prompts`.
    pub fn new(prompts: Vec<Begun>, news: UnboundedReceiver<(usize, News)>, shared: Shared) -> Self {
        let usage = Usage { prompt: prompts.iter().map(|p| p.ids.len()).sum(), made: 0 };
        let begin = |begun| {
            let text = Text::new(shared.tokenizer.clone(), shared.stops.clone());
            Growing { begun, text, chars: 0, at_end: false, done: false }
        };
        Reading { texts: prompts.into_iter().map(begin).collect(), news, shared, usage, work: None }
    }

    /// Number of texts.
    pub fn len(&self) -> usize {
        self.texts.len()
    }

    /// What is there before the first token of text `index`.
    pub fn beginning(&mut self, index: usize) -> Delta {
        let text = &mut self.texts[index];
        let echo = text.begun.echo.clone().unwrap_or_default();
        text.chars = echo.chars().count();
        Delta { index, text: echo, ..Delta::default() }
    }

    /// The next part of any text; `None` once all have ended.
    pub fn poll_next(&mut self, cx: &mut Context) -> Poll<Option<Result<Delta, Failure>>> {
        loop {
            if self.texts.iter().all(|text| text.done) {
                return Poll::Ready(None);
            }
            let Some((index, news)) = ready!(self.news.poll_recv(cx)) else {
                return Poll::Ready(Some(Err(Failure::closed())));
            };
            if !self.texts[index].done
                && let Some(part) = self.hear(index, news).transpose()
            {
                return Poll::Ready(Some(part));
            }
        }
    }

    fn hear(&mut self, index: usize, news: News) -> Result<Option<Delta>, Failure> {
        match news {
            News::Prompt(scores) => Ok(Some(self.prompt(index, &scores))),
            News::Token(id, score) => Ok(self.token(index, id, score)),
            News::End => {
                let text = &mut self.texts[index];
                let rest = text.text.rest();
                let stopped = text.at_end || text.text.ended;
                text.done = true;
                let finish = Some(if stopped { "stop" } else { "length" });
                Ok(Some(Delta { index, text: rest, scores: Vec::new(), finish }))
            }
            News::Closed => Err(Failure::closed()),
            News::Failed(line) => Err(Failure::of(StatusCode::INTERNAL_SERVER_ERROR, line)),
        }
    }

    /// The tokens of a prompt with their scores. Their text was there before.
    fn prompt(&mut self, index: usize, scores: &[TokenScore]) -> Delta {
        let ids = &self.texts[index].begun.ids;
        let none = TokenScore { token: f64::NAN, top: Vec::new() };
        let scores = std::iter::once(&none).chain(scores);
        let mut text = Text::new(self.shared.tokenizer.clone(), Arc::new([]));
        let (mut all, mut chars) = (Vec::new(), 0);
        for (&id, score) in ids.iter().zip(scores) {
            all.push(self.scored(id, score, chars));
            chars += text.push(id).chars().count();
        }
        Delta { index, scores: all, ..Delta::default() }
    }

    fn scored(&self, id: u32, score: &TokenScore, offset: usize) -> Scored {
        let decode = |ids: &[u32]| self.shared.tokenizer.decode(ids, Skip::Nothing).unwrap_or_default();
        let text = |id: u32| within(id, &decode);
        let top = score.top.iter().map(|(id, score)| (text(*id), *score)).collect();
        Scored { text: text(id), score: Some(score.token).filter(|s| !s.is_nan()), top, offset }
    }

    fn token(&mut self, index: usize, id: u32, score: Option<TokenScore>) -> Option<Delta> {
        self.usage.made += 1;
        let offset = self.texts[index].chars + self.texts[index].text.held();
        let scores: Vec<Scored> = score.iter().map(|score| self.scored(id, score, offset)).collect();
        let text = &mut self.texts[index];
        text.at_end = self.shared.ends.contains(&id);
        let piece = if text.at_end { String::new() } else { text.text.push(id) };
        text.chars += piece.chars().count();
        let mut delta = Delta { index, text: piece, scores, finish: None };
        if text.text.ended {
            text.begun.enough.store(true, Ordering::Relaxed);
            text.done = true;
            delta.finish = Some("stop");
        }
        let empty = delta.text.is_empty() && delta.scores.is_empty() && delta.finish.is_none();
        (!empty).then_some(delta)
    }
}
