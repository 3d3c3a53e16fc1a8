//! Matrix products: out (=|+=) scale * a b with strided factors, in tiles, or in plain loops as their reference.
//!
//! Both add up the inner dimension in an order that depends on its length alone.

use super::super::operands::{Context, Factors, Products, Sizes, Target};
use super::super::runtime::threads::Shared;
use super::{product_plain, product_tiles};
use crate::backend::Write;

/// out[m, n] (=|+=) scale * a b on all threads.
pub fn product(cx: Context, out: (&mut [f32], usize), write: Write, sizes: Sizes, f: Factors) {
    let (out, stride) = (Shared::new(out.0), out.1);
    let target = Target::rows(&out, stride, write);
    match cx.products {
        Products::Tiles => product_tiles::product(cx, target, sizes, f),
        Products::Plain => product_plain::product(cx, target, sizes, f),
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
/// No other thread accesses the m x n outputs at the target during the call.
pub unsafe fn tile(cx: Context, target: Target, sizes: Sizes, f: Factors) {
    if sizes.m == 0 || sizes.n == 0 {
        return;
    }
    f.check(sizes);
    // SAFETY: sizes were checked against the factors; the output is checked by `Target::pointer`, and is ours
    // by the caller's promise.
    unsafe {
        match cx.products {
            Products::Tiles => product_tiles::tile(target, sizes, f),
            Products::Plain => product_plain::tile(cx, target, sizes, f),
        }
    }
}
