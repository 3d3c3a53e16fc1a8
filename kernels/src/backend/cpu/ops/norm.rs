//! rmsnorm. Tasks are blocks of rows; within a group the sum of squares is sixteen partial sums and a tree.

use super::super::operands::Context;
use super::super::runtime::isa::kernel;
use super::super::runtime::math;
use super::bf16_activations as short;
use crate::backend::Write;

/// Rows per task.
const ROWS: usize = 16;

kernel! {
    fn forward_rows<L>(out: &mut [f32], inv_rms: &mut [f32], x: &[f32], gain: &[f32], eps: f32) {
        let group = gain.len();
        for ((out, inv), x) in out.chunks_exact_mut(group).zip(inv_rms).zip(x.chunks_exact(group)) {
            let square = math::dot::<L>(x, x) / group as f32;
            // A sum that overflows would make the scale, and all that follows, a clean zero: inf * 0 is NaN.
            let scale = 1.0 / (square + eps).sqrt() + square * 0.0;
            *inv = scale;
            for ((o, &x), &g) in out.iter_mut().zip(x).zip(gain) {
                *o = x * scale * g;
            }
        }
    }
}

kernel! {
    fn grad_rows<L>(dx: &mut [f32], write: Write, dy: &[f32], x: &[f32], norm: (&[f32], &[f32])) {
        let (gain, inv_rms) = norm;
        let group = gain.len();
        let rows = dy.chunks_exact(group).zip(x.chunks_exact(group)).zip(inv_rms);
        for (dx, ((dy, x), &inv)) in dx.chunks_exact_mut(group).zip(rows) {
            let mut part = [0.0; math::LANES];
            let whole = group / math::LANES * math::LANES;
            let blocks = gain.chunks_exact(math::LANES).zip(dy.chunks_exact(math::LANES));
            for ((g, dy), x) in blocks.zip(x.chunks_exact(math::LANES)) {
                for lane in 0..math::LANES {
                    part[lane] = L::fma(g[lane] * dy[lane], x[lane], part[lane]);
                }
            }
            for i in whole..group {
                part[i - whole] = L::fma(gain[i] * dy[i], x[i], part[i - whole]);
            }
            let along = math::tree(part) / group as f32 * inv * inv;
            if write == Write::Set {
                for (((d, &dy), &x), &g) in dx.iter_mut().zip(dy).zip(x).zip(gain) {
                    *d = inv * (g * dy - x * along);
                }
            } else {
                for (((d, &dy), &x), &g) in dx.iter_mut().zip(dy).zip(x).zip(gain) {
                    *d += inv * (g * dy - x * along);
                }
            }
        }
    }
}

/// out and inv_rms, see [`Backend::rmsnorm`](crate::backend::Backend::rmsnorm).
pub fn forward(cx: Context, out: (&mut [f32], &mut [f32]), cols: usize, x: (&[f32], &[f32]), eps: f32) {
    let (x, gain) = x;
    let groups = cols / gain.len();
    cx.threads.chunks2(out, (ROWS * cols, ROWS * groups), |i, out, inv| {
        let x = &x[i * ROWS * cols..][..out.len()];
        forward_rows(cx.isa, out, inv, x, gain, eps);
    });
}

/// The same in pairs, of groups that are whole rows.
pub fn forward_pairs(cx: Context, out: (&mut [u32], &mut [f32]), x: (&[f32], &[f32]), eps: f32) {
    let ((out, inv_rms), (x, gain)) = (out, x);
    let cols = gain.len();
    let out = (bytemuck::cast_slice_mut(out), inv_rms);
    cx.threads.chunks2(out, (ROWS * cols / 2, ROWS), |i, out, inv| {
        let mut row = vec![0.0; cols];
        let rows = x[i * ROWS * cols..].chunks_exact(cols).zip(inv.chunks_exact_mut(1));
        for (out, (x, inv)) in out.chunks_exact_mut(cols / 2).zip(rows) {
            forward_rows(cx.isa, &mut row, inv, x, gain, eps);
            short::pair(cx, bytemuck::cast_slice_mut(out), &row);
        }
    });
}

/// dx, see [`Backend::rmsnorm_grad`](crate::backend::Backend::rmsnorm_grad); `norm` is (gain, inv_rms).
pub fn grad(
    cx: Context,
    dx: (&mut [f32], Write),
    cols: usize,
    dy_x: (&[f32], &[f32]),
    norm: (&[f32], &[f32]),
) {
    let (gain, inv_rms) = norm;
    let groups = cols / gain.len();
    cx.threads.chunks(dx.0, ROWS * cols, |i, out| {
        let part = i * ROWS * cols..i * ROWS * cols + out.len();
        let inv = &inv_rms[i * ROWS * groups..][..out.len() / gain.len()];
        grad_rows(cx.isa, out, dx.1, &dy_x.0[part.clone()], &dy_x.1[part], (gain, inv));
    });
}
