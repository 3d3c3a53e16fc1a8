//! Transposes of sixteen vectors on AVX-512.

use std::arch::x86_64::*;

/// Up to sixteen rows, as `load` reads them; the others are 0.
///
/// # Safety
/// AVX-512 F.
#[inline]
#[target_feature(enable = "avx512f")]
pub unsafe fn load_rows(count: usize, load: impl Fn(usize) -> __m512) -> [__m512; 16] {
    let mut r = [_mm512_setzero_ps(); 16];
    for (i, r) in r.iter_mut().enumerate().take(count) {
        *r = load(i);
    }
    r
}

/// out[j * to + i] = scale * x[i * from + j], for i in 0..rows (at most 16) and j in 0..cols (at most 16).
/// Sixteen values are written in each row of out, those from `rows` on 0.
///
/// # Safety
/// AVX-512 F; all that the sizes and strides name is inside its allocation.
#[target_feature(enable = "avx512f")]
pub unsafe fn transpose(
    out: (*mut f32, usize),
    x: (*const f32, usize),
    (count, cols): (usize, usize),
    scale: f32,
) {
    let mask: __mmask16 = if cols >= 16 { !0 } else { (1 << cols) - 1 };
    // SAFETY: rows and columns exist, says the caller.
    let r = unsafe { load_rows(count, |i| _mm512_maskz_loadu_ps(mask, x.0.add(i * x.1))) };
    let by = _mm512_set1_ps(scale);
    for (j, &t) in transposed(r).iter().enumerate().take(cols) {
        // SAFETY: row j of out exists.
        unsafe { _mm512_storeu_ps(out.0.add(j * out.1), _mm512_mul_ps(t, by)) };
    }
}

/// Sixteen rows of sixteen 32-bit values, transposed.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn transposed(mut r: [__m512; 16]) -> [__m512; 16] {
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
        let lanes = across([r[c], r[4 + c], r[8 + c], r[12 + c]]);
        (t[c], t[4 + c], t[8 + c], t[12 + c]) = (lanes[0], lanes[1], lanes[2], lanes[3]);
    }
    t
}

/// Four vectors of four 128-bit lanes, transposed.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn across(r: [__m512; 4]) -> [__m512; 4] {
    let (low, odd) = (_mm512_shuffle_f32x4::<0x88>(r[0], r[1]), _mm512_shuffle_f32x4::<0xdd>(r[0], r[1]));
    let (low2, odd2) = (_mm512_shuffle_f32x4::<0x88>(r[2], r[3]), _mm512_shuffle_f32x4::<0xdd>(r[2], r[3]));
    [
        _mm512_shuffle_f32x4::<0x88>(low, low2),
        _mm512_shuffle_f32x4::<0x88>(odd, odd2),
        _mm512_shuffle_f32x4::<0xdd>(low, low2),
        _mm512_shuffle_f32x4::<0xdd>(odd, odd2),
    ]
}
