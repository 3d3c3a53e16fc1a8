//! Products in plain loops: the reference that tiles are compared with, in tests and by the self-test of devices. An
//! output is the sixteen partial sums of [`math::dot`], another order than that of tiles.

use super::super::operands::{Context, Factors, Sizes, Target};
use super::super::runtime::math;
use crate::backend::Write;

/// Rows of a task.
const ROWS: usize = 64;

/// See [`super::product::product`].
pub fn product(cx: Context, target: Target, sizes: Sizes, f: Factors) {
    if sizes.n == 0 {
        return;
    }
    f.check(sizes);
    cx.threads.each(sizes.m.div_ceil(ROWS), |task| {
        let i = task * ROWS;
        let part = Sizes { m: ROWS.min(sizes.m - i), ..sizes };
        // SAFETY: sizes were checked; rows are disjoint, and each belongs to one task.
        unsafe { tile(cx, target.from(i, 0), part, Factors { a: f.a.from(i, 0), ..f }) };
    });
}

/// See [`super::product::tile`], which has checked the sizes.
///
/// # Safety
/// As there.
pub unsafe fn tile(cx: Context, target: Target, Sizes { m, n, k }: Sizes, f: Factors) {
    let out = target.pointer(m, n);
    let rows: Vec<f32> = (0..m * k).map(|at| f.a.data[at / k * f.a.row + at % k * f.a.col]).collect();
    let mut column = vec![0.0; k];
    for j in 0..n {
        column.iter_mut().enumerate().for_each(|(t, x)| *x = f.b.data[t * f.b.row + j * f.b.col]);
        for i in 0..m {
            let sum = f.scale * math::dot_rows(cx.isa, &rows[i * k..][..k], &column);
            // SAFETY: the output was checked, and is the caller's.
            let out = unsafe { &mut *out.add(i * target.stride + j) };
            *out = if target.write == Write::Add { *out + sum } else { sum };
        }
    }
}
