//! Stands in for `few.rs` where the processor is not an x86-64: nobody calls it, because weights are then kept in
//! rows for the `gemm` crate.
#![allow(dead_code)] // it has the names of the other, asked for or not

use super::Context;
use super::product::{Strided, Target};
use super::stored::Stored;
use super::tiled::{Added, Tiled};

/// As in `few.rs`.
pub const ROWS: usize = 2;
/// As in `few.rs`.
pub const RANK: usize = 0;
/// As in `few.rs`.
pub const PANELS: usize = 4;

/// As in `few.rs`.
pub type Sums = [[[f32; 16]; 2]; PANELS];

/// As in `few.rs`.
pub trait Chains {
    /// Never called.
    ///
    /// # Safety
    /// None is needed.
    unsafe fn chains(&self, x: &[f32], outputs: (usize, usize), from: usize) -> Sums;
}

/// Never called.
///
/// # Safety
/// None is needed.
pub unsafe fn of_words<S: Stored, const P: usize>(_: &[f32], _: *const S::Word, _: usize) -> Sums {
    unreachable!("panels are for AVX-512");
}

/// Never called.
pub fn forward<W: Tiled>(_: Context, _: &W, _: Target, _: (Strided, usize), _: Option<Added>) {
    unreachable!("panels are for AVX-512");
}
