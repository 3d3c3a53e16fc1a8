//! Rounds values to few bits, so that they take few bytes on a network: in blocks, each with a unit of its own.
//!
//! Gradients are rounded up or down at random, so that the expected value is the value itself, to 2^-24 of a unit
//! (stochastic rounding, Gupta et al. 2015, arXiv:1502.02551). The result is a function of the values and of a key. It does not depend on earlier
//! gradients, so every process rounds a gradient to the same bits, and exact sums of rounded gradients have the same
//! bits in any order.
//!
//! Changes of parameters are rounded to the nearest value: what is left over enters the next change.

use super::fixed::FRACTION_BITS;
use super::rng::mix;

/// Values with a common unit.
pub const BLOCK: usize = 64;

/// Whether values can be rounded to that many bits; 0 stands for no rounding.
pub fn is_possible(bits: u32) -> bool {
    bits == 0 || (2..=16).contains(&bits)
}

/// Rounds `values` at random; their draws are numbered from `from` on. With the largest magnitude of a block below 2^e its
/// unit is 2^(e + 1 - bits): the values are integers of `bits` bits with their sign; rounded up, the largest may be
/// 2^(bits - 1). A block stays as it is if its unit would not exceed that of sums, or if it holds a value that is not finite.
pub fn round(values: &mut [f32], bits: u32, key: u32, from: usize) {
    in_blocks(values, bits, -(FRACTION_BITS as i32) + 1, |index, value| {
        let draw = mix(key, (from + index) as u32) >> 8;
        (value + f64::from(draw) * power(-24)).floor()
    });
}

/// Rounds `values` to the nearest integers of the same units, halves to even. Units are at least that of sums, so that
/// the results are numbers of fixed point.
pub fn nearest(values: &mut [f32], bits: u32) {
    in_blocks(values, bits, i32::MIN, |_, value| value.round_ties_even());
}

/// Replaces each value of a block by `rounded` of its index and its number of units. A block is unchanged if its unit is
/// below 2^least, or if a value is not finite.
fn in_blocks(values: &mut [f32], bits: u32, least: i32, rounded: impl Fn(usize, f64) -> f64) {
    for (index, block) in values.chunks_mut(BLOCK).enumerate() {
        let largest = block.iter().fold(0, |largest, v| largest.max(v.abs().to_bits()));
        let exponent = (largest >> 23) as i32 - 126;
        let unit = exponent + 1 - bits as i32;
        if exponent > 128 || unit < least {
            continue;
        }
        let unit = unit.max(-(FRACTION_BITS as i32));
        let (unit, per) = (power(unit), power(-unit));
        for (i, value) in block.iter_mut().enumerate() {
            // Adding 0 leaves no -0.
            *value = (rounded(index * BLOCK + i, f64::from(*value) * per) * unit) as f32 + 0.0;
        }
    }
}

/// 2^exponent.
fn power(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numeric::fixed;
    use crate::numeric::rng::Stream;
    use proptest::prelude::*;

    fn rounded(values: &[f32], bits: u32, key: u32) -> Vec<f32> {
        let mut values = values.to_vec();
        round(&mut values, bits, key, 0);
        values
    }

    proptest! {
        #[test]
        fn values_become_integers_of_few_bits(
            values in proptest::collection::vec(-1f32..1.0, 1..200), scale in -30i32..20, bits in 2u32..=16, key: u32,
        ) {
            let values: Vec<f32> = values.iter().map(|v| v * 2f32.powi(scale)).collect();
            let got = rounded(&values, bits, key);
            for (got, values) in got.chunks(BLOCK).zip(values.chunks(BLOCK)) {
                let largest = values.iter().fold(0f32, |m, v| m.max(v.abs()));
                // The smallest power of two above the largest magnitude, found by halving.
                let mut above = 2f64.powi(40);
                while above / 2.0 > f64::from(largest) && above > 2f64.powi(-60) {
                    above /= 2.0;
                }
                let unit = above / 2f64.powi(bits as i32 - 1);
                for (got, value) in got.iter().zip(values) {
                    if unit <= 2f64.powi(-40) {
                        prop_assert_eq!(got, value);
                        continue;
                    }
                    let whole = f64::from(*got) / unit;
                    prop_assert_eq!(whole, whole.round());
                    prop_assert!(whole.abs() <= 2f64.powi(bits as i32 - 1));
                    prop_assert!((f64::from(*got) - f64::from(*value)).abs() < unit);
                }
            }
        }

        #[test]
        fn sums_of_rounded_values_are_packed_in_few_bits(
            values in proptest::collection::vec(-1f32..1.0, BLOCK), scale in -20i32..4, key: u32,
        ) {
            let values: Vec<f32> = values.iter().map(|v| v * 2f32.powi(scale)).collect();
            let mut sum = vec![0; BLOCK];
            fixed::set_checked(&mut sum, &rounded(&values, 8, key));
            let mut packed = Vec::new();
            crate::numeric::pack::pack(&sum, &mut packed);
            // A width and a shift, and at most nine bits for each value.
            prop_assert!(packed.len() <= 2 + 9 * BLOCK / 8, "{} bytes", packed.len());
        }
    }

    /// The mean over many keys is the value: the draws are uniform, and no direction is preferred.
    #[test]
    fn rounding_has_no_bias() {
        let mut draws = Stream::new(&[5]);
        let values: Vec<f32> =
            (0..BLOCK).map(|_| draws.unit() * 2.0 - 1.0).chain([0.0, 0.25, -0.75]).collect();
        let (keys, bits) = (20_000, 4);
        let mut sums = vec![0.0; values.len()];
        for key in 0..keys {
            let got = rounded(&values, bits, crate::numeric::rng::hash(&[key]));
            sums.iter_mut().zip(got).for_each(|(sum, got)| *sum += f64::from(got));
        }
        for (sum, value) in sums.iter().zip(&values) {
            // The unit is 1/8; a draw has at most the deviation of half of it: six standard errors.
            let bound = 6.0 * 0.0625 / (keys as f64).sqrt();
            let off = sum / keys as f64 - f64::from(*value);
            assert!(off.abs() <= bound, "{value}: off {off}");
        }
        // Values that are integers of the unit stay.
        assert_eq!(rounded(&[0.0, 0.25, -0.75], bits, 9), [0.0, 0.25, -0.75]);
    }

    #[test]
    fn draws_differ_by_key_and_place_and_not_by_block() {
        let values = vec![0.3f32; 4 * BLOCK];
        let (a, b) = (rounded(&values, 4, 1), rounded(&values, 4, 2));
        assert_ne!(a, b);
        assert_ne!(a[..BLOCK], a[BLOCK..2 * BLOCK]);
        let mut tail = values[BLOCK..].to_vec();
        round(&mut tail, 4, 1, BLOCK);
        assert_eq!(tail, a[BLOCK..], "a part has the bits of the whole");
    }

    proptest! {
        #[test]
        fn nearest_values_are_within_half_a_unit(
            values in proptest::collection::vec(-1f32..1.0, 1..200), scale in -44i32..10, bits in 2u32..=16,
        ) {
            let values: Vec<f32> = values.iter().map(|v| v * 2f32.powi(scale)).collect();
            let mut got = values.clone();
            nearest(&mut got, bits);
            for (got, values) in got.chunks(BLOCK).zip(values.chunks(BLOCK)) {
                let largest = values.iter().fold(0f64, |m, v| m.max(f64::from(v.abs())));
                let bound = (largest / 2f64.powi(bits as i32 - 1)).max(2f64.powi(-41));
                for (got, value) in got.iter().zip(values) {
                    prop_assert!((f64::from(*got) - f64::from(*value)).abs() <= bound);
                    prop_assert_eq!(f64::from(*got) * 2f64.powi(40) % 1.0, 0.0, "a number of fixed point");
                }
            }
        }
    }

    #[test]
    fn what_no_sum_can_hold_stays_visible() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let got = rounded(&[1.0, bad, 0.3], 4, 1);
            assert_eq!(got[1].to_bits(), bad.to_bits());
            assert_eq!((got[0], got[2]), (1.0, 0.3));
        }
        let largest = rounded(&[f32::MAX, 1.0], 4, 1);
        assert!(largest[0].is_infinite() || largest[0] > 2e38, "{largest:?}");
        assert_eq!(rounded(&[0.0; 70], 4, 1), [0.0; 70]);
        assert_eq!(
            rounded(&[f32::MIN_POSITIVE, 1e-40], 4, 1),
            [f32::MIN_POSITIVE, 1e-40],
            "below the unit of sums"
        );
    }
}
