//! Hidden states and their gradients between two workers that hold a model together, as bytes.

use crate::numeric::dtype::Dtype;
use serde::{Deserialize, Serialize};

/// The type in which they travel. Each side computes in f32.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Wire {
    /// Every bit arrives.
    #[default]
    F32,
    /// Rounded to the nearest bf16, half to even.
    Bf16,
}

/// The smallest number that bf16 rounds to infinity: halfway to the one after its largest.
const BEYOND_BF16: f32 = f32::from_bits(0x7f7f_8000);

impl Wire {
    fn dtype(self) -> Dtype {
        match self {
            Wire::F32 => Dtype::F32,
            Wire::Bf16 => Dtype::Bf16,
        }
    }

    /// Bytes of a number.
    pub fn size(self) -> usize {
        self.dtype().size()
    }

    /// The first number that does not arrive as a finite one, as it arrives.
    pub fn not_finite(self, values: &[f32]) -> Option<f32> {
        let beyond = match self {
            Wire::F32 => f32::INFINITY,
            Wire::Bf16 => BEYOND_BF16,
        };
        let bad = values.iter().copied().find(|value| value.is_nan() || value.abs() >= beyond)?;
        Some(match self {
            Wire::F32 => bad,
            Wire::Bf16 => half::bf16::from_f32(bad).to_f32(),
        })
    }

    /// The numbers as little-endian bytes.
    pub fn bytes(self, values: &[f32]) -> Vec<u8> {
        self.dtype().bytes_of(values).into_owned()
    }

    /// The numbers that arrive.
    pub fn values(self, bytes: &[u8]) -> Vec<f32> {
        self.dtype().widen(bytes)
    }

    /// The numeric class of a line, where devices of class `class` are divided above these numbers of layers: the rounding
    /// depends on them.
    pub fn class(self, class: String, cuts: &[usize]) -> String {
        match self {
            Wire::F32 => class,
            Wire::Bf16 => {
                let cuts: Vec<String> = cuts.iter().map(usize::to_string).collect();
                format!("{class}+wire-bf16@{}", cuts.join("+"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_rounded_half_to_even() {
        let step = f32::powi(2.0, -7);
        for (value, arrives) in [
            (1.0, 1.0),
            (1.0 + 0.5 * step, 1.0),
            (1.0 + 1.5 * step, 1.0 + 2.0 * step),
            (-1.0 - 0.51 * step, -1.0 - step),
            (-0.0, -0.0),
        ] {
            let [there, here] = [Wire::Bf16, Wire::F32].map(|wire| wire.values(&wire.bytes(&[value]))[0]);
            assert!(
                (there - arrives).abs() <= 1e-42 && there.is_sign_negative() == arrives.is_sign_negative()
            );
            assert_eq!(here.to_bits(), value.to_bits());
        }
        assert_eq!([Wire::F32.bytes(&[1.0; 3]).len(), Wire::Bf16.bytes(&[1.0; 3]).len()], [12, 6]);
    }

    #[test]
    fn numbers_beyond_bf16_are_not_finite() {
        assert_eq!(Wire::F32.not_finite(&[1.0, f32::MAX]), None);
        assert_eq!(Wire::Bf16.not_finite(&[1.0, f32::MAX]), Some(f32::INFINITY));
        let below = f32::from_bits(BEYOND_BF16.to_bits() - 1);
        assert_eq!(Wire::Bf16.not_finite(&[below, -below]), None);
        assert_eq!(Wire::Bf16.not_finite(&[-BEYOND_BF16]), Some(f32::NEG_INFINITY));
        assert!(Wire::Bf16.not_finite(&[f32::NAN]).is_some_and(f32::is_nan));
    }
}
