//! Stands in for `avx512.rs` where the processor is not an x86-64: nobody calls it, because no such processor is
//! ever found to have AVX-512 and weights are then kept in rows for the `gemm` crate.

/// Most rows of a tile.
pub const ROWS: usize = 12;
/// Columns of a tile and of a panel.
pub const COLS: usize = 32;

/// As in `avx512.rs`.
#[derive(Debug, Clone, Copy)]
#[allow(dead_code)]
pub struct Part {
    /// Terms.
    pub k: usize,
    /// Left factor.
    pub a: *const f32,
    /// Distance between its rows.
    pub row: usize,
    /// Distance between its columns.
    pub col: usize,
    /// Right factor.
    pub b: *const f32,
    /// Distance between its rows.
    pub stride: usize,
}

/// As in `avx512.rs`.
#[derive(Debug, Clone, Copy)]
#[allow(dead_code)]
pub struct Place {
    /// Its first element.
    pub at: *mut f32,
    /// Distance between rows.
    pub stride: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Multiplies the sum.
    pub scale: f32,
    /// Whether what stands there is added.
    pub add: bool,
    /// Pairs of bf16 numbers go there, in words of which `stride` counts; `add` is not for them.
    pub short: bool,
}

/// As in `avx512.rs`.
#[derive(Debug, Clone, Copy)]
#[allow(dead_code)]
pub struct Ahead {
    /// The first byte.
    pub at: *const u8,
    /// Bytes of a run.
    pub run: usize,
    /// How many.
    pub runs: usize,
    /// Bytes from one to the next.
    pub stride: usize,
}

impl Ahead {
    /// Nothing to ask for.
    pub fn fetch(&self, _: usize, _: usize) {}
}

/// Never called.
///
/// # Safety
/// None is needed.
pub unsafe fn tile(_: &[Part], _: Place) {
    unreachable!("tiles are for AVX-512");
}
