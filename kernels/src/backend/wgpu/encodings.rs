//! The encodings of frozen matrices in kernels: each has a number, and a block type also has a piece of WGSL that
//! unpacks it. One row per type. Every kernel that reads frozen numbers is generated for all encodings from one text.

use super::kernel::Constant;
use crate::numeric::block::{Block, Encoding};
use crate::numeric::dtype::Dtype;

/// The number of the first block type.
const BLOCKS: u32 = 3;

/// The constant that identifies an encoding in kernels.
pub fn number(encoding: Encoding) -> u32 {
    match encoding {
        Encoding::Plain(Dtype::F32) => 0,
        Encoding::Plain(Dtype::Bf16) => 1,
        Encoding::Plain(Dtype::F16) => 2,
        Encoding::Blocks(block) => {
            Block::ALL.iter().zip(BLOCKS..).find(|(b, _)| **b == block).map_or(0, |f| f.1)
        }
    }
}

/// Every number.
pub fn all() -> Vec<u32> {
    (0..BLOCKS + Block::ALL.len() as u32).collect()
}

/// Whether a number identifies a block type.
pub fn is_block(number: u32) -> bool {
    number >= BLOCKS
}

/// The block type that a kernel with these constants reads.
pub fn block(constants: &[Constant]) -> Option<Block> {
    let number = constants.iter().find(|(name, _)| *name == "ENCODING")?.1;
    Block::ALL.get(number.checked_sub(BLOCKS)? as usize).copied()
}

macro_rules! piece {
    ($name:literal) => {
        include_str!(concat!("../../../wgsl/unpack_", $name, ".wgsl"))
    };
}

/// The WGSL that unpacks a block type.
pub fn pieces(block: Block) -> &'static [&'static str] {
    match block {
        Block::Q8_0 => &[piece!("q8_0")],
        Block::Q4_0 => &[piece!("q4_0")],
        Block::Q4_1 => &[piece!("q4_1")],
        Block::Q5_0 => &[piece!("q5_0")],
        Block::Q5_1 => &[piece!("q5_1")],
        Block::Q2_K => &[piece!("q2_k")],
        Block::Q3_K => &[piece!("q3_k")],
        Block::Q4_K => &[piece!("q4_k"), piece!("scale_min")],
        Block::Q5_K => &[piece!("q5_k"), piece!("scale_min")],
        Block::Q6_K => &[piece!("q6_k")],
        Block::NF4 => &[piece!("nf4")],
        Block::MXFP4 => &[piece!("mxfp4")],
    }
}
