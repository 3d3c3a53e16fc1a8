//! Frozen matrices: in panels, or in the blocks of their file.

use super::super::gemm::added::{Added, RANK};
use super::super::gemm::product::product;
use super::super::gemm::product_tiles;
use super::super::gemm::tiled::Tiled;
use super::super::operands::{Context, Factors, Left, Precision, Side, Sizes, Target};
use super::super::runtime::bf16::{round, upper};
use super::super::runtime::threads::Shared;
use super::blocks::InBlocks;
use super::panels::Panels;
use crate::backend::{Fault, Frozen, Write};
use crate::numeric::block::Blocks;
use crate::numeric::dtype::Dtype;
use half::{bf16, f16};

/// A frozen matrix [N, K].
pub struct Weight(Box<dyn Tiled>);

/// Where a frozen product goes: f32 values, or pairs of bf16 numbers where [`Weight::writes_pairs`].
pub enum Out<'a> {
    /// Set or added to.
    Values(&'a mut [f32], Write),
    /// Set.
    Pairs(&'a mut [u32]),
}

impl Out<'_> {
    /// Its words, what is done with them, and whether they are pairs.
    fn shared(&mut self) -> (Shared<'_>, Write, bool) {
        match self {
            Out::Values(values, write) => (Shared::new(values), *write, false),
            Out::Pairs(pairs) => (Shared::new(bytemuck::cast_slice_mut(pairs)), Write::Set, true),
        }
    }
}

impl Weight {
    /// Packs what a file holds: in f32 without rounding (f32 numbers that are all bf16 numbers are kept as such),
    /// else rounded to bf16.
    pub(in crate::backend::cpu) fn pack(cx: Context, source: Frozen) -> Result<Weight, Fault> {
        let Frozen { rows, cols, dtype, bytes } = source;
        let needed = rows * cols * dtype.size();
        if bytes.len() != needed {
            let reason = format!("a {rows} x {cols} matrix takes {needed} bytes, not {}", bytes.len());
            return Err(Fault::Device { device: "cpu".into(), reason });
        }
        let shape = (rows, cols);
        let wide = |i: usize| f32::from_le_bytes(std::array::from_fn(|b| bytes[4 * i + b]));
        let half = |i: usize| [bytes[2 * i], bytes[2 * i + 1]];
        let number = |i: usize| match dtype {
            Dtype::F32 => wide(i),
            Dtype::F16 => f16::from_le_bytes(half(i)).to_f32(),
            Dtype::Bf16 => bf16::from_le_bytes(half(i)).to_f32(),
        };
        Ok(Weight(match (cx.precision, dtype) {
            (Precision::F32, Dtype::F16) => {
                Box::new(Panels::pack(cx.threads, shape, |i| f16::from_le_bytes(half(i))))
            }
            (Precision::F32, Dtype::F32) if !dtype.halves(bytes) => {
                Box::new(Panels::pack(cx.threads, shape, wide))
            }
            (Precision::F32, _) => Box::new(Panels::pack(cx.threads, shape, |i| upper(number(i)))),
            _ => Box::new(Panels::pack(cx.threads, shape, |i| upper(round(number(i))))),
        }))
    }

    /// Keeps the blocks.
    pub(in crate::backend::cpu) fn of_blocks(cx: Context, source: &Blocks) -> Weight {
        Weight(Box::new(InBlocks::new(source, cx.precision)))
    }

    /// Its numbers, as products read them.
    pub(in crate::backend::cpu) fn tiled(&self) -> &dyn Tiled {
        &*self.0
    }

    /// out = row `id`
    pub fn row(&self, out: &mut [f32], id: usize) {
        self.0.row(out, id);
    }

    /// N
    pub fn rows(&self) -> usize {
        self.0.rows()
    }

    /// K
    pub fn cols(&self) -> usize {
        self.0.cols()
    }

    /// Whether tiles can write the product in pairs: they are of pairs, and hold the whole sum over that many terms.
    pub(in crate::backend::cpu) fn writes_pairs(left: Left, terms: usize, low: Option<&Added>) -> bool {
        let whole = product_tiles::slices(terms).count() == 1 && low.is_none_or(|low| low.rank <= RANK);
        whole && matches!(left.side, Side::Pairs(..))
    }

    /// y[T, N] (=|+=) x wᵀ [+ scale * left right]
    pub(in crate::backend::cpu) fn forward(&self, cx: Context, mut y: Out, x: Left, low: Option<Added>) {
        let (fits, rest) = split(low);
        self.0.forward(cx, target(&y.shared(), self.rows()), x, fits);
        add_low(cx, y, (x.rows, self.rows()), rest);
    }

    /// dx[T, K] (=|+=) dy w [+ scale * left right]
    pub(in crate::backend::cpu) fn backward(&self, cx: Context, mut dx: Out, dy: Left, low: Option<Added>) {
        let (fits, rest) = split(low);
        self.0.backward(cx, target(&dx.shared(), self.cols()), dy, fits);
        add_low(cx, dx, (dy.rows, self.cols()), rest);
    }
}

/// Rows of n outputs.
fn target<'a>((out, write, short): &'a (Shared<'_>, Write, bool), n: usize) -> Target<'a> {
    Target { short: *short, ..Target::rows(out, if *short { n / 2 } else { n }, *write) }
}

/// What does not go along with the frozen product [T, N], onto it.
fn add_low(cx: Context, y: Out, (t, n): (usize, usize), low: Option<Added>) {
    let (Some(low), Out::Values(y, _)) = (low, y) else { return };
    let f = Factors { a: low.left.numbers(), b: low.right, scale: low.scale };
    product(cx, (y, n), Write::Add, Sizes { m: t, n, k: low.rank }, f);
}

/// A low-rank product goes along with the frozen one, unless its rank is enormous.
fn split(low: Option<Added>) -> (Option<Added>, Option<Added>) {
    if low.is_some_and(|low| low.rank <= RANK) { (low, None) } else { (None, low) }
}
