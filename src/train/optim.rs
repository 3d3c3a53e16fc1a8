//! torch.optim.AdamW in f32, in the order of operations of its single-tensor path, without fused or reassociated
//! operations, so that every CPU gives the same bits. Scalars (learning rate, bias corrections) are f64 like Python's
//! floats, and are rounded to f32 where torch rounds them. (Loshchilov & Hutter 2019, arXiv:1711.05101)
//!
//! torch's vectorised `lerp` uses a fused multiply-add if the CPU has one, so the last bit of torch's result depends on
//! the CPU. With ATEN_CPU_CAPABILITY=default torch does not fuse; the golden test compares with that result.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// Values per block of a norm, and per work unit of a thread. The block size is a constant because the order of
/// summation must not depend on the machine.
pub(super) const BLOCK: usize = 4096;

/// Parameters of an update, apart from gradient and learning rate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Options {
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Added to the square root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay: parameters are multiplied by 1 - rate * weight_decay.
    pub weight_decay: f64,
    /// Maximum gradient norm; 0 disables clipping.
    pub max_grad_norm: f64,
    /// Learning rate of every B over that of all other values (LoRA+, Hayou et al. 2024, arXiv:2402.12354).
    #[serde(default = "one")]
    pub ratio_of_b: f64,
    /// Bits to which the change of a parameter is rounded; 0: it is not.
    #[serde(default)]
    pub update_bits: u32,
}

fn one() -> f64 {
    1.0
}

impl Default for Options {
    fn default() -> Self {
        Options {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            max_grad_norm: 1.0,
            ratio_of_b: 1.0,
            update_bits: 0,
        }
    }
}

/// The L2 norm in f64: squares are summed in order within a block, then over the blocks in order.
pub fn norm(gradient: &[f32]) -> f64 {
    let blocks: Vec<f64> = gradient.par_chunks(BLOCK).map(squares).collect();
    blocks.iter().sum::<f64>().sqrt()
}

/// The sum of the squares of one block, in order.
pub(super) fn squares(block: &[f32]) -> f64 {
    block.iter().map(|&g| f64::from(g) * f64::from(g)).sum()
}

/// Scales a gradient of norm `norm` down to `max_norm`, as clip_grad_norm_ does; 0 disables clipping.
pub fn clip(gradient: &mut [f32], norm: f64, max_norm: f64) {
    if let Some(c) = coefficient(norm, max_norm) {
        gradient.par_chunks_mut(BLOCK).for_each(|block| block.iter_mut().for_each(|g| *g *= c));
    }
}

/// The factor that clips a gradient of norm `norm`; None if no clipping is needed.
pub(super) fn coefficient(norm: f64, max_norm: f64) -> Option<f32> {
    let coefficient = max_norm / (norm + 1e-6);
    (max_norm > 0.0 && coefficient < 1.0).then_some(coefficient as f32)
}

/// The moments of all trained values.
#[derive(Debug, Clone, PartialEq)]
pub struct AdamW {
    options: Options,
    /// Number of updates so far.
    pub step: u64,
    /// First moments, in the flat layout.
    pub exp_avg: Vec<f32>,
    /// Second moments, in the flat layout.
    pub exp_avg_sq: Vec<f32>,
    /// What the last rounding of the parameters' changes has left, in the flat layout; empty if they are not rounded.
    pub residual: Vec<f32>,
}

/// The scalars of one update, rounded as torch rounds them.
pub(super) struct Scalars {
    shrink: Option<f32>,
    blend: f32,
    beta2: f32,
    fresh: f32,
    correction: f32,
    eps: f32,
    minus_step: f32,
}

impl AdamW {
    /// Moments of `len` values before the first update.
    pub fn new(options: Options, len: usize) -> Self {
        let residual = vec![0.0; if options.update_bits > 0 { len } else { 0 }];
        AdamW { options, step: 0, exp_avg: vec![0.0; len], exp_avg_sq: vec![0.0; len], residual }
    }

    /// The options of the optimizer.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Updates `parameters` in place, without rounding their changes; parameters, gradient and moments are in the flat layout.
    pub fn update(&mut self, parameters: &mut [f32], gradient: &[f32], rate: f64) {
        assert_eq!(parameters.len(), self.exp_avg.len(), "parameters and moments share one layout");
        assert_eq!(parameters.len(), gradient.len(), "parameters and gradient share one layout");
        self.step += 1;
        let scalars = self.scalars(self.step, rate, self.options.weight_decay);
        let moments = self.exp_avg.par_chunks_mut(BLOCK).zip(self.exp_avg_sq.par_chunks_mut(BLOCK));
        let values = parameters.par_chunks_mut(BLOCK).zip(gradient.par_chunks(BLOCK));
        values.zip(moments).for_each(|((p, g), (m, v))| block(&scalars, p, g, (m, v)));
    }

    /// The scalars of update number `step`.
    pub(super) fn scalars(&self, step: u64, rate: f64, weight_decay: f64) -> Scalars {
        let Options { beta1, beta2, eps, .. } = self.options;
        let correction1 = 1.0 - libm::pow(beta1, step as f64);
        let correction2 = 1.0 - libm::pow(beta2, step as f64);
        Scalars {
            shrink: (weight_decay != 0.0).then_some((1.0 - rate * weight_decay) as f32),
            blend: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            fresh: (1.0 - beta2) as f32,
            correction: correction2.sqrt() as f32,
            eps: eps as f32,
            minus_step: (-(rate / correction1)) as f32,
        }
    }
}

/// Parameters, first moments and second moments.
pub(super) type Moved<T> = (T, T, T);

/// Updates a block in place.
pub(super) fn block(
    s: &Scalars,
    parameters: &mut [f32],
    gradient: &[f32],
    (exp_avg, exp_avg_sq): (&mut [f32], &mut [f32]),
) {
    for (((p, &g), m), v) in parameters.iter_mut().zip(gradient).zip(exp_avg).zip(exp_avg_sq) {
        (*p, *m, *v) = updated(s, g, (*p, *m, *v));
    }
}

/// The largest magnitude. If a value is NaN, so is the result. Bits of magnitudes are ordered as the magnitudes, with infinity
/// and NaN above all.
pub(super) fn largest(values: &[f32]) -> f64 {
    let magnitude = |block: &[f32]| block.iter().fold(0, |most, v| most.max(v.to_bits() & !SIGN));
    f32::from_bits(values.par_chunks(BLOCK).map(magnitude).max().unwrap_or(0)).into()
}

/// Whether every value is finite and not negative.
pub(super) fn finite_from_zero(values: &[f32]) -> bool {
    // As integers, the bits of negative numbers are above those of all others.
    let most = |block: &[f32]| block.iter().fold(0, |most, v| most.max(v.to_bits()));
    values.par_chunks(BLOCK).map(most).max().is_none_or(|most| most < f32::INFINITY.to_bits())
}

/// The bit of a negative number.
const SIGN: u32 = 1 << 31;

/// Whether the update keeps every parameter of at most this magnitude finite, if no first moment or gradient exceeds
/// `moment` and every second moment is finite and not negative. A parameter moves by at most `minus_step` * moment / eps. The factor of 4
/// covers rounding, and the differences inside [`lerp`].
pub(super) fn in_range(s: &Scalars, parameter: f64, moment: f64) -> bool {
    let eps = f64::from(s.eps).min(1.0);
    let change = f64::from(s.minus_step.abs()) * moment / eps;
    let next = parameter * (1.0 + f64::from(s.shrink.unwrap_or(1.0).abs())) + change;
    // Not so if one of them is NaN.
    s.correction > 0.0 && s.eps > 0.0 && 4.0 * (next + moment) < f64::from(f32::MAX)
}

/// The first parameter in a block that the update would make infinite or NaN, with its index; nothing is stored.
pub(super) fn not_finite(s: &Scalars, gradient: &[f32], (p, m, v): Moved<&[f32]>) -> Option<(usize, f32)> {
    let values = p.iter().zip(m).zip(v).zip(gradient);
    let mut next = values.map(|(((&p, &m), &v), &g)| updated(s, g, (p, m, v)).0).enumerate();
    next.find(|(_, p)| !p.is_finite())
}

/// The update of one value: each line is one torch operation.
#[inline(always)]
fn updated(s: &Scalars, g: f32, (mut p, mut m, mut v): Moved<f32>) -> Moved<f32> {
    if let Some(shrink) = s.shrink {
        p *= shrink;
    }
    m = lerp(m, g, s.blend);
    v *= s.beta2;
    v += s.fresh * g * g;
    let denominator = v.sqrt() / s.correction + s.eps;
    p += s.minus_step * m / denominator;
    (p, m, v)
}

/// at::native::lerp: the formula depends on the weight, for accuracy.
#[inline(always)]
fn lerp(from: f32, to: f32, weight: f32) -> f32 {
    if weight.abs() < 0.5 { from + weight * (to - from) } else { to - (to - from) * (1.0 - weight) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blockwise_norm_equals_the_norm() {
        for n in [0usize, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 17] {
            let g: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
            let exact = g.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
            assert!((norm(&g) - exact).abs() <= 1e-12 * exact);
        }
    }

    #[test]
    fn clipping_limits_the_norm_and_zero_disables_it() {
        let g = vec![3.0f32, 4.0];
        for (max, want) in [(0.0, 5.0), (10.0, 5.0), (1.0, 5.0 / (5.0 + 1e-6))] {
            let mut c = g.clone();
            clip(&mut c, norm(&g), max);
            assert!((norm(&c) - want).abs() < 1e-6, "max {max}: {}", norm(&c));
        }
    }
}
