//! A frozen matrix in panels, packed once: [N / 32][K][32], so that 32 outputs lie side by side for every input,
//! in the dtype of the file. What is widened to f32 is one panel's slice at a time, in L2.
//!
//! One layout serves both directions. Forward takes a slice of a panel as it is; the input gradient, whose
//! inner dimension is N, turns blocks of 16 x 16 while it widens them (3 % of the product at 256 rows).

use super::Context;
use super::avx512::{self, Ahead, COLS, Stored};
use super::product::{Strided, Target};
use super::product_own::{self, SLICE, Share};
use super::threads::{Shared, Threads};
use crate::backend::Write;
use std::ops::Range;

/// Most terms of a low-rank product that is added in the same pass.
pub const RANK: usize = SLICE;

/// N x K numbers.
pub struct Panels<S> {
    rows: usize,
    cols: usize,
    data: Vec<S>,
}

/// A product that is added while the tile is in registers: left [T, R], right as a tile wants it (R rows), and
/// what multiplies it.
#[derive(Clone, Copy)]
pub struct Added<'a> {
    /// [T, R]
    pub left: Strided<'a>,
    /// [R, outputs]
    pub right: Strided<'a>,
    /// R
    pub rank: usize,
    /// Multiplies the product.
    pub scale: f32,
}

impl<S: Stored> Panels<S> {
    /// From row-major numbers; `number(i)` is the i-th.
    pub fn pack(threads: &Threads, (rows, cols): (usize, usize), number: impl Fn(usize) -> S + Sync) -> Self {
        let mut data = vec![S::default(); rows.div_ceil(COLS) * cols * COLS];
        threads.chunks(&mut data, cols * COLS, |p, panel| {
            for lane in 0..COLS.min(rows - p * COLS) {
                let from = (p * COLS + lane) * cols;
                for (k, out) in panel.iter_mut().skip(lane).step_by(COLS).enumerate() {
                    *out = number(from + k);
                }
            }
        });
        Panels { rows, cols, data }
    }

    /// out = row `id`
    pub fn row(&self, out: &mut [f32], id: usize) {
        let panel = &self.data[id / COLS * self.cols * COLS..][..self.cols * COLS];
        out.iter_mut().zip(panel.iter().skip(id % COLS).step_by(COLS)).for_each(|(o, v)| *o = v.widen());
    }

    /// y[T, N] (=|+=) x wᵀ [+ what is added]
    pub fn forward(&self, cx: Context, y: Target, x: (&[f32], usize), added: Option<Added>) {
        let (x, t) = (Strided::rows(x.0, self.cols), x.1);
        check(added, (t, self.rows));
        product_own::areas(cx, t, self.rows.div_ceil(COLS), |area| {
            product_own::with_panel(|scratch| {
                let (wide, low) = scratch.split_at_mut(SLICE * COLS);
                for (from, k) in product_own::slices(self.cols) {
                    let added = added.filter(|_| from + k == self.cols);
                    for p in area.panels.clone() {
                        let part = &self.data[(p * self.cols + from) * COLS..][..k * COLS];
                        let right = S::plain(part).unwrap_or_else(|| {
                            // SAFETY: panels are made for AVX-512 only.
                            unsafe { avx512::widen(&mut wide[..k * COLS], part) };
                            &wide[..k * COLS]
                        });
                        let share = (x.from(area.row, from), k, right.as_ptr(), COLS);
                        let here = slice_of(y.from(area.row, p * COLS), from);
                        let size = (area.rows, COLS.min(self.rows - p * COLS));
                        let ahead = self.next_forward(p + 1, from, k);
                        tiles(here, size, (share, ahead), (added, area.row, p * COLS), low);
                    }
                }
            });
        });
    }

    /// dx[T, K] (=|+=) dy w [+ what is added]
    pub fn backward(&self, cx: Context, dx: Target, dy: (&[f32], usize), added: Option<Added>) {
        let (dy, t) = (Strided::rows(dy.0, self.rows), dy.1);
        check(added, (t, self.cols));
        product_own::areas(cx, t, self.cols.div_ceil(COLS), |area| {
            product_own::with_panel(|scratch| {
                let (wide, low) = scratch.split_at_mut(SLICE * COLS);
                for (from, n) in product_own::slices(self.rows) {
                    let added = added.filter(|_| from + n == self.rows);
                    for p in area.panels.clone() {
                        self.turn(wide, p * COLS, (from, n));
                        let share = (dy.from(area.row, from), n, wide.as_ptr(), COLS);
                        let here = slice_of(dx.from(area.row, p * COLS), from);
                        let size = (area.rows, COLS.min(self.cols - p * COLS));
                        let ahead = self.next_backward((p + 1) * COLS, from, n);
                        tiles(here, size, (share, ahead), (added, area.row, p * COLS), low);
                    }
                }
            });
        });
    }

    /// out[n, outputs] = x wᵀ for some outputs, from a multiple of 32 on, on the caller's thread; `out` comes with
    /// the distance between its rows, x with n, and `wide` is the room of [`product_own::with_panel`].
    pub fn some_forward(
        &self,
        (out, stride): (&mut [f32], usize),
        (x, n): (&[f32], usize),
        outputs: Range<usize>,
        wide: &mut [f32],
    ) {
        let (x, out) = (Strided::rows(x, self.cols), Shared::new(out));
        for (from, k) in product_own::slices(self.cols) {
            for first in outputs.clone().step_by(COLS) {
                let part = &self.data[(first * self.cols + from * COLS)..][..k * COLS];
                let right = S::plain(part).unwrap_or_else(|| {
                    // SAFETY: panels are made for AVX-512 only.
                    unsafe { avx512::widen(&mut wide[..k * COLS], part) };
                    &wide[..k * COLS]
                });
                let target = Target { out: &out, at: first - outputs.start, stride, write: Write::Set };
                let share = (x.from(0, from), k, right.as_ptr(), COLS);
                let size = (n, COLS.min(outputs.end - first));
                let ahead = self.next_forward(first / COLS + 1, from, k);
                tiles(slice_of(target, from), size, (share, ahead), (None, 0, 0), &mut []);
            }
        }
    }

    /// out[n, K] (=|+=) e w for some outputs, at most [`SLICE`], from a multiple of 32 on, on the caller's thread.
    pub fn some_backward(
        &self,
        (out, write): (&mut [f32], Write),
        (e, n): (Strided, usize),
        outputs: Range<usize>,
        wide: &mut [f32],
    ) {
        let out = Shared::new(out);
        for col in (0..self.cols).step_by(COLS) {
            self.turn(wide, col, (outputs.start, outputs.len()));
            let share = (e, outputs.len(), wide.as_ptr(), COLS);
            let target = Target { out: &out, at: col, stride: self.cols, write };
            tiles(target, (n, COLS.min(self.cols - col)), (share, None), (None, 0, 0), &mut []);
        }
    }

    /// A slice of panel p.
    fn next_forward(&self, p: usize, from: usize, k: usize) -> Option<Ahead> {
        let at = (p * self.cols + from) * COLS;
        let run = k * COLS * size_of::<S>();
        self.data.get(at..).filter(|d| !d.is_empty()).map(|d| Ahead {
            at: d.as_ptr().cast(),
            run,
            runs: 1,
            stride: run,
        })
    }

    /// Columns k .. k + 32 of rows from .. from + n.
    fn next_backward(&self, k: usize, from: usize, n: usize) -> Option<Ahead> {
        let width = COLS.min(self.cols.checked_sub(k).filter(|&left| left > 0)?) * COLS * size_of::<S>();
        let at = self.data.get((from / COLS * self.cols + k) * COLS..)?.as_ptr().cast();
        let stride = self.cols * COLS * size_of::<S>();
        Some(Ahead { at, run: width, runs: n.div_ceil(COLS), stride })
    }

    /// out[n - from][32] = columns k .. k + 32 of rows from .. from + n; `from` is a multiple of 32.
    fn turn(&self, out: &mut [f32], k: usize, (from, n): (usize, usize)) {
        let out = &mut out[..n * COLS];
        for row in (0..n).step_by(16) {
            let (panel, lane) = ((from + row) / COLS, (from + row) % COLS);
            for half in [0, 16] {
                let ks = 16.min(self.cols.saturating_sub(k + half));
                let at = (panel * self.cols + (k + half).min(self.cols - 1)) * COLS + lane;
                let x = self.data[at..].as_ptr();
                let count = 16.min(n - row);
                assert!(ks == 0 || at + (ks - 1) * COLS + count <= self.data.len(), "inside the panel");
                // SAFETY: panels are made for AVX-512 only; the source is inside `data`, 16 values fit into
                // each of `count` rows of `out` from column `half` on.
                unsafe {
                    let to = out[row * COLS + half..].as_mut_ptr();
                    avx512::transpose((to, COLS), (x, COLS), ks, count, 1.0);
                }
            }
        }
    }
}

/// The factors of what is added have the rows and columns that tiles read without looking.
fn check(added: Option<Added>, (rows, outputs): (usize, usize)) {
    if let Some(a) = added {
        assert!(a.left.holds(rows, a.rank), "the left factor has T rows");
        assert!(a.right.holds(a.rank, outputs), "the right factor has R rows");
    }
}

/// Later slices add to what the first has written.
fn slice_of(target: Target, from: usize) -> Target {
    Target { write: if from > 0 { Write::Add } else { target.write }, ..target }
}

/// One slice of one panel, with the added product if this is the last slice.
fn tiles(
    target: Target,
    size: (usize, usize),
    (share, ahead): (Share, Option<Ahead>),
    (added, row, col): (Option<Added>, usize, usize),
    low: &mut [f32],
) {
    target.pointer(size.0, size.1);
    let second = added.map(|a| {
        product_own::lay_out(low, a.right.from(0, col), (a.rank, size.1), a.scale);
        (a.left.from(row, 0), a.rank, low.as_ptr(), COLS)
    });
    // SAFETY: the output was checked, and its rows and columns belong to this task; both right factors are
    // panels of as many rows as terms.
    unsafe {
        match second {
            Some(second) => product_own::rows_of_tiles(target, size, &[share, second], 1.0, ahead),
            None => product_own::rows_of_tiles(target, size, &[share], 1.0, ahead),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Cpu, isa::Isa};
    use super::*;

    #[test]
    fn what_is_added_is_as_large_as_tiles_read() {
        let cpu = Cpu::new(1);
        if cpu.isa != Isa::Avx512 {
            return println!("skipped: panels are for AVX-512");
        }
        let (t, n, k, rank) = (5, 40, 7, 3);
        let panels = Panels::pack(&cpu.threads, (n, k), |i| i as f32);
        let values = vec![1.0; 1000];
        let run = |left_rows: usize, right_rows: usize, back: bool| {
            let (ins, outs) = if back { (n, k) } else { (k, n) };
            let mut out = vec![0.0; t * outs];
            let shared = Shared::new(&mut out);
            let target = Target { out: &shared, at: 0, stride: outs, write: Write::Set };
            let left = Strided::rows(&values[..left_rows * rank], rank);
            let right = Strided::rows(&values[..right_rows * outs], outs);
            let (x, added) = ((&values[..t * ins], t), Some(Added { left, right, rank, scale: 1.0 }));
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
