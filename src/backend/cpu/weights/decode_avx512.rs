//! The chains of few rows, straight from blocks: sixteen outputs side by side, their codes as stored in memory. What
//! a run's codes are is loaded for sixteen rows and transposed once, four bytes at a time, so that a lane has the codes
//! of its own output; number by number they are then shifted to where a level is looked up, scaled, and multiplied.
//!
//! A number is worth what [`Packed::unpack`] makes of it, and numbers are added in ascending order, as tiles add
//! them: to the bit what the widened matrix gives.

use super::super::gemm::gemv::{PANELS, Sums};
use super::super::operands::COLS;
use super::block_rows::{Rounded, Rows};
use super::block_unpack_avx512::widen_half;
use super::panel_unpack_avx512::put_sums;
use crate::numeric::block::{Bits, CodeLayout, Packed, RUN, Scales, Split};
use std::arch::x86_64::*;

/// See [`super::block_unpack::InPlace`].
///
/// # Safety
/// AVX-512 F, BW, DQ and VL; x is whole runs, and at least one row has them.
pub unsafe fn decode<P: Packed>(x: &[f32], rows: Rows, from: usize) -> Sums {
    // SAFETY: the caller's promise.
    unsafe {
        match rows.rounded {
            Rounded::Not => panels::<P, false>(x, rows, from),
            Rounded::Bf16 => panels::<P, true>(x, rows, from),
        }
    }
}

/// Bytes of every row that are asked for before they are needed; past a row's end begins another one.
const AHEAD: usize = 256;

/// [`round`](super::super::runtime::bf16::round) of sixteen numbers.
#[inline]
#[target_feature(enable = "avx512f")]
fn rounded(x: __m512) -> __m512 {
    let (bits, word) = (_mm512_castps_si512(x), |w: u32| _mm512_set1_epi32(w as i32));
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), word(1));
    let up = _mm512_add_epi32(_mm512_add_epi32(bits, word(0x7fff)), odd);
    let size = _mm512_and_si512(bits, word(0x7fff_ffff));
    let small = _mm512_cmplt_epu32_mask(size, word(0x0080_0000));
    let kept = _mm512_mask_and_epi32(up, small, bits, word(0x8000_0000));
    let nan = _mm512_cmpgt_epu32_mask(size, word(0x7f80_0000));
    let all = _mm512_mask_or_epi32(kept, nan, bits, word(0x0040_0000));
    _mm512_castsi512_ps(_mm512_and_si512(all, word(0xffff_0000)))
}

/// Where sixteen rows begin; one that is not there is the last one again, and what comes of it is not used.
struct Sixteen {
    rows: [*const u8; 16],
    /// From the first of them.
    offsets: __m512i,
}

/// A run's codes of sixteen rows in lanes.
type Codes = [__m512i; 8];

/// What sixteen rows are multiplied by and what is added then: the first sixteen numbers of a run, and the others.
type Scaled = [(__m512, __m512); 2];

/// The chains; with ROUND values are rounded to bf16 before they are multiplied.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn panels<P: Packed, const ROUND: bool>(x: &[f32], rows: Rows, from: usize) -> Sums {
    let mut out = [[0.0; COLS]; PANELS];
    let in_block = P::ELEMENTS / RUN;
    for (p, out) in out.iter_mut().enumerate().take(rows.count.div_ceil(COLS)) {
        let mut sums = [_mm512_setzero_ps(); 2];
        let sides = [0, 16].map(|side| sixteen(&rows, p * COLS + side));
        for (i, x) in x.as_chunks::<RUN>().0.iter().enumerate() {
            let (block, run) = ((from + i) / in_block * P::BYTES, (from + i) % in_block);
            // Two chains: while one adds, the codes of the other are transposed.
            for (sum, side) in sums.iter_mut().zip(&sides) {
                // SAFETY: the caller has checked that rows have these blocks.
                unsafe {
                    let here = side.rows.map(|row| row.add(block));
                    here.iter().for_each(|at| _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD).cast()));
                    let codes = codes::<P>(&here, side.offsets, run);
                    *sum = chain::<P, ROUND>(*sum, x, &codes, &scales::<P>(&here, side.offsets, run));
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { put_sums(out, sums) };
    }
    out
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn sixteen(rows: &Rows, first: usize) -> Sixteen {
    // No matrix has rows of 128 MB, but a gather is not checked.
    assert!(rows.size <= i32::MAX as usize / 16, "sixteen rows are within reach of an i32");
    let row = |i: usize| (first + i).min(rows.count - 1) * rows.size;
    let offsets: [i32; 16] = std::array::from_fn(|i| (row(i) - row(0)) as i32);
    // SAFETY: sixteen numbers.
    let offsets = unsafe { _mm512_loadu_si512(offsets.as_ptr().cast()) };
    Sixteen { rows: std::array::from_fn(|i| rows.bytes[row(i)..].as_ptr()), offsets }
}

/// The codes of a run, sixteen rows in lanes: four of eight bits or eight of four bits in each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn codes<P: Packed>(blocks: &[*const u8; 16], offsets: __m512i, run: usize) -> Codes {
    let mut wide = [_mm512_setzero_si512(); 8];
    // SAFETY: the caller's promise, and the table's: a block has the bytes that its row of the table names.
    unsafe {
        match P::LAYOUT {
            CodeLayout::Planes { at } => {
                let first = at + run / 2 * 32;
                let [low, high] = [first, first + 16].map(|at| transposed_words(blocks, at));
                let down = _mm_cvtsi32_si128(4 * (run % 2) as i32);
                for j in 0..4 {
                    wide[j] = _mm512_srl_epi32(low[j], down);
                    wide[4 + j] = _mm512_srl_epi32(high[j], down);
                }
            }
            CodeLayout::Halves { at, .. } | CodeLayout::Pairs { at } => {
                wide[..4].copy_from_slice(&transposed_words(blocks, at + 16 * run));
            }
            CodeLayout::Fifths { at, bits, .. } => {
                wide[..4].copy_from_slice(&transposed_words(blocks, at));
                wide[4] = _mm512_i32gather_epi32::<1>(offsets, blocks[0].add(bits).cast());
            }
            CodeLayout::Bytes { at } => {
                wide[..4].copy_from_slice(&transposed_words(blocks, at + 32 * run));
                wide[4..].copy_from_slice(&transposed_words(blocks, at + 32 * run + 16));
            }
            CodeLayout::Split => {
                let split = P::split(run);
                for half in [0, 1] {
                    let low = transposed_words(blocks, split.low.at + 16 * half);
                    let high = transposed_words(blocks, split.high.at + 16 * half);
                    for (wide, (low, high)) in wide[4 * half..].iter_mut().zip(low.into_iter().zip(high)) {
                        *wide = together(&split, low, high);
                    }
                }
            }
        }
    }
    wide
}

/// Four codes in each lane, of bytes of either part.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn together(split: &Split, low: __m512i, high: __m512i) -> __m512i {
    let bits = |x, bits: Bits| {
        let down = _mm512_srl_epi32(x, _mm_cvtsi32_si128(bits.down as i32));
        _mm512_and_si512(down, _mm512_set1_epi8(bits.mask as i8))
    };
    let up = _mm512_sll_epi32(bits(high, split.high), _mm_cvtsi32_si128(split.up as i32));
    _mm512_sub_epi8(_mm512_or_si512(bits(low, split.low), up), _mm512_set1_epi8(split.less))
}

/// Sixteen bytes of sixteen rows, from byte `at` on: lane i of vector j has bytes 4 j .. 4 j + 4 of row i.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn transposed_words(rows: &[*const u8; 16], at: usize) -> [__m512i; 4] {
    let mut quads = [_mm512_setzero_si512(); 4];
    for (g, quad) in quads.iter_mut().enumerate() {
        // SAFETY: the caller's promise: sixteen bytes can be read of each row.
        unsafe {
            let first = _mm512_castsi128_si512(_mm_loadu_si128(rows[g].add(at).cast()));
            let second = _mm512_inserti32x4::<1>(first, _mm_loadu_si128(rows[4 + g].add(at).cast()));
            let third = _mm512_inserti32x4::<2>(second, _mm_loadu_si128(rows[8 + g].add(at).cast()));
            *quad = _mm512_inserti32x4::<3>(third, _mm_loadu_si128(rows[12 + g].add(at).cast()));
        }
    }
    let [a, b, c, d] = quads;
    let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
    let (ab2, cd2) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
    [
        _mm512_unpacklo_epi64(ab, cd),
        _mm512_unpackhi_epi64(ab, cd),
        _mm512_unpacklo_epi64(ab2, cd2),
        _mm512_unpackhi_epi64(ab2, cd2),
    ]
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn scales<P: Packed>(blocks: &[*const u8; 16], offsets: __m512i, run: usize) -> Scaled {
    // SAFETY: the caller's promise: a block begins with four bytes and more.
    unsafe {
        if P::SCALES == Scales::Computed {
            let mut all = [[0.0; 16]; 4];
            for (i, &block) in blocks.iter().enumerate() {
                let block = std::slice::from_raw_parts(block, P::BYTES);
                let [first, second] = P::scales(block, run, |bits| widen_half(bits));
                (all[0][i], all[1][i], all[2][i], all[3][i]) = (first.0, first.1, second.0, second.1);
            }
            let [a, b, c, d] = all.map(|x| _mm512_loadu_ps(x.as_ptr()));
            return [(a, b), (c, d)];
        }
        if P::SCALES == Scales::SixBits {
            return six_bits(transposed_words(blocks, 0), run);
        }
        let words = |at| _mm512_i32gather_epi32::<1>(offsets, blocks[0].add(at).cast());
        let half = |words| _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words));
        if let Scales::Signed { at } = P::SCALES {
            let (two, none) = (words(at + 2 * run), _mm512_setzero_ps());
            let d = half(_mm512_srli_epi32::<16>(words(at + P::ELEMENTS / 16 - 2)));
            let times_d = |top| _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(top)));
            let [first, second] = [_mm512_slli_epi32::<24>(two), _mm512_slli_epi32::<16>(two)];
            return [(times_d(first), none), (times_d(second), none)];
        }
        let words = words(0);
        match P::SCALES {
            Scales::Float => [(_mm512_castsi512_ps(words), _mm512_setzero_ps()); 2],
            Scales::Half => [(half(words), _mm512_setzero_ps()); 2],
            _ => [(half(words), half(_mm512_srli_epi32::<16>(words))); 2],
        }
    }
}

/// d s and -(dmin m) of a run: d and dmin, then four bytes each of s, of m, and of the lower bits of later ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn six_bits([d, s, m, low]: [__m512i; 4], run: usize) -> Scaled {
    let half = |words| _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words));
    let down = |x, by: usize| _mm512_srl_epi32(x, _mm_cvtsi32_si128(by as i32));
    let (by, mask) = (8 * (run % 4), |x, bits| _mm512_and_si512(x, _mm512_set1_epi32(bits)));
    let of = |top, from| match run {
        0..4 => mask(down(top, by), 63),
        // The two bits above those of run - 4, beside four of its own.
        _ => _mm512_or_si512(mask(down(top, by + 2), 48), mask(down(low, by + from), 15)),
    };
    let scale = _mm512_mul_ps(half(d), _mm512_cvtepi32_ps(of(s, 0)));
    let least = _mm512_mul_ps(half(_mm512_srli_epi32::<16>(d)), _mm512_cvtepi32_ps(of(m, 4)));
    let minus = _mm512_xor_ps(least, _mm512_set1_ps(-0.0));
    [(scale, minus); 2]
}

/// What four bits are worth, and five with the upper one set.
#[inline]
#[target_feature(enable = "avx512f")]
fn levels<P: Packed>() -> (__m512, __m512) {
    let less = if let CodeLayout::Halves { less, .. } | CodeLayout::Fifths { less, .. } = P::LAYOUT {
        less
    } else {
        0
    };
    let levels = P::LEVELS.unwrap_or_else(|| std::array::from_fn(|i| i as f32 - f32::from(less)));
    // SAFETY: sixteen levels.
    let levels = unsafe { _mm512_loadu_ps(levels.as_ptr()) };
    (levels, _mm512_add_ps(levels, _mm512_set1_ps(16.0)))
}

/// The chain of a run, begun with a sum.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn chain<P: Packed, const ROUND: bool>(
    from: __m512,
    x: &[f32; RUN],
    codes: &Codes,
    scales: &Scaled,
) -> __m512 {
    let mut sum = from;
    let mut add = |k: usize, level: __m512| {
        let (by, plus) = scales[k / 16];
        let product = _mm512_mul_ps(level, by);
        let number = if P::SCALES.add() { _mm512_add_ps(product, plus) } else { product };
        let number = if ROUND { rounded(number) } else { number };
        sum = _mm512_fmadd_ps(_mm512_set1_ps(x[k]), number, sum);
    };
    let (levels, upper) = levels::<P>();
    // A lookup heeds the lowest four bits alone, one of 32 levels five.
    let level = |codes, down: i32| match P::LAYOUT {
        CodeLayout::Split | CodeLayout::Bytes { .. } => {
            let top = _mm512_sll_epi32(codes, _mm_cvtsi32_si128(24 - down));
            _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(top))
        }
        _ => _mm512_permutexvar_ps(_mm512_srl_epi32(codes, _mm_cvtsi32_si128(down)), levels),
    };
    match P::LAYOUT {
        CodeLayout::Split | CodeLayout::Bytes { .. } | CodeLayout::Planes { .. } => {
            for (j, &codes) in codes.iter().enumerate() {
                (0..4).for_each(|b| add(4 * j + b, level(codes, 8 * b as i32)));
            }
        }
        CodeLayout::Halves { .. } => {
            for (half, down) in [0, 4].into_iter().enumerate() {
                for (j, &codes) in codes[..4].iter().enumerate() {
                    (0..4).for_each(|b| add(16 * half + 4 * j + b, level(codes, 8 * b as i32 + down)));
                }
            }
        }
        CodeLayout::Fifths { .. } => {
            for k in 0..RUN {
                let down = _mm_cvtsi32_si128((8 * (k % 4) + k / 16 * 4) as i32);
                let low = _mm512_srl_epi32(codes[k % 16 / 4], down);
                let fifth = _mm512_rolv_epi32(codes[4], _mm512_set1_epi32((36 - k as i32) % 32));
                let code = _mm512_ternarylogic_epi32::<0xca>(_mm512_set1_epi32(15), low, fifth);
                add(k, _mm512_permutex2var_ps(levels, code, upper));
            }
        }
        CodeLayout::Pairs { .. } => {
            for (j, &codes) in codes[..4].iter().enumerate() {
                let downs = [4, 0, 12, 8, 20, 16, 28, 24].into_iter().enumerate();
                downs.for_each(|(i, down)| add(8 * j + i, level(codes, down)));
            }
        }
    }
    sum
}
