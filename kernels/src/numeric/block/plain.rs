//! ggml's blocks of 32 values with f16 scales (`ggml-quants.c`).

use super::{CodeLayout, NOTHING, Packed, RUN, Scale, Scales, bits};

/// The codes in the low nibbles, then those in the high nibbles.
#[inline(always)]
fn nibbles(codes: &mut [i8; RUN], q: &[u8], less: i8) {
    let (low, high) = codes.split_at_mut(16);
    for (c, &q) in low.iter_mut().zip(q) {
        *c = (q & 15) as i8 - less;
    }
    for (c, &q) in high.iter_mut().zip(q) {
        *c = (q >> 4) as i8 - less;
    }
}

/// Adds 16 to code i if bit i is set.
#[inline(always)]
fn fifths(codes: &mut [i8; RUN], b: &[u8], at: usize) {
    let bits = u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
    for (i, c) in codes.iter_mut().enumerate() {
        *c += ((bits >> i & 1) << 4) as i8;
    }
}

/// d: f16, 32 x i8: y = d q.
pub struct Q8V0;

impl Packed for Q8V0 {
    const NAME: &'static str = "Q8_0";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 34;
    const LAYOUT: CodeLayout = CodeLayout::Bytes { at: 2 };
    const SCALES: Scales = Scales::Half;

    #[inline(always)]
    fn codes(codes: &mut [i8; RUN], b: &[u8], _: usize) {
        for (c, &q) in codes.iter_mut().zip(&b[2..34]) {
            *c = q as i8;
        }
    }

    #[inline(always)]
    fn scales(b: &[u8], _: usize, half: impl Fn(u16) -> f32) -> [Scale; 2] {
        [(half(bits(b, 0)), NOTHING); 2]
    }
}

/// d: f16, 16 bytes of two nibbles, low ones first: y = d (q - 8).
pub struct Q4V0;

impl Packed for Q4V0 {
    const NAME: &'static str = "Q4_0";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 18;
    const LAYOUT: CodeLayout = CodeLayout::Halves { at: 2, less: 8 };
    const SCALES: Scales = Scales::Half;

    #[inline(always)]
    fn codes(codes: &mut [i8; RUN], b: &[u8], _: usize) {
        nibbles(codes, &b[2..18], 8);
    }

    #[inline(always)]
    fn scales(b: &[u8], _: usize, half: impl Fn(u16) -> f32) -> [Scale; 2] {
        [(half(bits(b, 0)), NOTHING); 2]
    }
}

/// d, m: f16, nibbles as Q4_0: y = d q + m.
pub struct Q4V1;

impl Packed for Q4V1 {
    const NAME: &'static str = "Q4_1";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 20;
    const LAYOUT: CodeLayout = CodeLayout::Halves { at: 4, less: 0 };
    const SCALES: Scales = Scales::Halves;

    #[inline(always)]
    fn codes(codes: &mut [i8; RUN], b: &[u8], _: usize) {
        nibbles(codes, &b[4..20], 0);
    }

    #[inline(always)]
    fn scales(b: &[u8], _: usize, half: impl Fn(u16) -> f32) -> [Scale; 2] {
        [(half(bits(b, 0)), half(bits(b, 2))); 2]
    }
}

/// d: f16, 32 fifth bits, nibbles: y = d (q - 16).
pub struct Q5V0;

impl Packed for Q5V0 {
    const NAME: &'static str = "Q5_0";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 22;
    const LAYOUT: CodeLayout = CodeLayout::Fifths { at: 6, bits: 2, less: 16 };
    const SCALES: Scales = Scales::Half;

    #[inline(always)]
    fn codes(codes: &mut [i8; RUN], b: &[u8], _: usize) {
        nibbles(codes, &b[6..22], 16);
        fifths(codes, b, 2);
    }

    #[inline(always)]
    fn scales(b: &[u8], _: usize, half: impl Fn(u16) -> f32) -> [Scale; 2] {
        [(half(bits(b, 0)), NOTHING); 2]
    }
}

/// d, m: f16, 32 fifth bits, nibbles: y = d q + m.
pub struct Q5V1;

impl Packed for Q5V1 {
    const NAME: &'static str = "Q5_1";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 24;
    const LAYOUT: CodeLayout = CodeLayout::Fifths { at: 8, bits: 4, less: 0 };
    const SCALES: Scales = Scales::Halves;

    #[inline(always)]
    fn codes(codes: &mut [i8; RUN], b: &[u8], _: usize) {
        nibbles(codes, &b[8..24], 0);
        fifths(codes, b, 4);
    }

    #[inline(always)]
    fn scales(b: &[u8], _: usize, half: impl Fn(u16) -> f32) -> [Scale; 2] {
        [(half(bits(b, 0)), half(bits(b, 2))); 2]
    }
}
