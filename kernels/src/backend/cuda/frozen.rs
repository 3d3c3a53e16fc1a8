//! Products of frozen weights, for every storage format and tier. Blocks are not expanded as a whole: a part of the
//! matrix at a time is widened into a slab, which all parts share, and multiplied from there. Parts are adjacent in the
//! output and never split the sum, so the result has the bits of the whole widened matrix.

use super::launches::Shape;
use super::memory::{Memory, Stored, Weight};
use super::tensor::padded;
use super::{Arg, Cuda, Driver, Launch, Tier, Tokens, at, at_mut, blocks, size};
use crate::backend::{Fault, View, ViewMut, Write};
use crate::numeric::block::{Block, Blocks};
use half::bf16;
use std::sync::Arc;

/// Numbers in a slab, unless a strip as wide as a tile is larger.
pub(super) const SLAB: usize = 4 << 20;
/// Edge of the largest tile.
const EDGE: usize = 128;
/// Threads of the widening kernels; each makes four numbers.
const THREADS: usize = 128;
/// Rows that a device widens in the check of a block type.
const SHOWN: usize = 4;

/// The direction of a product with a frozen weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// x w^T, summed over the weight's columns.
    Forward,
    /// dy w, summed over the weight's rows.
    Backward,
}

/// An adapter's part, by * left[T, R] right, added in the same pass. right is [N, R] in the forward direction and [R,
/// K] in the backward direction.
#[derive(Debug, Clone, Copy)]
pub(super) struct Added {
    pub left: Arg,
    pub right: Arg,
    pub rank: usize,
    /// Numbers from row to row of right.
    pub between: usize,
    pub by: f32,
}

impl Added {
    /// The part that belongs to the outputs from `first` on.
    fn from(self, first: usize, direction: Direction) -> Added {
        let apart = if direction == Direction::Forward { self.between } else { 1 };
        let ahead = |arg| match arg {
            Arg::Address(at) => Arg::Address(at + 4 * (first * apart) as u64),
            other => other,
        };
        Added { right: ahead(self.right), ..self }
    }
}

/// Rows and columns of a matrix, each as (first, count).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    rows: (usize, usize),
    cols: (usize, usize),
}

/// Outputs and terms of a product with a matrix [rows, cols].
fn sides((rows, cols): (usize, usize), direction: Direction) -> (usize, usize) {
    match direction {
        Direction::Forward => (rows, cols),
        Direction::Backward => (cols, rows),
    }
}

/// Outputs that are computed from one slab.
fn step(sums: usize, slab: usize) -> usize {
    (slab / sums.max(1) / EDGE * EDGE).max(EDGE)
}

/// Most numbers of a matrix in blocks [rows, cols] that are widened at a time.
pub(super) fn most_numbers(shape: (usize, usize), direction: Direction, slab: usize) -> usize {
    let (outputs, sums) = sides(shape, direction);
    sums * step(sums, slab).min(outputs)
}

fn parts(w: &Weight, direction: Direction, slab: usize) -> Vec<Part> {
    let whole = Part { rows: (0, w.rows), cols: (0, w.cols) };
    let (outputs, sums) = sides((w.rows, w.cols), direction);
    let step = match w.stored {
        Stored::Blocks(_) => step(sums, slab),
        Stored::F32 | Stored::Bf16 | Stored::F16 => outputs.max(1),
    };
    let part = |first: usize| match (direction, (first, step.min(outputs - first))) {
        (Direction::Forward, rows) => Part { rows, ..whole },
        (Direction::Backward, cols) => Part { cols, ..whole },
    };
    (0..outputs).step_by(step).map(part).collect()
}

/// Blocks and the rows to widen.
struct Widening<'a> {
    weight: &'a Weight,
    block: Block,
    part: Part,
    /// Address of the row numbers that replace 0, 1, 2 ...; 0 for none.
    ids: u64,
    tier: Tier,
    /// The factor of f32 rows.
    scale: f32,
}

impl<D: Driver> Cuda<D> {
    /// y[T, N] (=|+=) x[T, K] w^T, or dx[T, K] (=|+=) dy[T, N] w; on tensor cores with an adapter's part.
    pub(super) fn frozen(
        &mut self,
        (out, write): (ViewMut<Memory>, Write),
        x: View<Memory>,
        (w, direction): (&Weight, Direction),
        added: Option<Added>,
    ) {
        assert!(
            added.is_none() || self.tier == Tier::Sm80,
            "only products of the bf16 class add an adapter's part"
        );
        let narrowed = match (self.tier, direction) {
            (Tier::F32 | Tier::Sm70, _) => None,
            (_, Direction::Forward) => Some(self.narrowed(x)),
            (_, Direction::Backward) => Some(Arc::new(self.narrow(x))),
        };
        let (left, lda) = match &narrowed {
            Some(narrowed) => (Arg::Address(narrowed.at(0)), padded(x.cols)),
            None => (at(&x), x.cols),
        };
        for part in parts(w, direction, self.slab) {
            let (first, n) = if direction == Direction::Forward { part.rows } else { part.cols };
            let slab = match w.stored {
                Stored::Blocks(block) => Some(self.widened(w, block, part)),
                Stored::F32 | Stored::Bf16 | Stored::F16 => None,
            };
            let (right, ldb) = match &slab {
                Some(slab) => (slab.at(0), part.cols.1),
                None => (w.memory.at(0), w.stride),
            };
            let Arg::Address(begin) = at_mut(&out) else { return };
            let out_at = Arg::Address(begin + 4 * first as u64);
            let s = Shape { m: out.rows, n, k: x.cols, lda, ldb, ldo: out.cols };
            let ab = (left, Arg::Address(right));
            match self.tier {
                Tier::Sm80 => {
                    let added = added.map(|added| added.from(first, direction));
                    self.product_bf16((out_at, write), ab, s, (direction, added));
                }
                Tier::Sm70 => self.product_f16((out_at, write), ab, s, (direction, w.stored)),
                Tier::F32 => self.product_f32((out_at, write), ab, s, (direction, w.stored)),
            }
        }
    }

    /// The product in f32 arithmetic, for a matrix of this storage format.
    pub(super) fn product_f32(
        &mut self,
        out: (Arg, Write),
        ab: (Arg, Arg),
        s: Shape,
        (direction, stored): (Direction, Stored),
    ) {
        let (file, stem) = match direction {
            Direction::Forward => ("linear.ptx", "linear"),
            Direction::Backward => ("linear_grad.ptx", "linear_grad"),
        };
        self.product((file, &format!("{stem}_{}", stored.name())), out, ab, 1.0, s);
    }

    /// out[T, C] = scale * `table[ids[T]]` of a table in blocks, in f32 in every tier.
    pub(super) fn embed_blocks(
        &mut self,
        out: ViewMut<Memory>,
        (weight, block): (&Weight, Block),
        tokens: &Tokens,
        scale: f32,
    ) {
        let part = Part { rows: (0, tokens.count), cols: (0, weight.cols) };
        let widening = Widening { weight, block, part, ids: tokens.ids(), tier: Tier::F32, scale };
        self.widen(at_mut(&out), &widening);
    }

    /// Uploads a matrix in its blocks. Before the first use of a block type, the device must widen it correctly,
    /// because the device has no slower kernel to compare with.
    pub(super) fn pack_blocks(&mut self, source: &Blocks) -> Result<Weight, Fault> {
        let Blocks { rows, cols, block, .. } = *source;
        let memory = self.uploaded(&source.bytes)?;
        let weight = Weight { memory, rows, cols, stride: cols, stored: Stored::Blocks(block) };
        if !self.unpacked.contains(&block) && rows * cols > 0 {
            self.show(source, &weight)?;
            self.unpacked.push(block);
        }
        Ok(weight)
    }

    fn show(&mut self, source: &Blocks, weight: &Weight) -> Result<(), Fault> {
        let Blocks { rows, cols, block, .. } = *source;
        let want = source.first(SHOWN);
        let n = want.len();
        let part = Part { rows: (0, rows.min(SHOWN)), cols: (0, cols) };
        let tiers: &[Tier] = if self.tier == Tier::Sm80 { &[Tier::F32, Tier::Sm80] } else { &[Tier::F32] };
        for &tier in tiers {
            let size = if tier == Tier::Sm80 { 2 } else { 4 };
            let slab = self.take(size * n);
            let widening = Widening { weight, block, part, ids: 0, tier, scale: 1.0 };
            self.widen(Arg::Address(slab.at(0)), &widening);
            let mut got = vec![0u8; size * n];
            self.fetch(slab.at(0), &mut got)?;
            let same = want.iter().zip(got.chunks_exact(size)).all(|(want, got)| match (tier, got) {
                (Tier::Sm80, &[a, b]) => bf16::from_f32(*want).to_le_bytes() == [a, b],
                (Tier::F32 | Tier::Sm70, &[a, b, c, d]) => want.to_le_bytes() == [a, b, c, d],
                _ => false,
            });
            // Infinities of a damaged file are reported by the file reader.
            if !same && want.iter().all(|x| x.is_finite()) {
                let reason = format!("widens {} wrong: check its driver", block.name());
                return Err(Fault::Device { device: self.driver.name().into(), reason });
            }
        }
        Ok(())
    }

    /// A part of a matrix as numbers of this tier, in contiguous rows.
    fn widened(&mut self, weight: &Weight, block: Block, part: Part) -> Memory {
        let tier = self.tier;
        let size = if tier == Tier::Sm80 { 2 } else { 4 };
        let slab = self.take(size * part.rows.1 * part.cols.1);
        self.widen(Arg::Address(slab.at(0)), &Widening { weight, block, part, ids: 0, tier, scale: 1.0 });
        slab
    }

    fn widen(&mut self, out: Arg, what: &Widening) {
        let Widening { weight, block, part, ids, tier, scale } = *what;
        let args = [
            out,
            Arg::Address(weight.memory.at(0)),
            Arg::Address(ids),
            size(part.rows.0),
            size(block.size_of(weight.cols)),
            size(part.cols.0),
            size(part.cols.1),
            Arg::F32(scale),
        ];
        let (file, stem, args) = match tier {
            Tier::F32 | Tier::Sm70 => ("widen.ptx", "widen", &args[..]),
            Tier::Sm80 => ("widen_sm80.ptx", "widen_sm80", &args[..7]),
        };
        let entry = format!("{stem}_{}", block.name().to_lowercase());
        let grid = [blocks(part.rows.1, 1), blocks(part.cols.1 / 4, THREADS), 1];
        self.launch(Launch { file, entry: &entry, grid, threads: THREADS as u32, args });
    }
}

#[cfg(test)]
mod tests {
    use super::super::pool::{Pool, tests::Card};
    use super::*;
    use crate::backend::{self, Backend, Frozen, view, view_mut};
    use crate::numeric::dtype::Dtype;

    #[test]
    #[should_panic(expected = "only products of the bf16 class add an adapter's part")]
    fn adapter_on_an_unsupported_product_panics() {
        let mut device = backend::Cuda::on(Card::of(1 << 20));
        let source = Frozen { rows: 4, cols: 4, dtype: Dtype::F32, bytes: &[0; 64] };
        let (w, x, mut y) = (device.weight(source).unwrap(), device.memory(16), device.memory(16));
        let (left, right) = (Arg::Address(x.at(0)), Arg::Address(x.at(4)));
        let added = Added { left, right, rank: 1, between: 1, by: 1.0 };
        let out = (view_mut(&mut y, 4, 4), Write::Set);
        device.frozen(out, view(&x, 4, 4), (&w, Direction::Forward), Some(added));
    }

    #[test]
    fn parts_cover_the_outputs_and_fit_the_slab() {
        for (rows, cols) in [(9728, 2560), (2560, 9728), (151_936, 2560), (4, 256), (0, 256)] {
            let memory = Pool::default().nothing();
            let w = Weight { memory, rows, cols, stride: cols, stored: Stored::Blocks(Block::Q4_K) };
            for direction in [Direction::Forward, Direction::Backward] {
                let mut next = 0;
                for part in parts(&w, direction, SLAB) {
                    let (first, count) = if direction == Direction::Forward { part.rows } else { part.cols };
                    assert!(first == next && count > 0, "{part:?}");
                    let numbers = part.rows.1 * part.cols.1;
                    assert!(numbers <= most_numbers((rows, cols), direction, SLAB), "{part:?}");
                    next = first + count;
                }
                assert_eq!(next, if direction == Direction::Forward { rows } else { cols });
            }
        }
    }
}
