//! Stands in for `stored.rs` where the processor is not an x86-64: nobody calls it, because weights are then kept
//! in rows for the `gemm` crate.

use half::{bf16, f16};

/// As in `stored.rs`.
pub trait Stored: Copy + Default + Send + Sync + 'static {
    /// What a panel is made of.
    type Word: Copy + Default + Send + Sync + bytemuck::Pod;
    /// Numbers in a word.
    const DEPTH: usize;
    /// A word of the numbers of k and, where DEPTH is 2, k + 1.
    fn word(numbers: [Self; 2]) -> Self::Word;
    /// Number i of a word.
    fn widen(word: Self::Word, i: usize) -> f32;
    /// Values that need no widening.
    fn plain(_: &[Self::Word]) -> Option<&[f32]> {
        None
    }
    /// Words that are pairs of bf16.
    fn pairs(_: &[Self::Word]) -> Option<&[u32]> {
        None
    }
    /// Never called.
    ///
    /// # Safety
    /// None is needed.
    unsafe fn widen_rows(_: &mut [f32], _: &[Self::Word]) {
        unreachable!("panels are for AVX-512");
    }
    /// Never called.
    ///
    /// # Safety
    /// None is needed.
    unsafe fn turn(_: *mut f32, _: *const Self::Word, _: (usize, usize)) {
        unreachable!("panels are for AVX-512");
    }
}

impl Stored for f32 {
    type Word = f32;
    const DEPTH: usize = 1;
    fn word([x, _]: [f32; 2]) -> f32 {
        x
    }
    fn widen(word: f32, _: usize) -> f32 {
        word
    }
}

impl Stored for f16 {
    type Word = f16;
    const DEPTH: usize = 1;
    fn word([x, _]: [f16; 2]) -> f16 {
        x
    }
    fn widen(word: f16, _: usize) -> f32 {
        word.to_f32()
    }
}

impl Stored for bf16 {
    type Word = bf16;
    const DEPTH: usize = 1;
    fn word([x, _]: [bf16; 2]) -> bf16 {
        x
    }
    fn widen(word: bf16, _: usize) -> f32 {
        word.to_f32()
    }
}

/// Never called.
///
/// # Safety
/// None is needed.
pub unsafe fn transpose(_: (*mut f32, usize), _: (*const f32, usize), _: (usize, usize), _: f32) {
    unreachable!("panels are for AVX-512");
}
