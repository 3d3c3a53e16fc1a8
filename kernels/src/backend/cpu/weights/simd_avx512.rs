//! [`Simd`] on AVX-512 F, BW, DQ and VL; [`Simd::pairs`] needs BF16.

use super::simd::{Levels, Shuffle, Simd, ops, row, words};
use std::arch::x86_64::*;

/// Vectors of sixteen outputs.
#[derive(Clone, Copy)]
pub struct Avx512;

impl Simd for Avx512 {
    const LANES: usize = 16;
    const LOOKS_UP: bool = true;
    type Floats = __m512;
    type Words = __m512i;

    ops! {
        store(to: *mut f32, x: __m512) -> () = _mm512_storeu_ps(to, x);
        store_words(to: *mut u32, x: __m512i) -> () = _mm512_storeu_si512(to.cast(), x);
        load(from: *const f32) -> __m512 = _mm512_loadu_ps(from);
        word(x: i32) -> __m512i = _mm512_set1_epi32(x);
        and(a: __m512i, b: __m512i) -> __m512i = _mm512_and_si512(a, b);
        or(a: __m512i, b: __m512i) -> __m512i = _mm512_or_si512(a, b);
        less_bytes(a: __m512i, b: __m512i) -> __m512i = _mm512_sub_epi8(a, b);
        least_bytes(a: __m512i, b: __m512i) -> __m512i = _mm512_min_epu8(a, b);
        down(x: __m512i, by: usize) -> __m512i = _mm512_srl_epi32(x, _mm_cvtsi32_si128(by as i32));
        up(x: __m512i, by: usize) -> __m512i = _mm512_sll_epi32(x, _mm_cvtsi32_si128(by as i32));
        shuffled(x: __m512i, shuffle: &Shuffle) -> __m512i = {
            let bytes = _mm_loadu_si128(shuffle.as_ptr().cast());
            _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(bytes))
        };
        float(x: f32) -> __m512 = _mm512_set1_ps(x);
        mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        fma(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        minus(x: __m512) -> __m512 = _mm512_xor_ps(x, _mm512_set1_ps(-0.0));
        floats(x: __m512i) -> __m512 = _mm512_castsi512_ps(x);
        from_signed(x: __m512i) -> __m512 = _mm512_cvtepi32_ps(x);
        halves(x: __m512i) -> __m512 = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x));
        half(bits: u16) -> f32 = super::block_unpack_avx512::widen_half(bits);
        transposed(rows: &[*const u8], at: usize) -> [__m512i; 4] = {
            let a = joined(row(rows[0], at), row(rows[4], at), row(rows[8], at), row(rows[12], at));
            let b = joined(row(rows[1], at), row(rows[5], at), row(rows[9], at), row(rows[13], at));
            let c = joined(row(rows[2], at), row(rows[6], at), row(rows[10], at), row(rows[14], at));
            let d = joined(row(rows[3], at), row(rows[7], at), row(rows[11], at), row(rows[15], at));
            let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
            let (ab2, cd2) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
            [
                _mm512_unpacklo_epi64(ab, cd),
                _mm512_unpackhi_epi64(ab, cd),
                _mm512_unpacklo_epi64(ab2, cd2),
                _mm512_unpackhi_epi64(ab2, cd2),
            ]
        };
        gathered(rows: &[*const u8], at: usize) -> __m512i = {
            let [a, b, c, d] = [&rows[..4], &rows[4..8], &rows[8..12], &rows[12..16]];
            joined(words(a, at), words(b, at), words(c, at), words(d, at))
        };
        rounded(x: __m512) -> __m512 = {
            let bits = _mm512_castps_si512(x);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), Self::word(1));
            let up = _mm512_add_epi32(_mm512_add_epi32(bits, Self::word(0x7fff)), odd);
            let size = _mm512_and_si512(bits, Self::word(0x7fff_ffff));
            let small = _mm512_cmplt_epu32_mask(size, Self::word(0x0080_0000));
            let kept = _mm512_mask_and_epi32(up, small, bits, Self::word(i32::MIN));
            let nan = _mm512_cmpgt_epu32_mask(size, Self::word(0x7f80_0000));
            let all = _mm512_mask_or_epi32(kept, nan, bits, Self::word(0x0040_0000));
            _mm512_castsi512_ps(_mm512_and_si512(all, Self::word(0xffff_0000_u32 as i32)))
        };
        looked_up(codes: __m512i, levels: &Levels) -> [__m512; 4] = {
            let levels = _mm512_loadu_ps(levels.values.as_ptr());
            // A lookup uses the lowest four bits only.
            [
                _mm512_permutexvar_ps(codes, levels),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<8>(codes), levels),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<16>(codes), levels),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<24>(codes), levels),
            ]
        };
        pairs(even: __m512, odd: __m512) -> __m512i = {
            let both: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(even, odd));
            _mm512_permutexvar_epi16(_mm512_loadu_si512(ORDER.as_ptr().cast()), both)
        };
    }
}

/// Four quarters of a vector.
#[inline(always)]
unsafe fn joined(a: __m128i, b: __m128i, c: __m128i, d: __m128i) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let half = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(a), b);
        _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(half, c), d)
    }
}

/// Of sixteen odd values and sixteen even ones after them, in 16 bits each: pair i in lane i, its even value in the upper
/// half.
const ORDER: [u16; 32] = {
    let (mut order, mut i) = ([0; 32], 0);
    while i < 16 {
        (order[2 * i], order[2 * i + 1]) = (i as u16, 16 + i as u16);
        i += 1;
    }
    order
};
