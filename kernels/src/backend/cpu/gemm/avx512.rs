//! The AVX-512 kernel of matrix products: one tile of at most 12 x 32 outputs in 24 registers.
//!
//! Its parts are inlined without features of their own, always: a sum that does not stay in registers runs at a
//! quarter of the speed.

use super::super::operands::{Part, Place};
use std::arch::x86_64::*;

/// out = [out +] scale * (sum of the parts)
///
/// # Safety
/// The processor has AVX-512 F; every element that the sizes and strides name is inside its allocation, and
/// no other thread accesses the output during the call. Of b only the first `cols` values of a row are read.
#[target_feature(enable = "avx512f")]
pub unsafe fn tile(parts: &[Part], place: Place) {
    macro_rules! by_rows {
        ($vectors:literal: $($rows:literal)*) => {
            match place.rows {
                // SAFETY: the caller's promise.
                $($rows => unsafe { fixed::<$rows, $vectors>(parts, place) },)*
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

#[target_feature(enable = "avx512f")]
unsafe fn fixed<const MR: usize, const NV: usize>(parts: &[Part], place: Place) {
    let mut sum = [[_mm512_setzero_ps(); NV]; MR];
    place.near::<MR>(NV);
    for p in parts {
        // SAFETY: the caller's promise.
        unsafe { chain(&mut sum, p, place.last::<NV>()) };
    }
    // SAFETY: the caller's promise.
    unsafe { put(&sum, place) };
}

impl Place {
    /// Lanes of the last vector of a row.
    #[inline]
    pub fn last<const NV: usize>(&self) -> __mmask16 {
        let lanes = self.cols - (NV - 1) * 16;
        if lanes >= 16 { !0 } else { (1 << lanes) - 1 }
    }
}

/// sum += a part, in ascending order of k. Of the last vector of a row of b only the lanes of `last` are read.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
pub unsafe fn chain<const MR: usize, const NV: usize>(
    sum: &mut [[__m512; NV]; MR],
    p: &Part,
    last: __mmask16,
) {
    // Four pointers, each for three rows: that is what addressing modes and registers allow.
    let mut a = [p.a, p.a.wrapping_add(3 * p.row), p.a.wrapping_add(6 * p.row), p.a.wrapping_add(9 * p.row)];
    let mut b = p.b;
    let mask = |j: usize| if j + 1 == NV { last } else { !0 };
    // SAFETY: in bounds by the caller's promise; lanes outside the mask are not touched.
    unsafe {
        if last == !0 {
            for _ in 0..p.k {
                let mut v = [_mm512_setzero_ps(); NV];
                for (j, v) in v.iter_mut().enumerate() {
                    *v = _mm512_loadu_ps(b.add(16 * j));
                }
                step(sum, &a, p.row, v);
                a.iter_mut().for_each(|a| *a = a.wrapping_add(p.col));
                b = b.wrapping_add(p.stride);
            }
        } else {
            for _ in 0..p.k {
                let mut v = [_mm512_setzero_ps(); NV];
                for (j, v) in v.iter_mut().enumerate() {
                    *v = _mm512_maskz_loadu_ps(mask(j), b.wrapping_add(16 * j));
                }
                step(sum, &a, p.row, v);
                a.iter_mut().for_each(|a| *a = a.wrapping_add(p.col));
                b = b.wrapping_add(p.stride);
            }
        }
    }
}

/// out = [out +] scale * sum
///
/// # Safety
/// As [`tile`].
#[inline(always)]
pub unsafe fn put<const MR: usize, const NV: usize>(sum: &[[__m512; NV]; MR], place: Place) {
    // SAFETY: the caller's promise.
    let scale = unsafe { _mm512_set1_ps(place.scale) };
    let mask = |j: usize| if j + 1 == NV { place.last::<NV>() } else { !0 };
    for (i, row) in sum.iter().enumerate() {
        for (j, &s) in row.iter().enumerate() {
            let at = place.at.wrapping_add(i * place.stride + 16 * j);
            // SAFETY: in bounds by the caller's promise; lanes outside the mask are not touched.
            unsafe {
                let v = if place.add {
                    _mm512_fmadd_ps(s, scale, _mm512_maskz_loadu_ps(mask(j), at))
                } else {
                    _mm512_mul_ps(s, scale)
                };
                _mm512_mask_storeu_ps(at, mask(j), v);
            }
        }
    }
}

/// One k of every row.
#[inline(always)]
unsafe fn step<const MR: usize, const NV: usize>(
    sum: &mut [[__m512; NV]; MR],
    a: &[*const f32; 4],
    row: usize,
    v: [__m512; NV],
) {
    for i in 0..MR {
        // SAFETY: row i of a exists, says the caller.
        unsafe {
            let x = _mm512_set1_ps(*a[i / 3].add(i % 3 * row));
            for j in 0..NV {
                sum[i][j] = _mm512_fmadd_ps(x, v[j], sum[i][j]);
            }
        }
    }
}
