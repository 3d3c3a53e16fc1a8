//! Encodings of numbers as bytes.

use std::borrow::Cow;

/// An element type, little endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dtype {
    /// IEEE f32.
    F32,
    /// IEEE f16.
    F16,
    /// bfloat16.
    Bf16,
}

impl Dtype {
    /// Number of bytes per number.
    pub fn size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }

    /// All numbers, widened to f32; `bytes` need not be aligned.
    pub fn widen(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            Dtype::F32 => {
                bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            }
            Dtype::F16 => {
                bytes.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
            }
            Dtype::Bf16 => {
                bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
            }
        }
    }

    /// Whether all numbers can be represented as bf16.
    pub fn halves(self, bytes: &[u8]) -> bool {
        match self {
            Dtype::F32 => bytes.chunks_exact(4).all(|b| b[0] == 0 && b[1] == 0),
            Dtype::F16 => false,
            Dtype::Bf16 => true,
        }
    }

    /// Same as [`Dtype::narrow`], without a copy if memory and file have the same byte order and type.
    pub fn bytes_of(self, values: &[f32]) -> Cow<'_, [u8]> {
        match self {
            Dtype::F32 if cfg!(target_endian = "little") => Cow::Borrowed(bytemuck::cast_slice(values)),
            _ => Cow::Owned(self.narrow(values)),
        }
    }

    /// Narrows f32 values to this type: little endian, rounded half to even.
    pub fn narrow(self, values: &[f32]) -> Vec<u8> {
        match self {
            Dtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Dtype::F16 => values.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect(),
            Dtype::Bf16 => values.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect(),
        }
    }
}
