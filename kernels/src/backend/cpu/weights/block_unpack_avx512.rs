//! Runs of single rows on AVX-512, as the input gradient wants them: the numbers of one output side by side.

use super::super::operands::COLS;
use super::super::runtime::bf16::round;
use super::block_rows::{Rounded, Rows};
use crate::numeric::block::{Packed, RUN, Scale};
use std::arch::x86_64::*;

/// out = run `run` of row `row`.
#[inline(always)]
fn unpack<P: Packed>(out: &mut [f32; RUN], rows: &Rows, row: usize, run: usize) {
    let block = &rows.bytes[row * rows.size + run * RUN / P::ELEMENTS * P::BYTES..][..P::BYTES];
    let run = run % (P::ELEMENTS / RUN);
    // SAFETY: callers unpack on AVX-512 only.
    unsafe {
        match P::LEVELS {
            Some(levels) => look_up(out, &levels, &block[..4], &block[4 + RUN / 2 * run..][..RUN / 2]),
            None => {
                let mut codes = [0; RUN];
                P::codes(&mut codes, block, run);
                scale(out, &codes, P::scales(block, run, |bits| widen_half(bits)));
            }
        }
    }
    if rows.rounded == Rounded::Bf16 {
        out.iter_mut().for_each(|x| *x = round(*x));
    }
}

/// The processor's own widening, which has every bit of [`crate::numeric::block::widen_half`].
///
/// # Safety
/// AVX-512 F and VL.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
pub unsafe fn widen_half(bits: u16) -> f32 {
    _mm512_cvtss_f32(_mm512_cvtph_ps(_mm256_castsi128_si256(_mm_cvtsi32_si128(i32::from(bits)))))
}

/// out = code * scale + what is added.
///
/// # Safety
/// AVX-512 F.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn scale(out: &mut [f32; RUN], codes: &[i8; RUN], scales: [Scale; 2]) {
    for (half, (by, plus)) in scales.into_iter().enumerate() {
        // SAFETY: both have two halves of sixteen.
        unsafe {
            let codes = _mm512_cvtepi8_epi32(_mm_loadu_si128(codes.as_ptr().add(16 * half).cast()));
            let product = _mm512_mul_ps(_mm512_cvtepi32_ps(codes), _mm512_set1_ps(by));
            _mm512_storeu_ps(out.as_mut_ptr().add(16 * half), _mm512_add_ps(product, _mm512_set1_ps(plus)));
        }
    }
}

/// out = level of each code, times the scale: sixteen codes at a time, which no compiler finds in a table.
///
/// # Safety
/// AVX-512 F; 4 bytes of scale and 16 of codes.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn look_up(out: &mut [f32; RUN], levels: &[f32; 16], scale: &[u8], codes: &[u8]) {
    let scale = _mm512_set1_ps(f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]));
    let first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    let second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    // SAFETY: the caller's promise.
    unsafe {
        let levels = _mm512_loadu_ps(levels.as_ptr());
        let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(codes.as_ptr().cast()));
        // The lookup reads the lower four bits alone.
        let upper = _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32::<4>(codes), levels), scale);
        let lower = _mm512_mul_ps(_mm512_permutexvar_ps(codes, levels), scale);
        _mm512_storeu_ps(out.as_mut_ptr(), _mm512_permutex2var_ps(upper, first, lower));
        _mm512_storeu_ps(out.as_mut_ptr().add(16), _mm512_permutex2var_ps(upper, second, lower));
    }
}

/// See [`super::block_unpack::Transposed`].
///
/// # Safety
/// AVX-512 F, BW, DQ and VL.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn transposed_run<P: Packed>(out: &mut [f32], rows: Rows, run: usize) {
    for (n, out) in out.as_chunks_mut::<COLS>().0.iter_mut().enumerate() {
        unpack::<P>(out, &rows, n, run);
    }
}

/// See [`super::block_unpack::TransposedPairs`].
///
/// # Safety
/// As [`transposed_run`]; AVX-512 BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub unsafe fn transposed_pairs<P: Packed>(out: &mut [u32], rows: Rows, run: usize) {
    // The widened bf16 kernel rounds in the same way, and a word takes the upper halves of two numbers.
    let rows = Rows { rounded: Rounded::Bf16, ..rows };
    let mut wide = [[0.0; RUN]; 2];
    for (pair, out) in out.as_chunks_mut::<COLS>().0.iter_mut().enumerate() {
        unpack::<P>(&mut wide[0], &rows, 2 * pair, run);
        if 2 * pair + 1 < rows.count {
            unpack::<P>(&mut wide[1], &rows, 2 * pair + 1, run);
        } else {
            wide[1] = [0.0; RUN];
        }
        for (i, out) in out.iter_mut().enumerate() {
            *out = wide[0][i].to_bits() | wide[1][i].to_bits() >> 16;
        }
    }
}
