//! Causal short convolutions between two gates: a lane for each value. A piece of the rows also reads those that its taps
//! reach, above it or, for the gradient, below: a piece is half as large as one binding allows.

use super::kernel::Access::{Read, Write as Written};
use super::kernel::Kernel;
use super::memory::Place;
use super::rows::{ELEMENT, kernel};
use super::{Memory, Tokens, Wgpu};
use crate::backend::{Gates, GatesGrad, View, ViewMut};

kernel!(CONVOLUTION, "convolution", ["usual"], [Written, Read, Read, Read, Read, Read]);
kernel!(
    CONVOLUTION_GRAD,
    "convolution_grad",
    ["usual"],
    [Written, Written, Read, Read, Read, Read, Read, Read]
);

/// The kernels of this file.
pub(super) const KERNELS: &[&Kernel] = &[&CONVOLUTION, &CONVOLUTION_GRAD];

impl Wgpu {
    pub(super) fn convolve(
        &mut self,
        mut out: ViewMut<Memory>,
        gates: Gates<Memory>,
        taps: View<Memory>,
        tokens: &Tokens,
    ) {
        let (above, reach) = (gates.x.rows - out.rows, taps.rows - 1);
        let positions = Place { slot: self.integers(&tokens.integers), base: 0 };
        let w = self.at(taps);
        for (from, rows) in self.pieces(out.rows, 2 * out.cols, ELEMENT * taps.len() as f64) {
            let first = (above + from).saturating_sub(reach);
            let reached = above + from + rows - first;
            let part = out.again().rows(from, rows);
            let (o, n, cols) = (self.at_mut(&part), part.len(), part.cols);
            let [b, x] = [gates.before, gates.x].map(|x| self.at(x.rows(first, reached)));
            let a = self.at(gates.after.rows(from, rows));
            let sizes = [tokens.len() + from, n, cols, taps.rows, above + from - first].map(|x| x as u32);
            let params = [&[o.base, b.base, a.base, x.base, w.base][..], &sizes].concat();
            self.each(&CONVOLUTION, n, &params, &[&o, &b, &a, &x, &w, &positions]);
        }
    }

    pub(super) fn convolve_grad(
        &mut self,
        grad: GatesGrad<Memory>,
        dout: View<Memory>,
        gates: Gates<Memory>,
        taps: View<Memory>,
        tokens: &Tokens,
    ) {
        let GatesGrad { mut before, after, mut x } = grad;
        self.convolve(after, Gates { after: dout, ..gates }, taps, tokens);
        let positions = Place { slot: self.integers(&tokens.integers), base: 0 };
        let w = self.at(taps);
        for (from, rows) in self.pieces(dout.rows, 2 * dout.cols, ELEMENT * taps.len() as f64) {
            let left = dout.rows - from;
            let reached = left.min(rows + taps.rows - 1);
            let (db, dx) = (before.again().rows(from, rows), x.again().rows(from, rows));
            let (n, cols) = (db.len(), db.cols);
            let (db, dx) = (self.at_mut(&db), self.at_mut(&dx));
            let [d, a] = [dout, gates.after].map(|x| self.at(x.rows(from, reached)));
            let [b, x] = [gates.before, gates.x].map(|x| self.at(x.rows(from, rows)));
            let sizes = [tokens.len() + from, n, cols, taps.rows, left].map(|x| x as u32);
            let bases = [&db, &dx, &d, &b, &a, &x, &w].map(|place| place.base);
            let params = [&bases[..], &sizes].concat();
            self.each(&CONVOLUTION_GRAD, n, &params, &[&db, &dx, &d, &b, &a, &x, &w, &positions]);
        }
    }
}
