//! Frozen matrices in their file's format, row-major without gaps: f32 numbers, pairs of bf16 or f16 numbers in 32-bit
//! words, or the bytes of blocks. A matrix that exceeds one binding is stored in parts of whole rows; verbs iterate
//! over the parts.

use super::Wgpu;
use super::pool::Storage;
use crate::backend::{Backend, Fault, Frozen, view, view_mut};
use crate::numeric::block::{Block, Blocks, Encoding};

/// A frozen matrix [N, K].
#[derive(Debug)]
pub struct Weight {
    /// N.
    pub rows: usize,
    /// K.
    pub cols: usize,
    /// The encoding of the numbers.
    pub encoding: Encoding,
    /// In the order of the rows.
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

/// Bytes of a frozen matrix with this many numbers, on any device.
pub fn matrix_bytes(encoding: Encoding, numbers: usize) -> usize {
    encoding.size_of(numbers)
}

impl Wgpu {
    /// Uploads a frozen matrix.
    pub(super) fn freeze(&mut self, source: Frozen) -> Result<Weight, Fault> {
        let Frozen { rows, cols, dtype, bytes } = source;
        if bytes.len() != rows * cols * dtype.size() {
            let whole = rows * cols * dtype.size();
            let reason = format!("a {rows} x {cols} matrix takes {whole} bytes, not {}", bytes.len());
            return Err(Fault::Device { device: self.gpu.faults.device().to_string(), reason });
        }
        let weight = self.sent((rows, cols), Encoding::Plain(dtype), bytes)?;
        self.try_matrix(&weight, bytes)?;
        Ok(weight)
    }

    /// Uploads blocks. Before the first use of a block type, the device must unpack it correctly.
    pub(super) fn freeze_blocks(&mut self, source: &Blocks) -> Result<Weight, Fault> {
        let shape = (source.rows, source.cols);
        let weight = self.sent(shape, Encoding::Blocks(source.block), &source.bytes)?;
        if !self.tried.contains(&weight.encoding) && source.rows * source.cols > 0 {
            self.judge_blocks(source, &weight)?;
            self.try_matrix(&weight, &source.bytes)?;
        }
        Ok(weight)
    }

    pub(super) fn sent(
        &mut self,
        (rows, cols): (usize, usize),
        encoding: Encoding,
        bytes: &[u8],
    ) -> Result<Weight, Fault> {
        let row = encoding.size_of(cols);
        // Numbers of a part are counted in 32 bits, and a word that begins in the middle of the last word needs one
        // behind it.
        let fit = (self.binding_limit as usize).saturating_sub(8) / row.max(1);
        let step = fit.min(u32::MAX as usize / cols.max(1));
        if step == 0 && rows > 0 {
            let reason = format!("a row of {row} bytes, and a binding holds {}", self.binding_limit);
            return Err(Fault::Device { device: self.gpu.faults.device().to_string(), reason });
        }
        let mut parts = Vec::new();
        for from in (0..rows).step_by(step.max(1)) {
            let rows = step.min(rows - from);
            let own = &bytes[from * row..(from + rows) * row];
            let behind = if matches!(encoding, Encoding::Blocks(_)) { 4 } else { 0 };
            let size = (own.len() as u64).next_multiple_of(4).max(4) + behind;
            let Some(storage) = self.gpu.freeze(size) else { break };
            self.gpu.write_new(&storage, own);
            parts.push(Part { storage, from, rows });
        }
        self.gpu.check()?;
        Ok(Weight { rows, cols, encoding, parts })
    }

    /// Compares the first rows of a matrix, unpacked on the device and on the host.
    fn judge_blocks(&mut self, source: &Blocks, weight: &Weight) -> Result<(), Fault> {
        const ENOUGH: usize = 4096;
        let Some(part) = weight.parts.first() else { return Ok(()) };
        let rows = (ENOUGH / source.cols).clamp(1, part.rows);
        let want = source.first(rows);
        let (traffic, pace, mut got) = (self.gpu.traffic, self.gpu.pace.clone(), vec![f32::NAN; want.len()]);
        let mut wide = self.memory(want.len());
        let out = self.at_mut(&view_mut(&mut wide, 1, want.len()));
        let blocks = self.place(&part.storage, 0, part.storage.bytes as usize / 4);
        self.widen_rows([&out, &blocks], weight.encoding, (0, want.len()));
        let read = self.read(view(&wide, 1, want.len()), &mut got);
        self.recycle(wide);
        read?;
        (self.gpu.traffic, self.gpu.pace) = (traffic, pace);
        wrong(source.block, &got, &want).map_or(Ok(()), |reason| {
            Err(Fault::Device { device: self.gpu.faults.device().to_string(), reason })
        })
    }
}

/// Describes the first error. A number is one product and one sum; the device may round each once more or not at all.
fn wrong(block: Block, got: &[f32], want: &[f32]) -> Option<String> {
    let largest = want.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    // A NaN is never within a bound.
    let near = |(g, w): (&f32, &f32)| (g - w).abs() <= 1e-6 * largest;
    let off = got.iter().zip(want).position(|pair| !near(pair))?;
    Some(format!("unpacks {} wrong: number {off} is {}, not {}", block.name(), got[off], want[off]))
}

#[cfg(test)]
mod tests {
    use super::wrong;
    use crate::numeric::block::Block;

    #[test]
    fn wrong_unpacking_is_detected() {
        let want = [1.0, -2.0, 0.0];
        assert_eq!(wrong(Block::Q4_K, &[1.0, -2.000_000_2, 0.0], &want), None);
        for bad in [[1.0, 2.0, 0.0], [1.0, -2.0, f32::NAN], [1.0, -2.0, 1e-3]] {
            let said = wrong(Block::Q4_K, &bad, &want).unwrap_or_default();
            assert!(said.starts_with("unpacks Q4_K wrong: number "), "{said}");
        }
    }
}
