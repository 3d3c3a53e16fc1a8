//! Numbers as panels hold them.
//!
//! A word holds the DEPTH numbers of one output that follow each other along K. bf16 numbers are stored in pairs, the
//! one of even k in the upper half: widening it is clearing the lower half, `_mm512_dpbf16_ps` adds the upper
//! product first, so that both kernels add in ascending order of k, and one layout serves them all.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// A number as it is stored.
pub trait Stored: Copy + Default + Send + Sync + 'static {
    /// What a panel is made of.
    type Word: Copy + Default + Send + Sync + bytemuck::Pod;
    /// Numbers in a word.
    const DEPTH: usize;
    /// A word of the numbers of k and, where DEPTH is 2, k + 1.
    fn word(numbers: [Self; 2]) -> Self::Word;
    /// Number i of a word.
    fn widen(word: Self::Word, i: usize) -> f32;
    /// The numbers of sixteen words; the second only where DEPTH is 2.
    fn sixteen(words: &[Self::Word; 16]) -> [[f32; 16]; 2];
    /// Values that need no widening.
    fn plain(_: &[Self::Word]) -> Option<&[f32]> {
        None
    }
    /// Words that are pairs of bf16.
    fn pairs(_: &[Self::Word]) -> Option<&[u32]> {
        None
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
    fn sixteen(words: &[f32; 16]) -> [[f32; 16]; 2] {
        [*words, [0.0; 16]]
    }
    fn plain(words: &[f32]) -> Option<&[f32]> {
        Some(words)
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
    fn sixteen(words: &[f16; 16]) -> [[f32; 16]; 2] {
        let mut out = [[0.0; 16]; 2];
        words.convert_to_f32_slice(&mut out[0]);
        out
    }
}

impl Stored for bf16 {
    type Word = u32;
    const DEPTH: usize = 2;
    fn word([even, odd]: [bf16; 2]) -> u32 {
        u32::from(even.to_bits()) << 16 | u32::from(odd.to_bits())
    }
    fn widen(word: u32, i: usize) -> f32 {
        f32::from_bits(if i == 0 { word & 0xffff_0000 } else { word << 16 })
    }
    fn sixteen(words: &[u32; 16]) -> [[f32; 16]; 2] {
        [0, 1].map(|i| words.map(|word| Self::widen(word, i)))
    }
    fn pairs(words: &[u32]) -> Option<&[u32]> {
        Some(words)
    }
}
