//! Verbs without sums: every output value depends on the values at its own place.

use super::super::operands::Context;
use super::super::runtime::isa::kernel;
use super::super::runtime::math;
use super::super::runtime::threads::Threads;
use crate::backend::Write;
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

kernel! {
    fn swiglu_values<L>(out: &mut [f32], gate: &[f32], up: &[f32]) {
        for ((o, &g), &u) in out.iter_mut().zip(gate).zip(up) {
            *o = g * math::sigmoid::<L>(g) * u;
        }
    }
}

kernel! {
    fn swiglu_grad_values<L>(gate: &mut [f32], up: &mut [f32], dout: &[f32]) {
        for ((g, u), &d) in gate.iter_mut().zip(up).zip(dout) {
            let s = math::sigmoid::<L>(*g);
            let silu = *g * s;
            *g = d * *u * L::fma(silu, 1.0 - s, s);
            *u = d * silu;
        }
    }
}

/// out = silu(gate) * up
pub fn swiglu(cx: Context, out: &mut [f32], gate: &[f32], up: &[f32]) {
    cx.threads.chunks(out, CHUNK, |i, out| {
        let part = i * CHUNK..i * CHUNK + out.len();
        swiglu_values(cx.isa, out, &gate[part.clone()], &up[part]);
    });
}

/// gate := d gate, up := d up
pub fn swiglu_grad(cx: Context, gate: &mut [f32], up: &mut [f32], dout: &[f32]) {
    cx.threads.chunks2((gate, up), (CHUNK, CHUNK), |i, gate, up| {
        let dout = &dout[i * CHUNK..][..gate.len()];
        swiglu_grad_values(cx.isa, gate, up, dout);
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
