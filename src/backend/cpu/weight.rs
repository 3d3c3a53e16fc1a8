//! Frozen matrices: in panels for our own kernel, in rows for the `gemm` crate.

use super::Context;
use super::head::{self, Question};
use super::panels::{Added, Panels, RANK};
use super::product::{Factors, Products, Sizes, Strided, Target, product};
use super::threads::Shared;
use crate::backend::{Fault, Frozen, Write};
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
}

/// A low-rank product [T, R] x [R, outputs] that is added in the same pass.
#[derive(Clone, Copy)]
pub struct LowRank<'a> {
    /// [T, R]
    pub left: &'a [f32],
    /// [R, outputs], however it lies.
    pub right: Strided<'a>,
    /// R
    pub rank: usize,
    /// Multiplies the product.
    pub scale: f32,
}

impl Weight {
    /// Packs what a file holds, without rounding: f32 numbers that are all bf16 numbers are kept as such.
    pub(super) fn pack(cx: Context, source: Frozen) -> Result<Weight, Fault> {
        let Frozen { rows, cols, dtype, bytes } = source;
        let needed = rows * cols * dtype.size();
        if bytes.len() != needed {
            let reason = format!("a {rows} x {cols} matrix takes {needed} bytes, not {}", bytes.len());
            return Err(Fault::Device { device: "cpu".into(), reason });
        }
        let shape = (rows, cols);
        let wide = |i: usize| [bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]];
        let half = |i: usize| [bytes[2 * i], bytes[2 * i + 1]];
        let values = match (cx.products, dtype) {
            (Products::Crate, _) => Values::Rows(dtype.widen(bytes)),
            (_, Dtype::Bf16) => {
                Values::Bf16(Panels::pack(cx.threads, shape, |i| bf16::from_le_bytes(half(i))))
            }
            (_, Dtype::F16) => Values::F16(Panels::pack(cx.threads, shape, |i| f16::from_le_bytes(half(i)))),
            (_, Dtype::F32) if bytes.chunks_exact(4).all(|b| b[0] == 0 && b[1] == 0) => {
                let high = |i: usize| bf16::from_le_bytes([wide(i)[2], wide(i)[3]]);
                Values::Bf16(Panels::pack(cx.threads, shape, high))
            }
            (_, Dtype::F32) => Values::F32(Panels::pack(cx.threads, shape, |i| f32::from_le_bytes(wide(i)))),
        };
        Ok(Weight { rows, cols, values })
    }

    /// out = row `id`
    pub fn row(&self, out: &mut [f32], id: usize) {
        match &self.values {
            Values::Rows(v) => out.copy_from_slice(&v[id * self.cols..][..self.cols]),
            Values::F32(p) => p.row(out, id),
            Values::F16(p) => p.row(out, id),
            Values::Bf16(p) => p.row(out, id),
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

    /// y[T, N] (=|+=) x wᵀ [+ scale * left right]
    pub(super) fn forward(&self, cx: Context, y: (&mut [f32], Write), x: &[f32], low: Option<LowRank>) {
        let (y, write) = y;
        let t = x.len() / self.cols.max(1);
        if let Values::Rows(values) = &self.values {
            let sizes = Sizes { m: t, n: self.rows, k: self.cols };
            let b = Strided::rows(values, self.cols).transposed();
            let f = Factors { a: Strided::rows(x, self.cols), b, scale: 1.0 };
            product(cx, (&mut *y, self.rows), write, sizes, f);
            return self.add_low(cx, (y, self.rows), t, low);
        }
        let (fits, rest) = split(low);
        let out = Shared::new(&mut *y);
        let target = Target { out: &out, at: 0, stride: self.rows, write };
        match &self.values {
            Values::F32(p) => p.forward(cx, target, (x, t), fits),
            Values::F16(p) => p.forward(cx, target, (x, t), fits),
            Values::Bf16(p) => p.forward(cx, target, (x, t), fits),
            Values::Rows(_) => {}
        }
        self.add_low(cx, (y, self.rows), t, rest);
    }

    /// dx[T, K] (=|+=) dy w [+ scale * left right]
    pub(super) fn backward(&self, cx: Context, dx: (&mut [f32], Write), dy: &[f32], low: Option<LowRank>) {
        let (dx, write) = dx;
        let t = dy.len() / self.rows.max(1);
        if let Values::Rows(values) = &self.values {
            let sizes = Sizes { m: t, n: self.cols, k: self.rows };
            let b = Strided::rows(values, self.cols);
            let f = Factors { a: Strided::rows(dy, self.rows), b, scale: 1.0 };
            product(cx, (&mut *dx, self.cols), write, sizes, f);
            return self.add_low(cx, (dx, self.cols), t, low);
        }
        let (fits, rest) = split(low);
        let out = Shared::new(&mut *dx);
        let target = Target { out: &out, at: 0, stride: self.cols, write };
        match &self.values {
            Values::F32(p) => p.backward(cx, target, (dy, t), fits),
            Values::F16(p) => p.backward(cx, target, (dy, t), fits),
            Values::Bf16(p) => p.backward(cx, target, (dy, t), fits),
            Values::Rows(_) => {}
        }
        self.add_low(cx, (dx, self.cols), t, rest);
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
            Values::Rows(_) => unreachable!("the spelling in verbs serves the crate's products"),
        }
    }

    fn add_low(&self, cx: Context, out: (&mut [f32], usize), t: usize, low: Option<LowRank>) {
        let Some(low) = low else { return };
        let sizes = Sizes { m: t, n: out.1, k: low.rank };
        let f = Factors { a: Strided::rows(low.left, low.rank), b: low.right, scale: low.scale };
        product(cx, out, Write::Add, sizes, f);
    }
}

/// A low-rank product goes along with the frozen one unless its rank is enormous.
fn split(low: Option<LowRank>) -> (Option<Added>, Option<LowRank>) {
    match low {
        Some(LowRank { left, right, rank, scale }) if rank <= RANK => {
            (Some(Added { left: Strided::rows(left, rank), right, rank, scale }), None)
        }
        other => (None, other),
    }
}
