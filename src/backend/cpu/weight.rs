//! Frozen matrices: in panels or in the blocks of their file for our own kernels, in rows of f32 for the twin, which
//! multiplies through the `gemm` crate.

use super::Context;
use super::blocks::InBlocks;
use super::head::{self, Question};
use super::left::{self, Left, Precision, Side};
use super::panels::Panels;
use super::product::{Factors, Products, Sizes, Strided, Target, product};
use super::threads::Shared;
use super::tiled::{Added, RANK, Tiled};
use super::{product_crate, product_own};
use crate::backend::{Fault, Frozen, Write};
use crate::numeric::block::Blocks;
use crate::numeric::dtype::Dtype;
use half::{bf16, f16};

/// A frozen matrix [N, K].
pub struct Weight {
    rows: usize,
    cols: usize,
    values: Values,
}

enum Values {
    Rows(Vec<f32>),
    F32(Panels<f32>),
    F16(Panels<f16>),
    Bf16(Panels<bf16>),
    Blocks(InBlocks),
}

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
    pub(super) fn pack(cx: Context, source: Frozen) -> Result<Weight, Fault> {
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
        let values = match (cx.products, cx.precision, dtype) {
            (Products::Crate, Precision::F32, _) => Values::Rows((0..rows * cols).map(number).collect()),
            (Products::Crate, ..) => Values::Rows((0..rows * cols).map(|i| left::round(number(i))).collect()),
            (_, Precision::F32, Dtype::F16) => {
                Values::F16(Panels::pack(cx.threads, shape, |i| f16::from_le_bytes(half(i))))
            }
            (_, Precision::F32, Dtype::F32) if !dtype.halves(bytes) => {
                Values::F32(Panels::pack(cx.threads, shape, wide))
            }
            (_, Precision::F32, _) => {
                Values::Bf16(Panels::pack(cx.threads, shape, |i| left::upper(number(i))))
            }
            _ => Values::Bf16(Panels::pack(cx.threads, shape, |i| left::upper(left::round(number(i))))),
        };
        Ok(Weight { rows, cols, values })
    }

    /// Keeps the blocks.
    pub(super) fn of_blocks(cx: Context, source: &Blocks) -> Weight {
        let blocks = InBlocks::new(source, cx.precision);
        let values = match cx.products {
            Products::Own => Values::Blocks(blocks),
            Products::Crate => {
                let mut numbers = vec![0.0; source.rows * source.cols];
                let rows = numbers.chunks_exact_mut(source.cols.max(1)).enumerate();
                rows.for_each(|(id, out)| blocks.row(out, id));
                Values::Rows(numbers)
            }
        };
        Weight { rows: source.rows, cols: source.cols, values }
    }

    /// out = row `id`
    pub fn row(&self, out: &mut [f32], id: usize) {
        match &self.values {
            Values::Rows(p) => out.copy_from_slice(&p[id * self.cols..][..self.cols]),
            Values::F32(p) => p.row(out, id),
            Values::F16(p) => p.row(out, id),
            Values::Bf16(p) => p.row(out, id),
            Values::Blocks(p) => p.row(out, id),
        }
    }

    /// N
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// K
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Whether tiles can write the product in pairs: they are of pairs, and hold the whole sum over so many terms.
    pub(super) fn writes_pairs(left: Left, terms: usize, low: Option<&Added>) -> bool {
        let whole = product_own::slices(terms).count() == 1 && low.is_none_or(|low| low.rank <= RANK);
        whole && matches!(left.side, Side::Pairs(..))
    }

    /// y[T, N] (=|+=) x wᵀ [+ scale * left right]
    pub(super) fn forward(&self, cx: Context, mut y: Out, x: Left, low: Option<Added>) {
        let t = x.rows;
        let (fits, rest) = self.split(low);
        let (out, write, short) = y.shared();
        let target =
            Target { short, ..Target::rows(&out, if short { self.rows / 2 } else { self.rows }, write) };
        match &self.values {
            Values::F32(p) => p.forward(cx, target, x, fits),
            Values::F16(p) => p.forward(cx, target, x, fits),
            Values::Bf16(p) => p.forward(cx, target, x, fits),
            Values::Blocks(p) => p.forward(cx, target, x, fits),
            Values::Rows(p) => {
                let f = Factors { a: x.numbers(), b: Strided::rows(p, self.cols).transposed(), scale: 1.0 };
                product_crate::product(cx, target, Sizes { m: t, n: self.rows, k: self.cols }, f);
            }
        }
        self.add_low(cx, y, self.rows, (t, rest));
    }

    /// dx[T, K] (=|+=) dy w [+ scale * left right]
    pub(super) fn backward(&self, cx: Context, mut dx: Out, dy: Left, low: Option<Added>) {
        let t = dy.rows;
        let (fits, rest) = self.split(low);
        let (out, write, short) = dx.shared();
        let target =
            Target { short, ..Target::rows(&out, if short { self.cols / 2 } else { self.cols }, write) };
        match &self.values {
            Values::F32(p) => p.backward(cx, target, dy, fits),
            Values::F16(p) => p.backward(cx, target, dy, fits),
            Values::Bf16(p) => p.backward(cx, target, dy, fits),
            Values::Blocks(p) => p.backward(cx, target, dy, fits),
            Values::Rows(p) => {
                let f = Factors { a: dy.numbers(), b: Strided::rows(p, self.cols), scale: 1.0 };
                product_crate::product(cx, target, Sizes { m: t, n: self.cols, k: self.rows }, f);
            }
        }
        self.add_low(cx, dx, self.cols, (t, rest));
    }

    /// The loss of a head and its gradient, see [`head::loss`].
    pub(super) fn head_loss(
        &self,
        cx: Context,
        out: (&mut [f32], Option<&mut [f32]>),
        question: Question,
        room: &mut [f32],
    ) {
        match &self.values {
            Values::F32(p) => head::loss(cx, p, out, question, room),
            Values::F16(p) => head::loss(cx, p, out, question, room),
            Values::Bf16(p) => head::loss(cx, p, out, question, room),
            Values::Blocks(p) => head::loss(cx, p, out, question, room),
            Values::Rows(_) => {
                unreachable!("the spelling in verbs serves the crate's products")
            }
        }
    }

    /// What does not go along with the frozen product, onto it.
    fn add_low(&self, cx: Context, y: Out, n: usize, (t, low): (usize, Option<Added>)) {
        let (Some(low), Out::Values(y, _)) = (low, y) else { return };
        let sizes = Sizes { m: t, n, k: low.rank };
        let f = Factors { a: low.left.numbers(), b: low.right, scale: low.scale };
        product(cx, (y, n), Write::Add, sizes, f);
    }

    /// A low-rank product goes along with the frozen one, unless its rank is enormous or the crate multiplies.
    fn split<'a>(&self, low: Option<Added<'a>>) -> (Option<Added<'a>>, Option<Added<'a>>) {
        let along = !matches!(self.values, Values::Rows(_));
        if low.is_some_and(|low| along && low.rank <= RANK) { (low, None) } else { (None, low) }
    }
}
