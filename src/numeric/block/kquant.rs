//! The K types: super-blocks of 256 with small integer scales of their own (ggml's `ggml-quants.c`).
//! The order of operations is the contract, as in [`super`].

use super::{Packed, RUN, half_at};

/// 16 scales (low nibble) and minima (high nibble), 64 bytes of 2-bit numbers, d, dmin:
/// y = (d s) q - (dmin m), in runs of 16.
pub struct Q2K;

impl Packed for Q2K {
    const NAME: &'static str = "Q2_K";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 84;

    #[inline(always)]
    fn unpack(y: &mut [f32; RUN], b: &[u8], run: usize) {
        let (d, dmin) = (half_at(b, 80), half_at(b, 82));
        let (qs, shift) = (&b[16 + run / 4 * 32..][..32], 2 * (run % 4));
        for (half, y) in y.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let s = b[2 * run + half];
            let (d, m) = (d * f32::from(s & 15), dmin * f32::from(s >> 4));
            for (y, &q) in y.iter_mut().zip(&qs[16 * half..][..16]) {
                *y = d * (i32::from(q) >> shift & 3) as f32 - m;
            }
        }
    }
}

/// 32 bytes of third bits, 64 bytes of 2-bit numbers, 12 bytes of 6-bit scales, d:
/// y = (d (s - 32)) (q - 4 where the third bit is *not* set).
pub struct Q3K;

impl Packed for Q3K {
    const NAME: &'static str = "Q3_K";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 110;

    #[inline(always)]
    fn unpack(y: &mut [f32; RUN], b: &[u8], run: usize) {
        let (high, packed, d) = (&b[..32], &b[96..108], half_at(b, 108));
        let (qs, shift) = (&b[32 + run / 4 * 32..][..32], 2 * (run % 4));
        for (half, y) in y.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let j = 2 * run + half;
            let low = packed[j % 8] >> (4 * (j / 8)) & 15;
            let top = packed[8 + j % 4] >> (2 * (j / 4)) & 3;
            let d = d * f32::from((low | top << 4) as i8 - 32);
            let third = &high[16 * half..][..16];
            for ((y, &q), &h) in y.iter_mut().zip(&qs[16 * half..][..16]).zip(third) {
                let q = (i32::from(q) >> shift & 3) + 4 * (i32::from(h) >> run & 1) - 4;
                *y = d * q as f32;
            }
        }
    }
}

/// Scale and minimum `j` (0..8), 6 bits each, out of 12 bytes.
#[inline(always)]
pub(super) fn scale_min(packed: &[u8], j: usize) -> (f32, f32) {
    let (s, m) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        let both = packed[j + 4];
        (both & 15 | packed[j - 4] >> 6 << 4, both >> 4 | packed[j] >> 6 << 4)
    };
    (f32::from(s), f32::from(m))
}

/// d, dmin, 12 bytes of scales and minima, 128 bytes of nibbles: y = (d s) q - (dmin m), in runs of 32.
pub struct Q4K;

impl Packed for Q4K {
    const NAME: &'static str = "Q4_K";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 144;

    #[inline(always)]
    fn unpack(y: &mut [f32; RUN], b: &[u8], run: usize) {
        let (d, dmin) = (half_at(b, 0), half_at(b, 2));
        let (s, m) = scale_min(&b[4..16], run);
        let (d, m) = (d * s, dmin * m);
        let (qs, shift) = (&b[16 + run / 2 * 32..][..32], 4 * (run % 2));
        for i in 0..32 {
            y[i] = d * (i32::from(qs[i]) >> shift & 15) as f32 - m;
        }
    }
}

/// As Q4_K with 32 bytes of fifth bits before the nibbles.
pub struct Q5K;

impl Packed for Q5K {
    const NAME: &'static str = "Q5_K";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 176;

    #[inline(always)]
    fn unpack(y: &mut [f32; RUN], b: &[u8], run: usize) {
        let (d, dmin) = (half_at(b, 0), half_at(b, 2));
        let (s, m) = scale_min(&b[4..16], run);
        let (d, m) = (d * s, dmin * m);
        let (high, qs, shift) = (&b[16..48], &b[48 + run / 2 * 32..][..32], 4 * (run % 2));
        for i in 0..32 {
            let q = i32::from(qs[i]) >> shift & 15 | (i32::from(high[i]) >> run & 1) << 4;
            y[i] = d * q as f32 - m;
        }
    }
}

/// 128 bytes of nibbles, 64 bytes of the upper 2 bits, 16 x i8 scales, d: y = (d s) (q - 32), in runs of 16.
/// Halves of 128; in each, four runs of 32 share 64 bytes of nibbles and 32 of upper bits.
pub struct Q6K;

impl Packed for Q6K {
    const NAME: &'static str = "Q6_K";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 210;

    #[inline(always)]
    fn unpack(y: &mut [f32; RUN], b: &[u8], run: usize) {
        let d = half_at(b, 208);
        let (part, at) = (run / 4, run % 4);
        let (low, shift) = (&b[part * 64 + at % 2 * 32..][..32], 4 * (at / 2));
        let high = &b[128 + part * 32..][..32];
        for (half, y) in y.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let d = d * f32::from(b[192 + 2 * run + half] as i8);
            let (low, high) = (&low[16 * half..][..16], &high[16 * half..][..16]);
            for i in 0..16 {
                let q = i32::from(low[i]) >> shift & 15 | (i32::from(high[i]) >> (2 * at) & 3) << 4;
                y[i] = d * (q - 32) as f32;
            }
        }
    }
}
