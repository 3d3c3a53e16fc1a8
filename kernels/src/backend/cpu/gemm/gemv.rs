//! Frozen products of few rows, as decoding makes them: the weights are read once, in place, by all threads. Reading or
//! decoding them takes most of the time. A task is a few panels, whose chains run side by side.
//!
//! Every output is the chain that tiles compute, so that a token decoded alone has the bits of a token in a
//! microbatch.

use super::super::operands::{COLS, Context, Strided, Target};
use super::super::runtime::isa::kernel;
use super::added::Added;
use super::product_tiles::{self, SLICE};
use crate::backend::Write;

/// Most rows for which chains are faster than tiles of plain weights.
pub const ROWS: usize = 2;
/// Most rows whose chains are computed together.
pub const AT_ONCE: usize = 8;
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
    /// Most rows of x for which chains are faster than tiles, at most [`AT_ONCE`]. (Left factors in pairs, which three rows
    /// and more have, are for tiles alone.)
    fn few(&self) -> usize {
        ROWS
    }
    /// The chains over some rows x, at most [`AT_ONCE`], of `panels` panels of outputs, at most [`PANELS`], from output
    /// `first` on, whose terms begin at `from`, in ascending order.
    fn chains(&self, sums: &mut [Sums], x: &[&[f32]], outputs: (usize, usize), from: usize);
}

/// y[T, N] (=|+=) x wᵀ [+ what is added], at most [`AT_ONCE`] rows.
pub fn forward<W: Chains + ?Sized>(cx: Context, w: &W, y: Target, x: (Strided, usize), added: Option<Added>) {
    let ((x, t), (rows, cols)) = (x, (w.rows(), w.cols()));
    assert!(x.holds(t, cols) && x.col == 1, "x has as many columns as the weight");
    assert!(t <= AT_ONCE, "few rows");
    if t == 0 {
        return;
    }
    // Tasks of few panels where there are few in all, so that no thread waits long for another one's last task.
    let all = rows.div_ceil(COLS);
    let most = (all / (TASKS * cx.threads.count())).clamp(1, PANELS);
    cx.threads.each(all.div_ceil(most), |task| {
        let (first, panels) = (task * most * COLS, most.min(all - task * most));
        let outputs = (rows - first).min(panels * COLS);
        let mut sums = [[[0.0; COLS]; PANELS]; AT_ONCE];
        for (from, k) in product_tiles::slices(cols) {
            let write = if from > 0 { Write::Add } else { y.write };
            let low = added.filter(|_| from + k == cols);
            let x: [&[f32]; AT_ONCE] = std::array::from_fn(|row| &x.from(row.min(t - 1), from).data[..k]);
            w.chains(&mut sums[..t], &x[..t], (first, panels), from);
            product_tiles::with_panel(|room| {
                lay_out(room, low, (first, panels), rows);
                for (row, sums) in sums[..t].iter_mut().enumerate() {
                    add(cx, sums, low.map(|a| (a, row)), (room, panels));
                    // SAFETY: the outputs of this task belong to it alone.
                    unsafe { put(sums, Target { write, ..y.from(row, first) }, outputs) };
                }
            });
        }
    });
}

/// The right factors of what is added, of some panels [panels][R][32].
fn lay_out(room: &mut [f32], added: Option<Added>, (first, panels): (usize, usize), rows: usize) {
    let Some(a) = added else { return };
    for p in 0..panels {
        let col = first + p * COLS;
        a.lay_out(&mut room[p * a.rank * COLS..], (col, COLS.min(rows - col)));
    }
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

/// The sums, and the products of a row of what is added.
fn add(cx: Context, sums: &mut Sums, added: Option<(Added, usize)>, (right, panels): (&[f32], usize)) {
    let Some((a, row)) = added else { return };
    let (left, mut factor) = (a.left.from(row, 0).numbers(), [0.0; RANK]);
    factor.iter_mut().zip(left.data.iter().step_by(left.col)).take(a.rank).for_each(|(f, &x)| *f = x);
    for (sums, right) in sums.iter_mut().zip(right.chunks(a.rank.max(1) * COLS)).take(panels) {
        chain(cx.isa, sums, &factor[..a.rank], right);
    }
}

/// y (=|+=) the sums
///
/// # Safety
/// The outputs belong to the caller.
unsafe fn put(sums: &Sums, y: Target, cols: usize) {
    // SAFETY: `pointer` checks the outputs, which are the caller's.
    let out = unsafe { std::slice::from_raw_parts_mut(y.pointer(1, cols), cols) };
    match y.write {
        Write::Add => out.iter_mut().zip(sums.as_flattened()).for_each(|(o, s)| *o += s),
        Write::Set => out.copy_from_slice(&sums.as_flattened()[..cols]),
    }
}
