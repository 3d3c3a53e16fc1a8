//! Numbers as panels hold them, and the widening and turning that make right factors for tiles out of them: by
//! `stored_avx512.rs` where the processor has AVX-512, in plain code elsewhere.
//!
//! A word holds the DEPTH numbers of one output that follow each other along K. bf16 numbers lie in pairs, the
//! one of even k in the upper half: widening it is clearing the lower half, `_mm512_dpbf16_ps` adds the upper
//! product first, so that both kernels add in ascending order of k, and one layout serves them all.

#[cfg(target_arch = "x86_64")]
use super::isa::{self, Isa};
#[cfg(target_arch = "x86_64")]
use super::stored_avx512;
#[cfg(target_arch = "x86_64")]
pub use super::stored_avx512::Vectors;
use super::tile::COLS;
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

/// Where there are no other vectors, all of this is plain code.
#[cfg(not(target_arch = "x86_64"))]
pub trait Vectors: Stored {}
#[cfg(not(target_arch = "x86_64"))]
impl<S: Stored> Vectors for S {}

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

/// out[k][32] = the words, widened; as many rows as both have.
pub fn widen_rows<S: Vectors>(out: &mut [f32], words: &[S::Word]) {
    assert!(out.len().is_multiple_of(COLS) && words.len().is_multiple_of(COLS), "whole rows");
    #[cfg(target_arch = "x86_64")]
    if isa::best() == Isa::Avx512 {
        // SAFETY: the processor was asked.
        return unsafe { S::widen_rows(out, words) };
    }
    for (rows, words) in out.chunks_mut(S::DEPTH * COLS).zip(words.as_chunks::<COLS>().0) {
        for (half, words) in words.as_chunks::<16>().0.iter().enumerate() {
            let numbers = S::sixteen(words);
            for (row, numbers) in rows.chunks_exact_mut(COLS).zip(&numbers) {
                row[16 * half..][..16].copy_from_slice(numbers);
            }
        }
    }
}

/// out[n][32] of `ns` outputs n (at most 16) and at most 32 k, of which words exist for `ks` (others become 0). Words of
/// the next k lie 32 further on.
pub fn turn<S: Vectors>(out: &mut [f32], x: &[S::Word], (ks, ns): (usize, usize)) {
    assert!(ks * S::DEPTH <= COLS && ns <= 16 && ns * COLS <= out.len(), "room for the outputs");
    assert!(ks > 0 && (ks - 1) * COLS + 16 <= x.len(), "the words are there");
    #[cfg(target_arch = "x86_64")]
    if isa::best() == Isa::Avx512 {
        // SAFETY: the processor was asked, and the sizes checked.
        return unsafe { S::turn(out.as_mut_ptr(), x.as_ptr(), (ks, ns)) };
    }
    let out = &mut out.as_chunks_mut::<COLS>().0[..ns];
    out.iter_mut().for_each(|row| row[ks * S::DEPTH..].fill(0.0));
    for (k, words) in x.chunks(COLS).enumerate().take(ks) {
        let Some(words) = words.first_chunk() else { unreachable!("sixteen words, as was checked") };
        let numbers = S::sixteen(words);
        for (n, row) in out.iter_mut().enumerate() {
            numbers.iter().take(S::DEPTH).enumerate().for_each(|(i, x)| row[k * S::DEPTH + i] = x[n]);
        }
    }
}

/// out[j * COLS + i] = scale * x[i * from + j], for i in 0..rows (at most 16) and j in 0..cols (at most 16).
/// Sixteen values are written in each row of out, those from `rows` on 0.
pub fn transpose(out: &mut [f32], (x, from): (&[f32], usize), (rows, cols): (usize, usize), scale: f32) {
    assert!(
        rows <= 16 && cols <= 16 && cols > 0 && (cols - 1) * COLS + 16 <= out.len(),
        "room for the columns"
    );
    assert!(rows == 0 || (rows - 1) * from + cols <= x.len(), "the rows are there");
    #[cfg(target_arch = "x86_64")]
    if isa::best() == Isa::Avx512 {
        let (out, x) = ((out.as_mut_ptr(), COLS), (x.as_ptr(), from));
        // SAFETY: the processor was asked, and the sizes checked.
        return unsafe { stored_avx512::transpose(out, x, (rows, cols), scale) };
    }
    for (j, out) in out.chunks_mut(COLS).enumerate().take(cols) {
        for (i, out) in out.iter_mut().enumerate().take(16) {
            *out = if i < rows { scale * x[i * from + j] } else { 0.0 };
        }
    }
}
