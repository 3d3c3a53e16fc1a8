//! Frozen matrices as the `gemm` crate multiplies them: in rows, in the dtype or the blocks of their file. A tile of
//! a product is widened into the room of its thread when it is needed, by the thread that needs it: a conversion for
//! every 128 multiply-adds, and no copy of the matrix in f32.

use super::Context;
use super::blocks::InBlocks;
use super::left::{self, Precision};
use super::product::{Strided, Target};
use super::product_crate;
use crate::backend::Frozen;
use crate::numeric::dtype::Dtype;
use half::{bf16, f16};
use std::ops::Range;

/// N x K numbers.
pub struct Rows {
    cols: usize,
    numbers: Numbers,
}

enum Numbers {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    Blocks(InBlocks),
}

impl Rows {
    /// What a file holds, whose size was checked: in f32 without rounding (f32 numbers that are all bf16 numbers are
    /// kept as such), else rounded to bf16.
    pub fn pack(cx: Context, source: Frozen) -> Rows {
        let Frozen { cols, dtype, bytes, .. } = source;
        let halves = || bytes.as_chunks::<2>().0.iter().copied();
        let rounded = |x: f32| left::upper(left::round(x));
        let numbers = match (cx.precision, dtype) {
            (Precision::F32, Dtype::F16) => Numbers::F16(halves().map(f16::from_le_bytes).collect()),
            (Precision::F32, Dtype::Bf16) => Numbers::Bf16(halves().map(bf16::from_le_bytes).collect()),
            (Precision::F32, Dtype::F32) if !dtype.halves(bytes) => Numbers::F32(dtype.widen(bytes)),
            (Precision::F32, Dtype::F32) => Numbers::Bf16(floats(bytes).map(left::upper).collect()),
            (_, Dtype::F32) => Numbers::Bf16(floats(bytes).map(rounded).collect()),
            (_, Dtype::F16) => {
                Numbers::Bf16(halves().map(|b| rounded(f16::from_le_bytes(b).to_f32())).collect())
            }
            (_, Dtype::Bf16) => {
                Numbers::Bf16(halves().map(|b| rounded(bf16::from_le_bytes(b).to_f32())).collect())
            }
        };
        Rows { cols, numbers }
    }

    /// Keeps the blocks.
    pub fn of_blocks(blocks: InBlocks) -> Rows {
        Rows { cols: blocks.cols, numbers: Numbers::Blocks(blocks) }
    }

    /// out = columns `cols` of row `row`; in blocks, `cols` begins and ends where blocks do.
    pub fn part(&self, out: &mut [f32], row: usize, cols: Range<usize>) {
        let at = row * self.cols + cols.start..row * self.cols + cols.end;
        match &self.numbers {
            Numbers::F32(x) => out.copy_from_slice(&x[at]),
            Numbers::F16(x) => out.iter_mut().zip(&x[at]).for_each(|(o, x)| *o = x.to_f32()),
            Numbers::Bf16(x) => out.iter_mut().zip(&x[at]).for_each(|(o, x)| *o = x.to_f32()),
            Numbers::Blocks(x) => x.part(out, row, cols),
        }
    }

    /// y[T, N] (=|+=) x wᵀ
    pub fn forward(&self, cx: Context, y: Target, x: (Strided, usize), n: usize) {
        product_crate::frozen(cx, y, x, (n, self.cols), &|room, terms, outputs| {
            let rows = room.chunks_exact_mut(terms.len().max(1));
            outputs.zip(rows).for_each(|(n, out)| self.part(out, n, terms.clone()));
            Strided::rows(room, terms.len()).transposed()
        });
    }

    /// dx[T, K] (=|+=) dy w
    pub fn backward(&self, cx: Context, dx: Target, dy: (Strided, usize), n: usize) {
        product_crate::frozen(cx, dx, dy, (self.cols, n), &|room, terms, outputs| {
            let rows = room.chunks_exact_mut(outputs.len().max(1));
            terms.zip(rows).for_each(|(n, out)| self.part(out, n, outputs.clone()));
            Strided::rows(room, outputs.len())
        });
    }
}

fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b))
}
