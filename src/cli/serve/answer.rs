//! Answers of OpenAI's interface: a whole response, or the events of a stream.

use super::request::Form;
use serde_json::{Map, Value, json};
use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// A token with its probability.
#[derive(Debug, Clone)]
pub struct Scored {
    /// Its own text, also of a special token.
    pub text: String,
    /// Logarithm of its probability; `None` for the first token of a prompt.
    pub score: Option<f64>,
    /// The most probable tokens in its place.
    pub top: Vec<(String, f64)>,
    /// Characters of the text before it.
    pub offset: usize,
}

/// What is new in one text of an answer.
#[derive(Debug, Clone, Default)]
pub struct Delta {
    /// Number of the text.
    pub index: usize,
    /// New characters.
    pub text: String,
    /// New tokens, where their probabilities are asked for.
    pub scores: Vec<Scored>,
    /// Why the text ends here.
    pub finish: Option<&'static str>,
}

/// Numbers of tokens.
#[derive(Debug, Clone, Copy, Default)]
pub struct Usage {
    /// Of all prompts.
    pub prompt: usize,
    /// New ones.
    pub made: usize,
}

/// What all parts of an answer contain.
pub struct Heading {
    /// Kind of the answer.
    pub form: Form,
    /// Name of the answer.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// Name of the model or adapter.
    pub model: String,
    /// Whether probabilities are asked for.
    pub scored: bool,
}

impl Heading {
    fn object(&self, kind: &str, choices: Vec<Value>) -> Map<String, Value> {
        let Heading { id, created, model, .. } = self;
        let object =
            json!({ "id": id, "object": kind, "created": created, "model": model, "choices": choices });
        object.as_object().cloned().unwrap_or_default()
    }

    /// A whole response; `texts` has all of each text.
    pub fn whole(&self, texts: &[Delta], usage: Usage) -> Value {
        let (kind, field) = match self.form {
            Form::Chat => ("chat.completion", "message"),
            Form::Text => ("text_completion", "text"),
        };
        let choice = |delta: &Delta| {
            let text = match self.form {
                Form::Chat => json!({ "role": "assistant", "content": delta.text, "refusal": null }),
                Form::Text => json!(delta.text),
            };
            self.choice(field, text, delta)
        };
        let mut object = self.object(kind, texts.iter().map(choice).collect());
        object.insert("usage".into(), numbers(usage));
        Value::Object(object)
    }

    /// The first event of a text.
    pub fn first(&self, index: usize) -> Option<Value> {
        let delta = Delta { index, ..Delta::default() };
        let role = json!({ "role": "assistant", "content": "" });
        (self.form == Form::Chat).then(|| self.event(role, &delta))
    }

    /// An event of a stream.
    pub fn part(&self, delta: &Delta) -> Value {
        let text = match self.form {
            Form::Text => json!(delta.text),
            Form::Chat if delta.text.is_empty() && delta.scores.is_empty() => json!({}),
            Form::Chat => json!({ "content": delta.text }),
        };
        self.event(text, delta)
    }

    fn event(&self, text: Value, delta: &Delta) -> Value {
        let (kind, field) = match self.form {
            Form::Chat => ("chat.completion.chunk", "delta"),
            Form::Text => ("text_completion", "text"),
        };
        Value::Object(self.object(kind, vec![self.choice(field, text, delta)]))
    }

    /// The event with the numbers of tokens, after all texts.
    pub fn last(&self, usage: Usage) -> Value {
        let kind = if self.form == Form::Chat { "chat.completion.chunk" } else { "text_completion" };
        let mut object = self.object(kind, Vec::new());
        object.insert("usage".into(), numbers(usage));
        Value::Object(object)
    }

    fn choice(&self, field: &str, text: Value, delta: &Delta) -> Value {
        let scores = match (self.scored, self.form) {
            (false, _) => Value::Null,
            (true, Form::Chat) => chat_scores(&delta.scores),
            (true, Form::Text) => text_scores(&delta.scores),
        };
        json!({ "index": delta.index, field: text, "logprobs": scores, "finish_reason": delta.finish })
    }
}

fn numbers(Usage { prompt, made }: Usage) -> Value {
    json!({ "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made })
}

fn chat_scores(scores: &[Scored]) -> Value {
    // Bytes of a part of a character are not known from its text.
    let bytes = |text: &str| (!text.contains('\u{fffd}')).then(|| text.bytes().collect::<Vec<_>>());
    let one = |text: &str, score: f64| json!({ "token": text, "logprob": score, "bytes": bytes(text) });
    let all = scores.iter().map(|token| {
        let mut value = one(&token.text, token.score.unwrap_or_default());
        value["top_logprobs"] = token.top.iter().map(|(text, score)| one(text, *score)).collect();
        value
    });
    json!({ "content": all.collect::<Vec<_>>(), "refusal": null })
}

fn text_scores(scores: &[Scored]) -> Value {
    let top = |token: &Scored| {
        let mut map = Map::new();
        for (text, score) in &token.top {
            // The most probable one of tokens with the same text.
            map.entry(text).or_insert_with(|| json!(score));
        }
        // As OpenAI's, the map has the token itself too.
        token.score.map(|score| {
            map.entry(&token.text).or_insert_with(|| json!(score));
            Value::Object(map)
        })
    };
    json!({
        "tokens": scores.iter().map(|t| &t.text).collect::<Vec<_>>(),
        "token_logprobs": scores.iter().map(|t| t.score).collect::<Vec<_>>(),
        "top_logprobs": scores.iter().map(top).collect::<Vec<_>>(),
        "text_offset": scores.iter().map(|t| t.offset).collect::<Vec<_>>(),
    })
}
