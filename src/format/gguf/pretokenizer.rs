//! The meaning of `tokenizer.ggml.pre`: normalizer and pre-tokenizer of the tokenizer.json that llama.cpp's converter
//! recognised when it wrote that name.

use serde_json::{Value, json};

/// How text is split before byte pairs are merged.
pub(super) struct Rule {
    pub normalizer: Value,
    pub pre_tokenizer: Value,
    /// True if a piece that is a token is not split, regardless of the merges.
    pub ignore_merges: bool,
}

const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// o200k of OpenAI.
const GPT_4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// The rule with the name `pre`.
pub(super) fn rule(pre: &str) -> Option<Rule> {
    let rule =
        |normalizer, pre_tokenizer, ignore_merges| Some(Rule { normalizer, pre_tokenizer, ignore_merges });
    match pre {
        "gpt-2" => rule(Value::Null, bytes(true), false),
        "smollm" => {
            let digits = json!({"type": "Digits", "individual_digits": true});
            rule(Value::Null, sequence(vec![digits, bytes(true)]), false)
        }
        "qwen2" | "deepseek-r1-qwen" | "megrez" => rule(json!({"type": "NFC"}), split(QWEN2), false),
        "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "smaug-bpe" | "lfm2" => {
            rule(Value::Null, split(LLAMA3), true)
        }
        "glm4" | "chatglm-bpe" => rule(Value::Null, split(LLAMA3), false),
        "tekken" => rule(Value::Null, split(TEKKEN), true),
        "gpt-4o" => rule(Value::Null, split(GPT_4O), false),
        _ => None,
    }
}

/// llama.cpp's name for the splitting rule of this tokenizer.json.
pub(super) fn name_of(tokenizer: &Value) -> Option<&'static str> {
    let plain = |v: &Value| {
        let mut v = v.clone();
        forget_offsets(&mut v);
        v
    };
    ["gpt-2", "smollm", "qwen2", "llama-bpe", "glm4", "tekken", "gpt-4o"].into_iter().find(|name| {
        rule(name).is_some_and(|rule| {
            plain(&rule.pre_tokenizer) == plain(&tokenizer["pre_tokenizer"])
                && rule.normalizer == tokenizer["normalizer"]
                && rule.ignore_merges == (tokenizer["model"]["ignore_merges"] == true)
        })
    })
}

/// Removes `trim_offsets`, which changes the span of a token but no id.
fn forget_offsets(v: &mut Value) {
    match v {
        Value::Object(map) => {
            map.shift_remove("trim_offsets");
            map.values_mut().for_each(forget_offsets);
        }
        Value::Array(all) => all.iter_mut().for_each(forget_offsets),
        _ => {}
    }
}

/// Whether llama.cpp adds BOS if the file does not specify it.
pub(super) fn adds_bos(pre: &str) -> bool {
    matches!(pre, "llama-bpe" | "llama3" | "llama-v3" | "tekken" | "lfm2")
}

fn sequence(all: Vec<Value>) -> Value {
    json!({"type": "Sequence", "pretokenizers": all})
}

fn bytes(use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": use_regex, "use_regex": use_regex})
}

fn split(regex: &str) -> Value {
    let split =
        json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    sequence(vec![split, bytes(false)])
}
