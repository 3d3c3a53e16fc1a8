//! The weights that a configuration implies, for a model whose weight files are absent: names, shapes and type, without
//! values.

use super::config::Config;
use super::layout::{LayerMatrix, matrices};
use crate::numeric::block::{Block, Encoding};
use crate::numeric::dtype::Dtype;
use crate::numeric::tensor::{About, Tensor, Tensors};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Names and shapes of a model's matrices, and the type of their numbers.
pub struct Implied {
    shapes: BTreeMap<String, Vec<usize>>,
    /// The type in config.json; bf16 where none is given.
    pub dtype: Dtype,
    /// The block type of the matrices of experts, where it differs.
    pub experts: Option<Block>,
    /// The file where the weights would be.
    file: PathBuf,
}

impl Implied {
    /// The weights of a model with the shape `config`, whose config.json is `json`, in `folder`.
    pub fn of(folder: &Path, config: &Config, json: &Value) -> Self {
        let mut shapes = BTreeMap::new();
        for layer in 0..config.layers {
            for LayerMatrix { path, shape: (rows, cols), .. } in matrices(config, layer) {
                shapes.insert(format!("model.{path}.weight"), vec![rows, cols]);
            }
        }
        let vocabulary = vec![config.vocab, config.hidden];
        shapes.insert("model.embed_tokens.weight".into(), vocabulary.clone());
        if !config.tied {
            shapes.insert("lm_head.weight".into(), vocabulary);
        }
        let named = json["dtype"].as_str().or_else(|| json["torch_dtype"].as_str());
        let dtype = match named {
            Some("float32") => Dtype::F32,
            Some("float16") => Dtype::F16,
            _ => Dtype::Bf16,
        };
        Implied { shapes, dtype, experts: None, file: folder.join("model.safetensors") }
    }
}

impl Tensors for Implied {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        Err(format!("{name}: the weights are not here"))
    }

    fn about(&self, name: &str) -> Result<Option<About>, String> {
        let Some(shape) = self.shapes.get(name) else { return Ok(None) };
        let whole = |block: &Block| shape[1].is_multiple_of(block.elements());
        let block = self.experts.filter(whole).filter(|_| name.contains(".mlp.experts."));
        let encoding = block.map_or(Encoding::Plain(self.dtype), Encoding::Blocks);
        Ok(Some(About { shape: shape.clone(), encoding }))
    }

    fn names(&self) -> Vec<String> {
        self.shapes.keys().cloned().collect()
    }

    fn file_of(&self, _: &str) -> Option<&Path> {
        Some(&self.file)
    }
}
