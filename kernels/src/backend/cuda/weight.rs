//! Upload of frozen matrices in their file's format. An f32 matrix whose numbers are all bf16 numbers is stored as
//! bf16, which is exact and halves the memory. For tensor cores everything is rounded to bf16, and rows are padded so
//! that each begins at a multiple of 16 bytes. Blocks stay blocks in every tier ([`super::frozen`]).

use super::memory::{Memory, Stored, Weight};
use super::tensor::padded;
use super::{Cuda, Driver, Tier};
use crate::backend::{Fault, Frozen};
use crate::numeric::block::Encoding;
use crate::numeric::dtype::Dtype;
use half::bf16;
use std::num::NonZero;

/// Bytes of a frozen matrix with this many numbers, on any device of the f32 class.
pub fn matrix_bytes(encoding: Encoding, numbers: usize) -> usize {
    encoding.size_of(numbers)
}

/// Bytes of the same matrix in the bf16 class, without the padding of rows.
pub fn matrix_bytes_bf16(encoding: Encoding, numbers: usize) -> usize {
    match encoding {
        Encoding::Plain(_) => 2 * numbers,
        Encoding::Blocks(block) => block.size_of(numbers),
    }
}

impl<D: Driver> Cuda<D> {
    pub(super) fn pack(&mut self, source: Frozen) -> Result<Weight, Fault> {
        let Frozen { rows, cols, dtype, bytes } = source;
        let needed = rows * cols * dtype.size();
        if bytes.len() != needed {
            let reason = format!("a {rows} x {cols} matrix takes {needed} bytes, not {}", bytes.len());
            return Err(Fault::Device { device: self.driver.name().into(), reason });
        }
        if self.tier == Tier::Sm80 {
            return self.pack_bf16(source);
        }
        let (stored, owned) = match dtype {
            Dtype::F32 if dtype.halves(bytes) => {
                (Stored::Bf16, Some(bytes.chunks_exact(4).flat_map(|b| [b[2], b[3]]).collect::<Vec<u8>>()))
            }
            Dtype::F32 => (Stored::F32, None),
            Dtype::Bf16 => (Stored::Bf16, None),
            Dtype::F16 => (Stored::F16, None),
        };
        let bytes = owned.as_deref().unwrap_or(bytes);
        let memory = self.uploaded(bytes)?;
        Ok(Weight { memory, rows, cols, stride: cols, stored })
    }

    fn pack_bf16(&mut self, source: Frozen) -> Result<Weight, Fault> {
        let Frozen { rows, cols, dtype, bytes } = source;
        let stride = padded(cols);
        if dtype == Dtype::Bf16 && stride == cols {
            let memory = self.uploaded(bytes)?;
            return Ok(Weight { memory, rows, cols, stride, stored: Stored::Bf16 });
        }
        let mut all = vec![0u8; 2 * rows * stride];
        if let (Some(to), Some(from)) = (NonZero::new(2 * stride), NonZero::new(cols * dtype.size())) {
            for (out, row) in all.chunks_exact_mut(to.get()).zip(bytes.chunks_exact(from.get())) {
                if dtype == Dtype::Bf16 {
                    out[..row.len()].copy_from_slice(row);
                    continue;
                }
                for (out, x) in out.chunks_exact_mut(2).zip(dtype.widen(row)) {
                    out.copy_from_slice(&bf16::from_f32(x).to_le_bytes());
                }
            }
        }
        let memory = self.uploaded(&all)?;
        Ok(Weight { memory, rows, cols, stride, stored: Stored::Bf16 })
    }

    pub(super) fn uploaded(&mut self, bytes: &[u8]) -> Result<Memory, Fault> {
        self.send();
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        let memory = self.pool.freeze(&mut self.driver, bytes.len())?;
        self.traffic.uploaded += bytes.len() as u64;
        self.driver.write(memory.at(0), bytes)?;
        Ok(memory)
    }
}
