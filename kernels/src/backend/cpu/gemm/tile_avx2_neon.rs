//! The kernel of matrix products where vectors have eight or four numbers: a tile in parts of at most 6 x 16 outputs,
//! whose sums are 12 registers of AVX2's 16 (a row of the right factor takes two more, a number of the left one another),
//! or 24 of NEON's 32. Elsewhere a part has 2 rows, 8 registers, and a multiply-add rounds twice.
//!
//! Its parts are inlined without features of their own, always: a sum that does not stay in registers runs at a
//! quarter of the speed.

use super::super::operands::{Part, Place};
use super::super::runtime::isa::{Lanes, Twice};
#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::*;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Columns of a part: a cache line of the right factor.
const COLS: usize = 16;

/// A register of f32 numbers.
///
/// # Safety
/// Of its functions: the processor has such registers, and the numbers at an address are there.
trait Vector: Copy {
    /// Numbers in it.
    const LANES: usize;
    /// Rows of a part, at most 6.
    const ROWS: usize = 6;
    /// x everywhere.
    unsafe fn splat(x: f32) -> Self;
    /// The numbers from there on.
    unsafe fn load(at: *const f32) -> Self;
    /// Writes them.
    unsafe fn store(self, at: *mut f32);
    /// self * by
    unsafe fn times(self, by: Self) -> Self;
    /// self * by + plus, rounded as [`Lanes`] of this processor say.
    unsafe fn times_plus(self, by: Self, plus: Self) -> Self;
}

#[cfg(target_arch = "x86_64")]
impl Vector for __m256 {
    const LANES: usize = 8;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the caller's promise, here and below.
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: as above.
        unsafe { _mm256_loadu_ps(at) }
    }
    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: as above.
        unsafe { _mm256_storeu_ps(at, self) }
    }
    #[inline(always)]
    unsafe fn times(self, by: Self) -> Self {
        // SAFETY: as above.
        unsafe { _mm256_mul_ps(self, by) }
    }
    #[inline(always)]
    unsafe fn times_plus(self, by: Self, plus: Self) -> Self {
        // SAFETY: as above.
        unsafe { _mm256_fmadd_ps(self, by, plus) }
    }
}

#[cfg(target_arch = "aarch64")]
impl Vector for float32x4_t {
    const LANES: usize = 4;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the caller's promise, here and below.
        unsafe { vdupq_n_f32(x) }
    }
    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: as above.
        unsafe { vld1q_f32(at) }
    }
    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: as above.
        unsafe { vst1q_f32(at, self) }
    }
    #[inline(always)]
    unsafe fn times(self, by: Self) -> Self {
        // SAFETY: as above.
        unsafe { vmulq_f32(self, by) }
    }
    #[inline(always)]
    unsafe fn times_plus(self, by: Self, plus: Self) -> Self {
        // SAFETY: as above.
        unsafe { vfmaq_f32(plus, self, by) }
    }
}

/// What every processor has, which the compiler puts into what this one has.
impl Vector for [f32; 4] {
    const LANES: usize = 4;
    const ROWS: usize = 2;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        [x; 4]
    }
    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: the caller's promise, here and below.
        unsafe { at.cast::<[f32; 4]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: as above.
        unsafe { at.cast::<[f32; 4]>().write_unaligned(self) }
    }
    #[inline(always)]
    unsafe fn times(self, by: Self) -> Self {
        std::array::from_fn(|i| self[i] * by[i])
    }
    #[inline(always)]
    unsafe fn times_plus(self, by: Self, plus: Self) -> Self {
        std::array::from_fn(|i| Twice::fma(self[i], by[i], plus[i]))
    }
}

/// On AVX2.
///
/// # Safety
/// As [`super::tile::tile`]; the processor has AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
pub unsafe fn avx2(parts: &[Part], place: Place) {
    // SAFETY: the caller's promise.
    unsafe { tile::<__m256, 2>(parts, place) }
}

/// On NEON.
///
/// # Safety
/// As [`super::tile::tile`].
#[cfg(target_arch = "aarch64")]
pub unsafe fn neon(parts: &[Part], place: Place) {
    // SAFETY: the caller's promise.
    unsafe { tile::<float32x4_t, 4>(parts, place) }
}

/// On what Rust compiles for.
///
/// # Safety
/// As [`super::tile::tile`].
pub unsafe fn generic(parts: &[Part], place: Place) {
    // SAFETY: the caller's promise.
    unsafe { tile::<[f32; 4], 4>(parts, place) }
}

/// `NV` vectors are the columns of a part.
#[inline(always)]
unsafe fn tile<V: Vector, const NV: usize>(parts: &[Part], place: Place) {
    const { assert!(NV * V::LANES == COLS) };
    for j in (0..place.cols).step_by(COLS) {
        for i in (0..place.rows).step_by(V::ROWS) {
            let at = place.at.wrapping_add(i * place.stride + j);
            let here =
                Place { at, rows: V::ROWS.min(place.rows - i), cols: COLS.min(place.cols - j), ..place };
            macro_rules! by_rows {
                ($($rows:literal)*) => {
                    match here.rows {
                        // SAFETY: the caller's promise.
                        $($rows => unsafe { fixed::<V, $rows, NV>(parts, (i, j), here) },)*
                        _ => unreachable!("a part has 1 to 6 rows"),
                    }
                };
            }
            by_rows!(1 2 3 4 5 6);
        }
    }
}

/// A part of MR rows, from row i and column j of the tile on.
#[inline(always)]
unsafe fn fixed<V: Vector, const MR: usize, const NV: usize>(
    parts: &[Part],
    (i, j): (usize, usize),
    place: Place,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut sum = [[V::splat(0.0); NV]; MR];
        place.near::<MR>(1);
        for p in parts {
            chain(&mut sum, &Part { a: p.a.wrapping_add(i * p.row), b: p.b.wrapping_add(j), ..*p });
        }
        put(&sum, place);
    }
}

/// sum += a part, in ascending order of k.
#[inline(always)]
unsafe fn chain<V: Vector, const MR: usize, const NV: usize>(sum: &mut [[V; NV]; MR], p: &Part) {
    // Two pointers, each for three rows: that is what addressing modes and registers allow.
    let (mut a, mut b) = ([p.a, p.a.wrapping_add(3 * p.row)], p.b);
    for _ in 0..p.k {
        // SAFETY: a row of b has 16 numbers from here on, and row r of a exists, says the caller.
        unsafe {
            let mut v = [V::splat(0.0); NV];
            for (j, v) in v.iter_mut().enumerate() {
                *v = V::load(b.add(j * V::LANES));
            }
            for r in 0..MR {
                let x = V::splat(*a[r / 3].add(r % 3 * p.row));
                for j in 0..NV {
                    sum[r][j] = x.times_plus(v[j], sum[r][j]);
                }
            }
        }
        a.iter_mut().for_each(|a| *a = a.wrapping_add(p.col));
        b = b.wrapping_add(p.stride);
    }
}

/// out = [out +] scale * sum
#[inline(always)]
unsafe fn put<V: Vector, const MR: usize, const NV: usize>(sum: &[[V; NV]; MR], place: Place) {
    // SAFETY: in bounds by the caller's promise; what is not whole goes through a row of its own.
    unsafe {
        if place.cols == COLS {
            for (r, row) in sum.iter().enumerate() {
                put_row(row, place.at.wrapping_add(r * place.stride), place);
            }
            return;
        }
        for (r, row) in sum.iter().enumerate() {
            let (at, mut part) = (place.at.wrapping_add(r * place.stride), [0.0; COLS]);
            if place.add {
                std::ptr::copy_nonoverlapping(at, part.as_mut_ptr(), place.cols);
            }
            put_row(row, part.as_mut_ptr(), place);
            std::ptr::copy_nonoverlapping(part.as_ptr(), at, place.cols);
        }
    }
}

/// A whole row.
#[inline(always)]
unsafe fn put_row<V: Vector, const NV: usize>(row: &[V; NV], to: *mut f32, place: Place) {
    // SAFETY: the caller's promise.
    unsafe {
        let scale = V::splat(place.scale);
        for (j, s) in row.iter().enumerate() {
            let to = to.add(j * V::LANES);
            let v = if place.add { s.times_plus(scale, V::load(to)) } else { s.times(scale) };
            v.store(to);
        }
    }
}
