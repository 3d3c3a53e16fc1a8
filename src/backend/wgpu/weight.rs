//! Frozen matrices as their file has them: f32 numbers, or pairs of bf16 or f16 numbers in 32-bit words, row-major
//! without gaps. A matrix that one binding cannot hold is kept in parts of whole rows; verbs go through the parts.

use super::Wgpu;
use super::pool::Storage;
use crate::backend::{Fault, Frozen};
use crate::numeric::block::Encoding;
use crate::numeric::dtype::Dtype;

/// A frozen matrix [N, K].
#[derive(Debug)]
pub struct Weight {
    /// N.
    pub rows: usize,
    /// K.
    pub cols: usize,
    /// How numbers are encoded.
    pub dtype: Dtype,
    /// From the first row on.
    pub parts: Vec<Part>,
}

/// Some rows of a frozen matrix.
#[derive(Debug)]
pub struct Part {
    pub(super) storage: Storage,
    /// First row.
    pub from: usize,
    /// Number of rows.
    pub rows: usize,
}

/// The constant by which kernels know an encoding.
pub fn encoding(dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::Bf16 => 1,
        Dtype::F16 => 2,
    }
}

/// Bytes that a frozen matrix of that many numbers takes on any device.
pub fn matrix_bytes(encoding: Encoding, numbers: usize) -> usize {
    match encoding {
        Encoding::Plain(dtype) => numbers * dtype.size(),
        Encoding::Blocks(_) => numbers * Dtype::F32.size(),
    }
}

impl Wgpu {
    /// Sends a frozen matrix to the device.
    pub(super) fn freeze(&mut self, source: Frozen) -> Result<Weight, Fault> {
        let Frozen { rows, cols, dtype, bytes } = source;
        let device = || self.gpu.faults.device().to_string();
        let row = cols * dtype.size();
        if bytes.len() != rows * row {
            let reason = format!("a {rows} x {cols} matrix takes {} bytes, not {}", rows * row, bytes.len());
            return Err(Fault::Device { device: device(), reason });
        }
        let step = (self.binding_limit as usize).saturating_sub(4) / row.max(1);
        if step == 0 && rows > 0 {
            let reason = format!("a row of {row} bytes, and a binding holds {}", self.binding_limit);
            return Err(Fault::Device { device: device(), reason });
        }
        self.gpu.faults.doing("weight");
        let mut parts = Vec::new();
        for from in (0..rows).step_by(step.max(1)) {
            let rows = step.min(rows - from);
            let own = &bytes[from * row..(from + rows) * row];
            let size = (own.len() as u64).next_multiple_of(4).max(4);
            let made = self.gpu.pool.freeze(&self.gpu.device, &self.gpu.faults, size);
            let Some(storage) = made else { break };
            if own.len().is_multiple_of(4) {
                self.gpu.write_new(&storage, own);
            } else {
                let mut padded = own.to_vec();
                padded.resize(size as usize, 0);
                self.gpu.write_new(&storage, &padded);
            }
            parts.push(Part { storage, from, rows });
        }
        self.gpu.check()?;
        Ok(Weight { rows, cols, dtype, parts })
    }
}
