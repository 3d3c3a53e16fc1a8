//! [`super::decode_avx512`] in vectors of eight outputs. AVX2 has no lookup of sixteen levels and half as many
//! registers, so the codes of a run are first brought into one form, a byte each, and the chains of four vectors run
//! side by side.
//!
//! A value is what [`Packed::unpack`] computes, and products are added in ascending order, as tiles add them: the
//! result has the bits of the widened matrix.

use super::super::gemm::gemv::{PANELS, Sums};
use super::super::operands::COLS;
use super::block_rows::{Rounded, Rows};
use crate::numeric::block::{Bits, CodeLayout, Packed, RUN, Scales};
use std::arch::x86_64::*;

/// Outputs of a vector.
const LANES: usize = 8;
/// Vectors of a panel.
const SIDES: usize = COLS / LANES;

/// Bytes of a line of the processor's cache.
const LINE: usize = 64;

/// See [`super::block_unpack::InPlace`].
///
/// # Safety
/// AVX2, FMA and F16C; x is whole runs, and at least one row has them.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn decode<P: Packed>(x: &[f32], rows: Rows, from: usize) -> Sums {
    // SAFETY: the caller's promise.
    unsafe {
        match rows.rounded {
            Rounded::Not => panels::<P, false>(x, rows, from),
            Rounded::Bf16 => panels::<P, true>(x, rows, from),
        }
    }
}

/// [`round`](super::super::runtime::bf16::round) of eight values.
#[inline]
#[target_feature(enable = "avx2")]
fn rounded(x: __m256) -> __m256 {
    let (bits, word) = (_mm256_castps_si256(x), |w: u32| _mm256_set1_epi32(w as i32));
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), word(1));
    let up = _mm256_add_epi32(_mm256_add_epi32(bits, word(0x7fff)), odd);
    // Without the sign, so a signed comparison is right.
    let size = _mm256_and_si256(bits, word(0x7fff_ffff));
    let small = _mm256_cmpgt_epi32(word(0x0080_0000), size);
    let kept = _mm256_blendv_epi8(up, _mm256_and_si256(bits, word(0x8000_0000)), small);
    let nan = _mm256_cmpgt_epi32(size, word(0x7f80_0000));
    let all = _mm256_blendv_epi8(kept, _mm256_or_si256(bits, word(0x0040_0000)), nan);
    _mm256_castsi256_ps(_mm256_and_si256(all, word(0xffff_0000)))
}

/// The blocks of eight rows.
type Eight = [*const u8; LANES];

/// The codes of a run of eight rows: byte b of a lane of vector j is the code of value 4 j + b.
type Codes = [__m256i; RUN / 4];

/// Scale and offset of the first sixteen values of a run, and of the others.
type Scaled = [(__m256, __m256); 2];

/// The chains; with ROUND values are rounded to bf16 before they are multiplied.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn panels<P: Packed, const ROUND: bool>(x: &[f32], rows: Rows, from: usize) -> Sums {
    let mut out = [[0.0; COLS]; PANELS];
    let in_block = P::ELEMENTS / RUN;
    for (p, out) in out.iter_mut().enumerate().take(rows.count.div_ceil(COLS)) {
        let sides: [Eight; SIDES] = std::array::from_fn(|side| eight(&rows, p * COLS + side * LANES));
        let mut sums = [_mm256_setzero_ps(); SIDES];
        let mut codes = [[_mm256_setzero_si256(); RUN / 4]; SIDES];
        let mut scales = [[(_mm256_setzero_ps(), _mm256_setzero_ps()); 2]; SIDES];
        for (i, x) in x.as_chunks::<RUN>().0.iter().enumerate() {
            let (block, run) = ((from + i) / in_block * P::BYTES, (from + i) % in_block);
            // A processor does not foresee 32 rows: the next panel's are asked for, a line at a time.
            let [before, at] = [(from + i).saturating_sub(1), from + i].map(|run| run * P::BYTES / in_block);
            let (is_asked, next) = (i == 0 || before / LINE != at / LINE, COLS * rows.size + at);
            for (side, (codes, scales)) in sides.iter().zip(codes.iter_mut().zip(&mut scales)) {
                if is_asked {
                    side.iter().for_each(|row| _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(next).cast()));
                }
                // SAFETY: the caller has checked that rows have these blocks.
                unsafe {
                    let here = side.map(|row| row.add(block));
                    *codes = codes_of::<P>(&here, run);
                    *scales = scales_of::<P>(&here, run);
                }
            }
            chains::<P, ROUND>(&mut sums, x, &codes, &scales);
        }
        for (out, sum) in out.as_chunks_mut::<LANES>().0.iter_mut().zip(sums) {
            // SAFETY: a vector is eight values.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), sum) };
        }
    }
    out
}

/// Where eight rows begin; for a row that does not exist it is the last one, and its result is not used.
fn eight(rows: &Rows, first: usize) -> Eight {
    std::array::from_fn(|i| rows.bytes[(first + i).min(rows.count - 1) * rows.size..].as_ptr())
}

/// The codes of a run.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn codes_of<P: Packed>(blocks: &Eight, run: usize) -> Codes {
    // SAFETY: the caller's promise, and the table's: a block has the bytes that its row of the table names.
    let words = |at| unsafe { transposed_words(blocks, at) };
    let nibble = |x, down| bits(x, Bits { at: 0, down, mask: 15 });
    let halves = |at| {
        let words = words(at);
        join(words.map(|x| nibble(x, 0)), words.map(|x| nibble(x, 4)))
    };
    let minus = |codes: Codes, less| codes.map(|x| _mm256_sub_epi8(x, _mm256_set1_epi8(less)));
    match P::LAYOUT {
        CodeLayout::Bytes { at } => join(words(at + 32 * run), words(at + 32 * run + 16)),
        CodeLayout::Planes { at } => {
            let first = at + run / 2 * 32;
            join(words(first), words(first + 16)).map(|x| nibble(x, 4 * (run % 2)))
        }
        CodeLayout::Halves { at, less: 0 } => halves(at + 16 * run),
        CodeLayout::Halves { at, less } => minus(halves(at + 16 * run), less),
        CodeLayout::Fifths { at, bits, less } => {
            // SAFETY: as above.
            let fifths = unsafe { gathered(blocks, bits) };
            let mut codes = halves(at);
            for (j, codes) in codes.iter_mut().enumerate() {
                *codes = _mm256_or_si256(*codes, spread(fifths, j));
            }
            minus(codes, less)
        }
        CodeLayout::Pairs { at } => {
            let words = words(at + 16 * run);
            let mut codes = [_mm256_setzero_si256(); RUN / 4];
            for (codes, x) in codes.as_chunks_mut::<2>().0.iter_mut().zip(words) {
                *codes = in_turn(nibble(x, 4), nibble(x, 0));
            }
            codes
        }
        CodeLayout::Split => {
            let split = P::split(run);
            let [low, high] = [split.low, split.high]
                .map(|part| join(words(part.at), words(part.at + 16)).map(|x| bits(x, part)));
            let up = _mm_cvtsi32_si128(split.up as i32);
            minus(std::array::from_fn(|j| _mm256_or_si256(low[j], _mm256_sll_epi32(high[j], up))), split.less)
        }
    }
}

/// Two halves of a run.
#[inline(always)]
fn join([a, b, c, d]: [__m256i; 4], [e, f, g, h]: [__m256i; 4]) -> Codes {
    [a, b, c, d, e, f, g, h]
}

/// A bit field of every byte.
#[inline]
#[target_feature(enable = "avx2")]
fn bits(x: __m256i, bits: Bits) -> __m256i {
    let down = _mm256_srl_epi32(x, _mm_cvtsi32_si128(bits.down as i32));
    _mm256_and_si256(down, _mm256_set1_epi8(bits.mask as i8))
}

/// Bits 4 j .. 4 j + 4 of every lane, each at bit 4 of a byte.
#[inline]
#[target_feature(enable = "avx2")]
fn spread(fifths: __m256i, j: usize) -> __m256i {
    const BYTES: [Shuffle; 4] = [in_lanes([0; 4]), in_lanes([1; 4]), in_lanes([2; 4]), in_lanes([3; 4])];
    let bytes = shuffled(fifths, &BYTES[j / 2]);
    let each = _mm256_set1_epi32(if j.is_multiple_of(2) { 0x0804_0201 } else { 0x8040_2010_u32 as i32 });
    let set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, each), each);
    _mm256_and_si256(set, _mm256_set1_epi8(16))
}

/// The first two bytes of every lane of both in turn, and the last two.
#[inline]
#[target_feature(enable = "avx2")]
fn in_turn(even: __m256i, odd: __m256i) -> [__m256i; 2] {
    const EVEN: [Shuffle; 2] = [in_lanes([0, -1, 1, -1]), in_lanes([2, -1, 3, -1])];
    const ODD: [Shuffle; 2] = [in_lanes([-1, 0, -1, 1]), in_lanes([-1, 2, -1, 3])];
    [0, 1].map(|part| _mm256_or_si256(shuffled(even, &EVEN[part]), shuffled(odd, &ODD[part])))
}

/// A shuffle: which byte of its lane each byte of a lane becomes; -1 is 0.
type Shuffle = [i8; 32];

const fn in_lanes(from: [i8; 4]) -> Shuffle {
    let (mut bytes, mut i) = ([-1; 32], 0);
    while i < 32 {
        if from[i % 4] >= 0 {
            // A shuffle counts bytes in its half of the vector.
            bytes[i] = (i % 16 / 4 * 4) as i8 + from[i % 4];
        }
        i += 1;
    }
    bytes
}

#[inline]
#[target_feature(enable = "avx2")]
fn shuffled(x: __m256i, shuffle: &Shuffle) -> __m256i {
    // SAFETY: 32 bytes.
    _mm256_shuffle_epi8(x, unsafe { _mm256_loadu_si256(shuffle.as_ptr().cast()) })
}

/// Sixteen bytes of eight rows, from byte `at` on: lane i of vector j has bytes 4 j .. 4 j + 4 of row i.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn transposed_words(rows: &Eight, at: usize) -> [__m256i; 4] {
    // SAFETY: the caller's promise: sixteen bytes can be read of each row.
    let [a, b, c, d] = [0, 1, 2, 3].map(|g| unsafe {
        let first = _mm256_castsi128_si256(_mm_loadu_si128(rows[g].add(at).cast()));
        _mm256_inserti128_si256::<1>(first, _mm_loadu_si128(rows[4 + g].add(at).cast()))
    });
    let (ab, cd) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
    let (ab2, cd2) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
    [
        _mm256_unpacklo_epi64(ab, cd),
        _mm256_unpackhi_epi64(ab, cd),
        _mm256_unpacklo_epi64(ab2, cd2),
        _mm256_unpackhi_epi64(ab2, cd2),
    ]
}

/// Four bytes of eight rows.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn gathered(rows: &Eight, at: usize) -> __m256i {
    // SAFETY: the caller's promise: four bytes can be read of each row.
    let [a, b, c, d, e, f, g, h] = rows.map(|row| unsafe { row.add(at).cast::<i32>().read_unaligned() });
    _mm256_setr_epi32(a, b, c, d, e, f, g, h)
}

/// The lower f16 of every lane.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn half(words: __m256i) -> __m256 {
    let lower = _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
    let packed = _mm_packus_epi32(_mm256_castsi256_si128(lower), _mm256_extracti128_si256::<1>(lower));
    _mm256_cvtph_ps(packed)
}

/// The scales of a run.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn scales_of<P: Packed>(blocks: &Eight, run: usize) -> Scaled {
    // SAFETY: the caller's promise: a block begins with four bytes and more.
    let words = |at| unsafe { gathered(blocks, at) };
    let none = _mm256_setzero_ps();
    match P::SCALES {
        Scales::Float => [(_mm256_castsi256_ps(words(0)), none); 2],
        Scales::Half => [(half(words(0)), none); 2],
        Scales::Halves => {
            let words = words(0);
            [(half(words), half(_mm256_srli_epi32::<16>(words))); 2]
        }
        Scales::Signed { at } => {
            let two = words(at + 2 * run);
            let d = half(_mm256_srli_epi32::<16>(words(at + P::ELEMENTS / 16 - 2)));
            let times_d = |top| _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(top)));
            let [first, second] = [_mm256_slli_epi32::<24>(two), _mm256_slli_epi32::<16>(two)];
            [(times_d(first), none), (times_d(second), none)]
        }
        // SAFETY: as above.
        Scales::SixBits => six_bits(unsafe { transposed_words(blocks, 0) }, run),
        Scales::Computed => {
            let mut all = [[0.0; LANES]; 4];
            for (i, &block) in blocks.iter().enumerate() {
                // SAFETY: the caller's promise.
                let block = unsafe { std::slice::from_raw_parts(block, P::BYTES) };
                let of_one = |bits: u16| _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))));
                let [first, second] = P::scales(block, run, of_one);
                (all[0][i], all[1][i], all[2][i], all[3][i]) = (first.0, first.1, second.0, second.1);
            }
            // SAFETY: eight values.
            let [a, b, c, d] = all.map(|x| unsafe { _mm256_loadu_ps(x.as_ptr()) });
            [(a, b), (c, d)]
        }
    }
}

/// d s and -(dmin m) of a run: d and dmin, then four bytes each of s, of m, and of the lower bits of later ones.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn six_bits([d, s, m, low]: [__m256i; 4], run: usize) -> Scaled {
    let field = |x, down: usize, mask| {
        _mm256_and_si256(_mm256_srl_epi32(x, _mm_cvtsi32_si128(down as i32)), _mm256_set1_epi32(mask))
    };
    let by = 8 * (run % 4);
    let of = |top, from| match run {
        0..4 => field(top, by, 63),
        // The two bits above those of run - 4, beside four of its own.
        _ => _mm256_or_si256(field(top, by + 2, 48), field(low, by + from, 15)),
    };
    let scale = _mm256_mul_ps(half(d), _mm256_cvtepi32_ps(of(s, 0)));
    let least = _mm256_mul_ps(half(_mm256_srli_epi32::<16>(d)), _mm256_cvtepi32_ps(of(m, 4)));
    [(scale, _mm256_xor_ps(least, _mm256_set1_ps(-0.0))); 2]
}

/// The chains of a run: four vectors side by side, as many as hide the latency of a multiply-add.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn chains<P: Packed, const ROUND: bool>(
    sums: &mut [__m256; SIDES],
    x: &[f32; RUN],
    codes: &[Codes; SIDES],
    scales: &[Scaled; SIDES],
) {
    let mut sum = *sums;
    for (half, x) in x.as_chunks::<{ RUN / 2 }>().0.iter().enumerate() {
        let scales = scales.map(|scales| (unit::<P>(scales[half].0), scales[half].1));
        for (j, x) in x.as_chunks::<4>().0.iter().enumerate() {
            for ((sum, codes), (by, plus)) in sum.iter_mut().zip(codes).zip(scales) {
                for (level, &x) in levels::<P>(codes[half * 4 + j]).into_iter().zip(x) {
                    let product = _mm256_mul_ps(level, by);
                    let value = if P::SCALES.add() { _mm256_add_ps(product, plus) } else { product };
                    let value = if ROUND { rounded(value) } else { value };
                    *sum = _mm256_fmadd_ps(_mm256_set1_ps(x), value, *sum);
                }
            }
        }
    }
    *sums = sum;
}

/// A scale in the unit of [`levels`].
#[inline]
#[target_feature(enable = "avx2")]
fn unit<P: Packed>(by: __m256) -> __m256 {
    const PART: f32 = 1.0 / (1 << 24) as f32;
    const { assert!(P::LEVELS.is_some() || !matches!(P::SCALES, Scales::Float), "scales come from f16") };
    if P::LEVELS.is_some() { by } else { _mm256_mul_ps(by, _mm256_set1_ps(PART)) }
}

/// The levels of the four bytes of every lane. A code that is its own value is moved to the top of its lane, for its
/// sign, so it is 2^24 times as large. Both that and the 2^-24 of a scale that comes from f16 are exact, and so is every bit of
/// their product.
#[inline]
#[target_feature(enable = "avx2")]
fn levels<P: Packed>(codes: __m256i) -> [__m256; 4] {
    if P::LEVELS.is_some() {
        return looked_up(codes, const { &bytes_of(P::LEVELS) });
    }
    const TOP: [Shuffle; 4] = [
        in_lanes([-1, -1, -1, 0]),
        in_lanes([-1, -1, -1, 1]),
        in_lanes([-1, -1, -1, 2]),
        in_lanes([-1, -1, -1, 3]),
    ];
    [0, 1, 2, 3].map(|b| _mm256_cvtepi32_ps(shuffled(codes, &TOP[b])))
}

/// Byte i of every level, in both halves of vector i.
const fn bytes_of(levels: Option<[f32; 16]>) -> [Shuffle; 4] {
    let (mut bytes, mut i) = ([[0; 32]; 4], 0);
    while let Some(levels) = levels
        && i < 128
    {
        bytes[i / 32][i % 32] = levels[i % 16].to_le_bytes()[i / 32] as i8;
        i += 1;
    }
    bytes
}

/// Levels of four bytes of every lane: byte by byte of an f32, then the four bytes of each are put together.
#[inline]
#[target_feature(enable = "avx2")]
fn looked_up(codes: __m256i, bytes: &[Shuffle; 4]) -> [__m256; 4] {
    const SIDE_BY_SIDE: Shuffle = {
        let (mut bytes, mut i) = ([0; 32], 0);
        while i < 32 {
            bytes[i] = (i % 4 * 4 + i % 16 / 4) as i8;
            i += 1;
        }
        bytes
    };
    // Byte b of four lanes side by side, so that those of vector b come together.
    let codes = shuffled(codes, &SIDE_BY_SIDE);
    // SAFETY: 32 bytes.
    let [a, b, c, d] = [0, 1, 2, 3]
        .map(|i| unsafe { _mm256_shuffle_epi8(_mm256_loadu_si256(bytes[i].as_ptr().cast()), codes) });
    let (ab, cd) = (_mm256_unpacklo_epi8(a, b), _mm256_unpacklo_epi8(c, d));
    let (ab2, cd2) = (_mm256_unpackhi_epi8(a, b), _mm256_unpackhi_epi8(c, d));
    [
        _mm256_unpacklo_epi16(ab, cd),
        _mm256_unpackhi_epi16(ab, cd),
        _mm256_unpacklo_epi16(ab2, cd2),
        _mm256_unpackhi_epi16(ab2, cd2),
    ]
    .map(|x| _mm256_castsi256_ps(x))
}
