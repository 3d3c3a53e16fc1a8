//! MXFP4 of the Open Compute Project (OCP Microscaling Formats 1.0) as ggml stores it (`block_mxfp4`): 32 floats of 4 bits
//! (E2M1) and one power of two.

use super::{CodeLayout, NOTHING, Packed, RUN, Scale, Scales};

/// The values of the codes: ggml stores twice the 4-bit float and half the power of two, so that both are exact.
pub const LEVELS: [i8; 16] = {
    let (mut levels, mut code) = ([0; 16], 0);
    while code < 16 {
        levels[code] = level(code as u8);
        code += 1;
    }
    levels
};

/// The value of a code: 0, 1, 2, 3, 4, 6, 8, 12, negative if bit 3 is set. Arithmetic instead of a table, for vectors.
#[inline(always)]
const fn level(code: u8) -> i8 {
    let size = code & 7;
    let size = (size + (size > 4) as u8 + (size > 5) as u8 + 3 * (size > 6) as u8) as i8;
    if code & 8 == 0 { size } else { -size }
}

/// 2^(e - 128), exact also where it is subnormal (e < 2).
#[inline(always)]
pub fn power(e: u8) -> f32 {
    let e = u32::from(e);
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e - 1) << 23 })
}

/// e, then 16 bytes of two nibbles, low ones first: y = 2^(e - 128) level.
pub struct Mxfp4;

impl Packed for Mxfp4 {
    const NAME: &'static str = "MXFP4";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 17;
    const LAYOUT: CodeLayout = CodeLayout::Table { at: 1, levels: LEVELS };
    const SCALES: Scales = Scales::Exponent;
    const LARGEST: f32 = 12.0;

    #[inline(always)]
    fn codes(codes: &mut [i8; RUN], b: &[u8], _: usize) {
        let (low, high) = codes.split_at_mut(16);
        for ((low, high), &q) in low.iter_mut().zip(high).zip(&b[1..17]) {
            (*low, *high) = (level(q & 15), level(q >> 4));
        }
    }

    #[inline(always)]
    fn scales(b: &[u8], _: usize, _: impl Fn(u16) -> f32) -> [Scale; 2] {
        [(power(b[0]), NOTHING); 2]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numeric::block::Block;

    #[test]
    fn levels_are_those_of_ggml() {
        assert_eq!(LEVELS, [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]);
    }

    #[test]
    fn every_exponent_is_a_power_of_two() {
        for e in 0..=255u8 {
            assert_eq!(f64::from(power(e)), 2f64.powi(i32::from(e) - 128), "{e}");
        }
    }

    #[test]
    fn exponents_from_253_on_are_not_finite() {
        for e in 0..=255u8 {
            let block: Vec<u8> = [e].into_iter().chain([0x77; 16]).collect();
            assert_eq!(Block::MXFP4.finite(&block), e < 253, "{e}");
        }
        // 255 is NaN in the OCP specification, whatever the codes are.
        assert!(!Block::MXFP4.finite(&[[255].as_slice(), &[0; 16]].concat()));
    }
}
