//! Floor 1: files. safetensors, GGUF, PEFT adapters, hub downloads, atomic writes.
//!
//! What is opened is not believed: sizes are checked against the file before anything is allocated or
//! borrowed, and what cannot be used is refused by name before anything heavy happens.

pub mod atomic;
mod bitsandbytes;
mod directory;
mod error;
pub mod gguf;
pub mod hub;
pub mod map;
pub mod peft;
pub mod rounded;
pub mod safetensors;

pub use directory::{id_of_cache_path, looks_like_id, with_weights, without_weights};
pub use error::FormatError;

use crate::numeric::tensor::Tensors;
use serde_json::Value;
use std::path::Path;

/// A base model on disk, opened but not read: a Hugging Face directory or a GGUF file.
pub struct ModelFiles {
    /// config.json, or one of the same shape made out of a GGUF's metadata.
    pub config: Value,
    /// Weights under Hugging Face names; q/k of a GGUF are un-permuted.
    pub tensors: Box<dyn Tensors>,
    /// Everything about tokens.
    pub tokenizer: TokenizerFiles,
    /// generation_config.json, where there is one.
    pub generation: Option<Value>,
    /// What an adapter's config should name as its base: a Hub id, where one is known.
    pub base_id: Option<String>,
    /// The commit, where it is known.
    pub revision: Option<String>,
    /// `bf16 safetensors`, `gguf Q4_1`: for cards and `inspect`.
    pub kind: String,
}

/// The tokenizer's files, as text, wherever they came from.
#[derive(Debug, Clone, Default)]
pub struct TokenizerFiles {
    /// tokenizer.json, whole.
    pub tokenizer_json: String,
    /// tokenizer_config.json.
    pub tokenizer_config: Option<Value>,
    /// special_tokens_map.json.
    pub special_tokens_map: Option<Value>,
    /// chat_template.jinja, else the default template in tokenizer_config.json.
    pub chat_template: Option<String>,
}

/// Opens a model: a Hugging Face directory or a .gguf file. Weights are mapped, not read.
pub fn open(path: &Path) -> Result<ModelFiles, FormatError> {
    let about = std::fs::metadata(path).map_err(|e| FormatError::io(path, e))?;
    if about.is_dir() {
        return directory::open(path);
    }
    if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) || begins_with_gguf(path) {
        return gguf::open(path);
    }
    Err(FormatError::unsupported(
        path,
        "not a model",
        "give a Hugging Face directory (config.json, model.safetensors, tokenizer.json) or a .gguf file",
    ))
}

fn begins_with_gguf(path: &Path) -> bool {
    let mut magic = [0; 4];
    let read =
        std::fs::File::open(path).and_then(|mut file| std::io::Read::read_exact(&mut file, &mut magic));
    read.is_ok() && &magic == b"GGUF"
}
