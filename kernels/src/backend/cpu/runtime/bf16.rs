//! Numbers rounded to bf16, one by one and in pairs: the first of a pair is the upper half of a word.

use super::isa::kernel;
use half::bf16;

kernel! {
    /// x = x rounded to bf16, in place.
    pub fn round_here<L>(x: &mut [f32]) {
        x.iter_mut().for_each(|x| *x = round(*x));
    }
}

/// To the nearest bf16, ties to even, as `vcvtneps2bf16` does: what is not normal becomes 0, NaN stays NaN.
#[inline(always)]
pub fn round(x: f32) -> f32 {
    let bits = x.to_bits();
    let up = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000;
    let size = bits & 0x7fff_ffff;
    let kept = if size < 0x0080_0000 { bits & 0x8000_0000 } else { up };
    f32::from_bits(if size > 0x7f80_0000 { (bits | 0x0040_0000) & 0xffff_0000 } else { kept })
}

/// The bf16 of the upper half of a number's bits: itself, where the lower half is zeros.
pub fn upper(x: f32) -> bf16 {
    bf16::from_bits((x.to_bits() >> 16) as u16)
}

/// The numbers of a pair.
#[inline(always)]
pub fn apart(pair: u32) -> (f32, f32) {
    (f32::from_bits(pair & 0xffff_0000), f32::from_bits(pair << 16))
}

/// Two numbers, rounded.
#[inline(always)]
pub fn together(even: f32, odd: f32) -> u32 {
    round(even).to_bits() | round(odd).to_bits() >> 16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_matches_bf16_and_flushes_subnormals_to_zero() {
        let all = (0..u32::MAX).step_by(4099).chain([0x7f80_0000, 0xff80_0000, 0x7f7f_ffff, 0x3f80_8000]);
        for x in all.map(f32::from_bits) {
            let (got, want) = (round(x), half::bf16::from_f32(x).to_f32());
            match x.is_nan() {
                true => assert!(got.is_nan()),
                false if x.is_normal() => assert_eq!(got.to_bits(), want.to_bits(), "{x:e}"),
                false if x.is_finite() => assert_eq!(got.to_bits(), 0.0f32.copysign(x).to_bits(), "{x:e}"),
                false => assert_eq!(got, x),
            }
        }
    }
}
