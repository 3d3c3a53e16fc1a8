//! Exact sums that do not depend on the order: f32 to f64, times 2^40, rounded half to even, added as i64.
//!
//! Integer addition is associative, so any grouping of microbatches gives the same bits. The range check is one
//! comparison per value, at conversion and before any addition: if each of m microbatches adds at most `floor((2^63 -
//! 1) / m)`, no grouping can overflow.

/// Number of fractional bits. The value is in run.yaml; all processes of a run must agree on it.
pub const FRACTION_BITS: u32 = 40;

/// Number of values per cell: sums of a flat layout are stored, added, packed and sent in cells of this size; the last
/// cell may be shorter. The cell size affects threads and messages, not the sums.
pub const CELL: usize = 1 << 16;

const SCALE: f64 = (1u64 << FRACTION_BITS) as f64;
const TWO_63: f64 = 9_223_372_036_854_775_808.0;

/// A value that a sum cannot hold.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("value {index} is {value}, outside what the sum can hold exactly")]
pub struct BadValue {
    /// Index in the slice.
    pub index: usize,
    /// The value: not finite, or too large for the range.
    pub value: f64,
}

/// The largest magnitude, in units of 2^-40, of a summand from one of `microbatches` microbatches.
pub fn cap(microbatches: usize) -> i64 {
    i64::MAX / microbatches.max(1) as i64
}

/// Converts a value to fixed point; None if it is not finite or exceeds `cap`.
#[inline]
pub fn to_fixed(value: f64, cap: i64) -> Option<i64> {
    let scaled = (value * SCALE).round_ties_even();
    // `cap as f64` may round up, even to 2^63, which `as i64` would saturate. Therefore the integers are compared
    // again.
    if scaled.abs() <= cap as f64 && scaled.abs() < TWO_63 {
        let fixed = scaled as i64;
        (fixed.unsigned_abs() <= cap as u64).then_some(fixed)
    } else {
        None
    }
}

/// The value of a fixed-point sum as f64, rounded once.
#[inline]
pub fn to_f64(sum: i64) -> f64 {
    sum as f64 / SCALE
}

/// Returns the first value that is not finite or exceeds `cap` as an error: one comparison per value.
pub fn check(values: &[f32], cap: i64) -> Result<(), BadValue> {
    let limit = limit(cap);
    // `partial_cmp` gives None for NaN, so NaN is an error too.
    match values.iter().position(|v| !matches!(v.abs().partial_cmp(&limit), Some(o) if o.is_le())) {
        Some(index) => Err(BadValue { index, value: f64::from(values[index]) }),
        None => Ok(()),
    }
}

/// The largest f32 that [`to_fixed`] accepts with `cap`.
fn limit(cap: i64) -> f32 {
    let mut limit = to_f64(cap) as f32;
    while to_fixed(f64::from(limit), cap).is_none() {
        limit = limit.next_down();
    }
    limit
}

/// Adds `values`, which must have passed [`check`], to `sum`. Addition wraps: if a malicious member made a total
/// overflow, the total is correct again once its sum is subtracted.
pub fn add_checked(sum: &mut [i64], values: &[f32]) {
    each(sum, values, |sum, value| *sum = sum.wrapping_add(value));
}

/// Replaces `sum` by `values`, which must have passed [`check`]; old contents are not read.
pub fn set_checked(sum: &mut [i64], values: &[f32]) {
    each(sum, values, |sum, value| *sum = value);
}

/// Subtracts values that [`add_checked`] added.
pub fn subtract_checked(sum: &mut [i64], values: &[f32]) {
    each(sum, values, |sum, value| *sum = sum.wrapping_sub(value));
}

/// Adds `values` to `sum`, all or nothing: the whole slice is checked before the first addition.
pub fn add(sum: &mut [i64], values: &[f32], cap: i64) -> Result<(), BadValue> {
    check(values, cap)?;
    add_checked(sum, values);
    Ok(())
}

/// 1.5 * 2^52: adding it to a number below 2^51 rounds half to even and leaves the integer in the low bits.
const MAGIC: f64 = 6_755_399_441_055_744.0;

/// Number of values per range check in [`each`].
const LOOK: usize = 64;

/// An f32 with a magnitude below this is below 2^51 after scaling.
const NEAR: f32 = 2048.0;

/// Converts every value, which must have passed [`check`], to fixed point. If all values of a group are near zero, as
/// almost all gradients are, the conversion has no branch and uses SIMD instructions of the oldest x86-64; f64 to i64
/// conversion has no SIMD instruction there.
#[inline(always)]
fn each(sum: &mut [i64], values: &[f32], put: impl Fn(&mut i64, i64)) {
    assert_eq!(sum.len(), values.len(), "sum and values share one layout");
    for (sum, values) in sum.chunks_mut(LOOK).zip(values.chunks(LOOK)) {
        let near = values.iter().fold(true, |near, v| near & (v.abs() < NEAR));
        let all = sum.iter_mut().zip(values);
        match near {
            true => all.for_each(|(s, &v)| put(s, low_bits(f64::from(v) * SCALE))),
            false => all.for_each(|(s, &v)| put(s, round_half_even(f64::from(v) * SCALE) as i64)),
        }
    }
}

/// Rounds a number with a magnitude below 2^51 half to even.
#[inline(always)]
fn low_bits(x: f64) -> i64 {
    ((x + MAGIC).to_bits() as i64).wrapping_sub(MAGIC.to_bits() as i64)
}

/// Same as `f64::round_ties_even`, without its library call on a CPU without SSE 4.1. Numbers from 2^51 have at most
/// one fractional bit, which an f32 times 2^40 of that size does not use (its last place is 2^28).
#[inline]
fn round_half_even(x: f64) -> f64 {
    if x.abs() < 2_251_799_813_685_248.0 { (x + MAGIC) - MAGIC } else { x }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn sums_in_any_order_have_the_same_bits(mut values in proptest::collection::vec(-1e4f32..1e4, 1..64)) {
            let m = values.len();
            let mut a = [0];
            values.iter().for_each(|&v| add(&mut a, &[v], cap(m)).unwrap());
            values.reverse();
            let mut b = [0];
            values.iter().for_each(|&v| add(&mut b, &[v], cap(m)).unwrap());
            prop_assert_eq!(a, b);
            let exact: f64 = values.iter().map(|&v| f64::from(v)).sum();
            prop_assert!((to_f64(a[0]) - exact).abs() <= m as f64 * 2f64.powi(-40));
        }
    }

    #[test]
    fn values_above_the_cap_are_rejected() {
        for m in [1usize, 2, 3, 64, 1000] {
            let c = cap(m);
            assert!((0..m).try_fold(0i64, |s, _| s.checked_add(c)).is_some());
            let above = to_f64(c) * 1.000_001;
            assert_eq!(to_fixed(above, c), None);
            assert_eq!(to_fixed(-above, c), None);
        }
        assert_eq!(to_fixed(f64::NAN, i64::MAX), None);
        assert_eq!(to_fixed(2f64.powi(23), i64::MAX), None);
        let mut sum = [5, 5];
        let bad = add(&mut sum, &[1.0, f32::INFINITY], cap(4)).unwrap_err();
        assert_eq!((bad.index, sum), (1, [5, 5]));
    }

    #[test]
    fn halves_are_rounded_to_even() {
        let unit = 2f64.powi(-40);
        assert_eq!(to_fixed(0.5 * unit, 10), Some(0));
        assert_eq!(to_fixed(1.5 * unit, 10), Some(2));
        assert_eq!(to_fixed(-2.5 * unit, 10), Some(-2));
    }

    proptest! {
        #[test]
        fn fast_path_equals_the_formula(bits in any::<u32>(), m in 1usize..5000) {
            let (v, c) = (f32::from_bits(bits), cap(m));
            let slow = to_fixed(f64::from(v), c);
            prop_assert_eq!(check(&[v], c).is_ok(), slow.is_some());
            if let Some(slow) = slow {
                let mut sum = [0];
                add_checked(&mut sum, &[v]);
                prop_assert_eq!(sum[0], slow);
                let mut total = [9];
                set_checked(&mut total, &[v]);
                prop_assert_eq!(total[0], slow);
            }
        }
    }

    /// Values near zero, far from it and mixed, at any position and of any length, give the same result as single
    /// values.
    #[test]
    fn grouped_conversion_equals_single_conversion() {
        let edge =
            [NEAR, NEAR.next_down(), -NEAR, -NEAR.next_down(), 0.0, -0.0, f32::MIN_POSITIVE, 3.7e5, -1e6];
        for len in [1, LOOK - 1, LOOK, LOOK + 1, 5 * LOOK + 3] {
            let small = |i: usize| ((i * 2_654_435_761) % 4096) as f32 * 0.497 - 1018.0;
            for (place, odd) in (0..len).step_by(7).zip(edge.into_iter().cycle()) {
                let mut values: Vec<f32> = (0..len).map(small).collect();
                values[place] = odd;
                let want: Vec<i64> = values.iter().map(|&v| to_fixed(v.into(), i64::MAX).unwrap()).collect();
                let mut sum = vec![1; len];
                set_checked(&mut sum, &values);
                assert_eq!(sum, want);
                add_checked(&mut sum, &values);
                subtract_checked(&mut sum, &values);
                assert_eq!(sum, want);
            }
        }
    }

    #[test]
    fn limit_is_the_largest_f32_under_the_cap() {
        for m in [1usize, 2, 3, 7, 64, 1000, 4097] {
            let c = cap(m);
            assert!(to_fixed(f64::from(limit(c)), c).is_some());
            assert!(to_fixed(f64::from(limit(c).next_up()), c).is_none());
        }
    }
}
