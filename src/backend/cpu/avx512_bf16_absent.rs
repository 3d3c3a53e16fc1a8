//! Stands in for `avx512_bf16.rs` where the processor is not an x86-64: nobody calls it, because no such processor
//! is ever found to have the instruction; bf16 is then computed by the f32 tiles on rounded numbers.

use super::tile::Place;

/// As in `avx512_bf16.rs`.
#[derive(Debug, Clone, Copy)]
#[allow(dead_code)]
pub struct Pairs {
    /// Pairs.
    pub k: usize,
    /// Left factor.
    pub a: *const u32,
    /// Distance between rows of a.
    pub row: usize,
    /// Distance between columns of a.
    pub col: usize,
    /// Right factor.
    pub b: *const u32,
}

/// Never called.
///
/// # Safety
/// None is needed.
pub unsafe fn tile(_: Pairs, _: Option<Pairs>, _: Place) {
    unreachable!("tiles are for AVX-512");
}

/// Never called.
///
/// # Safety
/// None is needed.
pub unsafe fn pair_up(_: &mut [u32], _: &[f32]) {
    unreachable!("pairs are for AVX-512 BF16");
}

/// Never called.
///
/// # Safety
/// None is needed.
pub unsafe fn interleave(_: &mut [u32], _: &[f32], _: &[f32]) {
    unreachable!("pairs are for AVX-512 BF16");
}

/// Never called.
///
/// # Safety
/// None is needed.
pub unsafe fn pair_and_turn(_: *mut u32, _: (*const f32, usize), _: (usize, usize)) {
    unreachable!("pairs are for AVX-512 BF16");
}

/// Never called.
///
/// # Safety
/// None is needed.
pub unsafe fn turn_rows(_: *mut u32, _: (*const u32, usize), _: usize, _: usize) {
    unreachable!("pairs are for AVX-512 BF16");
}

/// Never called.
///
/// # Safety
/// None is needed.
pub unsafe fn turn_pairs(_: *mut u32, _: *const u32, _: usize) {
    unreachable!("panels are for AVX-512");
}
