//! A Hugging Face model directory: its contents, and errors that name unusable files and an alternative.

use super::backbone::text_model;
use super::bitsandbytes::Quantised;
use super::error::FormatError;
use super::experts::Apart;
use super::safetensors::Sharded;
use super::{ModelFiles, TokenizerFiles};
use crate::families::{self, Family, JoinedExperts, wrapped};
use crate::numeric::tensor::Tensors;
use serde_json::{Value, json};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

/// The kind of weights in NF4.
pub const NF4: &str = "bitsandbytes nf4";
/// The kind of weights whose experts are in MXFP4.
pub const MXFP4: &str = "mxfp4";

/// How weights are quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// Not at all.
    None,
    /// NF4 of bitsandbytes.
    Nf4,
    /// Experts in MXFP4.
    Mxfp4,
}

/// Opens the model directory `dir`.
pub(super) fn open(dir: &Path) -> Result<ModelFiles, FormatError> {
    if holds(dir)? == Holds::NoWeights {
        let way = "download the model's weights into this folder";
        return Err(FormatError::unsupported(dir, "a model directory without model.safetensors", way));
    }
    let (mut config, tensors, kind) = weights(dir)?;
    let Some(text) = text_model(&config, &tensors) else { return with_weights(dir, config, tensors, kind) };
    // A head in the files is used whatever config.json says: transformers ties none that differs from the embedding, and
    // one that does not differ gives the same logits.
    if text.names().iter().any(|name| name == "lm_head.weight") {
        config["tie_word_embeddings"] = json!(false);
    }
    Ok(ModelFiles { whole: Some(tensors), ..with_weights(dir, config, text, kind)? })
}

/// The config.json without its quantisation, the tensors, and the name of their encoding.
pub fn weights(dir: &Path) -> Result<(Value, Arc<dyn Tensors>, String), FormatError> {
    let (config, method) = config_and_method(dir)?;
    let (tensors, kind): (Arc<dyn Tensors>, _) = match method {
        Method::Nf4 => (Arc::new(Quantised(Sharded::open_with_bytes(dir)?)), NF4.to_owned()),
        Method::Mxfp4 => (
            Arc::new(Apart::new(Sharded::open_with_bytes(dir)?, JoinedExperts::Alternating)),
            MXFP4.to_owned(),
        ),
        Method::None => {
            let tensors = Sharded::open(dir)?;
            let kind = format!("{} safetensors", tensors.dtype_name());
            match joined_experts(&config) {
                Some(how) => (Arc::new(Apart::new(tensors, how)), kind),
                None => (Arc::new(tensors), kind),
            }
        }
    };
    Ok((config, tensors, kind))
}

/// How the files of a model with this config.json have all experts of a layer in the same tensors.
fn joined_experts(config: &Value) -> Option<JoinedExperts> {
    let classes = config["architectures"].as_array().map_or(&[][..], |all| all);
    let has = |name: String| classes.iter().any(|class| *class == name);
    let is = |f: &&&Family| config["model_type"] == f.model_type || has(format!("{}ForCausalLM", f.name));
    let wrapped =
        wrapped::ALL.iter().filter(|wrapper| has(wrapper.class.into())).map(|wrapper| wrapper.family);
    families::ALL.iter().filter(is).copied().chain(wrapped).find_map(|family| family.joined_experts)
}

/// The config.json of a directory that has everything except the weights, for [`with_weights`], and the method of the
/// weights. `None` if the directory has weights, or is not a model.
pub fn without_weights(dir: &Path) -> Result<Option<(Value, Method)>, FormatError> {
    match holds(dir) {
        Ok(Holds::NoWeights) if dir.join("config.json").is_file() => config_and_method(dir).map(Some),
        _ => Ok(None),
    }
}

/// The config.json without its quantisation, and its method.
fn config_and_method(dir: &Path) -> Result<(Value, Method), FormatError> {
    let mut config = check_config(dir)?;
    let quantised = config.as_object_mut().and_then(|c| c.shift_remove("quantization_config"));
    let method = match quantised {
        None | Some(Value::Null) => Method::None,
        Some(of) if of["quant_method"] == MXFP4 => Method::Mxfp4,
        Some(_) => Method::Nf4,
    };
    Ok((config, method))
}

/// A model with the directory's files and `tensors`; `kind` is the name of their encoding.
pub fn with_weights(
    dir: &Path,
    config: Value,
    tensors: Arc<dyn Tensors>,
    kind: String,
) -> Result<ModelFiles, FormatError> {
    let tokenizer = tokenizer(dir)?;
    let (base_id, revision) = match id_of_cache_path(dir) {
        Some((id, revision)) => (Some(id), revision),
        None => (config["_name_or_path"].as_str().filter(|id| looks_like_id(id)).map(str::to_owned), None),
    };
    let generation = json(&dir.join("generation_config.json"))?;
    Ok(ModelFiles { config, tensors, whole: None, tokenizer, generation, base_id, revision, kind })
}

/// The config.json; an error if the weights have an unsupported quantisation.
pub(super) fn check_config(dir: &Path) -> Result<Value, FormatError> {
    let config = json(&dir.join("config.json"))?.ok_or_else(|| {
        let way = "download it from the model's page into this folder";
        FormatError::unsupported(dir, "a model directory without config.json", way)
    })?;
    refuse_quantised(dir, &config)?;
    Ok(config)
}

/// Contents of a model directory.
#[derive(PartialEq, Eq)]
enum Holds {
    /// Weights in safetensors.
    Weights,
    /// Files of a model, but not its weights.
    NoWeights,
}

/// Checks file names only; rejects directories with weights other than safetensors.
fn holds(dir: &Path) -> Result<Holds, FormatError> {
    let names: Vec<String> = std::fs::read_dir(dir)
        .map_err(|e| FormatError::io(dir, e))?
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    let has = |name: &str| names.iter().any(|n| n == name);
    let refuse = |what: &str, way: &str| Err(FormatError::unsupported(dir, what, way));
    if has("model.safetensors") || has("model.safetensors.index.json") {
        return Ok(Holds::Weights);
    }
    if has("adapter_config.json") {
        return refuse("a PEFT adapter, not a model", "give its base as MODEL and this with --adapter");
    }
    if names.iter().any(|n| n.starts_with("pytorch_model") && (n.ends_with(".bin") || n.ends_with(".json"))) {
        let way = "convert it once with transformers: save_pretrained(DIR, safe_serialization=True)";
        return refuse("its weights are pytorch_model.bin (pickle), which is not read", way);
    }
    if let Some(gguf) = names.iter().find(|n| n.ends_with(".gguf")) {
        return refuse("a folder of .gguf files", &format!("name the file: {}", dir.join(gguf).display()));
    }
    if has("config.json") || names.iter().any(|n| n.ends_with(".safetensors")) {
        return Ok(Holds::NoWeights);
    }
    refuse("not a model directory", "it needs config.json, model.safetensors and tokenizer.json")
}

/// Rejects `quantization_config` of GPTQ, AWQ, FP8 and similar methods, and of bitsandbytes other than NF4.
fn refuse_quantised(dir: &Path, config: &Value) -> Result<(), FormatError> {
    let quantised = &config["quantization_config"];
    if quantised.is_null() {
        return Ok(());
    }
    let method = quantised["quant_method"].as_str().unwrap_or_else(|| {
        let bitsandbytes = quantised["load_in_4bit"] == true || quantised["load_in_8bit"] == true;
        if bitsandbytes { "bitsandbytes" } else { "an unnamed method" }
    });
    let four = quantised["load_in_4bit"] == true;
    let nf4 = method == "bitsandbytes" && four && quantised["bnb_4bit_quant_type"] == "nf4";
    let joined = joined_experts(config);
    if nf4 && joined.is_none() || method == MXFP4 && joined == Some(JoinedExperts::Alternating) {
        return Ok(());
    }
    let method = match (method, four) {
        ("bitsandbytes", true) if nf4 => "bitsandbytes beside joined experts",
        ("bitsandbytes", true) => "bitsandbytes in FP4",
        ("bitsandbytes", false) => "bitsandbytes in 8 bits",
        (other, _) => other,
    };
    let what = format!("its weights are quantised with {method}, which is not supported");
    Err(FormatError::unsupported(dir, what, "use the model's bf16 or f16 weights, or a .gguf of it"))
}

fn tokenizer(dir: &Path) -> Result<TokenizerFiles, FormatError> {
    let Some(tokenizer_json) = text(&dir.join("tokenizer.json"))? else {
        let refuse = |what: &str, way: &str| Err(FormatError::unsupported(dir, what, way));
        if dir.join("tokenizer.model").exists() {
            let way = "make one with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)";
            return refuse("it has tokenizer.model but no tokenizer.json, which is needed", way);
        }
        let way = "copy tokenizer.json from the model's page into this folder";
        return refuse("a model directory without a tokenizer (tokenizer.json)", way);
    };
    let tokenizer_config = json(&dir.join("tokenizer_config.json"))?;
    let special_tokens_map = json(&dir.join("special_tokens_map.json"))?;
    let chat_template = match text(&dir.join("chat_template.jinja"))? {
        Some(template) => Some(template),
        None => tokenizer_config.as_ref().and_then(template_of),
    };
    Ok(TokenizerFiles { tokenizer_json, tokenizer_config, special_tokens_map, chat_template })
}

/// The chat template in tokenizer_config.json: a string, or the entry `default` (else the first one) of a list of
/// {name, template}.
pub(super) fn template_of(tokenizer_config: &Value) -> Option<String> {
    match &tokenizer_config["chat_template"] {
        Value::String(template) => Some(template.clone()),
        Value::Array(named) => {
            let default = named.iter().find(|t| t["name"] == "default").or(named.first())?;
            default["template"].as_str().map(str::to_owned)
        }
        _ => None,
    }
}

/// The text of a file, or None if the file does not exist.
pub(super) fn text(path: &Path) -> Result<Option<String>, FormatError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(FormatError::io(path, e)),
    }
}

/// The JSON object in a file, or None if the file does not exist.
pub(super) fn json(path: &Path) -> Result<Option<Value>, FormatError> {
    let Some(text) = text(path)? else { return Ok(None) };
    let value: Value = serde_json::from_str(&text)
        .map_err(|e| FormatError::malformed(path, format!("not valid JSON: {e}")))?;
    if !value.is_object() {
        return Err(FormatError::malformed(path, "not a JSON object"));
    }
    Ok(Some(value))
}

/// Id and revision of a path in the Hub's cache: `.../models--owner--name/snapshots/REVISION`.
pub fn id_of_cache_path(path: &Path) -> Option<(String, Option<String>)> {
    // A file in a snapshot is a link into blobs/, so only its directory is resolved.
    let path = if path.is_dir() { path.canonicalize() } else { path.parent()?.canonicalize() }.ok()?;
    let parts: Vec<&str> = path.iter().filter_map(|p| p.to_str()).collect();
    let at = parts.iter().rposition(|p| p.starts_with("models--"))?;
    let id = parts[at].strip_prefix("models--")?.replace("--", "/");
    let revision = match parts.get(at + 1..) {
        Some(["snapshots", revision, ..]) => Some((*revision).to_owned()),
        _ => None,
    };
    Some((id, revision))
}

/// Whether `text` is a Hub id (`owner/name`) and not an existing path.
pub fn looks_like_id(text: &str) -> bool {
    is_id(text) && !Path::new(text).exists()
}

/// Whether `text` is a Hub id (`owner/name`).
pub fn is_id(text: &str) -> bool {
    let part = |p: &str| {
        let legal = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        !p.is_empty()
            && p.len() <= 96
            && p.chars().all(legal)
            && !p.starts_with(['.', '-'])
            && !p.ends_with('.')
    };
    match text.split_once('/') {
        Some((owner, name)) => part(owner) && part(name),
        None => false,
    }
}
