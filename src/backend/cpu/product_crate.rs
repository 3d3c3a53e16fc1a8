//! The twin's products, through the `gemm` crate. Its blocking over K follows the cache sizes that it finds, but is never
//! finer than 512: in slices of at most that there is one block whatever the machine. Its order of summation
//! may depend on the sizes of a call, so the output is cut into tiles of a fixed size.

use super::Context;
use super::product::{Factors, Sizes, Target};
use crate::backend::Write;

/// Inner dimension per call.
const SLICE: usize = 512;
/// Output tile of one task.
const ROWS: usize = 128;
const COLS: usize = 256;

/// See [`super::product::product`].
pub fn product(cx: Context, target: Target, sizes: Sizes, f: Factors) {
    let (across, down) = (sizes.n.div_ceil(COLS), sizes.m.div_ceil(ROWS));
    cx.threads.each(across * down, |task| {
        let (i, j) = (task / across * ROWS, task % across * COLS);
        let part = Sizes { m: ROWS.min(sizes.m - i), n: COLS.min(sizes.n - j), k: sizes.k };
        let factors = Factors { a: f.a.from(i, 0), b: f.b.from(0, j), scale: f.scale };
        // SAFETY: tiles are disjoint, and each belongs to one task.
        unsafe { super::product::tile(cx, target.from(i, j), part, factors) };
    });
}

/// The slices of an inner dimension.
fn slices(k: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..k.max(1)).step_by(SLICE).map(move |from| (from, SLICE.min(k - from)))
}

/// See [`super::product::tile`], which has checked the sizes.
///
/// # Safety
/// As there.
pub unsafe fn tile(target: Target, sizes: Sizes, f: Factors) {
    for (from, k) in slices(sizes.k) {
        let add = target.write == Write::Add || from > 0;
        let f = Factors { a: f.a.from(0, from), b: f.b.from(from, 0), scale: f.scale };
        // SAFETY: the caller's promise.
        unsafe { slice((target, add), Sizes { k, ..sizes }, f) };
    }
}

/// One slice of a tile.
///
/// # Safety
/// As [`tile`].
unsafe fn slice((target, add): (Target, bool), Sizes { m, n, k }: Sizes, f: Factors) {
    let out = target.pointer(m, n);
    let (rows, cols) = (target.stride as isize, 1);
    let Factors { a, b, scale } = f;
    let (a_rows, a_cols, b_rows, b_cols) = (a.row as isize, a.col as isize, b.row as isize, b.col as isize);
    let (a, b, no, one) = (a.data.as_ptr(), b.data.as_ptr(), false, gemm::Parallelism::None);
    // SAFETY: the caller has checked the factors, `Target::pointer` the output. Strides are in elements.
    unsafe {
        gemm::gemm(
            m, n, k, out, cols, rows, add, a, a_cols, a_rows, b, b_cols, b_rows, 1.0, scale, no, no, no, one,
        );
    }
}
