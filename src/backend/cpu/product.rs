//! Matrix products through the `gemm` crate: out (=|+=) scale * a b with strided factors.
//!
//! The output is cut into tiles of a fixed size, the inner dimension into slices of a fixed size that are
//! added in order: `gemm` picks its own blocking over K by the cache sizes that it finds, but never one
//! below 512, so within a slice there is one block whatever the machine.

use super::threads::{Shared, Threads};
use crate::backend::Write;

/// Inner dimension per call.
const SLICE: usize = 512;
/// Output tile of one task.
const TILE_M: usize = 128;
const TILE_N: usize = 256;

/// A factor whose element (i, j) is `data[i * row + j * col]`.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a> {
    /// Its elements, from the first.
    pub data: &'a [f32],
    /// Distance between rows.
    pub row: usize,
    /// Distance between columns.
    pub col: usize,
}

impl<'a> Strided<'a> {
    /// Row-major, `stride` between rows.
    pub fn rows(data: &'a [f32], stride: usize) -> Self {
        Strided { data, row: stride, col: 1 }
    }

    /// The same elements with rows and columns exchanged.
    pub fn transposed(self) -> Self {
        Strided { row: self.col, col: self.row, ..self }
    }

    /// From element (i, j) on.
    pub fn from(self, i: usize, j: usize) -> Self {
        let at = (i * self.row + j * self.col).min(self.data.len());
        Strided { data: &self.data[at..], ..self }
    }

    /// Whether an m x n matrix of these strides lies inside the data.
    fn holds(&self, m: usize, n: usize) -> bool {
        m == 0 || n == 0 || (m - 1) * self.row + (n - 1) * self.col < self.data.len()
    }
}

/// Sizes of a product: out is [m, n], the inner dimension k.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// Rows of out.
    pub m: usize,
    /// Columns of out.
    pub n: usize,
    /// Inner dimension.
    pub k: usize,
}

/// What to multiply.
#[derive(Debug, Clone, Copy)]
pub struct Factors<'a> {
    /// [m, k]
    pub a: Strided<'a>,
    /// [k, n]
    pub b: Strided<'a>,
    /// Multiplies the product.
    pub scale: f32,
}

/// out[m, n] (=|+=) scale * a b on all threads; rows of out are `stride` apart.
pub fn product(threads: &Threads, out: (&mut [f32], usize), write: Write, sizes: Sizes, f: Factors) {
    let (out, stride) = out;
    let len = out.len();
    let shared = Shared::new(out);
    let (across, down) = (sizes.n.div_ceil(TILE_N), sizes.m.div_ceil(TILE_M));
    threads.each(across * down, |task| {
        let (i, j) = (task / across * TILE_M, task % across * TILE_N);
        let part = Sizes { m: TILE_M.min(sizes.m - i), n: TILE_N.min(sizes.n - j), k: sizes.k };
        let at = i * stride + j;
        let factors = Factors { a: f.a.from(i, 0), b: f.b.from(0, j), scale: f.scale };
        // SAFETY: the tile lies inside out (checked by `tile`), and tiles are disjoint.
        unsafe { tile((shared.pointer(at), stride, len - at), write, part, factors) };
    });
}

/// The same on the caller's thread.
pub fn small(out: (&mut [f32], usize), write: Write, sizes: Sizes, f: Factors) {
    let len = out.0.len();
    // SAFETY: out is borrowed mutably, and `tile` checks that the tile lies inside it.
    unsafe { tile((out.0.as_mut_ptr(), out.1, len), write, sizes, f) };
}

/// One tile; out is (pointer, row stride, values from the pointer to the end of the output).
///
/// # Safety
/// The m x n strided tile at the pointer is written by nobody else meanwhile, and `out.2` values follow it.
pub unsafe fn tile(out: (*mut f32, usize, usize), write: Write, sizes: Sizes, f: Factors) {
    let Sizes { m, n, k } = sizes;
    if m == 0 || n == 0 {
        return;
    }
    assert!((m - 1) * out.1 + n <= out.2, "the tile lies inside the output");
    assert!(f.a.holds(m, k) && f.b.holds(k, n), "the factors are as large as the product says");
    for from in (0..k.max(1)).step_by(SLICE) {
        let add = write == Write::Add || from > 0;
        let slice = SLICE.min(k - from);
        let (a, b) = (f.a.from(0, from), f.b.from(from, 0));
        // SAFETY: bounds were asserted above; strides are in elements.
        unsafe {
            gemm::gemm(
                m,
                n,
                slice,
                out.0,
                1,
                out.1 as isize,
                add,
                a.data.as_ptr(),
                a.col as isize,
                a.row as isize,
                b.data.as_ptr(),
                b.col as isize,
                b.row as isize,
                1.0,
                f.scale,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    }
}
