//! [`Simd`] on AVX2, FMA and F16C.

use super::simd::{Levels, Shuffle, Simd, ops, row, words};
use std::arch::x86_64::*;

/// Vectors of eight outputs.
#[derive(Clone, Copy)]
pub struct Avx2;

impl Simd for Avx2 {
    const LANES: usize = 8;
    const LOOKS_UP: bool = false;
    type Floats = __m256;
    type Words = __m256i;

    ops! {
        store(to: *mut f32, x: __m256) -> () = _mm256_storeu_ps(to, x);
        store_words(to: *mut u32, x: __m256i) -> () = _mm256_storeu_si256(to.cast(), x);
        load(from: *const f32) -> __m256 = _mm256_loadu_ps(from);
        word(x: i32) -> __m256i = _mm256_set1_epi32(x);
        and(a: __m256i, b: __m256i) -> __m256i = _mm256_and_si256(a, b);
        or(a: __m256i, b: __m256i) -> __m256i = _mm256_or_si256(a, b);
        less_bytes(a: __m256i, b: __m256i) -> __m256i = _mm256_sub_epi8(a, b);
        least_bytes(a: __m256i, b: __m256i) -> __m256i = _mm256_min_epu8(a, b);
        down(x: __m256i, by: usize) -> __m256i = _mm256_srl_epi32(x, _mm_cvtsi32_si128(by as i32));
        up(x: __m256i, by: usize) -> __m256i = _mm256_sll_epi32(x, _mm_cvtsi32_si128(by as i32));
        shuffled(x: __m256i, shuffle: &Shuffle) -> __m256i = _mm256_shuffle_epi8(x, twice(shuffle));
        float(x: f32) -> __m256 = _mm256_set1_ps(x);
        mul(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
        fma(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        minus(x: __m256) -> __m256 = _mm256_xor_ps(x, _mm256_set1_ps(-0.0));
        floats(x: __m256i) -> __m256 = _mm256_castsi256_ps(x);
        from_signed(x: __m256i) -> __m256 = _mm256_cvtepi32_ps(x);
        half(bits: u16) -> f32 = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))));
        transposed(rows: &[*const u8], at: usize) -> [__m256i; 4] = {
            let a = joined(row(rows[0], at), row(rows[4], at));
            let b = joined(row(rows[1], at), row(rows[5], at));
            let c = joined(row(rows[2], at), row(rows[6], at));
            let d = joined(row(rows[3], at), row(rows[7], at));
            let (ab, cd) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
            let (ab2, cd2) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
            [
                _mm256_unpacklo_epi64(ab, cd),
                _mm256_unpackhi_epi64(ab, cd),
                _mm256_unpacklo_epi64(ab2, cd2),
                _mm256_unpackhi_epi64(ab2, cd2),
            ]
        };
        gathered(rows: &[*const u8], at: usize) -> __m256i = joined(words(&rows[..4], at), words(&rows[4..8], at));
        rounded(x: __m256) -> __m256 = {
            let bits = _mm256_castps_si256(x);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), Self::word(1));
            let up = _mm256_add_epi32(_mm256_add_epi32(bits, Self::word(0x7fff)), odd);
            // Without the sign, so a signed comparison is right.
            let size = _mm256_and_si256(bits, Self::word(0x7fff_ffff));
            let small = _mm256_cmpgt_epi32(Self::word(0x0080_0000), size);
            let kept = _mm256_blendv_epi8(up, _mm256_and_si256(bits, Self::word(i32::MIN)), small);
            let nan = _mm256_cmpgt_epi32(size, Self::word(0x7f80_0000));
            let all = _mm256_blendv_epi8(kept, _mm256_or_si256(bits, Self::word(0x0040_0000)), nan);
            _mm256_castsi256_ps(_mm256_and_si256(all, Self::word(0xffff_0000_u32 as i32)))
        };
        halves(x: __m256i) -> __m256 = {
            let lower = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
            let [low, high] = [_mm256_castsi256_si128(lower), _mm256_extracti128_si256::<1>(lower)];
            _mm256_cvtph_ps(_mm_packus_epi32(low, high))
        };
        looked_up(codes: __m256i, levels: &Levels) -> [__m256; 4] = {
            // Byte b of four lanes side by side, so that those of vector b come together.
            let codes = Self::shuffled(codes, &SIDE_BY_SIDE);
            let [a, b, c, d] = &levels.bytes;
            let (a, b) = (_mm256_shuffle_epi8(twice(a), codes), _mm256_shuffle_epi8(twice(b), codes));
            let (c, d) = (_mm256_shuffle_epi8(twice(c), codes), _mm256_shuffle_epi8(twice(d), codes));
            let (ab, cd) = (_mm256_unpacklo_epi8(a, b), _mm256_unpacklo_epi8(c, d));
            let (ab2, cd2) = (_mm256_unpackhi_epi8(a, b), _mm256_unpackhi_epi8(c, d));
            [
                _mm256_castsi256_ps(_mm256_unpacklo_epi16(ab, cd)),
                _mm256_castsi256_ps(_mm256_unpackhi_epi16(ab, cd)),
                _mm256_castsi256_ps(_mm256_unpacklo_epi16(ab2, cd2)),
                _mm256_castsi256_ps(_mm256_unpackhi_epi16(ab2, cd2)),
            ]
        };
    }
}

/// Two halves of a vector.
#[inline(always)]
unsafe fn joined(a: __m128i, b: __m128i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(a), b) }
}

/// Sixteen bytes in both halves of a vector.
#[inline(always)]
unsafe fn twice(bytes: &Shuffle) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes.as_ptr().cast())) }
}

/// Byte b of four lanes side by side.
const SIDE_BY_SIDE: Shuffle = [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15];
