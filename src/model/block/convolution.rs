//! A layer whose first half is a causal short convolution between two gates: one matrix gives both gates and the values, in
//! the places of q, k and v; the projection of attention's output reads what the second gate lets through.

use super::super::linear::Batch;
use super::decode::Cache;
use super::saved::Saved;
use super::{Block, K, Q, V};
use crate::backend::{Backend, Fused, Gates, GatesGrad, View, ViewMut, view, view_mut};
use crate::families::tensors::TAPS;
use crate::model::config::Config;
use crate::model::weights::{ModelError, Weights};
use std::ops::Range;

/// The frozen taps [J, C], that of a token itself first.
pub(super) struct Convolution<M> {
    taps: M,
    count: usize,
}

impl<M> Convolution<M> {
    /// Reads the taps of a layer that has a convolution.
    pub fn load<B: Backend<Memory = M>>(
        backend: &mut B,
        weights: &Weights,
        config: &Config,
        layer: usize,
    ) -> Result<Option<Self>, ModelError> {
        let Some(count) = config.taps(layer) else { return Ok(None) };
        let name = weights.name(&format!("layers.{layer}.{}.weight", TAPS.1));
        let taps = weights.taps(backend, &name, (config.hidden, count), 0..config.hidden)?;
        Ok(Some(Convolution { taps, count }))
    }

    /// The memory of the taps.
    pub fn unload(self) -> M {
        self.taps
    }
}

/// The last `kept` rows of a text, which are cached, with new ones below them; the cache has the last rows then.
pub(super) fn behind<B: Backend>(
    backend: &mut B,
    (cached, kept): (&mut B::Memory, usize),
    new: View<B::Memory>,
) -> B::Memory {
    let (t, cols) = (new.rows, new.cols);
    let rows = kept + t;
    let mut all = backend.memory(rows * cols);
    backend.copy(view_mut(&mut all, rows, cols).rows(0, kept), view(cached, kept, cols));
    backend.copy(view_mut(&mut all, rows, cols).rows(kept, t), new);
    backend.copy(view_mut(cached, kept, cols), view(&all, rows, cols).rows(t, kept));
    all
}

impl<B: Fused> Block<B> {
    /// The output of the second gate [T, C], given both gates and the values.
    pub(super) fn convolve(
        &self,
        backend: &mut B,
        of: &Convolution<B::Memory>,
        [before, after, x]: [&B::Memory; 3],
        batch: &Batch<B>,
    ) -> B::Memory {
        let (t, c) = (batch.rows, self.hidden);
        let mut out = backend.memory(t * c);
        let gates = Gates { before: view(before, t, c), after: view(after, t, c), x: view(x, t, c) };
        backend.convolution(view_mut(&mut out, t, c), gates, view(&of.taps, of.count, c), batch.tokens);
        out
    }

    /// The same for the new tokens of a text, whose last values are in its cache.
    pub(super) fn convolve_cached(
        &self,
        backend: &mut B,
        of: &Convolution<B::Memory>,
        (out, [before, after, x]): (&mut B::Memory, [&B::Memory; 3]),
        (cache, tokens): (&mut Cache<B::Memory>, &B::Tokens),
        new: Range<usize>,
    ) {
        let (t, c, kept) = (new.len(), self.hidden, of.count - 1);
        let part = |memory| View { memory, offset: new.start * c, rows: t, cols: c };
        let rows = kept + t;
        let cached = cache.parts.iter_mut().zip([before, x]);
        let all: Vec<B::Memory> =
            cached.map(|(cached, new)| behind(backend, (cached, kept), part(new))).collect();
        cache.len += t;
        let [before, x] = [0, 1].map(|i| view(&all[i], rows, c));
        let out = ViewMut { memory: out, offset: new.start * c, rows: t, cols: c };
        let gates = Gates { before, after: part(after), x };
        backend.convolution(out, gates, view(&of.taps, of.count, c), tokens);
        all.into_iter().for_each(|m| backend.recycle(m));
    }

    /// Gradients of both gates and of the values.
    pub(super) fn convolution_backward(
        &self,
        backend: &mut B,
        of: &Convolution<B::Memory>,
        dout: &B::Memory,
        saved: &Saved<B::Memory>,
        batch: &Batch<B>,
    ) -> [B::Memory; 3] {
        let (t, c) = (batch.rows, self.hidden);
        let mut grads = [Q, K, V].map(|_| backend.memory(t * c));
        let [before, after, x] = grads.each_mut().map(|memory| view_mut(memory, t, c));
        let gates =
            Gates { before: view(&saved.q, t, c), after: view(&saved.k, t, c), x: view(&saved.v, t, c) };
        let (dout, taps) = (view(dout, t, c), view(&of.taps, of.count, c));
        backend.convolution_grad(GatesGrad { before, after, x }, dout, gates, taps, batch.tokens);
        grads
    }
}
