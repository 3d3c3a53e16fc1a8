//! Causal short convolutions between two gates; tasks are blocks of rows.

use super::super::operands::Context;
use super::super::runtime::isa::kernel;

/// Rows per task.
const ROWS: usize = 16;

kernel! {
    /// sum += tap * (a * b)
    fn add_product<L>(sum: &mut [f32], tap: &[f32], a: &[f32], b: &[f32]) {
        for (((s, &tap), &a), &b) in sum.iter_mut().zip(tap).zip(a).zip(b) {
            *s = L::fma(tap, a * b, *s);
        }
    }
}

kernel! {
    /// x *= gate
    fn multiply<L>(x: &mut [f32], gate: &[f32]) {
        x.iter_mut().zip(gate).for_each(|(x, &gate)| *x *= gate);
    }
}

/// Inputs, rows of `cols`.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    /// [P + T, C]
    pub before: &'a [f32],
    /// [T, C]
    pub after: &'a [f32],
    /// [P + T, C]
    pub x: &'a [f32],
    /// [J, C]
    pub taps: &'a [f32],
    /// C
    pub cols: usize,
    /// Of each token in its row.
    pub positions: &'a [u32],
}

impl Inputs<'_> {
    /// The rows above those of the tokens.
    fn above(&self) -> usize {
        self.x.len() / self.cols - self.positions.len()
    }

    /// out = the convolution of before * x at token t.
    fn sum(&self, cx: Context, out: &mut [f32], t: usize) {
        out.fill(0.0);
        let last = self.above() + t;
        for (j, tap) in self.taps.chunks_exact(self.cols).enumerate().take(self.positions[t] as usize + 1) {
            let row = (last - j) * self.cols..(last - j + 1) * self.cols;
            add_product(cx.isa, out, tap, &self.before[row.clone()], &self.x[row]);
        }
    }

    fn row<'b>(&self, x: &'b [f32], t: usize) -> &'b [f32] {
        &x[t * self.cols..(t + 1) * self.cols]
    }
}

/// out = after * the convolution of before * x
pub fn forward(cx: Context, out: &mut [f32], inputs: Inputs) {
    cx.threads.chunks(out, ROWS * inputs.cols, |i, out| {
        for (r, out) in out.chunks_exact_mut(inputs.cols).enumerate() {
            let t = i * ROWS + r;
            inputs.sum(cx, out, t);
            multiply(cx.isa, out, inputs.row(inputs.after, t));
        }
    });
}

/// The gradients of before, after and x.
pub fn gradient(cx: Context, [before, after, x]: [&mut [f32]; 3], dout: &[f32], inputs: Inputs) {
    forward(cx, after, Inputs { after: dout, ..inputs });
    let (tokens, cols) = (inputs.positions.len(), inputs.cols);
    cx.threads.chunks2((before, x), (ROWS * cols, ROWS * cols), |i, before, x| {
        let rows = before.chunks_exact_mut(cols).zip(x.chunks_exact_mut(cols));
        for (r, (before, x)) in rows.enumerate() {
            let t = i * ROWS + r;
            x.fill(0.0);
            for (j, tap) in inputs.taps.chunks_exact(cols).enumerate().take(tokens - t) {
                // Token t + j of the same row.
                if inputs.positions[t + j] as usize >= j {
                    add_product(cx.isa, x, tap, inputs.row(dout, t + j), inputs.row(inputs.after, t + j));
                }
            }
            before.copy_from_slice(x);
            multiply(cx.isa, before, inputs.row(inputs.x, t));
            multiply(cx.isa, x, inputs.row(inputs.before, t));
        }
    });
}
