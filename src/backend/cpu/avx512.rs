//! The AVX-512 kernels of matrix products: one tile of at most ROWS x COLS outputs in registers, and the
//! transposition and widening that feed it.
//!
//! A tile's value is one chain of fused multiply-adds over k in ascending order per slice of K; slices are
//! added in order. Nothing here knows of threads.

use std::arch::x86_64::*;

/// Most rows of a tile.
pub const ROWS: usize = 12;
/// Columns of a tile and of a panel: two vectors.
pub const COLS: usize = 32;

/// Sum over k of a[i * row + k * col] * b[k * stride + j].
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// Terms.
    pub k: usize,
    /// Left factor, read one value at a time.
    pub a: *const f32,
    /// Distance between rows of a.
    pub row: usize,
    /// Distance between columns of a.
    pub col: usize,
    /// Right factor: COLS values in a row (or as many as the tile is wide).
    pub b: *const f32,
    /// Distance between rows of b.
    pub stride: usize,
}

/// Where a tile goes.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// Its first element.
    pub at: *mut f32,
    /// Distance between rows.
    pub stride: usize,
    /// Rows, at most ROWS.
    pub rows: usize,
    /// Columns, at most COLS.
    pub cols: usize,
    /// Multiplies the sum.
    pub scale: f32,
    /// Whether what stands there is added.
    pub add: bool,
}

/// What will be read next: that many runs of bytes, evenly apart.
#[derive(Debug, Clone, Copy)]
pub struct Ahead {
    /// The first byte.
    pub at: *const u8,
    /// Bytes of a run.
    pub run: usize,
    /// How many.
    pub runs: usize,
    /// Bytes from one to the next.
    pub stride: usize,
}

impl Ahead {
    /// Asks for the `i`-th of `of` equal parts of it to come to L2.
    pub fn fetch(&self, i: usize, of: usize) {
        let lines = self.run.div_ceil(64).max(1);
        let all = lines * self.runs;
        for line in all * i / of..all * (i + 1) / of {
            let at = self.at.wrapping_add(line / lines * self.stride + line % lines * 64);
            // SAFETY: a hint, which no address can make fault.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
        }
    }
}

/// out = [out +] scale * (sum of the parts)
///
/// # Safety
/// The processor has AVX-512 F; every element that the sizes and strides name is inside its allocation, and
/// the output is nobody else's meanwhile. Of b only the first `cols` values of a row are read.
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
    let lanes = place.cols - (NV - 1) * 16;
    let last: __mmask16 = if lanes >= 16 { !0 } else { (1 << lanes) - 1 };
    let mask = |j: usize| if j + 1 == NV { last } else { !0 };
    let mut sum = [[_mm512_setzero_ps(); NV]; MR];
    for i in 0..MR {
        for j in 0..NV {
            // The output is not needed before all terms have been added, and then at once.
            _mm_prefetch::<_MM_HINT_T0>(place.at.wrapping_add(i * place.stride + 16 * j).cast());
        }
    }
    for p in parts {
        // Four pointers, each for three rows: that is what addressing modes and registers allow.
        let mut a =
            [p.a, p.a.wrapping_add(3 * p.row), p.a.wrapping_add(6 * p.row), p.a.wrapping_add(9 * p.row)];
        let mut b = p.b;
        // SAFETY: in bounds by the caller's promise; lanes outside the mask are not touched.
        unsafe {
            if last == !0 {
                for _ in 0..p.k {
                    let mut v = [_mm512_setzero_ps(); NV];
                    for (j, v) in v.iter_mut().enumerate() {
                        *v = _mm512_loadu_ps(b.add(16 * j));
                    }
                    step(&mut sum, &a, p.row, v);
                    a.iter_mut().for_each(|a| *a = a.wrapping_add(p.col));
                    b = b.wrapping_add(p.stride);
                }
            } else {
                for _ in 0..p.k {
                    let mut v = [_mm512_setzero_ps(); NV];
                    for (j, v) in v.iter_mut().enumerate() {
                        *v = _mm512_maskz_loadu_ps(mask(j), b.wrapping_add(16 * j));
                    }
                    step(&mut sum, &a, p.row, v);
                    a.iter_mut().for_each(|a| *a = a.wrapping_add(p.col));
                    b = b.wrapping_add(p.stride);
                }
            }
        }
    }
    let scale = _mm512_set1_ps(place.scale);
    for (i, row) in sum.iter().enumerate() {
        for (j, &s) in row.iter().enumerate() {
            let at = place.at.wrapping_add(i * place.stride + 16 * j);
            // SAFETY: as above.
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
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn step<const MR: usize, const NV: usize>(
    sum: &mut [[__m512; NV]; MR],
    a: &[*const f32; 4],
    row: usize,
    v: [__m512; NV],
) {
    for i in 0..MR {
        // SAFETY: row i of a exists, says the caller.
        let x = _mm512_set1_ps(unsafe { *a[i / 3].add(i % 3 * row) });
        for j in 0..NV {
            sum[i][j] = _mm512_fmadd_ps(x, v[j], sum[i][j]);
        }
    }
}

/// A number as it is stored.
pub trait Stored: Copy + Default + Send + Sync + bytemuck::Pod {
    /// Sixteen of them under the mask, widened; the others 0.
    ///
    /// # Safety
    /// AVX-512 F, BW and VL; those under the mask can be read.
    unsafe fn load(at: *const Self, mask: __mmask16) -> __m512;
    /// One of them.
    fn widen(self) -> f32;
    /// Values that need no widening.
    fn plain(_: &[Self]) -> Option<&[f32]> {
        None
    }
}

impl Stored for f32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn load(at: *const f32, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_maskz_loadu_ps(mask, at) }
    }
    fn widen(self) -> f32 {
        self
    }
    fn plain(values: &[f32]) -> Option<&[f32]> {
        Some(values)
    }
}

impl Stored for half::bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn load(at: *const half::bf16, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's promise.
        let bits = unsafe { _mm256_maskz_loadu_epi16(mask, at.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
    }
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

impl Stored for half::f16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn load(at: *const half::f16, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's promise.
        let bits = unsafe { _mm256_maskz_loadu_epi16(mask, at.cast()) };
        _mm512_cvtph_ps(bits)
    }
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

/// out[i] = widened x[i]
///
/// # Safety
/// AVX-512 F, BW and VL.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub unsafe fn widen<S: Stored>(out: &mut [f32], x: &[S]) {
    assert_eq!(out.len(), x.len(), "as many values");
    for i in (0..x.len()).step_by(16) {
        let mask: __mmask16 = if x.len() - i >= 16 { !0 } else { (1 << (x.len() - i)) - 1 };
        // SAFETY: the mask ends where the slices do.
        unsafe {
            let v = S::load(x.as_ptr().add(i), mask);
            _mm512_mask_storeu_ps(out.as_mut_ptr().add(i), mask, v);
        }
    }
}

/// out[j * to + i] = widened x[i * from + j], for i in 0..rows (at most 16) and j in 0..cols (at most 16).
/// Sixteen values are written in each row of out, those from `rows` on 0.
///
/// # Safety
/// AVX-512 F, BW and VL; all that the sizes and strides name is inside its allocation.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub unsafe fn transpose<S: Stored>(
    out: (*mut f32, usize),
    x: (*const S, usize),
    rows: usize,
    cols: usize,
    scale: f32,
) {
    let mask: __mmask16 = if cols >= 16 { !0 } else { (1 << cols) - 1 };
    let mut r = [_mm512_setzero_ps(); 16];
    for (i, r) in r.iter_mut().enumerate().take(rows) {
        // SAFETY: row i exists.
        *r = unsafe { S::load(x.0.add(i * x.1), mask) };
    }
    let mut t = [_mm512_setzero_ps(); 16];
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    // Groups of four rows: within each 128-bit lane a 4 x 4 transposition.
    for g in 0..4 {
        let q = |i: usize| _mm512_castps_pd(t[4 * g + i]);
        r[4 * g] = _mm512_castpd_ps(_mm512_unpacklo_pd(q(0), q(2)));
        r[4 * g + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(q(0), q(2)));
        r[4 * g + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(q(1), q(3)));
        r[4 * g + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(q(1), q(3)));
    }
    // Then the 4 x 4 lanes: r[4 g + c] holds column 4 l + c of rows 4 g .. 4 g + 4 in its lane l.
    for c in 0..4 {
        let low = _mm512_shuffle_f32x4::<0x88>(r[c], r[4 + c]);
        let odd = _mm512_shuffle_f32x4::<0xdd>(r[c], r[4 + c]);
        let low2 = _mm512_shuffle_f32x4::<0x88>(r[8 + c], r[12 + c]);
        let odd2 = _mm512_shuffle_f32x4::<0xdd>(r[8 + c], r[12 + c]);
        t[c] = _mm512_shuffle_f32x4::<0x88>(low, low2);
        t[8 + c] = _mm512_shuffle_f32x4::<0xdd>(low, low2);
        t[4 + c] = _mm512_shuffle_f32x4::<0x88>(odd, odd2);
        t[12 + c] = _mm512_shuffle_f32x4::<0xdd>(odd, odd2);
    }
    let by = _mm512_set1_ps(scale);
    for (j, &t) in t.iter().enumerate().take(cols) {
        // SAFETY: row j of out exists.
        unsafe { _mm512_storeu_ps(out.0.add(j * out.1), _mm512_mul_ps(t, by)) };
    }
}
