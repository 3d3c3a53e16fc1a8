//! Checkpoints that bitsandbytes has quantised to NF4: a matrix `X` consists of codes (`X`), magnitudes (`X.absmax`)
//! and further tensors (`X.quant_map`, `X.quant_state.bitsandbytes__nf4`, and for nested quantisation `X.nested_absmax`
//! and `X.nested_quant_map`). Reading converts them to [`Block::NF4`], which has magnitude and codes together;
//! magnitudes become f32 in the order of operations of bitsandbytes.

use super::safetensors::Sharded;
use crate::numeric::block::{Block, Blocks, Encoding, NF4_LEVELS};
use crate::numeric::dtype::Dtype;
use crate::numeric::tensor::{About, Tensor, Tensors, Use};
use serde::Deserialize;
use std::borrow::Cow;
use std::path::Path;

const STATE: &str = ".quant_state.bitsandbytes__nf4";
/// Suffixes of the further tensors of a matrix.
const BESIDE: [&str; 5] = [".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", STATE];

/// The JSON in a state tensor.
#[derive(Deserialize)]
struct State {
    blocksize: usize,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f64>,
}

/// The weights of a quantised checkpoint.
pub(super) struct Quantised(pub Sharded);

/// Whether a tensor has the shape of a matrix.
pub(super) fn is_shape(name: &str) -> bool {
    name.ends_with(STATE)
}

/// Whether a tensor is a matrix, not one of the further tensors of a matrix.
fn plain_name(name: &str) -> bool {
    !BESIDE.iter().any(|suffix| name.ends_with(suffix))
}

impl Quantised {
    fn state(&self, name: &str) -> Result<Option<State>, String> {
        let Some(text) = self.0.raw(&format!("{name}{STATE}")) else { return Ok(None) };
        let state: State = serde_json::from_slice(text)
            .map_err(|e| format!("{name}{STATE} is not the state of a matrix: {e}: download it again"))?;
        match state.shape.len() {
            2 => Ok(Some(state)),
            n => Err(format!("{name}{STATE}: a matrix of {n} dimensions: download it again")),
        }
    }

    /// The f32 values of a further tensor of a matrix.
    fn floats(&self, name: &str, suffix: &str, count: usize) -> Result<Vec<f32>, String> {
        let full = format!("{name}{suffix}");
        let tensor = self.0.tensor(&full)?.ok_or_else(|| format!("{full} is missing: download it again"))?;
        let values = tensor.dtype.widen(&tensor.bytes);
        match values.len() == count {
            true => Ok(values),
            false => {
                Err(format!("{full} has {} numbers, {count} are needed: download it again", values.len()))
            }
        }
    }

    /// The largest magnitudes of `count` blocks.
    fn absmax(&self, name: &str, state: &State, count: usize) -> Result<Vec<f32>, String> {
        let (Some(size), Some(offset)) = (state.nested_blocksize.filter(|&s| s > 0), state.nested_offset)
        else {
            return self.floats(name, ".absmax", count);
        };
        let codes = self.0.raw(&format!("{name}.absmax")).filter(|codes| codes.len() == count);
        let codes = codes.ok_or_else(|| format!("{name}.absmax is not {count} bytes: download it again"))?;
        let levels = self.floats(name, ".nested_quant_map", 256)?;
        let scales = self.floats(name, ".nested_absmax", count.div_ceil(size))?;
        let of = |(i, &code): (usize, &u8)| levels[usize::from(code)] * scales[i / size] + offset as f32;
        Ok(codes.iter().enumerate().map(of).collect())
    }

    /// The blocks of all numbers. Blocks may go on in the next row.
    fn pack(&self, name: &str, state: &State) -> Result<Vec<u8>, String> {
        let (rows, cols) = (state.shape[0], state.shape[1]);
        let (elements, size) = (Block::NF4.elements(), state.blocksize);
        let numbers = rows.saturating_mul(cols);
        if size == 0 || !size.is_multiple_of(elements) || !numbers.is_multiple_of(elements) {
            return Err(format!(
                "{name}: {numbers} numbers in blocks of {size} are not whole blocks of {elements}: use the model's \
                 unquantised weights"
            ));
        }
        if self.floats(name, ".quant_map", NF4_LEVELS.len())? != NF4_LEVELS {
            return Err(format!("{name}.quant_map is not that of NF4: use the model's unquantised weights"));
        }
        let codes = self.0.bytes(name).filter(|codes| codes.len() == numbers.div_ceil(2));
        let codes = codes.ok_or_else(|| {
            format!("{name} is not the codes of {rows} x {cols} numbers: download it again")
        })?;
        let absmax = self.absmax(name, state, numbers.div_ceil(size))?;
        let mut bytes = Vec::with_capacity(Block::NF4.size_of(numbers));
        for (i, codes) in codes.chunks_exact(elements / 2).enumerate() {
            bytes.extend(absmax[i * elements / size].to_le_bytes());
            bytes.extend(codes);
        }
        Ok(bytes)
    }
}

impl Tensors for Quantised {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        let Some(state) = self.state(name)? else { return self.0.tensor(name) };
        // Compares the shape with the length of the codes.
        let blocks = self.pack(name, &state)?;
        let mut values = vec![0.0; state.shape.iter().product()];
        Block::NF4.widen(&mut values, &blocks);
        let bytes = Cow::Owned(Dtype::F32.narrow(&values));
        Ok(Some(Tensor { shape: state.shape, dtype: Dtype::F32, bytes }))
    }

    fn blocks(&self, name: &str) -> Result<Option<Blocks>, String> {
        let Some(state) = self.state(name)? else { return Ok(None) };
        let (rows, cols) = (state.shape[0], state.shape[1]);
        let blocks = Blocks::new((rows, cols), Block::NF4, self.pack(name, &state)?.into());
        blocks.map(Some).ok_or_else(|| {
            let elements = Block::NF4.elements();
            format!(
                "{name}: rows of {cols} numbers are not whole blocks of {elements}: use the model's unquantised weights"
            )
        })
    }

    fn about(&self, name: &str) -> Result<Option<About>, String> {
        match self.state(name)? {
            Some(state) => Ok(Some(About { shape: state.shape, encoding: Encoding::Blocks(Block::NF4) })),
            None => self.0.about(name),
        }
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.0.names().into_iter().filter(|name| plain_name(name)).collect();
        names.extend(self.0.raw_names().filter(|name| plain_name(name)).map(str::to_owned));
        names.sort();
        names
    }

    fn advise(&self, name: &str, when: Use) {
        self.0.advise(name, when);
    }

    fn file_of(&self, name: &str) -> Option<&Path> {
        self.0.file_of(name)
    }
}
