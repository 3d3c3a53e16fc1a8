//! `tokenizer.json` alone decides the ids; the other files only name the special tokens and the template.
//!
//! So `add_bos_token` and its kin in tokenizer_config.json change nothing, as with transformers' fast tokenizers
//! whose post-processor stands in tokenizer.json. Truncation and padding that tokenizer.json may carry are
//! switched off: lengths are decided by --max-seq-len and by the plan.
//!
//! A text much longer than --max-seq-len is tokenised as far as needed (`beginning`), so that its cost follows from
//! what is kept of it.

use crate::data::error::DataError;
use crate::data::template::{ChatTemplate, SpecialTokens};
use crate::support::panics::caught;
use serde_json::Value;

/// Whether the tokenizer's own special tokens (its post-processor's, such as a BOS) go around the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    /// As the post-processor says.
    Add,
    /// Text only; special tokens spelled out in the text are still recognised.
    Omit,
}

/// A text's ids and, for each, the bytes of the text that it stands for.
#[derive(Debug, Clone)]
pub struct Encoded {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Byte ranges in the text, one for each id; empty for tokens that the tokenizer added.
    pub offsets: Vec<(usize, usize)>,
}

/// A tokenizer with what the model's other files say of it.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    specials: SpecialTokens,
    template: Option<ChatTemplate>,
    vocab_size: usize,
    /// The text of every token marked special, the named ones included.
    special_tokens: Vec<String>,
}

impl Tokenizer {
    /// Out of the texts of a model's tokenizer files; `chat_template` goes before the one in the config.
    /// A template that does not compile is reported by its first use, so that rows without chats do not need it.
    pub fn new(
        tokenizer_json: &str,
        tokenizer_config: Option<&Value>,
        special_tokens_map: Option<&Value>,
        chat_template: Option<&str>,
    ) -> Result<Self, DataError> {
        // The library panics on some decoders and prefixes.
        let read = caught(|| tokenizers::Tokenizer::from_bytes(tokenizer_json.as_bytes()));
        let read = read.unwrap_or_else(|panic| Err(panic.split(" (at ").next().unwrap_or(&panic).into()));
        let mut inner =
            read.map_err(|e| DataError::Tokenizer(format!("tokenizer.json cannot be read: {e}")))?;
        inner.with_truncation(None).map_err(|e| DataError::Tokenizer(e.to_string()))?;
        inner.with_padding(None);
        let specials = special_tokens(tokenizer_config, special_tokens_map);
        let vocab_size = inner.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        if vocab_size == 0 {
            return Err(DataError::Tokenizer("tokenizer.json has no tokens".into()));
        }
        let template = choose_template(tokenizer_config, chat_template)
            .map(|(main, with_tools)| ChatTemplate::new(&main, with_tools.as_deref(), specials.clone()));
        let added = inner.get_added_tokens_decoder().into_values().filter(|t| t.special).map(|t| t.content);
        let special_tokens = added.chain(specials.0.iter().map(|(_, t)| t.clone())).collect();
        Ok(Tokenizer { inner, specials, template, vocab_size, special_tokens })
    }

    /// The ids of a text.
    pub fn encode(&self, text: &str, special: Special) -> Result<Vec<u32>, DataError> {
        let run = || self.inner.encode_fast(text, special == Special::Add);
        Ok(answered(run)?.get_ids().to_vec())
    }

    /// The ids of a text with their byte ranges in it.
    pub fn encode_with_offsets(&self, text: &str, special: Special) -> Result<Encoded, DataError> {
        let encoding = answered(|| self.inner.encode(text, special == Special::Add))?;
        Ok(Encoded { ids: encoding.get_ids().to_vec(), offsets: encoding.get_offsets().to_vec() })
    }

    /// As `encode`, for a text of which only the first `most` ids are kept: all ids where there are at most `most`, else
    /// more than `most`, of which the first `most` are those of the whole text.
    pub fn beginning(&self, text: &str, special: Special, most: usize) -> Result<Vec<u32>, DataError> {
        beginning(text, most, |text| self.encode(text, special), |ids| ids)
    }

    /// As `beginning`, with byte ranges.
    pub fn beginning_with_offsets(
        &self,
        text: &str,
        special: Special,
        most: usize,
    ) -> Result<Encoded, DataError> {
        beginning(text, most, |text| self.encode_with_offsets(text, special), |e| &e.ids)
    }

    /// The text of ids; bytes that are no whole character come out as U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: Skip) -> Result<String, DataError> {
        self.inner.decode(ids, skip_special == Skip::Special).map_err(|e| DataError::Tokenizer(e.to_string()))
    }

    /// Highest id + 1: what an embedding must have rows for.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The id of a token by its exact text.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The id that ends a text.
    pub fn eos_id(&self) -> Option<u32> {
        self.eos_token().and_then(|t| self.inner.token_to_id(t))
    }

    /// The text of the token that begins a text.
    pub fn bos_token(&self) -> Option<&str> {
        self.specials.get("bos_token")
    }

    /// The text of the token that ends a text.
    pub fn eos_token(&self) -> Option<&str> {
        self.specials.get("eos_token")
    }

    /// The chat template, where there is one.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// Whether a text is exactly one of the tokens marked special.
    pub fn is_special(&self, token: &str) -> bool {
        self.inner.get_added_vocabulary().is_special_token(token)
    }

    /// Whether a text ends with one of the tokens marked special.
    pub fn ends_with_special(&self, text: &str) -> bool {
        self.special_tokens.iter().any(|t| text.ends_with(t.as_str()))
    }
}

/// A text is tokenised whole up to this many bytes, whatever is kept of it.
const WHOLE: usize = 1 << 16;
/// A longer text must show its first tokens within this many bytes, or within `BYTES_A_TOKEN` for each of them.
const LARGEST: usize = 2 << 20;
/// Bytes of text for each token that is kept: the first attempt.
const BYTES_A_TOKEN: usize = 8;
/// Tokens between those that are kept and the cut.
const MARGIN: usize = 64;
/// Bytes by which the second cut is further on: a prime, so that no grouping of characters fits both cuts.
const FURTHER: usize = 4099;

/// The most bytes that are tokenised at once where `most` tokens are kept.
pub fn reach(most: usize) -> usize {
    most.saturating_mul(BYTES_A_TOKEN).max(LARGEST).saturating_add(FURTHER)
}

/// Tokenises the text up to a cut. What a tokenizer does near the end of a text (a word that is cut in two, trimmed white
/// space, groups of digits counted from the right, a final special token) must not reach the tokens that are kept: there
/// are at least `MARGIN` tokens between, and a second cut further on must give the same tokens; else the cuts move on.
fn beginning<T>(
    text: &str,
    most: usize,
    encode: impl Fn(&str) -> Result<T, DataError>,
    ids: impl Fn(&T) -> &[u32],
) -> Result<T, DataError> {
    let last = reach(most);
    let mut cut = most.saturating_mul(BYTES_A_TOKEN).max(WHOLE);
    while cut.saturating_add(FURTHER) <= last.min(text.len()) {
        let short = encode(&text[..text.floor_char_boundary(cut)])?;
        if ids(&short).len() > most + MARGIN {
            let long = encode(&text[..text.floor_char_boundary(cut + FURTHER)])?;
            if ids(&long).get(..most) == Some(&ids(&short)[..most]) {
                return Ok(short);
            }
        }
        cut = cut.saturating_mul(4);
    }
    if text.len() > last {
        return Err(DataError::Tokenizer(format!(
            "the first {most} tokens of a text of {} MB cannot be found in its first {} MB: split the text",
            text.len() / 1_000_000,
            last / 1_000_000
        )));
    }
    encode(text)
}

/// What the library says, errors and panics alike: its regular expressions panic when they give up.
fn answered<T>(run: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, DataError> {
    match caught(run) {
        Ok(result) => result.map_err(|e| DataError::Tokenizer(e.to_string())),
        Err(panic) => {
            let why = panic.split(" (at ").next().unwrap_or(&panic);
            let what = "tokenizer.json fails on this text";
            let way = "use the tokenizer.json of the model's page, or leave the text out";
            Err(DataError::Tokenizer(format!("{what} ({why}): {way}")))
        }
    }
}

/// Whether decoding shows special tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Skip {
    /// Special tokens are left out of the text.
    Special,
    /// Everything is shown.
    Nothing,
}

/// tokenizer_config.json first, special_tokens_map.json for what it does not name; a token is a string or {content}.
fn special_tokens(config: Option<&Value>, map: Option<&Value>) -> SpecialTokens {
    let names = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
    let text = |v: &Value| v.as_str().or_else(|| v.get("content")?.as_str()).map(str::to_owned);
    let find = |name: &str| [config, map].into_iter().flatten().find_map(|v| v.get(name).and_then(text));
    SpecialTokens(names.iter().filter_map(|&n| Some((n.to_owned(), find(n)?))).collect())
}

/// (template, template for rows with tools): a list in the config may hold both, under `default` and `tool_use`.
fn choose_template(config: Option<&Value>, given: Option<&str>) -> Option<(String, Option<String>)> {
    let in_config = config.and_then(|c| c.get("chat_template"));
    let named = |name: &str| {
        let list = in_config?.as_array()?;
        let entry = list.iter().find(|e| e.get("name").and_then(Value::as_str) == Some(name))?;
        Some(entry.get("template")?.as_str()?.to_owned())
    };
    let default = in_config.and_then(Value::as_str).map(str::to_owned).or_else(|| named("default"));
    match (given, default) {
        (Some(g), default) if default.as_deref() != Some(g) => Some((g.to_owned(), None)),
        (_, Some(default)) => Some((default, named("tool_use"))),
        _ => None,
    }
}
