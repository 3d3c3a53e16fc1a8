//! Matrix products: out (=|+=) scale * a b with strided factors. Two ways to compute them: our own kernels, and the
//! `gemm` crate, their twin.
//!
//! Both add up the inner dimension in slices that depend on its length alone, in ascending order.

use super::Context;
use super::threads::Shared;
use super::{product_crate, product_own};
use crate::backend::Write;

/// Which code multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Products {
    /// Our own kernels.
    Own,
    /// The `gemm` crate.
    Crate,
}

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
    pub fn holds(&self, m: usize, n: usize) -> bool {
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

impl Factors<'_> {
    /// Panics where a factor is smaller than the product says.
    pub fn check(&self, s: Sizes) {
        assert!(self.a.holds(s.m, s.k) && self.b.holds(s.k, s.n), "factors are as large as the product says");
    }
}

/// Where a product goes: rows of `stride` words.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    /// The output.
    pub out: &'a Shared<'a>,
    /// Its first element there.
    pub at: usize,
    /// Distance between rows.
    pub stride: usize,
    /// Set or add.
    pub write: Write,
    /// Its words are pairs of bf16 numbers: for tiles of pairs, which set them.
    pub short: bool,
}

impl<'a> Target<'a> {
    /// f32 values, row-major.
    pub fn rows(out: &'a Shared<'a>, stride: usize, write: Write) -> Self {
        Target { out, at: 0, stride, write, short: false }
    }

    /// From element (i, j) on; of pairs, j is even.
    pub fn from(self, i: usize, j: usize) -> Self {
        let j = if self.short { j / 2 } else { j };
        Target { at: self.at + i * self.stride + j, ..self }
    }

    /// The pointer, once it is known that m x n outputs fit.
    pub fn pointer(&self, m: usize, n: usize) -> *mut f32 {
        let n = if self.short { n.div_ceil(2) } else { n };
        assert!(self.at + (m - 1) * self.stride + n <= self.out.len(), "the tile lies inside the output");
        self.out.pointer(self.at)
    }
}

/// out[m, n] (=|+=) scale * a b on all threads.
pub fn product(cx: Context, out: (&mut [f32], usize), write: Write, sizes: Sizes, f: Factors) {
    let (out, stride) = (Shared::new(out.0), out.1);
    let target = Target::rows(&out, stride, write);
    match cx.products {
        Products::Own => product_own::product(cx, target, sizes, f),
        Products::Crate => product_crate::product(cx, target, sizes, f),
    }
}

/// The same on the caller's thread.
pub fn small(cx: Context, out: (&mut [f32], usize), write: Write, sizes: Sizes, f: Factors) {
    let (out, stride) = (Shared::new(out.0), out.1);
    // SAFETY: out is borrowed mutably.
    unsafe { tile(cx, Target::rows(&out, stride, write), sizes, f) };
}

/// The same on the caller's thread, into part of an output that others write elsewhere.
///
/// # Safety
/// Nobody else touches the m x n outputs at the target meanwhile.
pub unsafe fn tile(cx: Context, target: Target, sizes: Sizes, f: Factors) {
    if sizes.m == 0 || sizes.n == 0 {
        return;
    }
    f.check(sizes);
    // SAFETY: sizes were checked against the factors; the output is checked by `Target::pointer`, and is ours
    // by the caller's promise.
    unsafe {
        match cx.products {
            Products::Own => product_own::tile(target, sizes, f),
            Products::Crate => product_crate::tile(target, sizes, f),
        }
    }
}
