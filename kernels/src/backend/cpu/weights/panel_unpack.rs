//! The words of panels widened and transposed into the right factors of tiles, and the chains of few rows over them: by
//! `panel_unpack_avx512.rs` where the processor has AVX-512, in plain code elsewhere.

use super::super::gemm::gemv::{PANELS, Sums, chain};
use super::super::operands::COLS;
use super::super::runtime::isa;
#[cfg(target_arch = "x86_64")]
use super::super::runtime::isa::Isa;
#[cfg(target_arch = "x86_64")]
use super::panel_unpack_avx512;
#[cfg(target_arch = "x86_64")]
pub use super::panel_unpack_avx512::Vectors;
#[cfg(not(target_arch = "x86_64"))]
use super::panel_words::Stored;

/// Terms that are widened at a time where there is no AVX-512.
const AT_ONCE: usize = 32;

/// Where there are no other vectors, all of this is plain code.
#[cfg(not(target_arch = "x86_64"))]
pub trait Vectors: Stored {}
#[cfg(not(target_arch = "x86_64"))]
impl<S: Stored> Vectors for S {}

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
/// the next k are 32 further on.
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

/// The chains over x of some panels, from 0, whose words are `deep` rows apart.
pub fn of_words<S: Vectors>(x: &[f32], (words, deep): (&[S::Word], usize), panels: usize) -> Sums {
    let terms = x.len().div_ceil(S::DEPTH);
    assert!((1..=PANELS).contains(&panels), "some panels");
    assert!(((panels - 1) * deep + terms) * COLS <= words.len(), "the panels' terms are there");
    #[cfg(target_arch = "x86_64")]
    if isa::best() == Isa::Avx512 {
        let words = words.as_ptr();
        // SAFETY: the processor was asked, and the sizes checked.
        unsafe {
            return match panels {
                1 => panel_unpack_avx512::of_words::<S, 1>(x, words, deep),
                2 => panel_unpack_avx512::of_words::<S, 2>(x, words, deep),
                3 => panel_unpack_avx512::of_words::<S, 3>(x, words, deep),
                _ => panel_unpack_avx512::of_words::<S, PANELS>(x, words, deep),
            };
        }
    }
    let (mut sums, mut room) = ([[0.0; COLS]; PANELS], [0.0; AT_ONCE * COLS]);
    for (p, sums) in sums.iter_mut().enumerate().take(panels) {
        let words = &words[p * deep * COLS..][..terms * COLS];
        for (x, words) in x.chunks(AT_ONCE).zip(words.chunks(AT_ONCE / S::DEPTH * COLS)) {
            let panel = S::plain(words).unwrap_or_else(|| {
                widen_rows::<S>(&mut room[..x.len() * COLS], words);
                &room
            });
            chain(isa::best(), sums, x, panel);
        }
    }
    sums
}
