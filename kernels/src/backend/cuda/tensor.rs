//! Products of frozen weights on tensor cores. Activations are narrowed to bf16 rows that begin at multiples of 16
//! bytes; each operand layout has its kernel. LoRA's own products stay in f32.

use super::frozen::{Added, Direction};
use super::launches::Shape;
use super::memory::Memory;
use super::sm90a;
use super::{Arg, Cuda, Driver, Launch, at, blocks, size};
use crate::backend::{View, Write};

const FILE: &str = "product_sm80.ptx";
/// Edge of the tile.
const TILE: usize = 128;

/// The length of a row in numbers, padded for tensor cores.
pub(super) fn padded(cols: usize) -> usize {
    cols.next_multiple_of(8)
}

impl<D: Driver> Cuda<D> {
    /// x as bf16, in rows of [`padded`] numbers.
    pub(super) fn narrow(&mut self, x: View<Memory>) -> Memory {
        let stride = padded(x.cols);
        let out = self.take(2 * x.rows * stride);
        if stride == x.cols && matches!(at(&x), Arg::Address(from) if from.is_multiple_of(16)) {
            let eights = x.len() / 8;
            let args = [Arg::Address(out.at(0)), at(&x), size(eights)];
            let grid = [blocks(eights, 256), 1, 1];
            self.launch(Launch { file: FILE, entry: "narrow_whole", grid, threads: 256, args: &args });
            return out;
        }
        let args = [Arg::Address(out.at(0)), at(&x), size(x.cols), size(stride)];
        let grid = [super::blocks(x.rows, 1), blocks(x.cols, 256), 1];
        self.launch(Launch { file: FILE, entry: "narrow", grid, threads: 256, args: &args });
        out
    }

    /// The product of two bf16 operands in rows of [`padded`] numbers.
    pub(super) fn product_bf16(
        &mut self,
        out: (Arg, Write),
        ab: (Arg, Arg),
        s: Shape,
        (direction, added): (Direction, Option<Added>),
    ) {
        if let Some(processors) = self.sm90a.filter(|_| sm90a::takes(&s, ab)) {
            return self.product_sm90a(processors, out, ab, s, (direction, added));
        }
        let mut args = s.args(out, ab, 1.0).to_vec();
        let (file, stem) = match added {
            None => (FILE, "product_sm80"),
            Some(Added { left, right, rank, between, by }) => {
                args.extend([left, right, size(rank), size(between), Arg::F32(by)]);
                ("lora_linear_sm80.ptx", "lora_linear_sm80")
            }
        };
        let grid = [blocks(s.n, TILE), blocks(s.m, TILE), 1];
        let entry = format!("{stem}_{}", if direction == Direction::Forward { "nt" } else { "nn" });
        self.launch(Launch { file, entry: &entry, grid, threads: 256, args: &args });
    }
}
