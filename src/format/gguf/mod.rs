//! GGUF files as models: weights with Hugging Face names, and a config.json and a tokenizer.json made from the
//! metadata, so that higher floors handle only one kind of model.

pub mod adapter;
mod config;
mod encode;
pub mod mix;
pub mod order;
mod pretokenizer;
mod quant;
mod reader;
mod tokenizer;
mod value;
mod weights;
mod write;
mod write_config;
mod write_tokenizer;

pub use encode::{F16, F32, decode, encode};
pub use quant::id as type_id;
pub use reader::{Gguf, Info};
pub use value::Value;
pub use write::{Meta, Metadata, Planned, write};
pub use write_config::{Rules, Scaling, Shape, file_type_of, stored_names};
pub use write_tokenizer::{add as add_tokenizer, extend as extend_tokenizer, unused};

use super::ModelFiles;
use super::directory::{id_of_cache_path, looks_like_id};
use super::error::FormatError;
use super::positions::{Beginning, Positions};
use std::path::Path;
use std::sync::Arc;
use weights::Weights;
pub use weights::{is_share, is_taps};

/// Opens a model.
pub(super) fn open(path: &Path) -> Result<ModelFiles, FormatError> {
    let file = Gguf::open(path)?;
    let made = config::make(&file)?;
    let (tokenizer, generation) = tokenizer::make(&file)?;
    let kind = format!("gguf {}", Weights::main_kind(&file).name());
    let (base_id, revision) = match id_of_cache_path(path) {
        Some((id, revision)) => (Some(id), revision),
        None => (repository(&file), None),
    };
    let layers = made.config["num_hidden_layers"].as_u64().map_or(usize::MAX, |layers| layers as usize);
    let tensors = Arc::new(Weights::new(file, (made.family, layers), made.orders)?);
    Ok(ModelFiles {
        whole: None,
        config: made.config,
        tensors,
        tokenizer,
        generation: Some(generation),
        base_id,
        revision,
        kind,
    })
}

/// Positions of the tensors of a file, of which the first `here` bytes are read.
pub(super) fn positions(path: &Path, here: u64) -> Result<Beginning, FormatError> {
    let mut found = Positions::default();
    let tensors = match Gguf::table(path, here)? {
        Ok(tensors) => tensors,
        Err(more) => return Ok(Beginning::Needs(more)),
    };
    for (stored, range) in tensors {
        match weights::is_not_a_weight(&stored) {
            // No worker reads what predicts further tokens.
            true if stored.contains(".nextn.") => {}
            true => found.shapes.push(range),
            false => drop(found.tensors.insert(weights::place_of(&stored), range)),
        }
    }
    Ok(Beginning::All(found))
}

/// The `owner/name` in `general.base_model.0.repo_url`.
fn repository(file: &Gguf) -> Option<String> {
    let url = file.get("general.base_model.0.repo_url")?.as_str()?;
    let id = url.split_once("://").map_or(url, |(_, rest)| rest).split_once('/')?.1.trim_end_matches('/');
    looks_like_id(id).then(|| id.to_owned())
}
