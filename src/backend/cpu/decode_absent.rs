//! Stands in for `decode.rs` where the processor is not an x86-64: nobody calls it, because matrices in blocks are then
//! widened for the `gemm` crate.

use super::few::Sums;
use super::unpack::Rows;
use crate::numeric::block::{Packed, Visitor};

/// The chains over x of at most four times 32 rows, see [`super::few::Chains`].
#[allow(dead_code)]
pub struct Decode<'a> {
    /// Whole runs.
    pub x: &'a [f32],
    /// At most 4 x 32.
    pub rows: Rows<'a>,
    /// First run of each row.
    pub from: usize,
}

impl Visitor for Decode<'_> {
    type Result = Sums;
    fn visit<P: Packed>(self) -> Sums {
        unreachable!("panels are for AVX-512");
    }
}
