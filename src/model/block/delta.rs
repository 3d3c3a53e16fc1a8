//! A layer whose first half is a gated delta rule. q, k and v go through a causal short convolution with a silu, and q and k
//! have length 1 (q divided by the root of its size) before the rule reads them. Only the outputs of the projections, of the
//! rule and its errors are kept; what is between them is computed again.

use super::super::linear::Batch;
use super::convolution::behind;
use super::decode::Cache;
use super::saved::{Projected, Saved};
use super::{Block, K, Q, V};
use crate::backend::{
    Backend, Delta, DeltaGrad, DeltaHeads, DeltaSaved, Fused, Norm, View, ViewMut, Write, view, view_mut,
};
use crate::families::tensors::{BETA, DECAY, DELTA_BIAS, DELTA_NORM, DELTA_RATE, DELTA_TAPS};
use crate::model::config::Config;
use crate::model::weights::{ModelError, Weights};
use std::ops::Range;

/// Added to the square of the length of q and k.
const EPS: f32 = 1e-6;

/// The frozen values of a delta rule.
pub(super) struct DeltaRule<M> {
    /// Of the convolutions of q, k and v [J, C], that of a token itself first.
    taps: [M; 3],
    count: usize,
    /// Constant gains that make norms of q and k lengths [1, K].
    lengths: [M; 2],
    /// Rates and biases of the decays [2, H].
    rates: M,
    /// Of the norm of the output [1, V].
    pub gain: M,
    pub heads: DeltaHeads,
}

/// What the rule reads.
struct Read<M> {
    /// q, k and v after the convolution.
    convolved: [M; 3],
    /// q and k, divided by their lengths.
    unit: [M; 2],
    /// What their norms multiplied by.
    inverse: [M; 2],
}

impl<M> DeltaRule<M> {
    /// Reads the values of a layer that has a delta rule.
    pub fn load<B: Backend<Memory = M>>(
        backend: &mut B,
        weights: &Weights,
        config: &Config,
        layer: usize,
    ) -> Result<Option<Self>, ModelError> {
        let (Some(heads), Some(of)) = (config.delta_heads(layer), &config.delta_rules) else {
            return Ok(None);
        };
        let name = |own: &str| weights.name(&format!("layers.{layer}.{own}"));
        let [q, k, v] = [Q, K, V].map(|i| config.shape(layer, i).0);
        let file = name(&format!("{}.weight", DELTA_TAPS.1));
        let mut taps = |part| weights.taps(backend, &file, (q + k + v, of.taps), part);
        let taps = [taps(0..q)?, taps(q..q + k)?, taps(q + k..q + k + v)?];
        let root = (heads.key_size as f32).sqrt();
        let lengths = [1.0 / heads.key_size as f32, 1.0 / root].map(|gain| {
            let mut memory = backend.memory(heads.key_size);
            backend.fill(view_mut(&mut memory, 1, heads.key_size), gain);
            memory
        });
        let mut rates = backend.memory(2 * heads.values);
        if backend.has_data() {
            let stored = |own: &str| {
                let tensor = weights.checked(&name(own), &[heads.values])?;
                Ok::<_, ModelError>(tensor.dtype.widen(&tensor.bytes))
            };
            let mut values: Vec<f32> = stored(DELTA_RATE.1)?.into_iter().map(|a| -libm::expf(a)).collect();
            values.extend(stored(DELTA_BIAS.1)?);
            backend.upload(view_mut(&mut rates, 2, heads.values), &values);
        }
        let gain =
            weights.gain(backend, &name(&format!("{}.weight", DELTA_NORM.1)), heads.value_size, 0.0)?;
        Ok(Some(DeltaRule { taps, count: of.taps, lengths, rates, gain, heads }))
    }

    /// The memory of the values.
    pub fn unload(self) -> impl Iterator<Item = M> {
        self.taps.into_iter().chain(self.lengths).chain([self.rates, self.gain])
    }

    /// Columns of q, k and v.
    fn widths(&self) -> [usize; 3] {
        let DeltaHeads { values, keys, value_size, key_size } = self.heads;
        [keys * key_size, keys * key_size, values * value_size]
    }

    fn inputs<'a>(&'a self, x: &'a Read<M>, [beta, decay]: [View<'a, M>; 2]) -> Delta<'a, M> {
        let (t, [q, k, v]) = (beta.rows, self.widths());
        Delta {
            q: view(&x.unit[0], t, q),
            k: view(&x.unit[1], t, k),
            v: view(&x.convolved[2], t, v),
            beta,
            decay,
            rates: view(&self.rates, 2, self.heads.values),
            heads: self.heads,
        }
    }
}

impl<M> Read<M> {
    fn recycle<B: Backend<Memory = M>>(self, backend: &mut B) {
        let all = self.convolved.into_iter().chain(self.unit).chain(self.inverse);
        all.for_each(|m| backend.recycle(m));
    }
}

impl<B: Fused> Block<B> {
    /// What the rule reads, given q, k and v with the same number of rows above those of the tokens.
    fn read_by_rule(
        backend: &mut B,
        of: &DeltaRule<B::Memory>,
        qkv: [View<B::Memory>; 3],
        (t, tokens): (usize, &B::Tokens),
    ) -> Read<B::Memory> {
        let widths = of.widths();
        let convolved = [0, 1, 2].map(|i| {
            let mut out = backend.memory(t * widths[i]);
            let taps = view(&of.taps[i], of.count, widths[i]);
            backend.convolution_silu(view_mut(&mut out, t, widths[i]), qkv[i], taps, tokens);
            out
        });
        let (n, d) = (widths[0], of.heads.key_size);
        let mut unit = [backend.memory(t * n), backend.memory(t * n)];
        let mut inverse = [backend.memory(t * (n / d)), backend.memory(t * (n / d))];
        for (i, (out, inv)) in unit.iter_mut().zip(&mut inverse).enumerate() {
            let (x, gain) = (view(&convolved[i], t, n), view(&of.lengths[i], 1, d));
            let (out, inv) = (view_mut(out, t, n), view_mut(inv, t, n / d));
            backend.rmsnorm(out, inv, x, gain, EPS / d as f32);
        }
        Read { convolved, unit, inverse }
    }

    /// The output of the rule and its errors [T, H*V], given the outputs of the projections.
    pub(super) fn rule(
        &self,
        backend: &mut B,
        of: &DeltaRule<B::Memory>,
        qkv: [&B::Memory; 3],
        beside: &[Option<B::Memory>; 3],
        batch: &Batch<B>,
    ) -> (B::Memory, B::Memory) {
        let (t, widths) = (batch.rows, of.widths());
        let (mut out, mut errors) = (backend.memory(t * widths[2]), backend.memory(t * widths[2]));
        let [_, Some(beta), Some(decay)] = beside else { return (out, errors) };
        let qkv = [0, 1, 2].map(|i| view(qkv[i], t, widths[i]));
        let read = Self::read_by_rule(backend, of, qkv, (t, batch.tokens));
        let inputs = of.inputs(&read, [beta, decay].map(|x| view(x, t, of.heads.values)));
        let (o, e) = (view_mut(&mut out, t, widths[2]), view_mut(&mut errors, t, widths[2]));
        backend.delta_rule(o, e, None, inputs, batch.tokens);
        read.recycle(backend);
        (out, errors)
    }

    /// The same for the new tokens of a text, without errors: the last values of q, k and v and the states are in its cache.
    pub(super) fn rule_cached(
        &self,
        backend: &mut B,
        of: &DeltaRule<B::Memory>,
        out: &mut B::Memory,
        projected: &Projected<B::Memory>,
        (cache, tokens, new): (&mut Cache<B::Memory>, &B::Tokens, Range<usize>),
    ) {
        let Projected { qkv, beside } = projected;
        let (t, kept, widths, heads) = (new.len(), of.count - 1, of.widths(), of.heads);
        let rows = kept + t;
        let ([_, Some(beta), Some(decay)], [q, k, v, state]) = (beside, &mut cache.parts[..]) else { return };
        let part = |memory, cols| View { memory, offset: new.start * cols, rows: t, cols };
        let mut all = Vec::with_capacity(widths.len());
        for (i, cached) in [q, k, v].into_iter().enumerate() {
            all.push(behind(backend, (cached, kept), part(qkv[i], widths[i])));
        }
        let (states, columns) = (heads.values * heads.key_size, heads.value_size);
        if cache.len == 0 {
            backend.fill(view_mut(state, states, columns), 0.0);
        }
        cache.len += t;
        let qkv = [0, 1, 2].map(|i| view(&all[i], rows, widths[i]));
        let read = Self::read_by_rule(backend, of, qkv, (t, tokens));
        let inputs = of.inputs(&read, [beta, decay].map(|x| part(x, heads.values)));
        let mut errors = backend.memory(t * widths[2]);
        let out = ViewMut { memory: out, offset: new.start * widths[2], rows: t, cols: widths[2] };
        let (e, state) = (view_mut(&mut errors, t, widths[2]), view_mut(state, states, columns));
        backend.delta_rule(out, e, Some(state), inputs, tokens);
        read.recycle(backend);
        all.into_iter().chain([errors]).for_each(|m| backend.recycle(m));
    }

    /// Gradients of the outputs of the projections: q, k and v, and those of the factors and of the decays.
    pub(super) fn rule_backward(
        &self,
        backend: &mut B,
        of: &DeltaRule<B::Memory>,
        dout: &B::Memory,
        saved: &Saved<B::Memory>,
        batch: &Batch<B>,
    ) -> Vec<(usize, B::Memory)> {
        let (t, widths, h) = (batch.rows, of.widths(), of.heads.values);
        let [_, Some(beta), Some(decay)] = &saved.beside else { return Vec::new() };
        let kept = [&saved.q, &saved.k, &saved.v];
        let qkv = [0, 1, 2].map(|i| view(kept[i], t, widths[i]));
        let read = Self::read_by_rule(backend, of, qkv, (t, batch.tokens));
        let mut grads = widths.map(|n| backend.memory(t * n));
        let (mut dbeta, mut ddecay) = (backend.memory(t * h), backend.memory(t * h));
        let [dq, dk, dv] = &mut grads;
        let grad = DeltaGrad {
            dq: view_mut(dq, t, widths[0]),
            dk: view_mut(dk, t, widths[1]),
            dv: view_mut(dv, t, widths[2]),
            dbeta: view_mut(&mut dbeta, t, h),
            ddecay: view_mut(&mut ddecay, t, h),
        };
        let inputs = of.inputs(&read, [beta, decay].map(|x| view(x, t, h)));
        let [dout, out, errors] = [dout, &saved.attended, &saved.logsumexp].map(|x| view(x, t, widths[2]));
        let kept = DeltaSaved { out, errors };
        backend.delta_rule_grad(grad, dout, kept, inputs, batch.tokens);
        let mut all = vec![(BETA, dbeta), (DECAY, ddecay)];
        for (i, grad) in grads.into_iter().enumerate() {
            let n = widths[i];
            let dconvolved = self.through_length(backend, of, (i, grad), &read, t);
            let mut dx = backend.memory(t * n);
            let (dout, taps) = (view(&dconvolved, t, n), view(&of.taps[i], of.count, n));
            backend.convolution_silu_grad(view_mut(&mut dx, t, n), dout, qkv[i], taps, batch.tokens);
            backend.recycle(dconvolved);
            all.push((i, dx));
        }
        read.recycle(backend);
        all
    }

    /// The gradient of q, k or v after its convolution, given that of what the rule read.
    fn through_length(
        &self,
        backend: &mut B,
        of: &DeltaRule<B::Memory>,
        (i, grad): (usize, B::Memory),
        read: &Read<B::Memory>,
        t: usize,
    ) -> B::Memory {
        if i == V {
            return grad;
        }
        let (n, d) = (of.widths()[i], of.heads.key_size);
        let mut dx = backend.memory(t * n);
        let norm = Norm { gain: view(&of.lengths[i], 1, d), inv_rms: view(&read.inverse[i], t, n / d) };
        let (dy, x) = (view(&grad, t, n), view(&read.convolved[i], t, n));
        backend.rmsnorm_grad(view_mut(&mut dx, t, n), Write::Set, dy, x, norm);
        backend.recycle(grad);
        dx
    }
}
