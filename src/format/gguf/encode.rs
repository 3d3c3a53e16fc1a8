//! Encodes f32 rows as tensor bytes, and decodes them.

use crate::numeric::block::{Encoding, quantise};
use crate::numeric::dtype::Dtype;

/// f32 values without blocks.
pub const F32: Encoding = Encoding::Plain(Dtype::F32);
/// f16 values, used if rows are not whole blocks.
pub const F16: Encoding = Encoding::Plain(Dtype::F16);

/// Encodes rows of whole blocks.
pub fn encode(kind: Encoding, values: &[f32]) -> Result<Vec<u8>, String> {
    match kind {
        Encoding::Plain(dtype) => Ok(dtype.narrow(values)),
        Encoding::Blocks(block) => quantise(block, values)
            .ok_or_else(|| format!("{} numbers are no whole blocks of {}", values.len(), block.name())),
    }
}

/// Decodes tensor bytes to f32.
pub fn decode(kind: Encoding, packed: &[u8]) -> Vec<f32> {
    match kind {
        Encoding::Plain(dtype) => dtype.widen(packed),
        Encoding::Blocks(block) => {
            let mut out = vec![0.0; packed.len() / block.bytes() * block.elements()];
            block.widen(&mut out, packed);
            out
        }
    }
}
