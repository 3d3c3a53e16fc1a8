//! Requests of OpenAI's interface. The fields of `refuse_unsupported` are refused unless they have no effect; other
//! unknown fields have no effect.

use crate::cli::listening::Failure;
use hyper::StatusCode;
use serde_json::{Map, Value, json};
use std::hash::{BuildHasher, Hasher, RandomState};

/// Most tokens whose probabilities are reported with each token.
const MOST_TOP: u64 = 20;
/// Most strings that end an answer.
const MOST_STOPS: usize = 16;
/// New tokens of `/v1/completions` without `max_tokens`.
const COMPLETION: usize = 16;

/// The two kinds of answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Text,
}

/// What is continued.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompt {
    /// Text, as it is.
    Text(String),
    /// Tokens.
    Ids(Vec<u32>),
    /// A conversation.
    Turns(Vec<Value>),
}

/// A request.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask {
    /// Kind of the answer.
    pub form: Form,
    /// Name of the model or adapter.
    pub model: String,
    /// At least one.
    pub prompts: Vec<Prompt>,
    /// Most new tokens; `None`: as many as the context has room for.
    pub most: Option<usize>,
    /// 0 is greedy.
    pub temperature: f32,
    /// See `Sampling::top_p`.
    pub top_p: f32,
    /// Seed of the draws.
    pub seed: u64,
    /// Strings that end the answer, which does not contain them.
    pub stops: Vec<String>,
    /// Most probable tokens to report with each token; `None`: no probabilities.
    pub top: Option<usize>,
    /// Whether the answer begins with the prompt.
    pub echo: bool,
    /// Whether the answer is a stream of events.
    pub stream: bool,
    /// Whether the stream ends with the numbers of tokens.
    pub usage: bool,
}

impl Ask {
    /// Reads the body of a request.
    pub fn read(form: Form, body: &[u8]) -> Result<Ask, Failure> {
        let wrong = |e: &dyn std::fmt::Display| Failure::of(StatusCode::BAD_REQUEST, e);
        let value: Value =
            serde_json::from_slice(body).map_err(|e| wrong(&format!("the body is not JSON: {e}")))?;
        let Value::Object(map) = value else { return Err(wrong(&"the body is not a JSON object")) };
        let fields = Fields(map);
        fields.refuse_unsupported()?;
        let (prompts, most, top) = match form {
            Form::Chat => (vec![fields.turns()?], fields.chat_length()?, fields.chat_top()?),
            Form::Text => {
                let most = fields.whole("max_tokens", 0, u64::from(u32::MAX))?;
                let top = fields.whole("logprobs", 0, MOST_TOP)?;
                (fields.prompts()?, Some(most.map_or(COMPLETION, |n| n as usize)), top)
            }
        };
        let echo = form == Form::Text && fields.flag("echo")?;
        if most == Some(0) && !echo {
            return Err(Failure::field("max_tokens", "0 new tokens are an answer only with echo"));
        }
        let seed = fields.get("seed").map(|seed| {
            let signed = seed.as_i64().map(|n| n as u64);
            signed.or(seed.as_u64()).ok_or_else(|| Failure::field("seed", "seed is not a whole number"))
        });
        Ok(Ask {
            form,
            model: fields.model()?,
            prompts,
            most,
            temperature: fields.number("temperature", 0.0, 2.0)?.unwrap_or(1.0) as f32,
            top_p: fields.number("top_p", 0.0, 1.0)?.unwrap_or(1.0) as f32,
            seed: seed.transpose()?.unwrap_or_else(random),
            stops: fields.stops()?,
            top: top.map(|n| n as usize),
            echo,
            stream: fields.flag("stream")?,
            usage: fields.0.get("stream_options").is_some_and(|o| o["include_usage"] == true),
        })
    }
}

/// A number that differs in every call.
pub fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// The fields of a request. A field that is null is absent.
struct Fields(Map<String, Value>);

impl Fields {
    fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn flag(&self, name: &'static str) -> Result<bool, Failure> {
        let Some(value) = self.get(name) else { return Ok(false) };
        value.as_bool().ok_or_else(|| Failure::field(name, format!("{name} is neither true nor false")))
    }

    fn whole(&self, name: &'static str, least: u64, most: u64) -> Result<Option<u64>, Failure> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let found = value.as_u64().filter(|n| (least..=most).contains(n));
        let wrong = || Failure::field(name, format!("{name} is not a whole number from {least} to {most}"));
        found.map(Some).ok_or_else(wrong)
    }

    fn number(&self, name: &'static str, least: f64, most: f64) -> Result<Option<f64>, Failure> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let found = value.as_f64().filter(|n| (least..=most).contains(n));
        found.map(Some).ok_or_else(|| Failure::field(name, format!("{name} is not from {least} to {most}")))
    }

    fn model(&self) -> Result<String, Failure> {
        let wrong = || Failure::field("model", "model is missing: GET /v1/models lists the names");
        self.get("model").and_then(Value::as_str).map(str::to_string).ok_or_else(wrong)
    }

    /// Fields that are supported with one value only.
    fn refuse_unsupported(&self) -> Result<(), Failure> {
        let text = json!({ "type": "text" });
        let only: [(&'static str, &[Value]); 12] = [
            ("n", &[json!(1)]),
            ("best_of", &[json!(1)]),
            ("top_k", &[json!(-1), json!(0)]),
            ("min_p", &[json!(0), json!(0.0)]),
            ("repetition_penalty", &[json!(1), json!(1.0)]),
            ("presence_penalty", &[json!(0), json!(0.0)]),
            ("frequency_penalty", &[json!(0), json!(0.0)]),
            ("logit_bias", &[json!({})]),
            ("suffix", &[json!("")]),
            ("tools", &[json!([])]),
            ("functions", &[json!([])]),
            ("response_format", &[text]),
        ];
        match only.iter().find(|(name, known)| self.get(name).is_some_and(|value| !known.contains(value))) {
            None => Ok(()),
            Some((name, known)) => {
                Err(Failure::field(name, format!("{name} is supported only as {}", known[0])))
            }
        }
    }

    fn stops(&self) -> Result<Vec<String>, Failure> {
        let wrong = |_| Failure::field("stop", format!("stop is not a text or up to {MOST_STOPS} texts"));
        let stops = match self.get("stop") {
            None => Vec::new(),
            Some(Value::String(one)) => vec![one.clone()],
            Some(list) => strings(list).filter(|list| list.len() <= MOST_STOPS).ok_or(()).map_err(wrong)?,
        };
        match stops.iter().any(String::is_empty) {
            true => Err(wrong(())),
            false => Ok(stops),
        }
    }

    fn prompts(&self) -> Result<Vec<Prompt>, Failure> {
        let what = "prompt is not a text, a list of token ids, or a list of one of them";
        let wrong = || Failure::field("prompt", what);
        let value = self.get("prompt").ok_or_else(wrong)?;
        if let Value::String(text) = value {
            return Ok(vec![Prompt::Text(text.clone())]);
        }
        let list = value.as_array().filter(|list| !list.is_empty()).ok_or_else(wrong)?;
        if let Some(texts) = strings(value) {
            return Ok(texts.into_iter().map(Prompt::Text).collect());
        }
        if let Some(ids) = ids(value) {
            return Ok(vec![Prompt::Ids(ids)]);
        }
        let all: Option<Vec<Prompt>> = list.iter().map(|one| ids(one).map(Prompt::Ids)).collect();
        all.ok_or_else(wrong)
    }

    fn turns(&self) -> Result<Prompt, Failure> {
        let list = self.get("messages").and_then(Value::as_array).filter(|list| !list.is_empty());
        let list = list.ok_or_else(|| Failure::field("messages", "messages is not a list of messages"))?;
        list.iter().map(message).collect::<Result<_, _>>().map(Prompt::Turns)
    }

    /// Most new tokens of a chat.
    fn chat_length(&self) -> Result<Option<usize>, Failure> {
        let old = self.whole("max_tokens", 1, u64::from(u32::MAX))?;
        let new = self.whole("max_completion_tokens", 1, u64::from(u32::MAX))?;
        Ok(new.or(old).map(|n| n as usize))
    }

    fn chat_top(&self) -> Result<Option<u64>, Failure> {
        let top = self.whole("top_logprobs", 0, MOST_TOP)?;
        match (self.flag("logprobs")?, top) {
            (false, Some(_)) => Err(Failure::field("top_logprobs", "top_logprobs goes with logprobs")),
            (false, None) => Ok(None),
            (true, top) => Ok(Some(top.unwrap_or(0))),
        }
    }
}

fn strings(value: &Value) -> Option<Vec<String>> {
    value.as_array()?.iter().map(|one| one.as_str().map(str::to_string)).collect()
}

fn ids(value: &Value) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}

/// A message as chat templates read it: its content is one text.
fn message(value: &Value) -> Result<Value, Failure> {
    let wrong = |what: &str| Failure::field("messages", format!("a message {what}"));
    let mut turn = value.as_object().ok_or_else(|| wrong("is not an object"))?.clone();
    let role = turn.get("role").and_then(Value::as_str).ok_or_else(|| wrong("has no role"))?;
    if role == "developer" {
        turn.insert("role".into(), "system".into());
    }
    let content = match turn.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let text = |part: &Value| {
                (part["type"] == "text").then(|| part["text"].as_str().map(str::to_string)).flatten()
            };
            let parts: Option<String> = parts.iter().map(text).collect();
            parts.ok_or_else(|| wrong("has a part that is not text"))?
        }
        _ => return Err(wrong("has no content")),
    };
    turn.insert("content".into(), content.into());
    Ok(Value::Object(turn))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(body: Value) -> Result<Ask, Failure> {
        Ask::read(Form::Chat, body.to_string().as_bytes())
    }

    fn text(body: Value) -> Result<Ask, Failure> {
        Ask::read(Form::Text, body.to_string().as_bytes())
    }

    #[test]
    fn prompts_are_texts_tokens_or_lists_of_them() {
        let (text_of, ids) = (|t: &str| Prompt::Text(t.into()), |ids: &[u32]| Prompt::Ids(ids.into()));
        for (prompt, expected) in [
            (json!("a"), vec![text_of("a")]),
            (json!(["a", "b"]), vec![text_of("a"), text_of("b")]),
            (json!([1, 2]), vec![ids(&[1, 2])]),
            (json!([[1], [2, 3]]), vec![ids(&[1]), ids(&[2, 3])]),
        ] {
            let ask = text(json!({ "model": "m", "prompt": prompt })).unwrap();
            assert_eq!((ask.prompts, ask.most), (expected, Some(16)), "{prompt}");
        }
    }

    #[test]
    fn contents_of_messages_become_one_text() {
        let parts = json!([{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }]);
        let messages =
            json!([{ "role": "developer", "content": "be brief" }, { "role": "user", "content": parts }]);
        let ask = chat(json!({ "model": "m", "messages": messages, "logprobs": true, "seed": -1 })).unwrap();
        let turns = json!([{ "role": "system", "content": "be brief" }, { "role": "user", "content": "ab" }]);
        assert_eq!(ask.prompts, [Prompt::Turns(turns.as_array().unwrap().clone())]);
        assert_eq!((ask.top, ask.seed, ask.most), (Some(0), u64::MAX, None));
    }

    #[test]
    fn wrong_fields_are_refused_by_name() {
        let turns = json!([{ "role": "user", "content": "x" }]);
        for (more, param) in [
            (json!({ "messages": [] }), "messages"),
            (json!({ "messages": [{ "role": "user" }] }), "messages"),
            (json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url" }] }] }), "messages"),
            (json!({ "model": 3 }), "model"),
            (json!({ "temperature": 3 }), "temperature"),
            (json!({ "top_p": -1 }), "top_p"),
            (json!({ "n": 2 }), "n"),
            (json!({ "tools": [{}] }), "tools"),
            (json!({ "top_k": 1 }), "top_k"),
            (json!({ "response_format": { "type": "json_object" } }), "response_format"),
            (json!({ "stop": ["a", ""] }), "stop"),
            (json!({ "stream": "yes" }), "stream"),
            (json!({ "max_tokens": 0 }), "max_tokens"),
            (json!({ "top_logprobs": 2 }), "top_logprobs"),
            (json!({ "top_logprobs": 21, "logprobs": true }), "top_logprobs"),
            (json!({ "seed": 0.5 }), "seed"),
        ] {
            let mut body = json!({ "model": "m", "messages": turns });
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let failure = chat(body).unwrap_err();
            assert_eq!((failure.status.as_u16(), &failure.body()["error"]["param"]), (400, &json!(param)));
        }
        for (body, param) in [
            (json!({ "model": "m" }), json!("prompt")),
            (json!({ "model": "m", "prompt": [] }), json!("prompt")),
            (json!({ "model": "m", "prompt": [1, -2] }), json!("prompt")),
            (json!({ "model": "m", "prompt": "x", "max_tokens": 0 }), json!("max_tokens")),
            (json!({ "model": "m", "prompt": "x", "logprobs": true }), json!("logprobs")),
            (json!([]), json!(null)),
        ] {
            assert_eq!(text(body).unwrap_err().body()["error"]["param"], param);
        }
        assert!(text(json!({ "model": "m", "prompt": "x", "max_tokens": 0, "echo": true })).is_ok());
    }
}
