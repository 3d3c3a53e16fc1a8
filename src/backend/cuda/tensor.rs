//! Products of frozen weights on tensor cores: activations are narrowed to bf16 rows that begin at multiples of 16
//! bytes, then one kernel for every way that operands lie. LoRA's own products stay in f32.

use super::memory::Memory;
use super::{Arg, Cuda, Driver, Launch, at, at_mut, blocks, size};
use crate::backend::{View, ViewMut, Write};

const FILE: &str = "product_sm80.ptx";
/// Edge of the tile.
const TILE: usize = 128;

/// Numbers of a row as tensor cores want it.
pub(super) fn padded(cols: usize) -> usize {
    cols.next_multiple_of(8)
}

/// Which weight product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// x w^T, sums over the weight's columns.
    Forward,
    /// dy w, sums over its rows.
    Backward,
}

impl<D: Driver> Cuda<D> {
    /// x as bf16, rows [`padded`].
    fn narrow(&mut self, x: View<Memory>) -> Memory {
        let stride = padded(x.cols);
        let out = self.take(2 * x.rows * stride);
        let args = [Arg::Address(out.at(0)), at(&x), size(x.cols), size(stride)];
        let grid = [super::blocks(x.rows, 1), blocks(x.cols, 256), 1];
        self.launch(Launch { file: FILE, entry: "narrow", grid, threads: 256, args: &args });
        out
    }

    pub(super) fn product_bf16(
        &mut self,
        (out, write): (ViewMut<Memory>, Write),
        x: View<Memory>,
        (w, stride): (&Memory, usize),
        direction: Direction,
    ) {
        let narrowed = self.narrow(x);
        let args = [
            at_mut(&out),
            Arg::Address(narrowed.at(0)),
            Arg::Address(w.at(0)),
            size(out.rows),
            size(out.cols),
            size(x.cols),
            size(padded(x.cols)),
            size(stride),
            Arg::F32(1.0),
            Arg::U32(u32::from(write == Write::Add)),
        ];
        let grid = [blocks(out.cols, TILE), blocks(out.rows, TILE), 1];
        let entry = if direction == Direction::Forward { "product_sm80_nt" } else { "product_sm80_nn" };
        self.launch(Launch { file: FILE, entry, grid, threads: 256, args: &args });
    }
}
