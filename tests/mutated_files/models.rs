//! A model's JSON: config.json, the tokenizer's files, chat templates.

use crate::mutate::{self, Dice};
use crate::weights::{file, golden, of};
use crate::{Files, Format};
use finetune::backend::Cpu;
use finetune::config::refusal::Refusal;
use finetune::data::Tokenizer;
use finetune::data::template::{ChatTemplate, Ending, SpecialTokens};
use finetune::data::tokenizer::{Skip, Special};
use finetune::format;
use finetune::model::config::Config;
use finetune::model::decoder::Build;
use finetune::model::lora::LoraSpec;
use finetune::model::targets::Choice;
use serde_json::{Value, json};
use stages::Loads;
use std::path::Path;
use std::sync::LazyLock;

pub const FORMATS: &[Format] = &[
    Format { name: "config", share: 3, whole: model, damage: in_the_config, read: read_model },
    Format { name: "tokenizer", share: 3, whole: tokens, damage: in_the_tokenizer, read: read_tokens },
    Format { name: "template", share: 3, whole: template, damage: in_the_template, read: read_template },
];

/// A tokenizer of bytes and words.
pub fn tokenizer_json() -> Vec<u8> {
    std::fs::read(golden("rows/bytes.json")).unwrap()
}

fn tokenizer_config() -> Value {
    json!({
        "bos_token": { "content": "<|im_start|>", "special": true }, "eos_token": "<|im_end|>", "add_bos_token": true,
        "chat_template": [{ "name": "default", "template": "{{ messages[0].content }}" },
            { "name": "tool_use", "template": "{{ tools }}" }],
    })
}

/// A complete model of two layers.
fn model() -> Files {
    let read = |name: &str| std::fs::read(golden("parity/llamacls/model").join(name)).unwrap();
    let mut small: Value = serde_json::from_slice(&tokenizer_json()).unwrap();
    small["model"]["vocab"].as_object_mut().unwrap().retain(|_, id| id.as_u64() < Some(100));
    small["model"]["merges"] = json!([]);
    vec![
        file("config.json", read("config.json")),
        file("model.safetensors", read("model.safetensors")),
        file("tokenizer.json", small.to_string()),
        file("generation_config.json", json!({ "eos_token_id": [1, 2], "max_length": 20 }).to_string()),
        file("special_tokens_map.json", json!({ "eos_token": "<|im_end|>" }).to_string()),
    ]
}

fn damage_json(dice: &mut Dice, whole: &Files, name: &str) -> Files {
    let value = serde_json::from_slice(of(whole, name)).unwrap();
    vec![file(name, mutate::json(dice, &value))]
}

fn in_the_config(dice: &mut Dice, whole: &Files) -> Files {
    match dice.below(12) {
        0 => damage_json(dice, whole, "generation_config.json"),
        1 => damage_json(dice, whole, "special_tokens_map.json"),
        2 => vec![(dice.pick(whole).0.clone(), None)],
        _ => {
            let mut config: Value = serde_json::from_slice(of(whole, "config.json")).unwrap();
            let more = [
                ("sliding_window", json!(8)),
                (
                    "rope_scaling",
                    json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 64}),
                ),
                ("rope_scaling", json!({"type": "yarn", "factor": 4.0})),
                ("quantization_config", json!({"quant_method": "bitsandbytes", "load_in_4bit": true})),
                ("layer_types", json!(["full_attention", "sliding_attention"])),
            ];
            if dice.one_in(3) {
                let (key, value) = dice.pick(&more).clone();
                config[key] = value;
            }
            vec![file("config.json", mutate::json(dice, &config))]
        }
    }
}

/// Loads the model onto a CPU.
fn read_model(folder: &Path) -> Result<(), Refusal> {
    let files = format::open(folder)?;
    let config = Config::from_json(&files.config)?;
    let t = &files.tokenizer;
    let tokenizer = Tokenizer::new(
        &t.tokenizer_json,
        t.tokenizer_config.as_ref(),
        t.special_tokens_map.as_ref(),
        t.chat_template.as_deref(),
    )?;
    config.check_vocabulary(tokenizer.vocab_size())?;
    let choice = Choice { targets: vec!["all-linear".into()], ..Choice::default() };
    let spec = choice.resolve(&config, LoraSpec { rank: 2, alpha: 4.0, seed: 1, ..LoraSpec::none() })?;
    let build = Build::whole(&config);
    drop(std::hint::black_box(Cpu::new(1).stage((&config, &*files.tensors, &spec), build)?));
    Ok(())
}

fn tokens() -> Files {
    vec![
        file("tokenizer.json", tokenizer_json()),
        file("tokenizer_config.json", tokenizer_config().to_string()),
    ]
}

/// Parts of tokenizers that this tokenizer does not have.
const PARTS: [(&str, &str); 12] = [
    ("normalizer", r#"{"type":"NFC"}"#),
    (
        "normalizer",
        r#"{"type":"Sequence","normalizers":[{"type":"Lowercase"},{"type":"Strip","strip_left":true,"strip_right":true}]}"#,
    ),
    ("normalizer", r#"{"type":"Replace","pattern":{"Regex":" +"},"content":"_"}"#),
    ("normalizer", r#"{"type":"Prepend","prepend":"_"}"#),
    (
        "pre_tokenizer",
        r#"{"type":"Split","pattern":{"Regex":"\\p{L}+|\\d"},"behavior":"Isolated","invert":false}"#,
    ),
    ("pre_tokenizer", r#"{"type":"Digits","individual_digits":true}"#),
    ("pre_tokenizer", r#"{"type":"Metaspace","replacement":"_","prepend_scheme":"always","split":true}"#),
    ("decoder", r#"{"type":"Sequence","decoders":[{"type":"ByteFallback"},{"type":"Fuse"}]}"#),
    (
        "post_processor",
        r#"{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<|im_start|>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[],"special_tokens":{"<|im_start|>":{"id":"<|im_start|>","ids":[1],"tokens":["<|im_start|>"]}}}"#,
    ),
    ("model", r#"{"type":"Unigram","unk_id":0,"vocab":[["a",-1.0],["b",-2.5]],"byte_fallback":false}"#),
    (
        "model",
        r#"{"type":"WordPiece","unk_token":"a","continuing_subword_prefix":"","max_input_chars_per_word":9,"vocab":{"a":0,"b":1}}"#,
    ),
    ("model", r#"{"type":"WordLevel","unk_token":"a","vocab":{"a":0,"b":1}}"#),
];

fn in_the_tokenizer(dice: &mut Dice, whole: &Files) -> Files {
    if dice.one_in(5) {
        return damage_json(dice, whole, "tokenizer_config.json");
    }
    let mut value: Value = serde_json::from_slice(of(whole, "tokenizer.json")).unwrap();
    if dice.one_in(2) {
        let (key, part) = dice.pick(&PARTS);
        let part: Value = serde_json::from_str(part).unwrap();
        // Damage within a part goes deeper than damage spread over the whole file.
        value[*key] = serde_json::from_slice(&mutate::json(dice, &part)).unwrap_or(part);
    }
    vec![file("tokenizer.json", mutate::json(dice, &value))]
}

fn read_tokens(folder: &Path) -> Result<(), Refusal> {
    let text = std::fs::read(folder.join("tokenizer.json")).unwrap_or_default();
    let text = String::from_utf8(text).map_err(Refusal::failure)?;
    let config = std::fs::read(folder.join("tokenizer_config.json")).unwrap_or_default();
    let config: Value = serde_json::from_slice(&config).map_err(Refusal::failure)?;
    let tokenizer = Tokenizer::new(&text, Some(&config), None, None)?;
    let encoded =
        tokenizer.encode_with_offsets("Write the blue 42 naïve 世界 <|im_end|>\n\n a\0b", Special::Add)?;
    tokenizer.decode(&encoded.ids, Skip::Nothing)?;
    tokenizer.decode(&[0, 1, 400, u32::MAX], Skip::Special)?;
    if let Some(template) = tokenizer.template() {
        template.render(&conversation(), None, Ending::GenerationPrompt)?;
    }
    Ok(())
}

fn conversation() -> Value {
    json!([
        { "role": "system", "content": "Be short." },
        { "role": "user", "content": [{ "type": "text", "text": "Grüße" }] },
        { "role": "user", "content": "{{ 1 }} {% raw %}" },
        { "role": "assistant", "content": null, "tool_calls": [{ "function": { "name": "f", "arguments": {"a": 1e9} } }] },
        { "role": "tool", "content": "\u{1b}[2J" },
        { "role": "assistant", "content": "answer", "reasoning_content": "why" },
    ])
}

static TEMPLATES: LazyLock<Vec<String>> = LazyLock::new(|| {
    let cases: Value =
        serde_json::from_slice(&std::fs::read(golden("templates/cases.json")).unwrap()).unwrap();
    cases["templates"].as_object().unwrap().values().filter_map(Value::as_str).map(String::from).collect()
});

fn template() -> Files {
    vec![file("chat_template.jinja", "{% for m in messages %}{{ m.role }}{{ '\\n' }}{% endfor %}")]
}

/// Fragments of templates. Numbers in them are small: other tests bound how much a template may compute and write.
const FRAGMENTS: [&str; 30] = [
    "{% if messages %}",
    "{% endif %}",
    "{% else %}",
    "{% for x in messages %}",
    "{% endfor %}",
    "{% generation %}",
    "{% endgeneration %}",
    "{%- set x = messages -%}",
    "{{ x }}",
    "{{ messages[0] }}",
    "{{ messages[-99] }}",
    "{{ messages[::-1] }}",
    "{{ messages[1:0:0] }}",
    "{{ x.y.z }}",
    "{{ 1 / 0 }}",
    "{{ 1 % 0 }}",
    "{{ 1 // 0 }}",
    "{{ -9223372036854775808 }}",
    "{{ 9223372036854775807 + 1 }}",
    "{{ messages | tojson }}",
    "{{ 'a' | join }}",
    "{{ raise_exception('no\n\x1b[2J') }}",
    "{{ strftime_now('%Q%') }}",
    "{{ strftime_now('%Y') }}",
    "{% macro m() %}",
    "{% endmacro %}{{ m() }}",
    "{# ",
    "{% break %}",
    "{{ ''.split('') }}",
    "{{ messages.append(1) }}",
];

fn in_the_template(dice: &mut Dice, _: &Files) -> Files {
    let mut text = dice.pick(&TEMPLATES).clone();
    for _ in 0..1 + dice.below(3) {
        // Positions where a tag or an expression begins or ends.
        let edges: Vec<usize> =
            text.match_indices(['{', '}', '|', '(', ')', '[']).map(|(at, _)| at).collect();
        let at = if edges.is_empty() { 0 } else { *dice.pick(&edges) };
        let other = if edges.is_empty() { 0 } else { *dice.pick(&edges) };
        let (from, to) = (at.min(other), at.max(other));
        match dice.below(6) {
            0 => text.insert_str(at, dice.word(&FRAGMENTS)),
            1 => drop(text.drain(from..to)),
            2 => {
                let part = &text[from..text.floor_char_boundary(to.min(from + 40))];
                let part = part.replace(['0', '9'], "1");
                text.insert_str(at, &part);
            }
            3 => text.truncate(at),
            4 => text.insert(
                at,
                *dice.pick(&['{', '}', '%', '#', '\'', '"', '|', '(', ')', '-', '.', '\0', '🦀']),
            ),
            _ => {
                text = text.replacen(dice.word(&["content", "role", "messages", "loop", "==", "%}"]), "x", 1)
            }
        }
        if !text.is_char_boundary(0) {
            break;
        }
    }
    vec![file("chat_template.jinja", text)]
}

fn read_template(folder: &Path) -> Result<(), Refusal> {
    let text = std::fs::read_to_string(folder.join("chat_template.jinja")).map_err(Refusal::failure)?;
    let specials =
        SpecialTokens(vec![("bos_token".into(), "<s>".into()), ("eos_token".into(), "</s>".into())]);
    let template = ChatTemplate::at(1_732_190_400, &text, None, specials);
    let tools = json!([{ "type": "function", "function": { "name": "f", "parameters": {} } }]);
    let traced = template.render_traced(&conversation(), None, Ending::GenerationPrompt);
    template.render_traced(&json!([]), Some(&tools), Ending::Turn)?;
    traced?;
    Ok(())
}
