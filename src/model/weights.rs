//! Loading of tensors by Hugging Face name into a backend's layout. Shapes and finiteness are checked during loading,
//! and only one tensor is held unpacked at a time: only the packed form stays in memory.

use super::config::{Config, ConfigError, DeltaRules};
use super::layout::{LayerMatrix, matrices};
use super::lora::LoraError;
use super::memory::size;
use super::rows::Rows;
use crate::backend::{Backend, Fault, Frozen, view_mut};
use crate::numeric::block::{Blocks, Encoding};
use crate::numeric::dtype::Dtype;
use crate::numeric::tensor::{Tensor, Tensors, Use};
use bytes::Bytes;
use rayon::prelude::*;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// Why a model cannot be built.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ModelError {
    /// An error of the configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An error of the adapter.
    #[error(transparent)]
    Lora(#[from] LoraError),
    /// An error of the device.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// A file could not provide a tensor.
    #[error("{0}")]
    Source(String),
    /// An error of one file.
    #[error("{}: {cause}", path.display())]
    In {
        /// The file.
        path: PathBuf,
        /// The error.
        cause: Box<ModelError>,
    },
    /// The tensor is missing.
    #[error(
        "the model's files have no tensor {name}: they are incomplete, or their configuration belongs to another model"
    )]
    Missing {
        /// Its Hugging Face name.
        name: String,
    },
    /// The tensor's shape differs from the one that the configuration implies.
    #[error("tensor {name} is {found:?}, the model's configuration implies {expected:?}")]
    Shape {
        /// Its Hugging Face name.
        name: String,
        /// Shape from the configuration.
        expected: Vec<usize>,
        /// Shape in the file.
        found: Vec<usize>,
    },
    /// A value that is NaN or infinite.
    #[error(
        "tensor {name} holds a value that is not finite at element {index}: the model's files are damaged; download them again"
    )]
    NonFinite {
        /// Its Hugging Face name.
        name: String,
        /// First such element.
        index: usize,
    },
    /// Memory does not suffice for the microbatch.
    #[error("needs about {} of memory, {} may be used: {way_out}", size(*needed), size(*limit))]
    Memory {
        /// Bytes needed with the most frugal policy.
        needed: u64,
        /// Bytes allowed.
        limit: u64,
        /// Options to reduce.
        way_out: String,
    },
}

impl ModelError {
    /// The fault of tensors that could be read when the stage was opened, and now cannot.
    pub fn into_fault<B: Backend>(self, backend: &B) -> Fault {
        match self {
            ModelError::Fault(fault) => fault,
            other => Fault::Device { device: backend.class(), reason: other.to_string() },
        }
    }

    /// Whether a retry with the same configuration is pointless (exit code 78).
    pub fn is_configuration(&self) -> bool {
        match self {
            ModelError::In { cause, .. } => cause.is_configuration(),
            _ => matches!(self, ModelError::Config(_) | ModelError::Lora(_) | ModelError::Memory { .. }),
        }
    }
}

/// Bytes of frozen weights, as a backend packs them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packed {
    /// All weights.
    pub total: u64,
    /// Matrices of the smallest and of the largest layer.
    pub layer: (u64, u64),
}

/// Bytes of frozen weights by their place in the model, as a backend packs them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedLayers {
    embedding: u64,
    /// The matrix of the head, where it is not the embedding.
    output: u64,
    /// Whether the head uses the embedding.
    tied: bool,
    /// Matrices of each layer.
    layers: Vec<u64>,
    /// Norms of a layer, and the norm before the head.
    norms: (u64, u64),
}

impl PackedLayers {
    /// Weights of a stage of these layers. A last stage that is not the first has a copy of a tied embedding.
    pub fn of(&self, layers: Range<usize>) -> u64 {
        let (first, last) = (layers.start == 0, layers.end == self.layers.len());
        let embedding = if first || (last && self.tied) { self.embedding } else { 0 };
        let head = if last { self.output + self.norms.1 } else { 0 };
        let norms = layers.len() as u64 * self.norms.0;
        embedding + head + norms + self.layers[layers].iter().sum::<u64>()
    }

    /// Weights of one layer, wherever it is.
    pub fn layer(&self, at: usize) -> u64 {
        self.layers[at] + self.norms.0
    }

    /// Weights of the whole model.
    fn whole(&self) -> Packed {
        let bounds = self.layers.iter().copied().min().zip(self.layers.iter().copied().max());
        Packed { total: self.of(0..self.layers.len()), layer: bounds.unwrap_or_default() }
    }
}

/// The tensors of one model, under names without the `model.` prefix.
pub struct Weights<'a> {
    tensors: &'a dyn Tensors,
    prefix: &'static str,
    /// Whether every value is checked to be finite.
    checks: bool,
    /// The same tensors, where a part of them is read later.
    again: Option<&'a Arc<dyn Tensors>>,
}

impl<'a> Weights<'a> {
    /// Detects whether the names have a prefix: those of a causal LM do, those of a bare model do not.
    pub fn new(tensors: &'a dyn Tensors) -> Result<Self, ModelError> {
        let bare = tensors.about("embed_tokens.weight").map_err(ModelError::Source)?.is_some();
        Ok(Weights { tensors, prefix: if bare { "" } else { "model." }, checks: true, again: None })
    }

    /// Tensors that were read and checked before, and are read again a part at a time.
    pub fn read_before(tensors: &'a Arc<dyn Tensors>) -> Result<Self, ModelError> {
        Ok(Weights { checks: false, again: Some(tensors), ..Weights::new(&**tensors)? })
    }

    /// The tensors, where a part of them is read later.
    pub fn again(&self) -> Option<Arc<dyn Tensors>> {
        self.again.cloned()
    }

    /// The name in the files of a name such as `layers.0.mlp.up_proj.weight`.
    pub fn name(&self, below_model: &str) -> String {
        format!("{}{below_model}", self.prefix)
    }

    /// Says when matrices will be read.
    pub fn advise(&self, matrices: &[LayerMatrix], when: Use) {
        let names = matrices.iter().map(|matrix| self.matrix_name(&matrix.path));
        names.for_each(|name| self.tensors.advise(&name, when));
    }

    /// The name in the files of the matrix with this path.
    pub fn matrix_name(&self, path: &str) -> String {
        self.name(&format!("{path}.weight"))
    }

    /// Adds the path of the tensor's file to the error, where there is one.
    fn fault(&self, name: &str, cause: ModelError) -> ModelError {
        match self.tensors.file_of(name) {
            Some(path) => ModelError::In { path: path.to_owned(), cause: Box::new(cause) },
            None => cause,
        }
    }

    fn said<T>(&self, name: &str, answer: Result<T, String>) -> Result<T, ModelError> {
        answer.map_err(|what| self.fault(name, ModelError::Source(what)))
    }

    /// Bytes of the model's frozen weights; `packing` gives the bytes of a matrix. Weights are not read.
    pub fn packed(
        &self,
        packing: &dyn Fn(Encoding, usize) -> usize,
        config: &Config,
    ) -> Result<Packed, ModelError> {
        Ok(self.packed_layers(packing, config)?.whole())
    }

    /// The same by their place in the model.
    pub fn packed_layers(
        &self,
        packing: &dyn Fn(Encoding, usize) -> usize,
        config: &Config,
    ) -> Result<PackedLayers, ModelError> {
        let generates = config.labels.is_none();
        let output = match generates && !config.tied {
            true => self.packed_matrix(packing, "lm_head.weight", &[config.vocab])?,
            false => 0,
        };
        let name = self.name("embed_tokens.weight");
        let embedding = self.packed_matrix(packing, &name, &[config.vocab])?;
        let layers = (0..config.layers).map(|layer| {
            let of = |matrix: LayerMatrix| {
                self.packed_matrix(packing, &self.matrix_name(&matrix.path), &matrix.parts)
            };
            let taps = config.taps(layer).map_or(0, |taps| taps * config.hidden);
            let rule = config.delta_rules.as_ref().filter(|_| config.delta_heads(layer).is_some());
            let biases = config.experts_of(layer).filter(|_| config.family.biased_experts);
            let biases = biases.map_or(0, |of| of.count * (1 + 2 * of.feed_forward + config.hidden));
            let share = if config.family.shared_expert { config.hidden } else { 0 };
            let more = 4 * (taps + rule.map_or(0, DeltaRules::values) + biases + share) as u64;
            matrices(config, layer).into_iter().map(of).chain([Ok(more)]).sum()
        });
        let layers: Vec<u64> = layers.collect::<Result<_, _>>()?;
        // Norms and biases are small and always f32.
        let norms = [config.family.attention_norms, config.family.mlp_norms].map(|n| [n.before, n.after]);
        let norms = norms.as_flattened().iter().flatten().count();
        let norm = 4 * config.hidden as u64;
        Ok(PackedLayers {
            embedding,
            output,
            tied: generates && config.tied,
            layers,
            norms: (norms as u64 * norm, norm),
        })
    }

    /// Bytes of a matrix that is packed in parts; `rows` has the number of rows of each part.
    fn packed_matrix(
        &self,
        packing: &dyn Fn(Encoding, usize) -> usize,
        name: &str,
        rows: &[usize],
    ) -> Result<u64, ModelError> {
        let about = self.said(name, self.tensors.about(name))?;
        let about = about.ok_or_else(|| self.fault(name, ModelError::Missing { name: name.to_owned() }))?;
        let (values, all) = (about.shape.iter().product::<usize>(), rows.iter().sum::<usize>().max(1));
        Ok(rows.iter().map(|rows| packing(about.encoding, values / all * rows) as u64).sum())
    }

    /// Returns the tensor `name` as stored; its shape must be `expected` and all values finite.
    pub fn checked(&self, name: &str, expected: &[usize]) -> Result<Tensor<'a>, ModelError> {
        let missing = || self.fault(name, ModelError::Missing { name: name.to_owned() });
        self.optional(name, expected)?.ok_or_else(missing)
    }

    /// Like [`Weights::checked`], but `None` where the files have no such tensor.
    pub fn optional(&self, name: &str, expected: &[usize]) -> Result<Option<Tensor<'a>>, ModelError> {
        let Some(tensor) = self.said(name, self.tensors.tensor(name))? else { return Ok(None) };
        let whole = expected.iter().product::<usize>() * tensor.dtype.size() == tensor.bytes.len();
        if tensor.shape != expected || !whole {
            let (expected, found) = (expected.to_vec(), tensor.shape);
            return Err(self.fault(name, ModelError::Shape { name: name.to_owned(), expected, found }));
        }
        match self.checks.then(|| first_not_finite(tensor.dtype, &tensor.bytes)).flatten() {
            Some(index) => Err(self.fault(name, ModelError::NonFinite { name: name.to_owned(), index })),
            None => Ok(Some(tensor)),
        }
    }

    /// Some rows of a matrix with `cols` columns, in f32.
    pub fn some_rows(&self, name: &str, cols: usize, rows: &[u32]) -> Result<Vec<f32>, ModelError> {
        let least = rows.iter().max().map_or(0, |last| *last as usize + 1);
        let fits = |found: &[usize]| match found {
            [count, width] if *count >= least && *width == cols => Ok(()),
            found => {
                let (expected, found) = (vec![least, cols], found.to_vec());
                Err(self.fault(name, ModelError::Shape { name: name.to_owned(), expected, found }))
            }
        };
        let mut values = vec![0.0; rows.len() * cols];
        let each = values.chunks_exact_mut(cols.max(1)).zip(rows.iter().map(|row| *row as usize));
        if let Some(blocks) = self.said(name, self.tensors.blocks(name))? {
            fits(&[blocks.rows, blocks.cols])?;
            each.for_each(|(out, row)| blocks.block.widen(out, blocks.row(row)));
        } else {
            let missing = || self.fault(name, ModelError::Missing { name: name.to_owned() });
            let tensor = self.said(name, self.tensors.tensor(name))?.ok_or_else(missing)?;
            fits(&tensor.shape)?;
            let size = cols * tensor.dtype.size();
            let bytes = |row: usize| tensor.bytes.get(row * size..(row + 1) * size).ok_or_else(missing);
            for (out, row) in each {
                out.copy_from_slice(&tensor.dtype.widen(bytes(row)?));
            }
        }
        match values.iter().position(|x| !x.is_finite()) {
            Some(index) => Err(self.fault(name, ModelError::NonFinite { name: name.to_owned(), index })),
            None => Ok(values),
        }
    }

    /// Loads a frozen matrix [rows, cols], packed by the backend.
    pub fn matrix<B: Backend>(
        &self,
        backend: &mut B,
        name: &str,
        shape: (usize, usize),
    ) -> Result<B::Weight, ModelError> {
        let mut whole = None;
        self.matrices(backend, name, shape, &[Rows::Range(0..shape.0)], |weight| whole = Some(weight))?;
        whole.ok_or_else(|| self.fault(name, ModelError::Missing { name: name.to_owned() }))
    }

    /// Loads a frozen matrix [rows, cols] in `parts`, each packed by the backend.
    pub fn matrices<B: Backend>(
        &self,
        backend: &mut B,
        name: &str,
        (rows, cols): (usize, usize),
        parts: &[Rows],
        mut done: impl FnMut(B::Weight),
    ) -> Result<(), ModelError> {
        if !backend.has_data() {
            for part in parts {
                done(self.unread(backend, name, (part.len(), cols))?);
            }
            return Ok(());
        }
        if let Some(stored) = self.said(name, self.tensors.block_parts(name))? {
            let expected = vec![rows, cols];
            let found = vec![stored.iter().map(|part| part.rows).sum(), stored.first().map_or(0, |p| p.cols)];
            let (full, fault) = (name.to_owned(), |e| self.fault(name, e));
            // The shape is checked before any value is read, because the file may declare any size.
            if expected != found {
                return Err(fault(ModelError::Shape { name: full, expected, found }));
            }
            if let Some(index) = self.checks.then(|| first_not_finite_in(&stored)).flatten() {
                return Err(fault(ModelError::NonFinite { name: full, index }));
            }
            for part in parts {
                let own = part.in_blocks(&stored);
                let own = own.ok_or_else(|| {
                    fault(ModelError::Shape {
                        name: name.to_owned(),
                        expected: expected.clone(),
                        found: found.clone(),
                    })
                })?;
                done(backend.weight_of_blocks(&own)?);
            }
            return Ok(());
        }
        let tensor = self.checked(name, &[rows, cols])?;
        for part in parts {
            let bytes = part.of(&tensor.bytes, cols * tensor.dtype.size());
            done(backend.weight(Frozen { rows: part.len(), cols, dtype: tensor.dtype, bytes: &bytes })?);
        }
        Ok(())
    }

    /// A frozen matrix of a backend without data: only its shape and encoding are known.
    fn unread<B: Backend>(
        &self,
        backend: &mut B,
        name: &str,
        (rows, cols): (usize, usize),
    ) -> Result<B::Weight, ModelError> {
        let about = self.said(name, self.tensors.about(name))?;
        let weight = match about.map(|about| about.encoding) {
            Some(Encoding::Blocks(block)) => {
                backend.weight_of_blocks(&Blocks { rows, cols, block, bytes: Bytes::new() })
            }
            plain => {
                let dtype = if let Some(Encoding::Plain(dtype)) = plain { dtype } else { Dtype::Bf16 };
                backend.weight(Frozen { rows, cols, dtype, bytes: &[] })
            }
        };
        Ok(weight?)
    }

    /// Loads these values of a bias of `len` values to device memory.
    pub fn bias<B: Backend>(
        &self,
        backend: &mut B,
        name: &str,
        (len, rows): (usize, &Rows),
    ) -> Result<B::Memory, ModelError> {
        let mut memory = backend.memory(rows.len());
        if backend.has_data() {
            let tensor = self.checked(name, &[len])?;
            let values = tensor.dtype.widen(&rows.of(&tensor.bytes, tensor.dtype.size()));
            backend.upload(view_mut(&mut memory, 1, rows.len()), &values);
        }
        Ok(memory)
    }

    /// Loads a small tensor of this shape to device memory.
    pub fn values<B: Backend>(
        &self,
        backend: &mut B,
        name: &str,
        shape: &[usize],
    ) -> Result<B::Memory, ModelError> {
        self.changed(backend, (name, shape), shape.iter().product(), |stored| stored)
    }

    /// Loads what `change` makes of a small tensor of this shape: `len` values.
    fn changed<B: Backend>(
        &self,
        backend: &mut B,
        (name, shape): (&str, &[usize]),
        len: usize,
        change: impl FnOnce(Vec<f32>) -> Vec<f32>,
    ) -> Result<B::Memory, ModelError> {
        if !backend.has_data() {
            return Ok(backend.memory(len));
        }
        let tensor = self.checked(name, shape)?;
        let values = change(tensor.dtype.widen(&tensor.bytes));
        let mut memory = backend.memory(len);
        backend.upload(view_mut(&mut memory, 1, len), &values);
        Ok(memory)
    }

    /// Loads the taps of some channels of a convolution as [J, C]. Row 0 is the tap of the token itself. The file stores
    /// [all channels, 1, J] with that tap last.
    pub fn taps<B: Backend>(
        &self,
        backend: &mut B,
        name: &str,
        (channels, count): (usize, usize),
        part: Range<usize>,
    ) -> Result<B::Memory, ModelError> {
        let len = count * part.len();
        self.changed(backend, (name, &[channels, 1, count]), len, |stored| {
            let stored = &stored[part.start * count..part.end * count];
            (0..count).flat_map(|j| stored[count - 1 - j..].iter().step_by(count).copied()).collect()
        })
    }

    /// Loads the gain of the norm of a head whose rows are in `order`.
    pub fn head_gain<B: Backend>(
        &self,
        backend: &mut B,
        name: &str,
        order: &[usize],
        offset: f32,
    ) -> Result<B::Memory, ModelError> {
        let len = order.len();
        self.changed(backend, (name, &[len]), len, |stored| {
            order.iter().map(|i| stored[*i] + offset).collect()
        })
    }

    /// Loads the gain of a norm to device memory: the stored values plus `offset`.
    pub fn gain<B: Backend>(
        &self,
        backend: &mut B,
        name: &str,
        len: usize,
        offset: f32,
    ) -> Result<B::Memory, ModelError> {
        self.scaled_gain(backend, name, len, (offset, 1.0))
    }

    /// The same, multiplied by a factor.
    pub fn scaled_gain<B: Backend>(
        &self,
        backend: &mut B,
        name: &str,
        len: usize,
        (offset, scale): (f32, f32),
    ) -> Result<B::Memory, ModelError> {
        self.changed(backend, (name, &[len]), len, |mut values| {
            // Adding 0 would change the sign of -0.
            if offset != 0.0 {
                values.iter_mut().for_each(|x| *x += offset);
            }
            values.iter_mut().for_each(|x| *x *= scale);
            values
        })
    }
}

/// Index of the first element that is NaN or infinite, which is an element whose exponent bits are all set.
fn first_not_finite(dtype: Dtype, bytes: &[u8]) -> Option<usize> {
    const BLOCK: usize = 1 << 16;
    let blocks = bytes.par_chunks(BLOCK * dtype.size()).enumerate();
    let bad = |b: &[u8]| match dtype {
        Dtype::F32 => exponents::<4>(b, |x| x[3] & 0x7f == 0x7f && x[2] & 0x80 == 0x80),
        Dtype::Bf16 => exponents::<2>(b, |x| x[1] & 0x7f == 0x7f && x[0] & 0x80 == 0x80),
        Dtype::F16 => exponents::<2>(b, |x| x[1] & 0x7c == 0x7c),
    };
    blocks.find_map_first(|(i, block)| bad(block).map(|at| i * BLOCK + at))
}

/// Like [`first_not_finite`] for a matrix in blocks, where a scale can make a number infinite or NaN. Its rows are those of
/// `parts`, one part after the other.
fn first_not_finite_in(parts: &[Blocks]) -> Option<usize> {
    let bad = |blocks: &Blocks, r: usize| {
        if blocks.block.finite(blocks.row(r)) {
            return None;
        }
        let mut row = vec![0.0; blocks.cols];
        blocks.block.widen(&mut row, blocks.row(r));
        row.iter().position(|x| !x.is_finite())
    };
    let mut before = 0;
    parts.iter().find_map(|blocks| {
        let rows = (0..blocks.rows).into_par_iter();
        let first = rows.find_map_first(|r| bad(blocks, r).map(|at| before + r * blocks.cols + at));
        before += blocks.rows * blocks.cols;
        first
    })
}

/// A whole block is folded without a branch first, because damage is rare and the fold is vectorised.
fn exponents<const N: usize>(block: &[u8], full: impl Fn(&[u8; N]) -> bool) -> Option<usize> {
    let (values, _) = block.as_chunks::<N>();
    if values.iter().fold(false, |any, x| any | full(x)) { values.iter().position(full) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numeric::block::Block;

    #[test]
    fn first_non_finite_value_of_parts_is_located() {
        let part = |scales: [f32; 2]| {
            let block = |scale| [&half::f16::from_f32(scale).to_le_bytes()[..], &[1; 32]].concat();
            Blocks::new((2, 32), Block::Q8_0, scales.map(block).concat().into()).unwrap()
        };
        let (fine, nan) = (part([0.5, 0.0]), part([1.0, f32::NAN]));
        assert_eq!(first_not_finite_in(&[fine.clone(), fine.clone()]), None);
        assert_eq!(first_not_finite_in(&[fine.clone(), nan.clone()]), Some(96));
        assert_eq!(first_not_finite_in(&[nan, fine]), Some(32));
    }

    #[test]
    fn first_non_finite_value_is_located() {
        for (dtype, bad) in [
            (Dtype::F32, f32::NAN.to_le_bytes().to_vec()),
            (Dtype::F32, f32::NEG_INFINITY.to_le_bytes().to_vec()),
            (Dtype::F16, half::f16::INFINITY.to_le_bytes().to_vec()),
            (Dtype::Bf16, half::bf16::NAN.to_le_bytes().to_vec()),
        ] {
            for at in [0, 65_535, 65_536, 99_998] {
                let mut bytes = vec![0x11; 99_999 * dtype.size()];
                assert_eq!(first_not_finite(dtype, &bytes), None);
                bytes[at * dtype.size()..][..dtype.size()].copy_from_slice(&bad);
                assert_eq!(first_not_finite(dtype, &bytes), Some(at));
            }
        }
        let largest = [f32::MAX.to_le_bytes(), f32::MIN_POSITIVE.to_le_bytes()].concat();
        assert_eq!(first_not_finite(Dtype::F32, &largest), None);
    }
}
