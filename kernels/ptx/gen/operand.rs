//! The layout of a product's operand in memory.

/// The order of its numbers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Rows are outputs, K is contiguous.
    AlongK,
    /// Rows are K, outputs are contiguous.
    AcrossK,
}

/// The type of its numbers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    F32,
    Bf16,
    F16,
}

impl Stored {
    /// Bytes of a number.
    pub fn size(self) -> usize {
        if self == Stored::F32 { 4 } else { 2 }
    }
}
