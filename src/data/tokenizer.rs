//! Token ids depend on `tokenizer.json` alone; the other files only provide the special tokens and the template.
//!
//! Options such as `add_bos_token` in tokenizer_config.json have no effect, as in transformers' fast tokenizers, whose
//! post-processor is in tokenizer.json. Truncation and padding from tokenizer.json are disabled: --max-seq-len and the
//! plan determine all lengths.
//!
//! A text much longer than --max-seq-len is tokenised only as far as needed (`beginning`), so that its cost depends on
//! the kept part.

use crate::data::error::DataError;
use crate::data::template::{ChatTemplate, SpecialTokens};
use crate::support::panics::{caught, without_place};
use serde_json::Value;

/// Whether the tokenizer adds its own special tokens (those of its post-processor, such as a BOS) to the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    /// Adds the tokens of the post-processor.
    Add,
    /// Adds no tokens; special tokens written in the text are still recognised.
    Omit,
}

/// Token ids and the byte range of each token in the text.
#[derive(Debug, Clone)]
pub struct Encoded {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Byte ranges in the text, one per id; empty for tokens that the tokenizer added.
    pub offsets: Vec<(usize, usize)>,
}

/// A tokenizer with the special tokens and the template of its model.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    specials: SpecialTokens,
    template: Option<ChatTemplate>,
    vocab_size: usize,
    /// The texts of all special tokens, including the named ones.
    special_tokens: Vec<String>,
}

impl Tokenizer {
    /// Creates a tokenizer from the texts of a model's tokenizer files; `chat_template` overrides the template in the
    /// config. A template that does not compile is reported on first use, so that rows without chats do not need one.
    pub fn new(
        tokenizer_json: &str,
        tokenizer_config: Option<&Value>,
        special_tokens_map: Option<&Value>,
        chat_template: Option<&str>,
    ) -> Result<Self, DataError> {
        // The library panics on some decoders and prefixes.
        let read = caught(|| tokenizers::Tokenizer::from_bytes(tokenizer_json.as_bytes()));
        let read = read.unwrap_or_else(|panic| Err(without_place(&panic).into()));
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

    /// The ids of a text with their byte ranges.
    pub fn encode_with_offsets(&self, text: &str, special: Special) -> Result<Encoded, DataError> {
        let encoding = answered(|| self.inner.encode(text, special == Special::Add))?;
        Ok(Encoded { ids: encoding.get_ids().to_vec(), offsets: encoding.get_offsets().to_vec() })
    }

    /// Same as `encode`, for a text of which only the first `most` ids are kept. A text with more than `most` ids gives
    /// a result with more than `most` ids, the first `most` of which are those of the whole text.
    pub fn beginning(&self, text: &str, special: Special, most: usize) -> Result<Vec<u32>, DataError> {
        beginning(text, most, |text| self.encode(text, special), |ids| ids)
    }

    /// Same as `beginning`, with byte ranges.
    pub fn beginning_with_offsets(
        &self,
        text: &str,
        special: Special,
        most: usize,
    ) -> Result<Encoded, DataError> {
        beginning(text, most, |text| self.encode_with_offsets(text, special), |e| &e.ids)
    }

    /// The ids of words that are tokenised one by one, and the word of each id; none of tokens that the tokenizer adds.
    /// If there are more than `most` ids, the result has more than `most`, the first `most` of which are right.
    pub fn words(&self, words: &[String], most: usize) -> Result<(Vec<u32>, Vec<Option<u32>>), DataError> {
        let mut enough = most.saturating_add(1);
        loop {
            // Words do not change each other's tokens.
            let beginning = words[..enough.min(words.len())].to_vec();
            let encoding = answered(|| self.inner.encode(beginning.clone(), true))?;
            if encoding.len() > most || enough >= words.len() {
                return Ok((encoding.get_ids().to_vec(), encoding.get_word_ids().to_vec()));
            }
            enough = enough.saturating_mul(4);
        }
    }

    /// Decodes ids to text; bytes that are not a complete character become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: Skip) -> Result<String, DataError> {
        self.inner.decode(ids, skip_special == Skip::Special).map_err(|e| DataError::Tokenizer(e.to_string()))
    }

    /// Highest id + 1: the number of rows that an embedding needs.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The id of the token with this exact text.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The text of the token with this id.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of the end-of-text token.
    pub fn eos_id(&self) -> Option<u32> {
        self.eos_token().and_then(|t| self.inner.token_to_id(t))
    }

    /// The text of the beginning-of-text token.
    pub fn bos_token(&self) -> Option<&str> {
        self.specials.get("bos_token")
    }

    /// The text of the end-of-text token.
    pub fn eos_token(&self) -> Option<&str> {
        self.specials.get("eos_token")
    }

    /// The chat template, if any.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// Whether `token` is exactly one of the special tokens.
    pub fn is_special(&self, token: &str) -> bool {
        self.inner.get_added_vocabulary().is_special_token(token)
    }

    /// Whether `text` ends with one of the special tokens.
    pub fn ends_with_special(&self, text: &str) -> bool {
        self.special_tokens.iter().any(|t| text.ends_with(t.as_str()))
    }
}

/// A text up to this many bytes is tokenised as a whole.
const WHOLE: usize = 1 << 16;
/// The first tokens of a longer text must be found within this many bytes, or within `BYTES_A_TOKEN` per token.
const LARGEST: usize = 2 << 20;
/// Bytes of text per kept token in the first attempt.
const BYTES_A_TOKEN: usize = 8;
/// Minimum number of tokens between the kept ones and the cut.
const MARGIN: usize = 64;
/// Distance of the second cut in bytes: a prime, so that no grouping of characters is aligned with both cuts.
const FURTHER: usize = 4099;

/// Maximum number of bytes that are tokenised at once to keep `most` tokens.
pub fn reach(most: usize) -> usize {
    most.saturating_mul(BYTES_A_TOKEN).max(LARGEST).saturating_add(FURTHER)
}

/// Tokenizes a text up to a cut. Effects at the end of a text (a split word, trimmed white space, groups of digits
/// counted from the right, a final special token) must not change the kept tokens. Therefore at least `MARGIN` tokens
/// follow the kept ones, and a second, later cut must give the same kept tokens; otherwise the cuts move further.
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

/// Runs a call of the library and returns errors and panics: its regular expressions panic at their limits.
fn answered<T>(run: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, DataError> {
    match caught(run) {
        Ok(result) => result.map_err(|e| DataError::Tokenizer(e.to_string())),
        Err(panic) => {
            let why = without_place(&panic);
            let what = "tokenizer.json fails on this text";
            let way = "use the tokenizer.json of the model's page, or leave the text out";
            Err(DataError::Tokenizer(format!("{what} ({why}): {way}")))
        }
    }
}

/// Whether decoding omits special tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Skip {
    /// Omits special tokens.
    Special,
    /// Omits no tokens.
    Nothing,
}

/// The special tokens of tokenizer_config.json, completed from special_tokens_map.json; a token is a string or
/// {content}.
fn special_tokens(config: Option<&Value>, map: Option<&Value>) -> SpecialTokens {
    let names = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
    let text = |v: &Value| v.as_str().or_else(|| v.get("content")?.as_str()).map(str::to_owned);
    let find = |name: &str| [config, map].into_iter().flatten().find_map(|v| v.get(name).and_then(text));
    SpecialTokens(names.iter().filter_map(|&n| Some((n.to_owned(), find(n)?))).collect())
}

/// (template, template for rows with tools): a list in the config may contain both, as `default` and `tool_use`.
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
