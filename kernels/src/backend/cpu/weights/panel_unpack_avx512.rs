//! [`super::panel_unpack`] on AVX-512.

use super::super::gemm::gemv::{PANELS, Sums};
use super::super::gemm::transpose_avx512::{load_rows, transposed};
use super::super::operands::COLS;
use super::panel_words::Stored;
use half::{bf16, f16};
use std::arch::x86_64::*;

/// What vectors make of stored numbers.
pub trait Vectors: Stored {
    /// out[k][32] = the words, widened; as many rows as there are whole ones in `out`.
    ///
    /// # Safety
    /// AVX-512 F, BW and VL.
    unsafe fn widen_rows(out: &mut [f32], words: &[Self::Word]);
    /// The numbers of sixteen words; the second only where DEPTH is 2.
    ///
    /// # Safety
    /// AVX-512 F, BW and VL; sixteen words can be read.
    unsafe fn numbers(words: *const Self::Word) -> [__m512; 2];
    /// See [`super::panel_unpack::turn`].
    ///
    /// # Safety
    /// AVX-512 F, BW and VL; `block.0` rows of 16 words can be read, and 32 values written for each of the
    /// `block.1` outputs.
    unsafe fn turn(out: *mut f32, x: *const Self::Word, block: (usize, usize));
}

impl Vectors for f32 {
    unsafe fn widen_rows(out: &mut [f32], words: &[f32]) {
        out.copy_from_slice(words);
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn numbers(words: *const f32) -> [__m512; 2] {
        // SAFETY: the caller's promise.
        [unsafe { _mm512_loadu_ps(words) }, _mm512_setzero_ps()]
    }
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn turn(out: *mut f32, x: *const f32, (ks, ns): (usize, usize)) {
        for half in [0, 16] {
            // SAFETY: the caller's promise.
            unsafe {
                let rows = load_rows(ks.saturating_sub(half), |i| _mm512_loadu_ps(x.add((half + i) * COLS)));
                put_rows(out.add(half), transposed(rows), ns);
            }
        }
    }
}

impl Vectors for f16 {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn widen_rows(out: &mut [f32], words: &[f16]) {
        for (out, words) in out.as_chunks_mut::<16>().0.iter_mut().zip(words.as_chunks::<16>().0) {
            // SAFETY: both have sixteen values.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), Self::numbers(words.as_ptr())[0]) };
        }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn numbers(words: *const f16) -> [__m512; 2] {
        // SAFETY: the caller's promise.
        let bits = unsafe { _mm256_loadu_si256(words.cast()) };
        [_mm512_cvtph_ps(bits), _mm512_setzero_ps()]
    }
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn turn(out: *mut f32, x: *const f16, (ks, ns): (usize, usize)) {
        for half in [0, 16] {
            // SAFETY: the caller's promise.
            unsafe {
                let load = |i| Self::numbers(x.add((half + i) * COLS))[0];
                put_rows(out.add(half), transposed(load_rows(ks.saturating_sub(half), load)), ns);
            }
        }
    }
}

impl Vectors for bf16 {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn widen_rows(out: &mut [f32], words: &[u32]) {
        for (pair, words) in out.chunks_mut(2 * COLS).zip(words.as_chunks::<COLS>().0) {
            let (even, odd) = pair.split_at_mut(COLS);
            for j in [0, 16] {
                // SAFETY: rows have 32 values; the last odd one may be missing.
                unsafe {
                    let (first, second) = apart(_mm512_loadu_si512(words.as_ptr().add(j).cast()));
                    _mm512_storeu_ps(even.as_mut_ptr().add(j), first);
                    if !odd.is_empty() {
                        _mm512_storeu_ps(odd.as_mut_ptr().add(j), second);
                    }
                }
            }
        }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn numbers(words: *const u32) -> [__m512; 2] {
        // SAFETY: the caller's promise.
        let (even, odd) = apart(unsafe { _mm512_loadu_si512(words.cast()) });
        [even, odd]
    }
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn turn(out: *mut f32, x: *const u32, (ks, ns): (usize, usize)) {
        let lower = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        let upper = _mm512_add_epi32(lower, _mm512_set1_epi32(8));
        // SAFETY: the caller's promise.
        let columns = unsafe { transposed(load_rows(ks, |i| _mm512_loadu_ps(x.add(i * COLS).cast()))) };
        for (n, &pairs) in columns.iter().enumerate().take(ns) {
            let (even, odd) = apart(_mm512_castps_si512(pairs));
            // SAFETY: the caller's promise.
            unsafe {
                _mm512_storeu_ps(out.add(n * COLS), _mm512_permutex2var_ps(even, lower, odd));
                _mm512_storeu_ps(out.add(n * COLS + 16), _mm512_permutex2var_ps(even, upper, odd));
            }
        }
    }
}

/// The chains over x of P panels, from 0, in ascending order of k.
///
/// # Safety
/// AVX-512 F, BW and VL; P panels of x's terms are `deep` rows of words apart.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub unsafe fn of_words<S: Vectors, const P: usize>(x: &[f32], words: *const S::Word, deep: usize) -> Sums {
    let mut sums = [[_mm512_setzero_ps(); 2]; P];
    for word in 0..x.len().div_ceil(S::DEPTH) {
        // A last single number goes with 0, which is beside it in the panel too.
        let second = x.get(word * S::DEPTH + 1).copied().unwrap_or(0.0);
        let x = [_mm512_set1_ps(x[word * S::DEPTH]), _mm512_set1_ps(second)];
        for (p, sums) in sums.iter_mut().enumerate() {
            for (half, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the caller's promise.
                let w = unsafe { S::numbers(words.add((p * deep + word) * COLS + 16 * half)) };
                *sum = _mm512_fmadd_ps(x[0], w[0], *sum);
                if S::DEPTH == 2 {
                    *sum = _mm512_fmadd_ps(x[1], w[1], *sum);
                }
            }
        }
    }
    let mut out = [[0.0; COLS]; PANELS];
    for (out, sums) in out.iter_mut().zip(sums) {
        // SAFETY: two vectors are 32 numbers.
        unsafe { put_sums(out, sums) };
    }
    out
}

/// The sums of a panel.
///
/// # Safety
/// AVX-512 F.
#[inline]
#[target_feature(enable = "avx512f")]
pub unsafe fn put_sums(out: &mut [f32; COLS], sums: [__m512; 2]) {
    // SAFETY: two vectors are 32 numbers.
    unsafe {
        _mm512_storeu_ps(out.as_mut_ptr(), sums[0]);
        _mm512_storeu_ps(out.as_mut_ptr().add(16), sums[1]);
    }
}

/// The numbers of sixteen pairs: those of even k, those of odd k.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn apart(pairs: __m512i) -> (__m512, __m512) {
    let even = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
    (_mm512_castsi512_ps(even), _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)))
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn put_rows(out: *mut f32, r: [__m512; 16], count: usize) {
    for (j, &r) in r.iter().enumerate().take(count) {
        // SAFETY: the caller's promise: rows of `COLS` values.
        unsafe { _mm512_storeu_ps(out.add(j * COLS), r) };
    }
}
