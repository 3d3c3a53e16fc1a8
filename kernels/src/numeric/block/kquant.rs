//! The K types: super-blocks of 256 values with small integer scales (ggml's `ggml-quants.c`). The order of operations
//! is part of the contract, as in [`super`].

use super::{Bits, CodeLayout, NOTHING, Packed, RUN, Scale, Scales, Split, bits};

/// 16 scales (low nibble) and minima (high nibble), 64 bytes of 2-bit values, d, dmin: y = (d s) q - (dmin m), in runs
/// of 16.
pub struct Q2K;

impl Packed for Q2K {
    const NAME: &'static str = "Q2_K";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 84;

    #[inline(always)]
    fn split(run: usize) -> Split {
        let low = Bits { at: 16 + run / 4 * 32, down: 2 * (run % 4), mask: 3 };
        let high = Bits { at: 16, down: 0, mask: 0 };
        Split { low, high, up: 0, less: 0 }
    }

    #[inline(always)]
    fn codes(codes: &mut [i8; RUN], b: &[u8], run: usize) {
        let shift = 2 * (run % 4);
        for (c, &q) in codes.iter_mut().zip(&b[16 + run / 4 * 32..][..32]) {
            *c = (q >> shift & 3) as i8;
        }
    }

    #[inline(always)]
    fn scales(b: &[u8], run: usize, half: impl Fn(u16) -> f32) -> [Scale; 2] {
        let (d, dmin) = (half(bits(b, 80)), half(bits(b, 82)));
        [b[2 * run], b[2 * run + 1]].map(|s| (d * f32::from(s & 15), -(dmin * f32::from(s >> 4))))
    }
}

/// 32 bytes of third bits, 64 bytes of 2-bit values, 12 bytes of 6-bit scales, d: y = (d (s - 32)) (q - 4 if the third
/// bit is *not* set).
pub struct Q3K;

impl Packed for Q3K {
    const NAME: &'static str = "Q3_K";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 110;

    #[inline(always)]
    fn split(run: usize) -> Split {
        let low = Bits { at: 32 + run / 4 * 32, down: 2 * (run % 4), mask: 3 };
        let high = Bits { at: 0, down: run, mask: 1 };
        Split { low, high, up: 2, less: 4 }
    }

    #[inline(always)]
    fn codes(codes: &mut [i8; RUN], b: &[u8], run: usize) {
        let shift = 2 * (run % 4);
        for (c, (&q, &h)) in codes.iter_mut().zip(b[32 + run / 4 * 32..][..32].iter().zip(&b[..32])) {
            *c = (q >> shift & 3 | (h >> run & 1) << 2) as i8 - 4;
        }
    }

    #[inline(always)]
    fn scales(b: &[u8], run: usize, half: impl Fn(u16) -> f32) -> [Scale; 2] {
        let (packed, d) = (&b[96..108], half(bits(b, 108)));
        [2 * run, 2 * run + 1].map(|j| {
            let low = packed[j % 8] >> (4 * (j / 8)) & 15;
            let top = packed[8 + j % 4] >> (2 * (j / 4)) & 3;
            (d * f32::from((low | top << 4) as i8 - 32), NOTHING)
        })
    }
}

/// Scale and minimum `j` (0..8), 6 bits each, from 12 bytes.
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

/// Scale d s and offset -(dmin m) of run `j`.
#[inline(always)]
fn scaled(b: &[u8], j: usize, half: impl Fn(u16) -> f32) -> [Scale; 2] {
    let (s, m) = scale_min(&b[4..16], j);
    [(half(bits(b, 0)) * s, -(half(bits(b, 2)) * m)); 2]
}

/// d, dmin, 12 bytes of scales and minima, 128 bytes of nibbles: y = (d s) q - (dmin m), in runs of 32.
pub struct Q4K;

impl Packed for Q4K {
    const NAME: &'static str = "Q4_K";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 144;
    const SCALES: Scales = Scales::SixBits;
    const LAYOUT: CodeLayout = CodeLayout::Planes { at: 16 };

    #[inline(always)]
    fn codes(codes: &mut [i8; RUN], b: &[u8], run: usize) {
        let shift = 4 * (run % 2);
        for (c, &q) in codes.iter_mut().zip(&b[16 + run / 2 * 32..][..32]) {
            *c = (q >> shift & 15) as i8;
        }
    }

    #[inline(always)]
    fn scales(b: &[u8], run: usize, half: impl Fn(u16) -> f32) -> [Scale; 2] {
        scaled(b, run, half)
    }
}

/// Same as Q4_K, with 32 bytes of fifth bits before the nibbles.
pub struct Q5K;

impl Packed for Q5K {
    const NAME: &'static str = "Q5_K";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 176;
    const SCALES: Scales = Scales::SixBits;

    #[inline(always)]
    fn split(run: usize) -> Split {
        let low = Bits { at: 48 + run / 2 * 32, down: 4 * (run % 2), mask: 15 };
        let high = Bits { at: 16, down: run, mask: 1 };
        Split { low, high, up: 4, less: 0 }
    }

    #[inline(always)]
    fn codes(codes: &mut [i8; RUN], b: &[u8], run: usize) {
        let shift = 4 * (run % 2);
        for (c, (&q, &h)) in codes.iter_mut().zip(b[48 + run / 2 * 32..][..32].iter().zip(&b[16..48])) {
            *c = (q >> shift & 15 | (h >> run & 1) << 4) as i8;
        }
    }

    #[inline(always)]
    fn scales(b: &[u8], run: usize, half: impl Fn(u16) -> f32) -> [Scale; 2] {
        scaled(b, run, half)
    }
}

/// 128 bytes of nibbles, 64 bytes of the upper 2 bits, 16 x i8 scales, d: y = (d s) (q - 32), in runs of 16. The block
/// has two halves of 128 values; in each half, four runs of 32 share 64 bytes of nibbles and 32 bytes of upper bits.
pub struct Q6K;

impl Packed for Q6K {
    const NAME: &'static str = "Q6_K";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 210;
    const SCALES: Scales = Scales::Signed { at: 192 };

    #[inline(always)]
    fn split(run: usize) -> Split {
        let low = Bits { at: run / 4 * 64 + run % 2 * 32, down: run % 4 / 2 * 4, mask: 15 };
        let high = Bits { at: 128 + run / 4 * 32, down: 2 * (run % 4), mask: 3 };
        Split { low, high, up: 4, less: 32 }
    }

    #[inline(always)]
    fn codes(codes: &mut [i8; RUN], b: &[u8], run: usize) {
        let (part, at) = (run / 4, run % 4);
        let (low, shift) = (&b[part * 64 + at % 2 * 32..][..32], 4 * (at / 2));
        let high = &b[128 + part * 32..][..32];
        for (c, (&low, &high)) in codes.iter_mut().zip(low.iter().zip(high)) {
            *c = (low >> shift & 15 | (high >> (2 * at) & 3) << 4) as i8 - 32;
        }
    }

    #[inline(always)]
    fn scales(b: &[u8], run: usize, half: impl Fn(u16) -> f32) -> [Scale; 2] {
        let d = half(bits(b, 208));
        [192 + 2 * run, 193 + 2 * run].map(|at| (d * f32::from(b[at] as i8), NOTHING))
    }
}
