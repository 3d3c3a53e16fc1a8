//! Cross-entropy and its gradient, in place; a task is one row of logits.

use super::super::operands::Context;
use super::super::runtime::isa::kernel;
use super::super::runtime::math;

kernel! {
    /// row := e^(row - largest); returns their sum.
    pub(super) fn exponentials<L>(row: &mut [f32], largest: f32) -> f32 {
        let mut part = [0.0; math::LANES];
        let mut chunks = row.chunks_exact_mut(math::LANES);
        for c in &mut chunks {
            for lane in 0..math::LANES {
                let e = math::exp::<L>(c[lane] - largest);
                c[lane] = e;
                part[lane] += e;
            }
        }
        for (lane, v) in chunks.into_remainder().iter_mut().enumerate() {
            *v = math::exp::<L>(*v - largest);
            part[lane] += *v;
        }
        math::tree(part)
    }
}

kernel! {
    /// The largest value; NaNs are passed over.
    pub(super) fn largest<L>(row: &[f32]) -> f32 { math::max(row) }
}

/// losses[n] and the gradient in the place of the logits, rows of `vocab`.
pub fn cross_entropy(
    cx: Context,
    losses: &mut [f32],
    logits: (&mut [f32], usize),
    targets: &[u32],
    weights: Option<&[f32]>,
) {
    let (logits, vocab) = logits;
    cx.threads.chunks2((losses, logits), (1, vocab), |i, loss, row| {
        let target = targets[i] as usize;
        let weight = weights.map_or(1.0, |w| w[target]);
        let m = largest(cx.isa, row);
        let chosen = row[target];
        let sum = exponentials(cx.isa, row, m);
        loss[0] = weight * (libm::logf(sum) - (chosen - m));
        math::scale_row(cx.isa, row, weight / sum);
        row[target] -= weight;
    });
}
