//! Frozen products of few rows, as decoding makes them: the weights are read once, in place, by all
//! threads, because reading them is all that takes time. A task is a few panels, whose chains run side by side.
//!
//! Every output is the chain that tiles compute, so that a token decoded alone has the bits of a token in a
//! microbatch.

use super::super::operands::{COLS, Context, Strided, Target};
use super::super::runtime::isa::kernel;
use super::added::Added;
use super::product_tiles::{self, SLICE};
use crate::backend::Write;

/// Most rows that this is faster for than tiles.
pub const ROWS: usize = 2;
/// Panels side by side: eight vectors of sums, as many as multiply-adds are under way at a time.
pub const PANELS: usize = 4;

/// Least tasks for each thread, if there are panels enough.
const TASKS: usize = 8;

/// N x K numbers, which give the chains of some outputs.
pub trait Chains: Send + Sync {
    /// N
    fn rows(&self) -> usize;
    /// K
    fn cols(&self) -> usize;
    /// The chains over x of `panels` panels of outputs, at most [`PANELS`], from output `first` on, whose terms begin
    /// at `from`, in ascending order.
    fn chains(&self, x: &[f32], outputs: (usize, usize), from: usize) -> Sums;
}

/// y[T, N] (=|+=) x wᵀ [+ what is added], at most [`ROWS`] rows.
pub fn forward<W: Chains + ?Sized>(cx: Context, w: &W, y: Target, x: (Strided, usize), added: Option<Added>) {
    let ((x, t), (rows, cols)) = (x, (w.rows(), w.cols()));
    assert!(x.holds(t, cols) && x.col == 1, "x has as many columns as the weight");
    // Tasks of few panels where there are few in all, so that no thread waits long for another one's last task.
    let all = rows.div_ceil(COLS);
    let most = (all / (TASKS * cx.threads.count())).clamp(1, PANELS);
    cx.threads.each(all.div_ceil(most), |task| {
        let (first, panels) = (task * most * COLS, most.min(all - task * most));
        for row in 0..t {
            let (x, y) = (&x.from(row, 0).data[..cols], y.from(row, first));
            for (from, k) in product_tiles::slices(cols) {
                let write = if from > 0 { Write::Add } else { y.write };
                let low = added.filter(|_| from + k == cols);
                product_tiles::with_panel(|room| {
                    let low = low.map(|a| lay_out(room, a, (row, first), panels, rows));
                    let sums = w.chains(&x[from..][..k], (first, panels), from);
                    // SAFETY: the outputs of this task belong to it alone.
                    unsafe {
                        put(cx, sums, low, Target { write, ..y }, (rows - first).min(panels * COLS));
                    }
                });
            }
        }
    });
}

/// What is added, of one row: its left factor, and the right one of some panels [panels][R][32].
fn lay_out<'a>(
    room: &'a mut [f32],
    a: Added<'a>,
    (row, first): (usize, usize),
    panels: usize,
    rows: usize,
) -> (Strided<'a>, &'a [f32], usize) {
    for p in 0..panels {
        let col = first + p * COLS;
        a.lay_out(&mut room[p * a.rank * COLS..], (col, COLS.min(rows - col)));
    }
    (a.left.from(row, 0).numbers(), room, a.rank)
}

/// Most terms of what is added: the room of a thread holds this number for every panel.
pub const RANK: usize = 2 * SLICE / PANELS;

/// Of every output of the panels.
pub type Sums = [[f32; COLS]; PANELS];

kernel! {
    /// sums += x[k] * panel[k][32], in ascending order of k.
    pub fn chain<L>(sums: &mut [f32; COLS], x: &[f32], panel: &[f32]) {
        let mut sum = *sums;
        for (&x, row) in x.iter().zip(panel.as_chunks::<COLS>().0) {
            for (sum, &w) in sum.iter_mut().zip(row) {
                *sum = L::fma(x, w, *sum);
            }
        }
        *sums = sum;
    }
}

/// y (=|+=) the sums, to which the products of what is added come first.
///
/// # Safety
/// The outputs belong to the caller.
unsafe fn put(cx: Context, mut sums: Sums, low: Option<(Strided, &[f32], usize)>, y: Target, cols: usize) {
    let at = y.pointer(1, cols);
    if let Some((left, right, rank)) = low {
        let mut factor = [0.0; RANK];
        factor.iter_mut().zip(left.data.iter().step_by(left.col)).take(rank).for_each(|(f, &x)| *f = x);
        let panels = cols.div_ceil(COLS);
        for (sums, right) in sums.iter_mut().zip(right.chunks(rank.max(1) * COLS)).take(panels) {
            chain(cx.isa, sums, &factor[..rank], right);
        }
    }
    // SAFETY: `pointer` has checked the outputs, which are the caller's.
    let out = unsafe { std::slice::from_raw_parts_mut(at, cols) };
    match y.write {
        Write::Add => out.iter_mut().zip(sums.as_flattened()).for_each(|(o, s)| *o += s),
        Write::Set => out.copy_from_slice(&sums.as_flattened()[..cols]),
    }
}
