//! The AVX-512 BF16 kernel of matrix products: a tile as in `avx512.rs` whose factors are pairs of bf16 numbers.
//!
//! `_mm512_dpbf16_ps` is two fused multiply-adds, the upper numbers of the pairs first, each rounded to nearest
//! even; what is smaller than a normal number counts as 0. (So says the manual; `the_dot_product_is_two_fused_
//! multiply_adds` asks the processor.) With the number of even k in the upper half a tile's value is the chain
//! over ascending k that the f32 tile computes of the same rounded numbers: that tile is the reference, and,
//! where this instruction runs at half the rate, the faster one.

use super::super::operands::{COLS, Pairs, Place};
use super::avx512::put;
use super::transpose_avx512::{across, load_rows, transposed};
use std::arch::x86_64::*;

/// out = [out +] scale * (sum of the pairs, then of those of the second product)
///
/// # Safety
/// As [`super::tile::tile`]; the processor has AVX-512 BF16. All of b's 32 pairs in a row are read.
#[target_feature(enable = "avx512f,avx512bf16")]
pub unsafe fn tile(pairs: Pairs, second: Option<Pairs>, place: Place) {
    macro_rules! by_rows {
        ($vectors:literal: $($rows:literal)*) => {
            match place.rows {
                // SAFETY: the caller's promise.
                $($rows => unsafe { fixed::<$rows, $vectors>(pairs, second, place) },)*
                _ => unreachable!("a tile has 1 to 12 rows"),
            }
        };
    }
    if place.cols > 16 {
        by_rows!(2: 1 2 3 4 5 6 7 8 9 10 11 12);
    } else {
        by_rows!(1: 1 2 3 4 5 6 7 8 9 10 11 12);
    }
}

#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn fixed<const MR: usize, const NV: usize>(pairs: Pairs, second: Option<Pairs>, place: Place) {
    let mut sum = [[_mm512_setzero_ps(); NV]; MR];
    place.near::<MR>(NV);
    // SAFETY: the caller's promise.
    unsafe {
        dots(&mut sum, pairs);
        if let Some(second) = second {
            dots(&mut sum, second);
        }
        if place.short { put_pairs(&sum, place) } else { put(&sum, place) }
    }
}

/// sum += a product, in ascending order of pairs.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
unsafe fn dots<const MR: usize, const NV: usize>(sum: &mut [[__m512; NV]; MR], pairs: Pairs) {
    let far = |rows: usize| pairs.a.wrapping_add(rows * pairs.row);
    let (mut a, mut b) = ([pairs.a, far(3), far(6), far(9)], pairs.b);
    for _ in 0..pairs.k {
        // SAFETY: a row of b has 32 pairs, and row i of a exists, says the caller; pairs of bf16 are 32 bits, whatever
        // they are called.
        unsafe {
            let mut v = [_mm512_setzero_si512(); NV];
            for (j, v) in v.iter_mut().enumerate() {
                *v = _mm512_loadu_si512(b.add(16 * j).cast());
            }
            for i in 0..MR {
                let x: __m512bh =
                    std::mem::transmute(_mm512_set1_epi32(*a[i / 3].add(i % 3 * pairs.row) as i32));
                for j in 0..NV {
                    sum[i][j] =
                        _mm512_dpbf16_ps(sum[i][j], x, std::mem::transmute::<__m512i, __m512bh>(v[j]));
                }
            }
        }
        a.iter_mut().for_each(|a| *a = a.wrapping_add(pairs.col));
        b = b.wrapping_add(COLS);
    }
}

/// out = scale * sum in pairs, rounded as [`pair_up`] does.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
unsafe fn put_pairs<const MR: usize, const NV: usize>(sum: &[[__m512; NV]; MR], place: Place) {
    // SAFETY: in bounds by the caller's promise; the mask ends where the outputs do.
    unsafe {
        let (scale, mask) = (_mm512_set1_ps(place.scale), first(place.cols.div_ceil(2)));
        for (i, row) in sum.iter().enumerate() {
            let high = if NV == 2 { row[NV - 1] } else { _mm512_setzero_ps() };
            let pairs = paired(_mm512_mul_ps(row[0], scale), _mm512_mul_ps(high, scale));
            let at = place.at.wrapping_add(i * place.stride);
            _mm512_mask_storeu_epi32(at.cast(), mask, pairs);
        }
    }
}

/// out = x in pairs, rounded to nearest even (what is not normal becomes 0); a last single number gets a 0.
///
/// # Safety
/// AVX-512 F, BW and BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub unsafe fn pair_up(out: &mut [u32], x: &[f32]) {
    assert_eq!(out.len(), x.len().div_ceil(2), "a word for two numbers");
    let (whole, rest) = out.split_at_mut(x.len() / 32 * 16);
    let (vectors, single) = x.as_chunks::<32>();
    for (out, x) in whole.chunks_exact_mut(16).zip(vectors) {
        // SAFETY: sixteen words, and as many pairs.
        unsafe {
            let (low, high) = (_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x.as_ptr().add(16)));
            _mm512_storeu_si512(out.as_mut_ptr().cast(), paired(low, high));
        }
    }
    if !rest.is_empty() {
        // SAFETY: the mask ends where the slice does.
        unsafe {
            let pairs = pairs_of(single.as_ptr(), single.len());
            _mm512_mask_storeu_epi32(rest.as_mut_ptr().cast(), first(rest.len()), pairs);
        }
    }
}

/// out[j] = the pair of even[j] and odd[j], rounded as [`pair_up`] does.
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub unsafe fn interleave(out: &mut [u32], even: &[f32], odd: &[f32]) {
    assert!(
        out.len() == even.len() && out.len() == odd.len() && out.len().is_multiple_of(16),
        "whole vectors"
    );
    // Of 32 numbers, those of the odd row first: 16 above 0, 17 above 1, and so on.
    let order: [u32; 16] = std::array::from_fn(|j| (j as u32 + 16) << 16 | j as u32);
    // SAFETY: sixteen words.
    let order = unsafe { _mm512_loadu_si512(order.as_ptr().cast()) };
    for ((out, even), odd) in out.chunks_exact_mut(16).zip(even.chunks_exact(16)).zip(odd.chunks_exact(16)) {
        // SAFETY: all three have sixteen values; 32 numbers are a vector, whatever they are called.
        unsafe {
            let both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(even.as_ptr()), _mm512_loadu_ps(odd.as_ptr()));
            let pairs = _mm512_permutexvar_epi16(order, std::mem::transmute::<__m512bh, __m512i>(both));
            _mm512_storeu_si512(out.as_mut_ptr().cast(), pairs);
        }
    }
}

/// out[w * 32 + i] = pair w of x[i * stride ..] for `rows` rows i (at most 16) of at most 32 numbers each, rounded as
/// [`pair_up`] does. Sixteen words are written for each pair, those from `rows` on 0.
///
/// # Safety
/// As there; all that the sizes and the stride name is inside its allocation.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub unsafe fn pair_and_turn(
    out: *mut u32,
    (x, stride): (*const f32, usize),
    (rows, numbers): (usize, usize),
) {
    // SAFETY: the caller's promise.
    let pairs = unsafe { load_rows(rows, |i| _mm512_castsi512_ps(pairs_of(x.add(i * stride), numbers))) };
    for (w, &column) in transposed(pairs).iter().enumerate().take(numbers.div_ceil(2)) {
        // SAFETY: as above.
        unsafe { _mm512_storeu_ps(out.add(w * COLS).cast(), column) };
    }
}

/// Pairs along the columns become pairs along the rows: out[w * 32 + j] is the pair of rows 2 w and 2 w + 1 in column j
/// of x, for `rows` rows `stride` words apart, of which `words` words (at most 16) are read; what is beyond is 0.
///
/// # Safety
/// As there; `rows.div_ceil(2) * 32` words can be written.
#[target_feature(enable = "avx512f,avx512bw")]
pub unsafe fn turn_rows(out: *mut u32, (x, stride): (*const u32, usize), rows: usize, words: usize) {
    // Numbers of the first row are 0 to 31 and of the second 32 to 63, of every word the odd column first.
    let order = |from: usize| -> [u16; 32] {
        std::array::from_fn(|i| {
            let column = from + i / 2;
            let number = (column ^ 1) as u16;
            if i % 2 == 0 { 32 + number } else { number }
        })
    };
    let orders = [order(0), order(16)];
    // SAFETY: the caller's promise; the orders are vectors.
    unsafe {
        let orders = orders.each_ref().map(|o| _mm512_loadu_si512(o.as_ptr().cast()));
        let load = |row: usize| {
            let mask = if row < rows { first(words) } else { 0 };
            _mm512_maskz_loadu_epi32(mask, x.wrapping_add(row * stride).cast())
        };
        for w in 0..rows.div_ceil(2) {
            let (even, odd) = (load(2 * w), load(2 * w + 1));
            for (half, order) in orders.iter().enumerate() {
                let paired = _mm512_permutex2var_epi16(even, *order, odd);
                _mm512_storeu_si512(out.add(w * COLS + 16 * half).cast(), paired);
            }
        }
    }
}

/// At most 32 numbers in pairs; a last single one gets a 0.
///
/// # Safety
/// As [`pair_up`]; that many numbers can be read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn pairs_of(x: *const f32, numbers: usize) -> __m512i {
    // SAFETY: the masks end where the numbers do.
    unsafe {
        let low = _mm512_maskz_loadu_ps(first(numbers), x);
        let high = _mm512_maskz_loadu_ps(first(numbers.saturating_sub(16)), x.wrapping_add(16));
        paired(low, high)
    }
}

/// The first `count` lanes, or all.
fn first(count: usize) -> __mmask16 {
    if count >= 16 { !0 } else { (1 << count) - 1 }
}

/// 32 numbers in pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn paired(low: __m512, high: __m512) -> __m512i {
    // SAFETY: 32 numbers of 16 bits are a vector, whatever they are called.
    let pairs: __m512i = unsafe { std::mem::transmute(_mm512_cvtne2ps_pbh(high, low)) };
    // In memory's order the even number is the lower half.
    _mm512_rol_epi32::<16>(pairs)
}

/// Pairs along K become pairs along N: out[n / 2 * 32 + k] for 16 outputs n and at most 16 k, of which words
/// exist for `words` (others become 0). Words of the next k are 32 further on.
///
/// # Safety
/// AVX-512 F and BW; `words` rows of 16 words can be read, and 16 words written in each of 8 rows of `out`.
#[target_feature(enable = "avx512f,avx512bw")]
pub unsafe fn turn_pairs(out: *mut u32, x: *const u32, words: usize) {
    // Of outputs n and n + 1 and numbers k and k + 1, as 16 bits: (n, k+1) (n, k) (n+1, k+1) (n+1, k) becomes
    // (n+1, k) (n, k) (n+1, k+1) (n, k+1).
    let order = _mm512_set4_epi32(0x0908_0d0c, 0x0b0a_0f0e, 0x0100_0504, 0x0302_0706);
    let mut r = [_mm512_setzero_si512(); 8];
    for (i, r) in r.iter_mut().enumerate().take(words) {
        // SAFETY: the caller's promise.
        *r = _mm512_shuffle_epi8(unsafe { _mm512_loadu_si512(x.add(i * COLS).cast()) }, order);
    }
    let pair = |i: usize, odd: bool| {
        let (a, b) = (r[2 * i], r[2 * i + 1]);
        _mm512_castsi512_ps(if odd { _mm512_unpackhi_epi64(a, b) } else { _mm512_unpacklo_epi64(a, b) })
    };
    for odd in [false, true] {
        let lanes = across([pair(0, odd), pair(1, odd), pair(2, odd), pair(3, odd)]);
        for (l, lanes) in lanes.into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { _mm512_storeu_ps(out.add((2 * l + usize::from(odd)) * COLS).cast(), lanes) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::runtime::isa::{Bf16, bf16};
    use super::*;
    use crate::numeric::rng::Stream;

    /// One dot product.
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn dot(sum: f32, a: u32, b: u32) -> f32 {
        let of = |x: u32| _mm512_set1_epi32(x as i32);
        // SAFETY: pairs of bf16 are 32 bits, whatever they are called.
        let (a, b): (__m512bh, __m512bh) = unsafe {
            (std::mem::transmute::<__m512i, __m512bh>(of(a)), std::mem::transmute::<__m512i, __m512bh>(of(b)))
        };
        _mm512_cvtss_f32(_mm512_dpbf16_ps(_mm512_set1_ps(sum), a, b))
    }

    #[test]
    fn the_dot_product_is_two_fused_multiply_adds() {
        if bf16() == Bf16::None {
            return println!("skipped: the processor has no AVX-512 BF16");
        }
        let mut draws = Stream::new(&[7]);
        // Any sign and mantissa, exponents far enough from the ends.
        let mut number = || {
            let (bits, exponent) = (draws.below(1 << 24), 110 + draws.below(34));
            (bits & 1) << 31 | exponent << 23 | (bits >> 1)
        };
        for _ in 0..100_000 {
            let [a0, a1, b0, b1, sum] = std::array::from_fn(|_| number());
            let upper = |x: u32| f32::from_bits(x & 0xffff_0000);
            let pair = |x: u32, y: u32| x & 0xffff_0000 | y >> 16;
            // SAFETY: the processor was asked.
            let got = unsafe { dot(f32::from_bits(sum), pair(a0, a1), pair(b0, b1)) };
            let first = upper(a0).mul_add(upper(b0), f32::from_bits(sum));
            let want = upper(a1).mul_add(upper(b1), first);
            assert_eq!(got.to_bits(), want.to_bits(), "{got} {want}");
        }
    }

    #[test]
    fn pairs_along_k_become_pairs_along_n() {
        if bf16() == Bf16::None {
            return println!("skipped: the processor has no AVX-512 BF16");
        }
        let number = |n: usize, k: usize| (n * 100 + k) as u32;
        let mut x = [0u32; 8 * COLS];
        for words in 0..=8 {
            for (i, x) in x.iter_mut().enumerate() {
                let (k, n) = (i / COLS * 2, i % COLS);
                *x = number(n, k) << 16 | number(n, k + 1);
            }
            let mut out = [u32::MAX; 8 * COLS];
            // SAFETY: the processor was asked; 8 rows of 32 words each.
            unsafe { turn_pairs(out.as_mut_ptr(), x.as_ptr(), words) };
            for (i, &out) in out.iter().enumerate() {
                let (n, k) = (i / COLS * 2, i % COLS);
                let want = if k < 2 * words { number(n, k) << 16 | number(n + 1, k) } else { 0 };
                assert_eq!(
                    out,
                    if k < 16 { want } else { u32::MAX },
                    "{words} words, outputs {n}, number {k}"
                );
            }
        }
    }
}
