//! Causal short convolutions with a silu after them; tasks are blocks of rows.

use super::super::operands::Context;
use super::super::runtime::isa::kernel;
use super::super::runtime::math;

/// Rows per task.
const ROWS: usize = 16;

kernel! {
    /// sum += tap * x
    fn add_product<L>(sum: &mut [f32], tap: &[f32], x: &[f32]) {
        for ((s, &tap), &x) in sum.iter_mut().zip(tap).zip(x) {
            *s = L::fma(tap, x, *s);
        }
    }
}

kernel! {
    /// x = silu(x)
    fn activate<L>(x: &mut [f32]) {
        x.iter_mut().for_each(|x| *x = math::silu::<L>(*x));
    }
}

kernel! {
    /// u = dout * silu'(u)
    fn slope<L>(u: &mut [f32], dout: &[f32]) {
        u.iter_mut().zip(dout).for_each(|(u, &d)| *u = d * math::silu_slope::<L>(*u).1);
    }
}

/// Inputs, rows of `cols`.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
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
    /// out = the convolution of x at token t.
    fn sum(&self, cx: Context, out: &mut [f32], t: usize) {
        out.fill(0.0);
        let last = self.x.len() / self.cols - self.positions.len() + t;
        for (j, tap) in self.taps.chunks_exact(self.cols).enumerate().take(self.positions[t] as usize + 1) {
            add_product(cx.isa, out, tap, &self.x[(last - j) * self.cols..(last - j + 1) * self.cols]);
        }
    }
}

/// out = silu(the convolution of x)
pub fn forward(cx: Context, out: &mut [f32], inputs: Inputs) {
    cx.threads.chunks(out, ROWS * inputs.cols, |i, out| {
        for (r, out) in out.chunks_exact_mut(inputs.cols).enumerate() {
            inputs.sum(cx, out, i * ROWS + r);
            activate(cx.isa, out);
        }
    });
}

/// dx = the gradient of x
pub fn gradient(cx: Context, dx: &mut [f32], dout: &[f32], inputs: Inputs) {
    let (tokens, cols) = (inputs.positions.len(), inputs.cols);
    let reach = (inputs.taps.len() / cols.max(1)).saturating_sub(1);
    cx.threads.chunks(dx, ROWS * cols, |i, dx| {
        let from = i * ROWS;
        let rows = tokens.min(from + dx.len() / cols + reach) - from;
        let mut sums = vec![0.0; rows * cols];
        for (r, sum) in sums.chunks_exact_mut(cols).enumerate() {
            inputs.sum(cx, sum, from + r);
            slope(cx.isa, sum, &dout[(from + r) * cols..(from + r + 1) * cols]);
        }
        for (r, dx) in dx.chunks_exact_mut(cols).enumerate() {
            dx.fill(0.0);
            for (j, tap) in inputs.taps.chunks_exact(cols).enumerate().take(rows - r) {
                // Token t + j of the same row.
                if inputs.positions[from + r + j] as usize >= j {
                    add_product(cx.isa, dx, tap, &sums[(r + j) * cols..(r + j + 1) * cols]);
                }
            }
        }
    });
}
