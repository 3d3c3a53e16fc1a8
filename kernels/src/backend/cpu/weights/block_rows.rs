//! Rows of blocks, and what becomes of their numbers.

/// What becomes of unpacked numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounded {
    /// Nothing.
    Not,
    /// They are rounded to bf16.
    Bf16,
}

/// Some rows of blocks.
#[derive(Clone, Copy)]
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
