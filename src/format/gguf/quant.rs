//! ggml's numbers of tensor encodings. The values of the codes are defined in [`crate::numeric::block`].

use crate::numeric::block::{Block, Encoding};
use crate::numeric::dtype::Dtype;

const KINDS: [(u32, Encoding); 14] = [
    (0, Encoding::Plain(Dtype::F32)),
    (1, Encoding::Plain(Dtype::F16)),
    (30, Encoding::Plain(Dtype::Bf16)),
    (8, Encoding::Blocks(Block::Q8_0)),
    (2, Encoding::Blocks(Block::Q4_0)),
    (3, Encoding::Blocks(Block::Q4_1)),
    (6, Encoding::Blocks(Block::Q5_0)),
    (7, Encoding::Blocks(Block::Q5_1)),
    (10, Encoding::Blocks(Block::Q2_K)),
    (11, Encoding::Blocks(Block::Q3_K)),
    (12, Encoding::Blocks(Block::Q4_K)),
    (13, Encoding::Blocks(Block::Q5_K)),
    (14, Encoding::Blocks(Block::Q6_K)),
    (39, Encoding::Blocks(Block::MXFP4)),
];

/// Unsupported ggml types, for error messages.
const OTHERS: [(u32, &str); 21] = [
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
    (40, "NVFP4"),
];

/// The encoding with ggml's number `id`; the error is the name of an unsupported type.
pub(super) fn of(id: u32) -> Result<Encoding, String> {
    match KINDS.iter().find(|k| k.0 == id) {
        Some(k) => Ok(k.1),
        None => Err(OTHERS.iter().find(|o| o.0 == id).map_or(format!("type {id}"), |o| o.1.to_owned())),
    }
}

/// ggml's number of an encoding, or None if it has none.
pub fn id(encoding: Encoding) -> Option<u32> {
    KINDS.iter().find(|k| k.1 == encoding).map(|k| k.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_number_has_one_encoding() {
        for (number, encoding) in KINDS {
            assert_eq!((of(number), id(encoding)), (Ok(encoding), Some(number)));
        }
        assert_eq!(id(Encoding::Blocks(Block::NF4)), None);
        assert_eq!(of(23), Err("IQ4_XS".into()));
        assert_eq!(of(99), Err("type 99".into()));
    }
}
