//! A base and its adapter as one model: W + scale * B A, in f32, one tensor at a time, under the base's names. The
//! merged model is a source of tensors like the base, so the same readers and writers work for both.

use super::config::Config;
use super::layout::{
    self, EMBEDDING_A, EMBEDDING_B, EMBEDDING_ROWS, Entry, HEAD_PATH, HEAD_ROWS, Layout, head_tensor,
    peft_path,
};
use super::lora::LoraSpec;
use crate::numeric::block::{Blocks, Encoding};
use crate::numeric::dtype::Dtype;
use crate::numeric::tensor::{About, Tensor, Tensors};
use rayon::prelude::*;
use std::borrow::Cow;
use std::path::Path;

/// The merged model. A tensor is computed when it is read.
pub struct Merged<'a> {
    /// The base.
    pub base: &'a dyn Tensors,
    /// Its configuration.
    pub config: &'a Config,
    /// Configuration of the adapter.
    pub lora: &'a LoraSpec,
    /// Offsets of the values in `flat`, for all layers.
    pub layout: &'a Layout,
    /// The trained values.
    pub flat: &'a [f32],
    /// Lengths of the rows of merged weights, by the path of their module (DoRA); empty for plain LoRA.
    pub magnitudes: &'a [(String, Vec<f32>)],
    /// Type of all written tensors; `None` keeps the base's encoding.
    pub dtype: Option<Dtype>,
}

impl Merged<'_> {
    fn values(&self, entry: &Entry) -> &[f32] {
        &self.flat[entry.range()]
    }

    /// A, B and the factor of the projection whose weight has this name, with or without the prefix `model.`.
    fn adapter(&self, name: &str) -> Option<(&Entry, &Entry, f32)> {
        let path = name.strip_suffix(".weight")?;
        let path = path.strip_prefix("model.").unwrap_or(path);
        let find = |path: &str, ab: &str| self.layout.find(&format!("{path}.{ab}.weight"));
        if path == "lm_head" && !self.config.tied {
            let scale = self.lora.scale_of(self.lora.ends.head?);
            return Some((find(HEAD_PATH, "lora_A")?, find(HEAD_PATH, "lora_B")?, scale));
        }
        let (_, module) = path.rsplit_once('.')?;
        let layer: usize = path.strip_prefix("layers.")?.split('.').next()?.parse().ok()?;
        // Only the canonical spelling is a projection of this model.
        let matrix =
            self.config.matrix(layer, module).filter(|matrix| layout::path(layer, matrix) == path)?;
        let path = peft_path(self.config, layer, &matrix);
        let scale = self.lora.scale_of(self.lora.adapter(layer, module)?);
        Some((find(&path, "lora_A")?, find(&path, "lora_B")?, scale))
    }

    /// A [R, V], B [C, R] and the factor of the embedding's adapter, if the tensor is the embedding.
    fn embedding_adapter(&self, name: &str) -> Option<(&Entry, &Entry, f32)> {
        let numbers = self.lora.ends.embedding.filter(|_| name.ends_with("embed_tokens.weight"))?;
        let ends = [EMBEDDING_A, EMBEDDING_B].map(|end| self.layout.ending(end));
        Some((ends[0]?, ends[1]?, self.lora.scale_of(numbers)))
    }

    /// Trained rows of the matrix with this name, which has no other changes, by token.
    pub fn replaced(&self, name: &str) -> Option<impl Iterator<Item = (usize, &[f32])>> {
        let (entry, tokens) = self.rows(name)?;
        let rows = self.values(entry).chunks_exact(entry.cols);
        Some(tokens.iter().map(|token| *token as usize).zip(rows))
    }

    /// Trained rows of the matrix with this name, with or without the prefix `model.`, and their tokens.
    fn rows(&self, name: &str) -> Option<(&Entry, &[u32])> {
        let (rows, embedding) = (&self.lora.rows, name.strip_prefix("model.").unwrap_or(name));
        match embedding {
            // Files of a tied model may have both.
            "lm_head.weight" if !self.config.tied => Some((self.layout.find(HEAD_ROWS)?, &rows.head)),
            "embed_tokens.weight" | "lm_head.weight" => {
                Some((self.layout.ending(EMBEDDING_ROWS)?, &rows.embedding))
            }
            _ => None,
        }
    }

    /// Whether the adapter changes the tensor of that name.
    pub fn touches(&self, name: &str) -> bool {
        self.adapter(name).is_some() || self.rows(name).is_some() || self.embedding_adapter(name).is_some()
    }

    fn merge_embedding(
        &self,
        tensor: Tensor,
        (a, b, scale): (&Entry, &Entry, f32),
    ) -> Result<Tensor<'static>, String> {
        let (v, c, rank) = (a.cols, b.rows, a.rows);
        let dtype = self.dtype.unwrap_or(tensor.dtype);
        let mut values = tensor.dtype.widen(&tensor.bytes);
        if tensor.shape != [v, c] || values.len() != v * c {
            return Err(format!("a tensor of shape {:?} cannot take an adapter of [{v}, {c}]", tensor.shape));
        }
        let (a, b) = (self.values(a), self.values(b));
        values.par_chunks_mut(c).enumerate().for_each(|(token, row)| {
            for (w, b) in row.iter_mut().zip(b.chunks_exact(rank)) {
                let delta: f32 = b.iter().enumerate().map(|(k, b)| a[k * v + token] * b).sum();
                *w += scale * delta;
            }
        });
        Ok(Tensor { shape: tensor.shape, dtype, bytes: Cow::Owned(dtype.narrow(&values)) })
    }

    fn replace<'r>(
        &self,
        tensor: Tensor,
        mut rows: impl Iterator<Item = (usize, &'r [f32])>,
    ) -> Result<Tensor<'static>, String> {
        let dtype = self.dtype.unwrap_or(tensor.dtype);
        let (mut values, shape) = (tensor.dtype.widen(&tensor.bytes), tensor.shape);
        rows.try_for_each(|(row, own)| {
            let place = values.get_mut(row * own.len()..(row + 1) * own.len());
            let place = place.filter(|_| shape[1..] == [own.len()]);
            place.map(|place| place.copy_from_slice(own)).ok_or_else(|| {
                format!("a tensor of shape {shape:?} has no row {row} of {} values", own.len())
            })
        })?;
        Ok(Tensor { shape, dtype, bytes: Cow::Owned(dtype.narrow(&values)) })
    }

    fn encode<'t>(&self, tensor: Tensor<'t>) -> Tensor<'t> {
        match self.dtype {
            Some(dtype) if dtype != tensor.dtype => {
                let bytes = Cow::Owned(dtype.narrow(&tensor.dtype.widen(&tensor.bytes)));
                Tensor { shape: tensor.shape, dtype, bytes }
            }
            _ => tensor,
        }
    }

    /// The part of a classifier's head with this name, and its shape.
    fn of_head(&self, name: &str) -> Option<(&Entry, Vec<usize>)> {
        self.layout
            .head()
            .map(|entry| (entry, head_tensor(entry)))
            .find_map(|(entry, (own, shape))| (own == name).then_some((entry, shape)))
    }

    fn merge(&self, tensor: Tensor, (a, b, scale): (&Entry, &Entry, f32)) -> Result<Tensor<'static>, String> {
        let (k, rank) = (a.cols, a.rows);
        let dtype = self.dtype.unwrap_or(tensor.dtype);
        let mut values = tensor.dtype.widen(&tensor.bytes);
        if tensor.shape != [b.rows, k] || values.len() != b.rows * k {
            return Err(format!(
                "a tensor of shape {:?} cannot take an adapter of [{}, {k}]",
                tensor.shape, b.rows
            ));
        }
        let (a_name, a, b) = (&*a.name, self.values(a), self.values(b));
        values.par_chunks_mut(k).zip(b.par_chunks(rank)).for_each(|(row, b)| {
            let mut delta = vec![0f32; k];
            for (b, a) in b.iter().zip(a.chunks_exact(k)) {
                delta.iter_mut().zip(a).for_each(|(d, a)| *d += b * a);
            }
            row.iter_mut().zip(delta).for_each(|(w, d)| *w += scale * d);
        });
        let path = a_name.strip_suffix(".lora_A.weight").unwrap_or(a_name);
        if let Some((_, lengths)) = self.magnitudes.iter().find(|(module, _)| module == path) {
            // As in peft 0.21 (`DoraLinearLayer`): m (W + scale * B A) / |W + scale * B A|, row by row.
            values.par_chunks_mut(k).zip(lengths).enumerate().try_for_each(|(at, (row, length))| {
                let norm = row.iter().map(|w| f64::from(*w) * f64::from(*w)).sum::<f64>().sqrt();
                if norm == 0.0 {
                    return Err(format!("row {at} of the merged weight is 0, which DoRA gives no length"));
                }
                let factor = (f64::from(*length) / norm) as f32;
                row.iter_mut().for_each(|w| *w *= factor);
                Ok(())
            })?;
        }
        Ok(Tensor { shape: tensor.shape, dtype, bytes: Cow::Owned(dtype.narrow(&values)) })
    }

    /// Whether a matrix that the base has in blocks is given in the same blocks.
    fn keeps_blocks(&self, name: &str) -> bool {
        let numbers_stay = matches!(self.dtype, None | Some(Dtype::F32));
        let dropped = self.config.labels.is_some() && name == "lm_head.weight";
        !self.touches(name) && numbers_stay && !dropped
    }
}

impl Tensors for Merged<'_> {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        if let Some((entry, shape)) = self.of_head(name) {
            let dtype = match self.dtype {
                Some(dtype) => dtype,
                None => self
                    .base
                    .tensor("norm.weight")?
                    .or(self.base.tensor("model.norm.weight")?)
                    .map_or(Dtype::F32, |t| t.dtype),
            };
            let bytes = Cow::Owned(dtype.narrow(self.values(entry)));
            return Ok(Some(Tensor { shape, dtype, bytes }));
        }
        if self.config.labels.is_some() && name == "lm_head.weight" {
            return Ok(None);
        }
        let Some(tensor) = self.base.tensor(name)? else { return Ok(None) };
        let merged = match (self.adapter(name), self.embedding_adapter(name), self.replaced(name)) {
            (Some(adapter), ..) => self.merge(tensor, adapter),
            (_, Some(adapter), _) => self.merge_embedding(tensor, adapter),
            (.., Some(rows)) => self.replace(tensor, rows),
            _ => Ok(self.encode(tensor)),
        };
        merged.map(Some).map_err(|e| format!("{name}: {e}"))
    }

    fn blocks(&self, name: &str) -> Result<Option<Blocks>, String> {
        if self.keeps_blocks(name) { self.base.blocks(name) } else { Ok(None) }
    }

    fn block_parts(&self, name: &str) -> Result<Option<Vec<Blocks>>, String> {
        if self.keeps_blocks(name) { self.base.block_parts(name) } else { Ok(None) }
    }

    fn about(&self, name: &str) -> Result<Option<About>, String> {
        if self.of_head(name).is_some() || self.config.labels.is_some() && name == "lm_head.weight" {
            let tensor = self.tensor(name)?;
            return Ok(tensor.map(|t| About { shape: t.shape, encoding: Encoding::Plain(t.dtype) }));
        }
        let Some(about) = self.base.about(name)? else { return Ok(None) };
        let encoding = match (about.encoding, self.dtype) {
            (Encoding::Blocks(_), None | Some(Dtype::F32)) if !self.touches(name) => about.encoding,
            // Weights in blocks are converted to f32.
            (Encoding::Blocks(_), dtype) => Encoding::Plain(dtype.unwrap_or(Dtype::F32)),
            (Encoding::Plain(own), dtype) => Encoding::Plain(dtype.unwrap_or(own)),
        };
        Ok(Some(About { encoding, ..about }))
    }

    fn file_of(&self, name: &str) -> Option<&Path> {
        self.base.file_of(name)
    }

    fn names(&self) -> Vec<String> {
        let mut names = self.base.names();
        if self.config.labels.is_some() {
            names.retain(|name| name != "lm_head.weight" && self.of_head(name).is_none());
            names.extend(self.layout.head().map(|entry| head_tensor(entry).0.to_owned()));
            names.sort();
        }
        names
    }
}
