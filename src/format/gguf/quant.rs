//! How GGUF stores numbers, and back to f32, with ggml's own order of operations: every product and sum is
//! rounded once and nothing is fused, so that the bits are those of ggml and of the Python `gguf` package
//! (`tests/golden/gguf` holds random blocks of every kind).

use super::kquant;

/// A storage type that is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, non_camel_case_types)] // ggml's own names
pub enum Kind {
    F32,
    F16,
    BF16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
}

/// (ggml's number, kind, name, elements per block, bytes per block)
const KINDS: [(u32, Kind, &str, usize, usize); 13] = [
    (0, Kind::F32, "F32", 1, 4),
    (1, Kind::F16, "F16", 1, 2),
    (30, Kind::BF16, "BF16", 1, 2),
    (8, Kind::Q8_0, "Q8_0", 32, 34),
    (2, Kind::Q4_0, "Q4_0", 32, 18),
    (3, Kind::Q4_1, "Q4_1", 32, 20),
    (6, Kind::Q5_0, "Q5_0", 32, 22),
    (7, Kind::Q5_1, "Q5_1", 32, 24),
    (10, Kind::Q2_K, "Q2_K", 256, 84),
    (11, Kind::Q3_K, "Q3_K", 256, 110),
    (12, Kind::Q4_K, "Q4_K", 256, 144),
    (13, Kind::Q5_K, "Q5_K", 256, 176),
    (14, Kind::Q6_K, "Q6_K", 256, 210),
];

/// Types of ggml that are not read, to name them.
const OTHERS: [(u32, &str); 22] = [
    (4, "Q4_2"),
    (5, "Q4_3"),
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

impl Kind {
    /// The kind with ggml's number `id`; else the name of what it is.
    pub(super) fn of(id: u32) -> Result<Kind, String> {
        match KINDS.iter().find(|k| k.0 == id) {
            Some(k) => Ok(k.1),
            None => Err(OTHERS.iter().find(|o| o.0 == id).map_or(format!("type {id}"), |o| o.1.to_owned())),
        }
    }

    fn row(self) -> (u32, Kind, &'static str, usize, usize) {
        // Every kind has its row: the table is written beside the enum, and a test walks both.
        KINDS.iter().copied().find(|k| k.1 == self).unwrap_or(KINDS[0])
    }

    /// ggml's name.
    pub fn name(self) -> &'static str {
        self.row().2
    }

    /// Elements per block.
    pub fn block(self) -> usize {
        self.row().3
    }

    /// Bytes per block.
    pub fn bytes(self) -> usize {
        self.row().4
    }

    /// One row of whole blocks to f32, little endian: `out.len() == 4 * elements`.
    pub(super) fn widen_row(self, out: &mut [u8], row: &[u8]) {
        let (_, _, _, elements, bytes) = self.row();
        let decode: fn(&mut [f32], &[u8]) = match self {
            Kind::F32 => f32_,
            Kind::F16 => f16_,
            Kind::BF16 => bf16_,
            Kind::Q8_0 => q8_0,
            Kind::Q4_0 => q4_0,
            Kind::Q4_1 => q4_1,
            Kind::Q5_0 => q5_0,
            Kind::Q5_1 => q5_1,
            Kind::Q2_K => kquant::q2_k,
            Kind::Q3_K => kquant::q3_k,
            Kind::Q4_K => kquant::q4_k,
            Kind::Q5_K => kquant::q5_k,
            Kind::Q6_K => kquant::q6_k,
        };
        let mut values = [0f32; 256];
        let values = &mut values[..elements];
        for (out, block) in out.chunks_exact_mut(4 * elements).zip(row.chunks_exact(bytes)) {
            decode(values, block);
            out.chunks_exact_mut(4).zip(values.iter()).for_each(|(o, v)| o.copy_from_slice(&v.to_le_bytes()));
        }
    }
}

/// The half-precision number at byte `at`.
pub(super) fn half_at(b: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

fn f32_(y: &mut [f32], b: &[u8]) {
    y[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
}

fn f16_(y: &mut [f32], b: &[u8]) {
    y[0] = half_at(b, 0);
}

fn bf16_(y: &mut [f32], b: &[u8]) {
    y[0] = half::bf16::from_le_bytes([b[0], b[1]]).to_f32();
}

/// d: f16, 32 x i8: y = d q.
fn q8_0(y: &mut [f32], b: &[u8]) {
    let d = half_at(b, 0);
    y.iter_mut().zip(&b[2..]).for_each(|(y, &q)| *y = d * f32::from(q as i8));
}

/// d: f16, 16 bytes of two nibbles, low ones first: y = d (q - 8).
fn q4_0(y: &mut [f32], b: &[u8]) {
    let d = half_at(b, 0);
    for (i, &q) in b[2..].iter().enumerate() {
        y[i] = d * f32::from((q & 15) as i8 - 8);
        y[i + 16] = d * f32::from((q >> 4) as i8 - 8);
    }
}

/// d, m: f16, nibbles as Q4_0: y = d q + m.
fn q4_1(y: &mut [f32], b: &[u8]) {
    let (d, m) = (half_at(b, 0), half_at(b, 2));
    for (i, &q) in b[4..].iter().enumerate() {
        y[i] = d * f32::from(q & 15) + m;
        y[i + 16] = d * f32::from(q >> 4) + m;
    }
}

/// The fifth bits of a Q5 block, at byte `at`: bit i belongs to element i.
fn fifth(b: &[u8], at: usize, i: usize) -> u8 {
    let bits = u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
    ((bits >> i & 1) as u8) << 4
}

/// d: f16, 32 fifth bits, nibbles: y = d (q - 16).
fn q5_0(y: &mut [f32], b: &[u8]) {
    let d = half_at(b, 0);
    for (i, &q) in b[6..].iter().enumerate() {
        y[i] = d * f32::from((q & 15 | fifth(b, 2, i)) as i8 - 16);
        y[i + 16] = d * f32::from((q >> 4 | fifth(b, 2, i + 16)) as i8 - 16);
    }
}

/// d, m: f16, 32 fifth bits, nibbles: y = d q + m.
fn q5_1(y: &mut [f32], b: &[u8]) {
    let (d, m) = (half_at(b, 0), half_at(b, 2));
    for (i, &q) in b[8..].iter().enumerate() {
        y[i] = d * f32::from(q & 15 | fifth(b, 4, i)) + m;
        y[i + 16] = d * f32::from(q >> 4 | fifth(b, 4, i + 16)) + m;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_its_own_row() {
        for (id, kind, ..) in KINDS {
            assert_eq!(Kind::of(id), Ok(kind));
            assert_eq!(kind.row().0, id);
        }
        assert_eq!(Kind::of(23), Err("IQ4_XS".into()));
        assert_eq!(Kind::of(99), Err("type 99".into()));
    }
}
