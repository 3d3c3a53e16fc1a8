//! Sinks of attention: each query head has a score z of its own in the sum of its softmax, which has no value. With l the
//! logarithm of the sum of the exponentials of the other scores, the output is the one without a sink times
//! f = exp(l) / (exp(l) + exp(z)) = sigmoid(l - z). So no attention kernel knows sinks.
//!
//! The gradient: with p the probabilities without a sink and o' = f o the output, ds = f p (do v - do o'). This is the
//! gradient without a sink, p (do' v - do' o), of the output o' and of its gradient do' = f do.

use super::super::config::Config;
use super::super::weights::{ModelError, Weights};
use super::Block;
use crate::backend::{Activation, Backend, Fused, view, view_mut};
use crate::families::tensors::SINKS;

/// The sinks of a layer, negative [1, H]; `None` where the family has none.
pub(super) fn load<B: Backend>(
    backend: &mut B,
    weights: &Weights,
    config: &Config,
    layer: usize,
) -> Result<Option<B::Memory>, ModelError> {
    if !config.family.sinks {
        return Ok(None);
    }
    let name = weights.name(&format!("layers.{layer}.{}", SINKS.1));
    weights.scaled_gain(backend, &name, config.heads.query, (0.0, -1.0)).map(Some)
}

impl<B: Fused> Block<B> {
    /// Multiplies each head of x [T, H*D] by what its sink leaves, given attention's logsumexp [T, H].
    pub(super) fn beside_sinks(
        &self,
        backend: &mut B,
        x: B::Memory,
        logsumexp: &B::Memory,
        t: usize,
    ) -> B::Memory {
        let Some(sinks) = &self.sinks else { return x };
        let (h, d) = (self.heads.query, self.heads.size);
        let [mut above, mut ones, mut factors] = [(); 3].map(|()| backend.memory(t * h));
        backend.copy(view_mut(&mut above, t, h), view(logsumexp, t, h));
        backend.bias(view_mut(&mut above, t, h), view(sinks, 1, h));
        backend.fill(view_mut(&mut ones, t, h), 1.0);
        let (out, gate, up) = (view_mut(&mut factors, t, h), view(&above, t, h), view(&ones, t, h));
        backend.gated(out, gate, up, Activation::Sigmoid);
        let mut out = backend.memory(t * h * d);
        let (to, rows, by) = (view_mut(&mut out, t * h, d), view(&x, t * h, d), view(&factors, t * h, 1));
        backend.scale_rows(to, rows, by);
        [above, ones, factors, x].into_iter().for_each(|m| backend.recycle(m));
        out
    }
}
