//! A low-rank product that is added to a frozen one in the same pass over the output.

use super::super::operands::{COLS, Left, Strided};
use super::super::runtime::bf16::round;
use super::product_tiles;
pub use crate::numeric::slices::RANK;

/// A product that is added while the tile is in registers: left [T, R], right as a tile wants it (R rows), and
/// what multiplies it.
#[derive(Clone, Copy)]
pub struct Added<'a> {
    /// [T, R]
    pub left: Left<'a>,
    /// [R, outputs]; where the frozen product is of bf16 numbers it is rounded as a tile reads it.
    pub right: Strided<'a>,
    /// R
    pub rank: usize,
    /// Multiplies the right factor, before it is rounded.
    pub scale: f32,
    /// Whether it is rounded.
    pub rounded: bool,
}

impl Added<'_> {
    /// panel[R][32] = the right factor from output `col` on.
    pub fn lay_out(&self, panel: &mut [f32], (col, cols): (usize, usize)) {
        product_tiles::lay_out(panel, self.right.from(0, col), (self.rank, cols), self.scale);
        if self.rounded {
            panel[..self.rank * COLS].iter_mut().for_each(|x| *x = round(*x));
        }
    }
}

/// The factors of what is added have the rows and columns that tiles read without looking.
pub fn check(added: Option<Added>, (rows, outputs): (usize, usize)) {
    if let Some(a) = added {
        assert!(a.left.holds(rows, a.rank), "the left factor has T rows");
        assert!(a.right.holds(a.rank, outputs), "the right factor has R rows");
    }
}
