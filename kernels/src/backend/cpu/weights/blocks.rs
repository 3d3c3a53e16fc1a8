//! A frozen matrix that stays in the blocks of its file: rows of whole blocks along K. What a tile needs is unpacked
//! into the room of a thread, in L2, every time that it is needed, and then multiplied by the kernels that multiply
//! panels: to the bit what the same matrix gives that was widened first and packed into panels.
//!
//! In bf16 the unpacked numbers are rounded, as a matrix of f32 is when it is packed.

use super::super::gemm::gemv::{AT_ONCE, Chains, ROWS, Sums};
use super::super::gemm::tile::Ahead;
use super::super::gemm::tiled::{Right, Tiled};
use super::super::operands::{COLS, Precision, Side};
use super::super::runtime::bf16::round;
use super::block_rows::{Rounded, Rows};
use super::block_unpack as unpack;
use crate::numeric::block::{Blocks, RUN};
use std::ops::Deref;

/// N x K numbers.
pub struct InBlocks {
    blocks: Blocks,
    rounded: Rounded,
}

impl Deref for InBlocks {
    type Target = Blocks;

    fn deref(&self) -> &Blocks {
        &self.blocks
    }
}

impl InBlocks {
    /// Shares the bytes.
    pub fn new(blocks: &Blocks, precision: Precision) -> Self {
        let rounded = if precision == Precision::F32 { Rounded::Not } else { Rounded::Bf16 };
        InBlocks { blocks: blocks.clone(), rounded }
    }

    /// Which rows, and how they are rounded.
    fn rows_from(&self, first: usize, most: usize) -> Rows<'_> {
        let size = self.block.size_of(self.cols);
        let count = most.min(self.blocks.rows - first);
        Rows { bytes: &self.bytes[first * size..], size, count, rounded: self.rounded }
    }
}

impl Tiled for InBlocks {
    fn row(&self, out: &mut [f32], id: usize) {
        self.block.widen(out, self.blocks.row(id));
        if self.rounded == Rounded::Bf16 {
            out.iter_mut().for_each(|x| *x = round(*x));
        }
    }

    fn upright<'a>(
        &'a self,
        wide: &'a mut [f32],
        first: usize,
        (from, k): (usize, usize),
        left: Side,
    ) -> Right<'a> {
        let (rows, runs) = (self.rows_from(first, COLS), from / RUN..(from + k) / RUN);
        match left {
            Side::Floats(_) => {
                let wide = &mut wide[..k * COLS];
                self.block.visit(unpack::Upright { out: &mut *wide, rows, runs });
                Right::Floats(wide)
            }
            Side::Pairs(..) => {
                let words = bytemuck::cast_slice_mut(&mut wide[..k / 2 * COLS]);
                self.block.visit(unpack::UprightPairs { out: &mut *words, rows, runs });
                Right::Pairs(words)
            }
        }
    }

    fn transposed<'a>(
        &'a self,
        wide: &'a mut [f32],
        k: usize,
        (from, n): (usize, usize),
        left: Side,
    ) -> Right<'a> {
        let (rows, run) = (self.rows_from(from, n), k / RUN);
        match left {
            Side::Floats(_) => {
                let wide = &mut wide[..n * COLS];
                self.block.visit(unpack::Transposed { out: &mut *wide, rows, run });
                Right::Floats(wide)
            }
            Side::Pairs(..) => {
                let words = bytemuck::cast_slice_mut(&mut wide[..n.div_ceil(2) * COLS]);
                self.block.visit(unpack::TransposedPairs { out: &mut *words, rows, run });
                Right::Pairs(words)
            }
        }
    }

    fn next_forward(&self, p: usize, from: usize, k: usize) -> Option<Ahead> {
        let size = self.block.size_of(self.cols);
        let at = self.bytes.get(p * COLS * size + self.block.size_of(from)..).filter(|b| !b.is_empty())?;
        let runs = COLS.min(self.blocks.rows - p * COLS);
        Some(Ahead { at: at.as_ptr(), run: self.block.size_of(k), runs, stride: size })
    }

    fn next_backward(&self, k: usize, from: usize, n: usize) -> Option<Ahead> {
        let size = self.block.size_of(self.cols);
        let at = self.bytes.get(from * size + self.block.size_of(k)..).filter(|_| k < self.cols)?;
        Some(Ahead { at: at.as_ptr(), run: self.block.bytes(), runs: n, stride: size })
    }
}

impl Chains for InBlocks {
    fn rows(&self) -> usize {
        self.blocks.rows
    }

    fn cols(&self) -> usize {
        self.blocks.cols
    }

    fn few(&self) -> usize {
        if unpack::is_in_vectors() { AT_ONCE } else { ROWS }
    }

    fn chains(&self, sums: &mut [Sums], x: &[&[f32]], (first, panels): (usize, usize), from: usize) {
        let rows = self.rows_from(first, panels * COLS);
        self.block.visit(unpack::InPlace { sums, x, rows, from: from / RUN });
    }
}
