//! Verbs without sums: every output value depends on the values at its own place.

use super::super::operands::Context;
use super::super::runtime::isa::kernel;
use super::super::runtime::math;
use super::super::runtime::threads::Threads;
use crate::backend::{Activation, Write};
use crate::numeric::rng;

/// Values per task.
const CHUNK: usize = 16 * 1024;

/// out = value
pub fn fill(threads: &Threads, out: &mut [f32], value: f32) {
    threads.chunks(out, CHUNK, |_, out| out.fill(value));
}

/// out = x
pub fn copy(threads: &Threads, out: &mut [f32], x: &[f32]) {
    threads.chunks(out, CHUNK, |i, out| out.copy_from_slice(&x[i * CHUNK..][..out.len()]));
}

/// out += x
pub fn add(cx: Context, out: &mut [f32], x: &[f32]) {
    cx.threads.chunks(out, CHUNK, |i, out| math::add_row(cx.isa, out, &x[i * CHUNK..][..out.len()]));
}

/// y[T, N] += bias[N]
pub fn bias(cx: Context, y: &mut [f32], bias: &[f32]) {
    let rows = (CHUNK / bias.len().max(1)).max(1);
    cx.threads.chunks(y, rows * bias.len(), |_, y| {
        y.chunks_exact_mut(bias.len()).for_each(|row| math::add_row(cx.isa, row, bias));
    });
}

/// A gate with this activation and this factor, and its gradient by the activation's slope.
macro_rules! gate {
    ($values:ident = $act:ident * $factor:ident, $grad:ident = $slope:ident) => {
        kernel! {
            fn $values<L>(out: &mut [f32], gate: &[f32], up: &[f32]) {
                for ((o, &g), &u) in out.iter_mut().zip(gate).zip(up) {
                    *o = math::$act::<L>(g) * math::$factor(u).0;
                }
            }
        }

        kernel! {
            fn $grad<L>(gate: &mut [f32], up: &mut [f32], dout: &[f32]) {
                for ((g, u), &d) in gate.iter_mut().zip(up).zip(dout) {
                    let ((act, slope), (factor, varies)) = (math::$slope::<L>(*g), math::$factor(*u));
                    *g = d * factor * slope;
                    *u = if varies { d * act } else { 0.0 };
                }
            }
        }
    };
}

gate!(swiglu_values = silu * whole, swiglu_grad_values = silu_slope);
gate!(geglu_values = gelu * whole, geglu_grad_values = gelu_slope);
gate!(sigmoid_values = sigmoid * whole, sigmoid_grad_values = sigmoid_slope);
gate!(clamped_values = clamped_silu * clamped, clamped_grad_values = clamped_silu_slope);

/// out = act(gate) * up
pub fn gated(cx: Context, out: &mut [f32], (gate, up): (&[f32], &[f32]), activation: Activation) {
    let values = match activation {
        Activation::SwiGlu => swiglu_values,
        Activation::GeGlu => geglu_values,
        Activation::Sigmoid => sigmoid_values,
        Activation::ClampedSwiGlu => clamped_values,
    };
    cx.threads.chunks(out, CHUNK, |i, out| {
        let part = i * CHUNK..i * CHUNK + out.len();
        values(cx.isa, out, &gate[part.clone()], &up[part]);
    });
}

/// gate := d gate, up := d up
pub fn gated_grad(cx: Context, (gate, up): (&mut [f32], &mut [f32]), dout: &[f32], activation: Activation) {
    let values = match activation {
        Activation::SwiGlu => swiglu_grad_values,
        Activation::GeGlu => geglu_grad_values,
        Activation::Sigmoid => sigmoid_grad_values,
        Activation::ClampedSwiGlu => clamped_grad_values,
    };
    cx.threads.chunks2((gate, up), (CHUNK, CHUNK), |i, gate, up| {
        let dout = &dout[i * CHUNK..][..gate.len()];
        values(cx.isa, gate, up, dout);
    });
}

/// The mask of one microbatch: the base hash of every token, the draw below which an element is dropped, and
/// what the others are multiplied by.
pub struct Mask {
    /// [T]
    pub bases: Vec<u32>,
    /// See [`DropoutKey::threshold`](crate::backend::DropoutKey::threshold).
    pub threshold: u32,
    /// See [`DropoutKey::scale`](crate::backend::DropoutKey::scale).
    pub scale: f32,
}

kernel! {
    fn dropout_row<L>(out: &mut [f32], write: Write, x: &[f32], base: u32, keep: (u32, f32)) {
        let (threshold, scale) = keep;
        let kept = |c: usize, x: f32| if rng::mix(base, c as u32) >= threshold { x * scale } else { 0.0 };
        let pairs = out.iter_mut().zip(x).enumerate();
        match write {
            Write::Set => pairs.for_each(|(c, (o, &x))| *o = kept(c, x)),
            Write::Add => pairs.for_each(|(c, (o, &x))| *o += kept(c, x)),
        }
    }
}

/// out (=|+=) x * mask / (1 - p), rows of `cols`
pub fn dropout(cx: Context, out: &mut [f32], write: Write, x: (&[f32], usize), mask: &Mask) {
    let (x, cols) = x;
    let rows = (CHUNK / cols.max(1)).max(1);
    cx.threads.chunks(out, rows * cols, |i, out| {
        for (r, row) in out.chunks_exact_mut(cols).enumerate() {
            let t = i * rows + r;
            let keep = (mask.threshold, mask.scale);
            dropout_row(cx.isa, row, write, &x[t * cols..][..cols], mask.bases[t], keep);
        }
    });
}
