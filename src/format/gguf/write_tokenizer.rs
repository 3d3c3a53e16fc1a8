//! Writes a byte-level BPE tokenizer.json as `tokenizer.ggml.*`, in the format of llama.cpp's converter
//! (`_set_vocab_gpt2`). The converter finds the name of the pre-tokenizer from the ids of a test text; here the
//! splitting rule in the file must equal one with a known name. Any other tokenizer is rejected, because an
//! approximation would give different ids without any error.

use super::pretokenizer;
use super::reader::Gguf;
use super::value::Value as Stored;
use super::write::{Meta, Metadata};
use crate::format::TokenizerFiles;
use serde_json::Value;
use std::collections::BTreeMap;

const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
/// The score that llama.cpp's converter gives to added tokens.
const NO_SCORE: f32 = -1000.0;

/// Adds all metadata of the tokenizer; the error says what cannot be written. `config` is config.json, for the ids of
/// special tokens that the tokenizer does not name.
pub fn add(all: &mut Metadata, files: &TokenizerFiles, config: &Value, vocab: usize) -> Result<(), String> {
    let json: Value = serde_json::from_str(&files.tokenizer_json)
        .map_err(|e| format!("tokenizer.json is not valid JSON: {e}"))?;
    let model = &json["model"];
    if model["type"] != "BPE" || json["decoder"]["type"] != "ByteLevel" {
        return Err("its tokenizer is not a byte-level BPE, the only kind that is written".into());
    }
    let pre = pretokenizer::name_of(&json)
        .ok_or("its tokenizer cuts text in a way that has no name in llama.cpp")?;
    let tokens = tokens(&json, vocab)?;
    all.set("tokenizer.ggml.model", Meta::Text("gpt2".into()));
    all.set("tokenizer.ggml.pre", Meta::Text(pre.into()));
    let (texts, kinds) = tokens.into_iter().unzip();
    all.set("tokenizer.ggml.tokens", Meta::Texts(texts));
    all.set("tokenizer.ggml.token_type", Meta::Ints(kinds));
    all.set("tokenizer.ggml.merges", Meta::Texts(merges(model)?));
    specials(all, files, &json, config);
    let first = |item: &Value| item["SpecialToken"]["id"].as_str().map(str::to_owned);
    let around = template_of(&json["post_processor"]);
    let bos = around.first().and_then(first);
    let eos = around.last().filter(|_| around.len() > 1).and_then(first);
    all.set("tokenizer.ggml.add_bos_token", Meta::Bool(bos.is_some()));
    all.set("tokenizer.ggml.add_eos_token", Meta::Bool(eos.is_some()));
    let spaced = files.tokenizer_config.as_ref().and_then(|c| c["add_prefix_space"].as_bool());
    // The converter writes this key for `llama` only; byte-level BPE does not use it.
    if let Some(spaced) =
        spaced.filter(|_| all.get("general.architecture") == Some(&Meta::Text("llama".into())))
    {
        all.set("tokenizer.ggml.add_space_prefix", Meta::Bool(spaced));
    }
    if let Some(template) = &files.chat_template {
        all.set("tokenizer.chat_template", Meta::Text(template.clone()));
    }
    Ok(())
}

/// Gives the tokens of `file` those of tokenizer.json's added tokens that they lack, in a vocabulary of `vocab`.
pub fn extend(all: &mut Metadata, file: &Gguf, files: &TokenizerFiles, vocab: usize) -> Result<(), String> {
    let json: Value = serde_json::from_str(&files.tokenizer_json)
        .map_err(|e| format!("tokenizer.json is not valid JSON: {e}"))?;
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let get = |name: &str| file.get(&key(name));
    let mut texts = get("tokens").and_then(Stored::as_texts).map(<[String]>::to_vec).unwrap_or_default();
    let kinds = get("token_type").and_then(Stored::as_ints).unwrap_or_default();
    let mut kinds: Vec<i32> = kinds.iter().map(|kind| *kind as i32).collect();
    kinds.resize(texts.len(), NORMAL);
    kinds.resize(vocab, UNUSED);
    texts.extend((texts.len()..vocab).map(unused));
    for (id, text, kind) in added(&json) {
        if let Some(place) = texts.get_mut(id).filter(|place| **place != text) {
            (*place, kinds[id]) = (text, kind);
        }
    }
    if let Some(scores) = get("scores").and_then(Stored::as_floats) {
        let mut scores = scores.to_vec();
        scores.resize(vocab, NO_SCORE);
        all.set(&key("scores"), Meta::Floats(scores));
    }
    all.set(&key("tokens"), Meta::Texts(texts));
    all.set(&key("token_type"), Meta::Ints(kinds));
    Ok(())
}

/// llama.cpp's text of a row without a token.
pub fn unused(id: usize) -> String {
    format!("[PAD{id}]")
}

/// The added tokens of tokenizer.json: id, text and type.
fn added(json: &Value) -> impl Iterator<Item = (usize, String, i32)> {
    json["added_tokens"].as_array().into_iter().flatten().filter_map(|token| {
        let (id, text) = (token["id"].as_u64()?, token["content"].as_str()?);
        let control = token["special"] == true || looks_special(text);
        Some((id as usize, text.to_owned(), if control { CONTROL } else { USER_DEFINED }))
    })
}

/// The list `single` of the template among the post-processors.
fn template_of(processor: &Value) -> Vec<Value> {
    let inside = processor["processors"].as_array().cloned().unwrap_or_else(|| vec![processor.clone()]);
    let template = inside.into_iter().find(|p| p["type"] == "TemplateProcessing");
    template.and_then(|p| p["single"].as_array().cloned()).unwrap_or_default()
}

/// Text and type of every row of the embedding.
fn tokens(json: &Value, vocab: usize) -> Result<Vec<(String, i32)>, String> {
    let mut by_id: BTreeMap<usize, (String, i32)> = BTreeMap::new();
    let entries = json["model"]["vocab"].as_object().ok_or("tokenizer.json has no vocabulary")?;
    for (text, id) in entries {
        let id = id.as_u64().ok_or("tokenizer.json: an id is no number")? as usize;
        by_id.insert(id, (text.clone(), NORMAL));
    }
    by_id.extend(added(json).map(|(id, text, kind)| (id, (text, kind))));
    if let Some((id, _)) = by_id.last_key_value().filter(|(id, _)| **id >= vocab) {
        return Err(format!("the tokenizer has id {id}, the embedding {vocab} rows"));
    }
    Ok((0..vocab).map(|id| by_id.remove(&id).unwrap_or_else(|| (unused(id), UNUSED))).collect())
}

/// Whether a text looks like a control token: some models do not mark tokens of their chat template.
fn looks_special(text: &str) -> bool {
    let between = |a: &str, b: &str| text.starts_with(a) && text.ends_with(b);
    ["<pad>", "<mask>", "<2mass>", "[@BOS@]"].contains(&text)
        || between("<|", "|>")
        || between("<｜", "｜>")
        || between("<unused", ">")
}

fn merges(model: &Value) -> Result<Vec<String>, String> {
    let all = model["merges"].as_array().ok_or("tokenizer.json has no merges")?;
    let one = |merge: &Value| match (merge.as_str(), merge[0].as_str(), merge[1].as_str()) {
        (Some(text), ..) => Some(text.to_owned()),
        // A space inside a token would look like the separator, so it is written as byte-level BPE writes it.
        (_, Some(a), Some(b)) => Some(format!("{} {}", a.replace(' ', "Ġ"), b.replace(' ', "Ġ"))),
        _ => None,
    };
    all.iter().map(|m| one(m).ok_or_else(|| format!("merge {m} is not a pair of tokens"))).collect()
}

/// Writes ids of special tokens by their names in tokenizer_config.json, else by the ids in config.json.
fn specials(all: &mut Metadata, files: &TokenizerFiles, json: &Value, config: &Value) {
    let id_of = |text: &str| {
        let added = json["added_tokens"].as_array().into_iter().flatten();
        let added = added.filter(|t| t["content"] == text).find_map(|t| t["id"].as_u64());
        added.or_else(|| json["model"]["vocab"][text].as_u64())
    };
    let sources = [&files.tokenizer_config, &files.special_tokens_map];
    for (name, key) in [
        ("bos", "bos"),
        ("eos", "eos"),
        ("unk", "unknown"),
        ("sep", "seperator"),
        ("pad", "padding"),
        ("mask", "mask"),
    ] {
        let text = |v: &Value| v.as_str().or_else(|| v["content"].as_str()).map(str::to_owned);
        let named = sources
            .iter()
            .filter_map(|s| s.as_ref())
            .find_map(|s| s.get(format!("{name}_token")).and_then(text));
        let id = named.and_then(|t| id_of(&t)).or_else(|| config[format!("{name}_token_id")].as_u64());
        if let Some(id) = id.and_then(|id| u32::try_from(id).ok()) {
            all.set(&format!("tokenizer.ggml.{key}_token_id"), Meta::U32(id));
        }
    }
}
