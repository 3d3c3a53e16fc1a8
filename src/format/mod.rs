//! Floor 1: files. safetensors, GGUF, PEFT adapters, downloads and uploads of the Hub, atomic writes.
//!
//! File contents are not trusted: sizes are checked against the file before anything is allocated or borrowed, and
//! unsupported files are rejected by name before any expensive work.

pub mod atomic;
mod backbone;
mod bitsandbytes;
mod directory;
mod error;
mod experts;
pub mod gguf;
pub mod hub;
pub mod map;
pub mod peft;
mod positions;
pub mod rounded;
pub mod safetensors;

pub use backbone::{Checkpoint, text_model};
pub use directory::{
    MXFP4, Method, NF4, id_of_cache_path, is_id, looks_like_id, weights, with_weights, without_weights,
};
pub use error::FormatError;
pub use experts::Joined;
pub use positions::{Beginning, Positions};

use crate::numeric::tensor::Tensors;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// A base model on disk, opened but not read: a Hugging Face directory or a GGUF file.
pub struct ModelFiles {
    /// config.json, or an equivalent object made from the metadata of a GGUF.
    pub config: Value,
    /// Weights with Hugging Face names; q and k of a GGUF are in Hugging Face row order.
    pub tensors: Arc<dyn Tensors>,
    /// All tensors of a checkpoint in which `tensors` are the text model, under the checkpoint's names.
    pub whole: Option<Arc<dyn Tensors>>,
    /// The tokenizer's files.
    pub tokenizer: TokenizerFiles,
    /// generation_config.json, if it exists.
    pub generation: Option<Value>,
    /// The base for an adapter's config: a Hub id, if known.
    pub base_id: Option<String>,
    /// The commit, if known.
    pub revision: Option<String>,
    /// Name of the encoding for cards and `inspect`: `bf16 safetensors`, `gguf Q4_1`.
    pub kind: String,
}

/// The tokenizer's files as text, from any source.
#[derive(Debug, Clone, Default)]
pub struct TokenizerFiles {
    /// The complete tokenizer.json.
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

/// Positions of the tensors of a file of weights, of which the first `here` bytes are read.
pub fn positions(path: &Path, here: u64) -> Result<Beginning, FormatError> {
    if begins_with_gguf(path) {
        return gguf::positions(path, here);
    }
    let mut found = safetensors::positions(path, here)?;
    if let Beginning::All(Positions { tensors, shapes }) = &mut found {
        let states = tensors.iter().filter(|(name, _)| bitsandbytes::is_shape(name));
        shapes.extend(states.map(|(_, range)| range.clone()));
    }
    Ok(found)
}

fn begins_with_gguf(path: &Path) -> bool {
    let mut magic = [0; 4];
    let read =
        std::fs::File::open(path).and_then(|mut file| std::io::Read::read_exact(&mut file, &mut magic));
    read.is_ok() && &magic == b"GGUF"
}
