//! Frozen products of few rows, as decoding makes them: the weights are read once, from where they lie, by all
//! threads, because reading them is all that takes time. A task is a few panels, whose chains run side by side.
//!
//! Every output is the chain that tiles compute, so that a token decoded alone has the bits of a token in a
//! microbatch.

use super::Context;
use super::avx512::COLS;

use super::product::{Strided, Target};
use super::product_own::{self, SLICE};
use super::stored::Stored;
use super::tiled::{Added, Tiled};
use crate::backend::Write;
use std::arch::x86_64::*;

/// Most rows that this is faster for than tiles.
pub const ROWS: usize = 2;
/// Panels side by side: eight vectors of sums, as many as multiply-adds are under way at a time.
pub const PANELS: usize = 4;

/// Least tasks for each thread, if there are panels enough.
const TASKS: usize = 8;

/// What the chains of some outputs are made of.
pub trait Chains {
    /// The chains over x of `panels` panels of outputs, at most [`PANELS`], from output `first` on, whose terms begin
    /// at `from`, in ascending order.
    ///
    /// # Safety
    /// AVX-512 F, BW and VL; the outputs' panels and the terms are there.
    unsafe fn chains(&self, x: &[f32], outputs: (usize, usize), from: usize) -> Sums;
}

/// y[T, N] (=|+=) x wᵀ [+ what is added], at most [`ROWS`] rows.
pub fn forward<W: Tiled>(cx: Context, w: &W, y: Target, x: (Strided, usize), added: Option<Added>) {
    let ((x, t), (rows, cols)) = (x, (w.rows(), w.cols()));
    assert!(x.holds(t, cols) && x.col == 1, "x has as many columns as the weight");
    // Tasks of few panels where there are few in all, so that no thread waits long for another one's last task.
    let all = rows.div_ceil(COLS);
    let most = (all / (TASKS * cx.threads.count())).clamp(1, PANELS);
    cx.threads.each(all.div_ceil(most), |task| {
        let (first, panels) = (task * most * COLS, most.min(all - task * most));
        for row in 0..t {
            let (x, y) = (&x.from(row, 0).data[..cols], y.from(row, first));
            for (from, k) in product_own::slices(cols) {
                let write = if from > 0 { Write::Add } else { y.write };
                let low = added.filter(|_| from + k == cols);
                product_own::with_panel(|room| {
                    let low = low.map(|a| lay_out(room, a, (row, first), panels, rows));
                    // SAFETY: such matrices are made for AVX-512 only; the outputs of this task belong to it alone.
                    unsafe {
                        let sums = w.chains(&x[from..][..k], (first, panels), from);
                        put(sums, low, Target { write, ..y }, (rows - first).min(panels * COLS));
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

/// Most terms of what is added: the room of a thread holds so many for every panel.
pub const RANK: usize = 2 * SLICE / PANELS;

/// Two vectors for each panel.
pub type Sums = [[__m512; 2]; PANELS];

/// The chains of P panels, from 0, in ascending order of k.
///
/// # Safety
/// AVX-512 F, BW and VL; P panels of x's terms lie `deep` rows of words apart.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub unsafe fn of_words<S: Stored, const P: usize>(x: &[f32], words: *const S::Word, deep: usize) -> Sums {
    let mut sums = [[_mm512_setzero_ps(); 2]; PANELS];
    for word in 0..x.len().div_ceil(S::DEPTH) {
        // A last single number goes with 0, which lies beside it in the panel too.
        let second = x.get(word * S::DEPTH + 1).copied().unwrap_or(0.0);
        let x = [_mm512_set1_ps(x[word * S::DEPTH]), _mm512_set1_ps(second)];
        for (p, sums) in sums.iter_mut().enumerate().take(P) {
            for (half, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the caller's promise.
                let w = unsafe { S::numbers(words.add((p * deep + word) * COLS + 16 * half)) };
                *sum = _mm512_fmadd_ps(x[0], w[0], *sum);
                if S::DEPTH == 2 {
                    *sum = _mm512_fmadd_ps(x[1], w[1], *sum);
                }
            }
        }
    }
    sums
}

/// y (=|+=) the sums, to which the products of what is added come first.
///
/// # Safety
/// AVX-512 F; the outputs belong to the caller.
#[target_feature(enable = "avx512f")]
unsafe fn put(sums: Sums, low: Option<(Strided, &[f32], usize)>, y: Target, cols: usize) {
    let at = y.pointer(1, cols);
    for j in (0..cols).step_by(16) {
        let (p, half) = (j / COLS, j % COLS / 16);
        let mut sum = sums[p][half];
        if let Some((left, right, rank)) = low {
            for r in 0..rank {
                let right = &right[(p * rank + r) * COLS + 16 * half..][..16];
                // SAFETY: sixteen values.
                let right = unsafe { _mm512_loadu_ps(right.as_ptr()) };
                sum = _mm512_fmadd_ps(_mm512_set1_ps(left.data[r * left.col]), right, sum);
            }
        }
        let mask: __mmask16 = if cols - j >= 16 { !0 } else { (1 << (cols - j)) - 1 };
        // SAFETY: `pointer` has checked the outputs, and the mask ends where they do.
        unsafe {
            let at = at.add(j);
            if y.write == Write::Add {
                sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, at));
            }
            _mm512_mask_storeu_ps(at, mask, sum);
        }
    }
}
