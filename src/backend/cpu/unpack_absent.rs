//! Stands in for `unpack.rs` where the processor is not an x86-64: nobody calls it, because matrices in blocks are then
//! widened for the `gemm` crate.

use super::blocks::Rounded;
use crate::numeric::block::{Packed, Visitor};
use std::ops::Range;

/// Some rows of blocks.
#[derive(Clone, Copy)]
#[allow(dead_code)]
pub struct Rows<'a> {
    /// From the first byte of the first row.
    pub bytes: &'a [u8],
    /// Bytes of a row.
    pub size: usize,
    /// How many rows.
    pub count: usize,
    /// What becomes of their numbers.
    pub rounded: Rounded,
}

/// out[k][32] = the runs of 32 rows; rows that are not there are 0.
#[allow(dead_code)]
pub struct Upright<'a> {
    /// 32 numbers for each term.
    pub out: &'a mut [f32],
    /// At most 32.
    pub rows: Rows<'a>,
    /// Runs of each row.
    pub runs: Range<usize>,
}

/// The same in pairs of bf16 numbers: out[k / 2][32].
#[allow(dead_code)]
pub struct UprightPairs<'a> {
    /// 32 words for two terms.
    pub out: &'a mut [u32],
    /// At most 32.
    pub rows: Rows<'a>,
    /// Runs of each row.
    pub runs: Range<usize>,
}

/// out[n][32] = one run of each row.
#[allow(dead_code)]
pub struct Turned<'a> {
    /// 32 numbers for each row.
    pub out: &'a mut [f32],
    /// As many as there are terms.
    pub rows: Rows<'a>,
    /// Which run.
    pub run: usize,
}

/// The same in pairs of bf16 numbers: out[n / 2][32].
#[allow(dead_code)]
pub struct TurnedPairs<'a> {
    /// 32 words for two rows.
    pub out: &'a mut [u32],
    /// As many as there are terms.
    pub rows: Rows<'a>,
    /// Which run.
    pub run: usize,
}

macro_rules! absent {
    ($($name:ident -> $result:ty),*) => {
        $(impl Visitor for $name<'_> {
            type Result = $result;
            fn visit<P: Packed>(self) -> $result {
                unreachable!("panels are for AVX-512");
            }
        })*
    };
}

absent!(Upright -> (), UprightPairs -> (), Turned -> (), TurnedPairs -> ());
