//! Stands in for `few.rs` where the processor is not an x86-64: nobody calls it, because weights are then kept in
//! rows for the `gemm` crate.

use super::Context;
use super::panels::Added;
use super::product::{Strided, Target};
use super::stored::Stored;

/// As in `few.rs`.
pub const ROWS: usize = 2;
/// As in `few.rs`.
pub const RANK: usize = 0;

/// As in `few.rs`.
#[allow(dead_code)]
pub struct Matrix<'a, S: Stored> {
    /// [N / 32][K / DEPTH][32]
    pub data: &'a [S::Word],
    /// K / DEPTH
    pub deep: usize,
    /// N
    pub rows: usize,
    /// K
    pub cols: usize,
}

/// Never called.
pub fn forward<S: Stored>(_: Context, _: &Matrix<S>, _: Target, _: (Strided, usize), _: Option<Added>) {
    unreachable!("panels are for AVX-512");
}
