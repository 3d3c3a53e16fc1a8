//! Frozen matrices as products see them: whatever gives the right factors of tiles, 32 columns wide, in either
//! direction, gives both products, the head's and the few rows' of decoding.
//!
//! How a matrix is kept changes no bit: an output is the chain that `tile.rs` describes of the numbers that
//! the matrix is worth.

use super::super::operands::{COLS, Context, Factors, Left, Pairs, Products, Side, Sizes, Strided, Target};
use super::super::runtime::threads::Shared;
use super::added::{Added, check};
use super::pair_tiles::{self, rows_of_pair_tiles};
use super::product_tiles::{self, SLICE};
use super::tile::Ahead;
use super::{gemv, product_plain};
use crate::backend::Write;
use std::ops::Range;

/// A panel [k][32], or [k / 2][32] in pairs.
pub enum Right<'a> {
    /// f32 numbers.
    Floats(&'a [f32]),
    /// Pairs of bf16 numbers.
    Pairs(&'a [u32]),
}

/// N x K numbers.
pub trait Tiled: gemv::Chains {
    /// out = row `id`
    fn row(&self, out: &mut [f32], id: usize);
    /// Terms from .. from + k of outputs first .. first + 32, as a tile with that left factor reads them.
    fn upright<'a>(
        &'a self,
        wide: &'a mut [f32],
        first: usize,
        terms: (usize, usize),
        left: Side,
    ) -> Right<'a>;
    /// Columns k .. k + 32 of rows from .. from + n, `from` a multiple of 32, as a tile reads them.
    fn transposed<'a>(&'a self, wide: &'a mut [f32], k: usize, rows: (usize, usize), left: Side)
    -> Right<'a>;
    /// What [`Tiled::upright`] will read for panel p.
    fn next_forward(&self, p: usize, from: usize, k: usize) -> Option<Ahead>;
    /// What [`Tiled::transposed`] will read.
    fn next_backward(&self, k: usize, from: usize, n: usize) -> Option<Ahead>;

    /// y[T, N] (=|+=) x wᵀ [+ what is added]
    fn forward(&self, cx: Context, y: Target, x: Left, added: Option<Added>) {
        check(added, (x.rows, self.rows()));
        if cx.products == Products::Plain {
            let (w, sizes) = (numbers(self), Sizes { m: x.rows, n: self.rows(), k: self.cols() });
            let b = Strided::rows(&w, self.cols()).transposed();
            return product_plain::product(cx, y, sizes, Factors { a: x.numbers(), b, scale: 1.0 });
        }
        let small = added.is_none_or(|a| a.rank <= gemv::RANK);
        if let (Side::Floats(floats), true) = (x.side, x.rows <= self.few() && small) {
            return gemv::forward(cx, self, y, (floats, x.rows), added);
        }
        product_tiles::areas(cx, x.rows, self.rows().div_ceil(COLS), |area| {
            product_tiles::with_panel(|scratch| {
                let (wide, low) = scratch.split_at_mut(SLICE * COLS);
                for (from, k) in product_tiles::slices(self.cols()) {
                    let added = added.filter(|_| from + k == self.cols());
                    for p in area.panels.clone() {
                        let right = self.upright(wide, p * COLS, (from, k), x.side);
                        let share = Share { left: x.from(area.row, from), k, right };
                        let here = slice_of(y.from(area.row, p * COLS), from);
                        let size = (area.rows, COLS.min(self.rows() - p * COLS));
                        let ahead = self.next_forward(p + 1, from, k);
                        tiles(here, size, (share, ahead), (added, area.row, p * COLS), low);
                    }
                }
            });
        });
    }

    /// dx[T, K] (=|+=) dy w [+ what is added]
    fn backward(&self, cx: Context, dx: Target, dy: Left, added: Option<Added>) {
        check(added, (dy.rows, self.cols()));
        if cx.products == Products::Plain {
            let (w, sizes) = (numbers(self), Sizes { m: dy.rows, n: self.cols(), k: self.rows() });
            let b = Strided::rows(&w, self.cols());
            return product_plain::product(cx, dx, sizes, Factors { a: dy.numbers(), b, scale: 1.0 });
        }
        product_tiles::areas(cx, dy.rows, self.cols().div_ceil(COLS), |area| {
            product_tiles::with_panel(|scratch| {
                let (wide, low) = scratch.split_at_mut(SLICE * COLS);
                for (from, n) in product_tiles::slices(self.rows()) {
                    let added = added.filter(|_| from + n == self.rows());
                    for p in area.panels.clone() {
                        let right = self.transposed(wide, p * COLS, (from, n), dy.side);
                        let share = Share { left: dy.from(area.row, from), k: n, right };
                        let here = slice_of(dx.from(area.row, p * COLS), from);
                        let size = (area.rows, COLS.min(self.cols() - p * COLS));
                        let ahead = self.next_backward((p + 1) * COLS, from, n);
                        tiles(here, size, (share, ahead), (added, area.row, p * COLS), low);
                    }
                }
            });
        });
    }

    /// out[n, outputs] = x wᵀ for some outputs, from a multiple of 32 on, on the caller's thread; `out` comes with
    /// the distance between its rows, and `wide` is the room of [`product_tiles::with_panel`].
    fn some_forward(
        &self,
        (out, stride): (&mut [f32], usize),
        x: Left,
        outputs: Range<usize>,
        wide: &mut [f32],
    ) {
        let out = Shared::new(out);
        for (from, k) in product_tiles::slices(self.cols()) {
            for first in outputs.clone().step_by(COLS) {
                let right = self.upright(&mut *wide, first, (from, k), x.side);
                let target = Target { at: first - outputs.start, ..Target::rows(&out, stride, Write::Set) };
                let share = Share { left: x.from(0, from), k, right };
                let size = (x.rows, COLS.min(outputs.end - first));
                let ahead = self.next_forward(first / COLS + 1, from, k);
                tiles(slice_of(target, from), size, (share, ahead), (None, 0, 0), &mut []);
            }
        }
    }

    /// out[n, K] (=|+=) e w for some outputs, at most [`SLICE`], from a multiple of 32 on, on the caller's thread.
    fn some_backward(
        &self,
        (out, write): (&mut [f32], Write),
        e: Left,
        outputs: Range<usize>,
        wide: &mut [f32],
    ) {
        let out = Shared::new(out);
        for col in (0..self.cols()).step_by(COLS) {
            let right = self.transposed(&mut *wide, col, (outputs.start, outputs.len()), e.side);
            let share = Share { left: e, k: outputs.len(), right };
            let target = Target { at: col, ..Target::rows(&out, self.cols(), write) };
            tiles(target, (e.rows, COLS.min(self.cols() - col)), (share, None), (None, 0, 0), &mut []);
        }
    }
}

/// The matrix [N, K], row-major.
fn numbers<W: Tiled + ?Sized>(w: &W) -> Vec<f32> {
    let mut numbers = vec![0.0; w.rows() * w.cols()];
    numbers.chunks_exact_mut(w.cols().max(1)).enumerate().for_each(|(id, out)| w.row(out, id));
    numbers
}

/// A slice of one product.
struct Share<'a> {
    left: Left<'a>,
    k: usize,
    right: Right<'a>,
}

/// Later slices add to what the first has written.
fn slice_of(target: Target, from: usize) -> Target {
    Target { write: if from > 0 { Write::Add } else { target.write }, ..target }
}

/// One slice of one panel, with the added product if this is the last slice. Meanwhile `ahead` comes nearer.
fn tiles(
    target: Target,
    size: (usize, usize),
    (share, ahead): (Share, Option<Ahead>),
    (added, row, col): (Option<Added>, usize, usize),
    low: &mut [f32],
) {
    target.pointer(size.0, size.1);
    let added = added.map(|a| (a, a.left.from(row, 0).side));
    // SAFETY: the output was checked, and its rows and columns belong to this task; right factors are panels of
    // as many rows as terms, and left factors have the rows and terms of the share.
    unsafe {
        match (share.left.side, share.right) {
            (Side::Floats(left), Right::Floats(right)) => {
                let first = (left, share.k, right.as_ptr(), COLS);
                match added {
                    Some((a, Side::Floats(floats))) => {
                        a.lay_out(low, (col, size.1));
                        let second = (floats, a.rank, low.as_ptr(), COLS);
                        product_tiles::rows_of_tiles(target, size, &[first, second], 1.0, ahead);
                    }
                    Some(_) => unreachable!("what is added is of the same kind"),
                    None => product_tiles::rows_of_tiles(target, size, &[first], 1.0, ahead),
                }
            }
            (Side::Pairs(left, row), Right::Pairs(right)) => {
                let k = share.k.div_ceil(2);
                assert!((size.0 - 1) * row + k <= left.len() && k * COLS <= right.len(), "factors are there");
                let pairs = Pairs { k, a: left.as_ptr(), row, col: 1, b: right.as_ptr() };
                let second = match added {
                    Some((a, Side::Pairs(words, row))) => {
                        let panel: &mut [u32] = bytemuck::cast_slice_mut(low);
                        pair_tiles::lay_out(panel, a.right.from(0, col), (a.rank, size.1));
                        let (k, b) = (a.rank.div_ceil(2), panel.as_ptr());
                        Some(Pairs { k, a: words.as_ptr(), row, col: 1, b })
                    }
                    Some(_) => unreachable!("what is added is of the same kind"),
                    None => None,
                };
                rows_of_pair_tiles(target, size, (pairs, second), 1.0, ahead);
            }
            _ => unreachable!("both factors are of one kind"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::weights::panels::Panels;
    use super::*;
    use crate::backend::Cpu;

    #[test]
    fn short_adapter_factors_are_rejected() {
        let cpu = Cpu::new(1);
        let (t, n, k, rank) = (5, 40, 7, 3);
        let panels = Panels::pack(&cpu.threads, (n, k), |i| i as f32);
        let values = vec![1.0; 1000];
        let run = |left_rows: usize, right_rows: usize, back: bool| {
            let (ins, outs) = if back { (n, k) } else { (k, n) };
            let mut out = vec![0.0; t * outs];
            let shared = Shared::new(&mut out);
            let target = Target::rows(&shared, outs, Write::Set);
            let left = Left::floats(&values[..left_rows * rank], rank);
            let right = Strided::rows(&values[..right_rows * outs], outs);
            let x = Left::floats(&values[..t * ins], ins);
            let added = Some(Added { left, right, rank, scale: 1.0, rounded: false });
            match back {
                true => panels.backward(cpu.context(), target, x, added),
                false => panels.forward(cpu.context(), target, x, added),
            }
        };
        for back in [false, true] {
            run(t, rank, back);
            for (left, right) in [(t - 1, rank), (t, rank - 1)] {
                let short = std::panic::AssertUnwindSafe(|| run(left, right, back));
                assert!(std::panic::catch_unwind(short).is_err(), "{left} rows, {right} rows");
            }
        }
    }
}
