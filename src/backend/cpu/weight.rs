//! Frozen matrices.

use super::isa::Isa;
use super::product::{Factors, Sizes, Strided, product};
use super::threads::Threads;
use crate::backend::{Fault, Frozen, Write};

/// A frozen matrix [N, K], row-major.
pub struct Weight {
    rows: usize,
    cols: usize,
    values: Vec<f32>,
}

impl Weight {
    /// Widens what a file holds.
    pub fn pack(source: Frozen) -> Result<Weight, Fault> {
        let needed = source.rows * source.cols * source.dtype.size();
        if source.bytes.len() != needed {
            let (rows, cols, have) = (source.rows, source.cols, source.bytes.len());
            let reason = format!("a {rows} x {cols} matrix takes {needed} bytes, not {have}");
            return Err(Fault::Device { device: "cpu".into(), reason });
        }
        Ok(Weight { rows: source.rows, cols: source.cols, values: source.dtype.widen(source.bytes) })
    }

    /// out = row `id`
    pub fn row(&self, out: &mut [f32], id: usize) {
        out.copy_from_slice(&self.values[id * self.cols..][..self.cols]);
    }

    /// N
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// K
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// y[T, N] (=|+=) x wᵀ
    pub fn forward(&self, cx: (&Threads, Isa), y: &mut [f32], write: Write, x: &[f32]) {
        let sizes = Sizes { m: y.len() / self.rows, n: self.rows, k: self.cols };
        let b = Strided::rows(&self.values, self.cols).transposed();
        let f = Factors { a: Strided::rows(x, self.cols), b, scale: 1.0 };
        product(cx.0, (y, self.rows), write, sizes, f);
    }

    /// dx[T, K] (=|+=) dy w
    pub fn backward(&self, cx: (&Threads, Isa), dx: &mut [f32], write: Write, dy: &[f32]) {
        let sizes = Sizes { m: dx.len() / self.cols, n: self.cols, k: self.rows };
        let b = Strided::rows(&self.values, self.cols);
        let f = Factors { a: Strided::rows(dy, self.rows), b, scale: 1.0 };
        product(cx.0, (dx, self.cols), write, sizes, f);
    }
}
