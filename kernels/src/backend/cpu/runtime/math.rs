//! exp and sums, ours, so that a class has one answer on every system. All are written so that LLVM turns
//! them into vector code inside a [`kernel!`](super::isa::kernel) body.

use super::isa::{Lanes, kernel};
use crate::backend::{CLAMPED_LIMIT, CLAMPED_SLOPE};

/// Above this exp is infinite; below the negative of about 87.34 it is 0 (no denormals).
const EXP_MAX: f32 = 88.722_84;
const EXP_MIN: f32 = -87.336_55;

/// e^x to 1 ulp (tested over all of the range): 2^n * p(r), r = x - n ln 2 in two parts, p a polynomial of
/// degree 6 (coefficients as in Cephes' expf, Moshier 1992). NaN stays NaN.
#[inline(always)]
pub fn exp<L: Lanes>(x: f32) -> f32 {
    let clamped = if x > EXP_MAX { EXP_MAX } else { x };
    let clamped = if clamped < EXP_MIN { EXP_MIN } else { clamped };
    let (p, n) = exp_parts::<L>(clamped);
    // n is up to 128: two factors keep the exponent field in range.
    let bits = n as i32;
    let half = bits >> 1;
    let two = |e: i32| f32::from_bits(((e + 127) as u32) << 23);
    let y = p * two(half) * two(bits - half);
    let y = if x > EXP_MAX { f32::INFINITY } else { y };
    if x < EXP_MIN { 0.0 } else { y }
}

/// [`exp`] to the bit in a third fewer operations, for what is not above 0 but for rounding, or NaN: one factor
/// scales by 2^n.
#[inline(always)]
pub fn exp_below<L: Lanes>(x: f32) -> f32 {
    let clamped = if x < EXP_MIN { EXP_MIN } else { x };
    let (p, n) = exp_parts::<L>(clamped);
    let y = p * f32::from_bits(n.wrapping_add(127) << 23);
    if x < EXP_MIN { 0.0 } else { y }
}

/// e^x = p * 2^n, p between 0.7 and 1.42; n in two's complement.
#[inline(always)]
fn exp_parts<L: Lanes>(x: f32) -> (f32, u32) {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer, ties to even
    let shifted = L::fma(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = L::fma(n, -0.693_359_4, x);
    let r = L::fma(n, 2.121_944_4e-4, r);
    let mut p = 1.987_569_2e-4;
    p = L::fma(p, r, 1.398_2e-3);
    p = L::fma(p, r, 8.333_452e-3);
    p = L::fma(p, r, 4.166_579_6e-2);
    p = L::fma(p, r, 1.666_666_5e-1);
    p = L::fma(p, r, 0.5);
    // The low bits of `shifted` are n.
    (L::fma(p, r * r, r) + 1.0, shifted.to_bits().wrapping_sub(ROUND.to_bits()))
}

/// 1 / (1 + e^-x)
#[inline(always)]
pub fn sigmoid<L: Lanes>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<L>(-x))
}

/// [`sigmoid`] and its derivative.
#[inline(always)]
pub fn sigmoid_slope<L: Lanes>(x: f32) -> (f32, f32) {
    let s = sigmoid::<L>(x);
    (s, s * (1.0 - s))
}

/// x * sigmoid(x)
#[inline(always)]
pub fn silu<L: Lanes>(x: f32) -> f32 {
    x * sigmoid::<L>(x)
}

/// [`silu`] and its derivative.
#[inline(always)]
pub fn silu_slope<L: Lanes>(x: f32) -> (f32, f32) {
    let s = sigmoid::<L>(x);
    let silu = x * s;
    (silu, L::fma(silu, 1.0 - s, s))
}

/// The gate of [`crate::backend::Activation::ClampedSwiGlu`].
#[inline(always)]
pub fn clamped_silu<L: Lanes>(x: f32) -> f32 {
    let x = if x > CLAMPED_LIMIT { CLAMPED_LIMIT } else { x };
    x * sigmoid::<L>(CLAMPED_SLOPE * x)
}

/// [`clamped_silu`] and its derivative, 0 beyond the limit.
#[inline(always)]
pub fn clamped_silu_slope<L: Lanes>(x: f32) -> (f32, f32) {
    let beyond = x > CLAMPED_LIMIT;
    let x = if beyond { CLAMPED_LIMIT } else { x };
    let s = sigmoid::<L>(CLAMPED_SLOPE * x);
    let act = x * s;
    (act, if beyond { 0.0 } else { L::fma(act, CLAMPED_SLOPE * (1.0 - s), s) })
}

/// The factor of a gate that is `up` itself, and whether it has a gradient.
#[inline(always)]
pub fn whole(up: f32) -> (f32, bool) {
    (up, true)
}

/// The factor of [`clamped_silu`], and whether it has a gradient.
#[inline(always)]
pub fn clamped(up: f32) -> (f32, bool) {
    let (above, below) = (up > CLAMPED_LIMIT, up < -CLAMPED_LIMIT);
    let up = if above { CLAMPED_LIMIT } else { up };
    let up = if below { -CLAMPED_LIMIT } else { up };
    (up + 1.0, !(above | below))
}

/// 2 sqrt(2/pi), and that times 0.044715.
const GELU: [f32; 2] = [1.595_769_2, 0.071_354_814];

/// x/2 (1 + tanh(v)) = x * sigmoid(2 v) with 2 v = 2 sqrt(2/pi) (x + 0.044715 x^3)
#[inline(always)]
pub fn gelu<L: Lanes>(x: f32) -> f32 {
    let twice = x * L::fma(GELU[1], x * x, GELU[0]);
    x * sigmoid::<L>(twice)
}

/// [`gelu`] and its derivative.
#[inline(always)]
pub fn gelu_slope<L: Lanes>(x: f32) -> (f32, f32) {
    let square = x * x;
    let s = sigmoid::<L>(x * L::fma(GELU[1], square, GELU[0]));
    let (gelu, inner) = (x * s, L::fma(3.0 * GELU[1], square, GELU[0]));
    (gelu, L::fma(gelu * (1.0 - s), inner, s))
}

/// Partial sums.
pub const LANES: usize = 16;

/// Adds up the partial sums: a tree of halves.
#[inline(always)]
pub fn tree(mut part: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            part[i] += part[i + half];
        }
        half /= 2;
    }
    part[0]
}

/// Sum of products, sixteen partial sums, each a chain of multiply-adds.
#[inline(always)]
pub fn dot<L: Lanes>(a: &[f32], b: &[f32]) -> f32 {
    let b = &b[..a.len()];
    let mut part = [0.0; LANES];
    let (a16, b16) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let (a_rest, b_rest) = (a16.remainder(), b16.remainder());
    for (x, y) in a16.zip(b16) {
        for lane in 0..LANES {
            part[lane] = L::fma(x[lane], y[lane], part[lane]);
        }
    }
    for (lane, (&x, &y)) in a_rest.iter().zip(b_rest).enumerate() {
        part[lane] = L::fma(x, y, part[lane]);
    }
    tree(part)
}

/// The largest value; NaNs are passed over (they show up in what is computed next).
#[inline(always)]
pub fn max(x: &[f32]) -> f32 {
    let mut part = [f32::NEG_INFINITY; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for c in chunks {
        for lane in 0..LANES {
            part[lane] = if c[lane] > part[lane] { c[lane] } else { part[lane] };
        }
    }
    let most = |m: f32, &v: &f32| if v > m { v } else { m };
    rest.iter().fold(part.iter().fold(f32::NEG_INFINITY, most), most)
}

kernel! {
    /// [`dot`] of two rows.
    pub fn dot_rows<L>(a: &[f32], b: &[f32]) -> f32 { dot::<L>(a, b) }
}

kernel! {
    /// row += x
    pub fn add_row<L>(row: &mut [f32], x: &[f32]) {
        row.iter_mut().zip(x).for_each(|(o, &x)| *o += x);
    }
}

kernel! {
    /// row *= by
    pub fn scale_row<L>(row: &mut [f32], by: f32) {
        row.iter_mut().for_each(|v| *v *= by);
    }
}

#[cfg(test)]
mod tests {
    use super::super::isa::{Isa, best};
    use super::*;

    kernel! {
        fn exp_of<L>(x: f32) -> f32 { exp::<L>(x) }
    }

    kernel! {
        fn exp_below_of<L>(x: f32) -> f32 { exp_below::<L>(x) }
    }

    /// Units in the last place of `exact` that `got` is off.
    fn ulps(got: f32, exact: f64) -> f64 {
        let rounded = exact as f32;
        let ulp = f64::from(f32::from_bits(rounded.to_bits() + 1)) - f64::from(rounded);
        (f64::from(got) - exact).abs() / ulp
    }

    #[test]
    fn exp_is_within_one_ulp_everywhere() {
        for isa in [best(), Isa::Generic] {
            let mut worst = (0.0, 0.0);
            // every 997th float of both signs in range
            for bits in (0..0x42b1_7200u32).step_by(997) {
                for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                    if x < EXP_MIN {
                        continue;
                    }
                    let off = ulps(exp_of(isa, x), f64::from(x).exp());
                    if off > worst.0 {
                        worst = (off, x);
                    }
                }
            }
            assert!(worst.0 < 1.0, "{isa:?}: {} ulp at {}", worst.0, worst.1);
            assert_eq!(exp_of(isa, 0.0), 1.0);
            assert_eq!(exp_of(isa, -1e30), 0.0);
            assert_eq!(exp_of(isa, f32::NEG_INFINITY), 0.0);
            assert_eq!(exp_of(isa, 89.0), f32::INFINITY);
            assert_eq!(exp_of(isa, f32::INFINITY), f32::INFINITY);
            assert!(exp_of(isa, f32::NAN).is_nan());
        }
    }

    #[test]
    fn exp_below_zero_equals_exp_bit_for_bit() {
        for isa in [best(), Isa::Generic] {
            let below = (0..=f32::INFINITY.to_bits()).step_by(1009).map(|bits| -f32::from_bits(bits));
            for x in below.chain([EXP_MIN, f32::NEG_INFINITY, 1e-5, 0.3]) {
                assert_eq!(exp_below_of(isa, x).to_bits(), exp_of(isa, x).to_bits(), "{isa:?}: {x}");
            }
            assert!(exp_below_of(isa, f32::NAN).is_nan() && exp_below_of(isa, -f32::NAN).is_nan());
        }
    }
}
