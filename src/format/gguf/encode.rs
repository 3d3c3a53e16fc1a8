//! f32 rows to the bytes of a tensor, and back.

use crate::numeric::block::{Encoding, quantise};
use crate::numeric::dtype::Dtype;

/// A way of storing numbers one by one.
pub const F32: Encoding = Encoding::Plain(Dtype::F32);
/// What takes the place of blocks where rows are none.
pub const F16: Encoding = Encoding::Plain(Dtype::F16);

/// The bytes of rows of whole blocks.
pub fn encode(kind: Encoding, values: &[f32]) -> Result<Vec<u8>, String> {
    match kind {
        Encoding::Plain(dtype) => Ok(dtype.narrow(values)),
        Encoding::Blocks(block) => quantise(block, values)
            .ok_or_else(|| format!("{} numbers are no whole blocks of {}", values.len(), block.name())),
    }
}

/// The reverse.
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
