//! ggml's blocks of 32 with scales in half precision (`ggml-quants.c`).

use super::{Packed, RUN, half_at};

/// d: f16, 32 x i8: y = d q.
pub struct Q8V0;

impl Packed for Q8V0 {
    const NAME: &'static str = "Q8_0";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 34;

    #[inline(always)]
    fn unpack(y: &mut [f32; RUN], b: &[u8], _: usize) {
        let (d, q) = (half_at(b, 0), &b[2..34]);
        for i in 0..32 {
            y[i] = d * f32::from(q[i] as i8);
        }
    }
}

/// d: f16, 16 bytes of two nibbles, low ones first: y = d (q - 8).
pub struct Q4V0;

impl Packed for Q4V0 {
    const NAME: &'static str = "Q4_0";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 18;

    #[inline(always)]
    fn unpack(y: &mut [f32; RUN], b: &[u8], _: usize) {
        let (d, q) = (half_at(b, 0), &b[2..18]);
        let (low, high) = y.split_at_mut(16);
        for i in 0..16 {
            low[i] = d * (i32::from(q[i] & 15) - 8) as f32;
            high[i] = d * (i32::from(q[i] >> 4) - 8) as f32;
        }
    }
}

/// d, m: f16, nibbles as Q4_0: y = d q + m.
pub struct Q4V1;

impl Packed for Q4V1 {
    const NAME: &'static str = "Q4_1";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 20;

    #[inline(always)]
    fn unpack(y: &mut [f32; RUN], b: &[u8], _: usize) {
        let (d, m, q) = (half_at(b, 0), half_at(b, 2), &b[4..20]);
        let (low, high) = y.split_at_mut(16);
        for i in 0..16 {
            low[i] = d * i32::from(q[i] & 15) as f32 + m;
            high[i] = d * i32::from(q[i] >> 4) as f32 + m;
        }
    }
}

/// The fifth bits of a Q5 block at byte `at`: bit i belongs to element i.
#[inline(always)]
fn fifth(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// Elements i and i + 16.
#[inline(always)]
fn five(bits: u32, q: u8, i: u32) -> (i32, i32) {
    let (low, high) = (bits >> i & 1, bits >> (i + 16) & 1);
    ((u32::from(q & 15) | low << 4) as i32, (u32::from(q >> 4) | high << 4) as i32)
}

/// d: f16, 32 fifth bits, nibbles: y = d (q - 16).
pub struct Q5V0;

impl Packed for Q5V0 {
    const NAME: &'static str = "Q5_0";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 22;

    #[inline(always)]
    fn unpack(y: &mut [f32; RUN], b: &[u8], _: usize) {
        let (d, bits, q) = (half_at(b, 0), fifth(b, 2), &b[6..22]);
        let (low, high) = y.split_at_mut(16);
        for i in 0..16 {
            let (first, second) = five(bits, q[i], i as u32);
            low[i] = d * (first - 16) as f32;
            high[i] = d * (second - 16) as f32;
        }
    }
}

/// d, m: f16, 32 fifth bits, nibbles: y = d q + m.
pub struct Q5V1;

impl Packed for Q5V1 {
    const NAME: &'static str = "Q5_1";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 24;

    #[inline(always)]
    fn unpack(y: &mut [f32; RUN], b: &[u8], _: usize) {
        let (d, m, bits, q) = (half_at(b, 0), half_at(b, 2), fifth(b, 4), &b[8..24]);
        let (low, high) = y.split_at_mut(16);
        for i in 0..16 {
            let (first, second) = five(bits, q[i], i as u32);
            low[i] = d * first as f32 + m;
            high[i] = d * second as f32 + m;
        }
    }
}
