//! Makes tokenizer.json from GGUF metadata: byte-level BPE (`gpt2`) with a pre-tokenizer that the file names, and BPE
//! over sentencepiece pieces (`llama`), whose merges follow from the scores. Any other tokenizer is rejected by name,
//! because an approximation would give different ids without any error.

use super::pretokenizer;
use super::reader::Gguf;
use super::value::Value as Meta;
use crate::format::TokenizerFiles;
use crate::format::error::FormatError;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const BYTE: i64 = 6;

struct Source<'a> {
    file: &'a Gguf,
    tokens: &'a [String],
    types: Vec<i64>,
}

impl Source<'_> {
    fn get(&self, key: &str) -> Option<&Meta> {
        self.file.get(&format!("tokenizer.ggml.{key}"))
    }

    fn bad(&self, what: impl Into<String>) -> FormatError {
        FormatError::malformed(self.file.path(), what)
    }

    fn refuse(&self, what: String) -> FormatError {
        let way = "use the Hugging Face directory of this model, whose tokenizer.json is exact";
        FormatError::unsupported(self.file.path(), what, way)
    }

    /// The special token `key` ("bos") as (id, text).
    fn special(&self, key: &str) -> Result<Option<(usize, &str)>, FormatError> {
        let Some(id) = self.get(&format!("{key}_token_id")) else { return Ok(None) };
        // Some converters write -1 for no token.
        let Some(id) = id.as_u64().filter(|&id| id != u64::from(u32::MAX)) else { return Ok(None) };
        match self.tokens.get(id as usize) {
            Some(text) => Ok(Some((id as usize, text))),
            None => Err(self.bad(format!("{key}_token_id is {id}, there are {} tokens", self.tokens.len()))),
        }
    }

    fn flag(&self, key: &str, default: fn(&str) -> bool, pre: &str) -> bool {
        self.get(key).and_then(Meta::as_bool).unwrap_or_else(|| default(pre))
    }
}

/// The tokenizer's files, and generation_config.json.
pub(super) fn make(file: &Gguf) -> Result<(TokenizerFiles, Value), FormatError> {
    let s = source(file)?;
    let model = s.get("model").and_then(Meta::as_str).unwrap_or("none");
    let pre =
        s.get("pre").and_then(Meta::as_str).unwrap_or(if model == "llama" { "default" } else { "(none)" });
    let mut json = match model {
        "gpt2" => byte_level(&s, pre)?,
        "llama" => sentencepiece(&s)?,
        other => return Err(s.refuse(format!("tokenizer model '{other}' is not supported"))),
    };
    json["added_tokens"] = Value::Array(added(&s));
    json["post_processor"] = post_processor(&s, model, pre)?;
    let tokenizer_config = tokenizer_config(&s)?;
    let chat_template = tokenizer_config["chat_template"].as_str().map(str::to_owned);
    let special: Map<String, Value> = ["bos", "eos", "unk", "pad"]
        .iter()
        .map(|name| format!("{name}_token"))
        .filter_map(|key| Some((key.clone(), tokenizer_config.get(&key)?.clone())))
        .collect();
    let generation = generation(&s)?;
    let files = TokenizerFiles {
        tokenizer_json: json.to_string(),
        tokenizer_config: Some(tokenizer_config),
        special_tokens_map: Some(Value::Object(special)),
        chat_template,
    };
    Ok((files, generation))
}

fn source(file: &Gguf) -> Result<Source<'_>, FormatError> {
    let Some(tokens) = file.get("tokenizer.ggml.tokens").and_then(Meta::as_texts).filter(|t| !t.is_empty())
    else {
        let way = "convert the model again with its tokenizer";
        return Err(FormatError::unsupported(file.path(), "a GGUF without a tokenizer", way));
    };
    let types = match file.get("tokenizer.ggml.token_type").and_then(Meta::as_ints) {
        Some(types) => types.to_vec(),
        None => vec![1; tokens.len()],
    };
    if types.len() != tokens.len() {
        let what = format!("{} token types for {} tokens", types.len(), tokens.len());
        return Err(FormatError::malformed(file.path(), what));
    }
    Ok(Source { file, tokens, types })
}

fn vocabulary(s: &Source) -> Result<Map<String, Value>, FormatError> {
    let mut vocab = Map::with_capacity(s.tokens.len());
    for (id, token) in s.tokens.iter().enumerate() {
        if let Some(other) = vocab.insert(token.clone(), json!(id)) {
            return Err(s.bad(format!("tokens {other} and {id} are both '{}'", token.escape_debug())));
        }
    }
    Ok(vocab)
}

fn added(s: &Source) -> Vec<Value> {
    let special = |(id, &kind): (usize, &i64)| {
        // Only sentencepiece has the type UNKNOWN; a byte-level vocabulary marks the unknown token as CONTROL.
        matches!(kind, CONTROL | USER_DEFINED | UNKNOWN).then(|| {
            json!({
                "id": id, "content": s.tokens[id], "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": kind != USER_DEFINED,
            })
        })
    };
    s.types.iter().enumerate().filter_map(special).collect()
}

/// The common fields of both BPE models.
fn bpe(vocab: Map<String, Value>, merges: Vec<Value>) -> Value {
    json!({
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
        "vocab": vocab, "merges": merges,
    })
}

fn byte_level(s: &Source, pre: &str) -> Result<Value, FormatError> {
    let Some(rule) = pretokenizer::rule(pre) else {
        return Err(s.refuse(format!("pre-tokenizer '{pre}' is not known")));
    };
    let stored =
        s.get("merges").and_then(Meta::as_texts).ok_or_else(|| s.bad("tokenizer.ggml.merges is missing"))?;
    let vocab = vocabulary(s)?;
    let mut merges = Vec::with_capacity(stored.len());
    for merge in stored {
        // Byte-level BPE writes a space as a letter, so only a broken file has a piece that begins with a space.
        let pair = merge.split_once(' ').filter(|(a, b)| {
            vocab.contains_key(*a) && vocab.contains_key(*b) && vocab.contains_key(&format!("{a}{b}"))
        });
        let Some((a, b)) = pair else {
            return Err(s.bad(format!("merge '{}' does not join two tokens", merge.escape_debug())));
        };
        merges.push(json!([a, b]));
    }
    let mut model = bpe(vocab, merges);
    model["ignore_merges"] = json!(rule.ignore_merges);
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": rule.normalizer, "pre_tokenizer": rule.pre_tokenizer, "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": model,
    }))
}

fn sentencepiece(s: &Source) -> Result<Value, FormatError> {
    let scores = s.get("scores").and_then(Meta::as_floats).filter(|x| x.len() == s.tokens.len());
    let scores = scores.ok_or_else(|| s.bad("tokenizer.ggml.scores is missing or of another length"))?;
    let vocab = vocabulary(s)?;
    let mut model = bpe(vocab, merges_of(s, scores));
    model["byte_fallback"] = json!(s.types.contains(&BYTE));
    model["fuse_unk"] = json!(true);
    model["unk_token"] = json!(s.special("unknown")?.map(|(_, text)| text));
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    let normalizer = if s.flag("add_space_prefix", |_| true, "") {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]})
    } else {
        replace
    };
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": normalizer, "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": decoders}, "model": model,
    }))
}

/// Every split of a piece into two pieces is a merge, ranked by the score of the piece (transformers'
/// `generate_merges`: score, then the lengths of the halves in characters, highest first).
fn merges_of(s: &Source, scores: &[f32]) -> Vec<Value> {
    let ordinary = |id: &usize| !matches!(s.types[*id], CONTROL | BYTE | UNKNOWN);
    let ids: HashMap<&str, usize> =
        (0..s.tokens.len()).filter(ordinary).map(|id| (s.tokens[id].as_str(), id)).collect();
    let mut merges = Vec::new();
    for id in (0..s.tokens.len()).filter(ordinary) {
        let piece = s.tokens[id].as_str();
        let length = piece.chars().count();
        let first = merges.len();
        for (left, (at, _)) in piece.char_indices().enumerate().skip(1) {
            if let (Some(&a), Some(&b)) = (ids.get(&piece[..at]), ids.get(&piece[at..])) {
                merges.push((scores[id], left, length - left, a, b));
            }
        }
        merges[first..].sort_by_key(|m| (m.3, m.4));
    }
    // Python's reverse sort keeps the order of equal items, as a stable sort by reversed keys does.
    merges.sort_by(|x, y| y.0.total_cmp(&x.0).then((y.1, y.2).cmp(&(x.1, x.2))));
    merges.iter().map(|m| json!([s.tokens[m.3], s.tokens[m.4]])).collect()
}

/// Adds BOS at the start and EOS at the end, as the file specifies, else with llama.cpp's defaults.
fn post_processor(s: &Source, model: &str, pre: &str) -> Result<Value, FormatError> {
    let by_default: fn(&str) -> bool = if model == "llama" { |_| true } else { pretokenizer::adds_bos };
    let bos = s.special("bos")?.filter(|_| s.flag("add_bos_token", by_default, pre));
    let eos = s.special("eos")?.filter(|_| s.flag("add_eos_token", |_| false, pre));
    if bos.is_none() && eos.is_none() {
        return Ok(Value::Null);
    }
    let mut known = Map::new();
    for (id, text) in bos.iter().chain(eos.iter()) {
        known.insert((*text).to_owned(), json!({"id": text, "ids": [id], "tokens": [text]}));
    }
    let around = |sequence: &str, type_id: u32| {
        let token = |text: &str| json!({"SpecialToken": {"id": text, "type_id": type_id}});
        let mut all: Vec<Value> = bos.iter().map(|(_, text)| token(text)).collect();
        all.push(json!({"Sequence": {"id": sequence, "type_id": type_id}}));
        all.extend(eos.iter().map(|(_, text)| token(text)));
        all
    };
    let single = around("A", 0);
    let pair = [single.clone(), around("B", 1)].concat();
    Ok(json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known}))
}

fn tokenizer_config(s: &Source) -> Result<Value, FormatError> {
    let mut decoder = Map::new();
    for token in added(s) {
        let mut token = token;
        let id = token["id"].to_string();
        token.as_object_mut().map(|t| t.shift_remove("id"));
        decoder.insert(id, token);
    }
    let mut config = json!({
        "added_tokens_decoder": decoder, "add_prefix_space": false, "clean_up_tokenization_spaces": false,
        // PreTrainedTokenizerFast uses tokenizer.json unchanged; GPT2Tokenizer of transformers 5 replaces the
        // pre-tokenizer of the file by its own.
        "tokenizer_class": "PreTrainedTokenizerFast",
    });
    for (key, name) in [("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")] {
        if let Some((_, text)) = s.special(key)? {
            config[format!("{name}_token")] = json!(text);
        }
    }
    if let Some(template) = s.file.get("tokenizer.chat_template").and_then(Meta::as_str) {
        config["chat_template"] = json!(template);
    }
    Ok(config)
}

/// The generation_config.json; several tokens may end a turn.
fn generation(s: &Source) -> Result<Value, FormatError> {
    let mut stop = Vec::new();
    for key in ["eos", "eot", "eom"] {
        stop.extend(s.special(key)?.map(|(id, _)| id));
    }
    stop.dedup();
    let mut all = Map::new();
    for (key, name) in [("bos", "bos_token_id"), ("padding", "pad_token_id")] {
        if let Some((id, _)) = s.special(key)? {
            all.insert(name.into(), json!(id));
        }
    }
    match stop[..] {
        [] => {}
        [one] => drop(all.insert("eos_token_id".into(), json!(one))),
        _ => drop(all.insert("eos_token_id".into(), json!(stop))),
    }
    Ok(Value::Object(all))
}
