//! bitsandbytes' NF4 (Dettmers et al. 2023, arXiv:2305.14314): 64 values, their largest magnitude as f32, and a 4-bit
//! code per value that selects a level; the first of two values in a byte has the upper bits. bitsandbytes stores codes
//! and magnitudes in two tensors; here a block contains both, so that a matrix row is contiguous. Quantized magnitudes
//! (nested quantisation) are stored as f32 here.

use super::{CodeLayout, NOTHING, Packed, RUN, Scale, Scales};

/// The values of the codes, from bitsandbytes (`get_4bit_type("nf4")`).
pub const LEVELS: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// absmax: f32, then 32 bytes of two codes each: y = level absmax.
pub struct Nf4;

impl Packed for Nf4 {
    const NAME: &'static str = "NF4";
    const ELEMENTS: usize = 64;
    const BYTES: usize = 36;
    const LAYOUT: CodeLayout = CodeLayout::Pairs { at: 4 };
    const SCALES: Scales = Scales::Float;
    const LEVELS: Option<[f32; 16]> = Some(LEVELS);

    #[inline(always)]
    fn codes(codes: &mut [i8; RUN], b: &[u8], run: usize) {
        for (pair, &byte) in codes.as_chunks_mut::<2>().0.iter_mut().zip(&b[4 + 16 * run..][..16]) {
            *pair = [(byte >> 4) as i8, (byte & 15) as i8];
        }
    }

    #[inline(always)]
    fn scales(b: &[u8], _: usize, _: impl Fn(u16) -> f32) -> [Scale; 2] {
        [(f32::from_le_bytes([b[0], b[1], b[2], b[3]]), NOTHING); 2]
    }
}
