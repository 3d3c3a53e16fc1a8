//! A block without a backward pass, whose keys and values stay in a cache. The block uses the verbs of the forward
//! pass; only attention over cached keys has a verb of its own.

use super::saved::{Output, Projected, Saved};
use super::{Block, DOWN, Inner, K, Last, O, Q, Reader, V};
use crate::backend::{Backend, Fault, Fused, Qkv, View, ViewMut, view, view_mut};
use crate::families::Mixer;
use crate::families::tensors::COUNT;
use crate::model::config::Config;
use crate::model::linear::Batch;
use std::ops::Range;

/// What a layer keeps of a text. Of attention the keys and values of all tokens [capacity, G*D], keys rotated; the first
/// `len` rows are filled. Of a convolution with J taps the gate before it and the values of the last J - 1 tokens
/// [J - 1, C]; rows of a text that is shorter are not read. Of a delta rule q, k and v of the last J - 1 tokens, and the
/// states [H*K, V].
pub struct Cache<M> {
    /// What is kept.
    pub parts: Vec<M>,
    /// Number of tokens of the text.
    pub len: usize,
    /// Columns of keys and values.
    cols: usize,
}

impl<M> Cache<M> {
    /// Allocates the cache of a layer for `capacity` tokens.
    pub fn new<B: Backend<Memory = M>>(
        backend: &mut B,
        config: &Config,
        layer: usize,
        capacity: usize,
    ) -> Self {
        let cols = |i: usize| config.shape(layer, i).0;
        let rows = config.taps(layer).map_or(capacity, |taps| taps - 1);
        let mut parts = vec![rows * cols(V); 2];
        if let (Some(heads), Some(of)) = (config.delta_heads(layer), &config.delta_rules) {
            parts = [Q, K, V].map(|i| (of.taps - 1) * cols(i)).to_vec();
            parts.push(heads.values * heads.key_size * heads.value_size);
        }
        let parts = parts.into_iter().map(|len| backend.memory(len)).collect();
        Cache { parts, len: 0, cols: cols(V) }
    }

    /// Moves the cache to memory for `capacity` tokens, where it keeps all of them.
    pub fn grow<B: Backend<Memory = M>>(
        &mut self,
        backend: &mut B,
        config: &Config,
        layer: usize,
        capacity: usize,
    ) {
        if config.mixer(layer) != Mixer::Attention {
            return;
        }
        let n = self.cols;
        let mut wide = Cache { len: self.len, ..Cache::new(backend, config, layer, capacity) };
        for (wide, own) in wide.parts.iter_mut().zip(&self.parts) {
            backend.copy(view_mut(wide, self.len, n), view(own, self.len, n));
        }
        let old = std::mem::replace(self, wide);
        old.parts.into_iter().for_each(|m| backend.recycle(m));
    }
}

/// A text of a batch: its cache, the number of its new tokens, and these tokens at their positions.
pub type Growing<'a, B> = (&'a mut Cache<<B as Backend>::Memory>, usize, &'a <B as Backend>::Tokens);

impl<B: Fused> Block<B> {
    /// Returns the block's output for the batch's tokens: those of one text after another, which follow the text's
    /// cached ones and are appended to its cache.
    pub fn decode(
        &self,
        backend: &mut B,
        x: B::Memory,
        texts: &mut [Growing<B>],
        batch: &Batch<B>,
    ) -> Result<B::Memory, Fault> {
        let (t, c) = (batch.rows, self.hidden);
        let (mut inv_rms, mut h) = (backend.memory(t), Saved::no_h());
        let normed = (&x, &self.attention_gains);
        let normed = self.normed(backend, normed, &mut inv_rms, Reader::Projections, batch);
        let input = view(normed.as_ref().unwrap_or(&x), t, c);
        let ([mut q, mut k], norms) = self.unrotated(backend, input, &mut h, batch);
        let v = self.project(backend, V, input, &mut h, batch);
        let beside = self.beside(backend, input, &mut h, batch);
        let mut attended = backend.memory(t * self.linears[O].shape.1);
        let mut logsumexp = backend.memory(t * self.heads.query);
        let mut from = 0;
        for (cache, rows, tokens) in texts {
            if let Some(of) = &self.convolution {
                let inputs = (&mut attended, [&q, &k, &v]);
                self.convolve_cached(backend, of, inputs, (cache, tokens), from..from + *rows);
                from += *rows;
                continue;
            }
            if let Some(of) = &self.delta_rule {
                let projected = Projected { qkv: [&q, &k, &v], beside: &beside };
                let text = (&mut **cache, *tokens, from..from + *rows);
                self.rule_cached(backend, of, &mut attended, &projected, text);
                from += *rows;
                continue;
            }
            for (memory, i) in [(&mut q, Q), (&mut k, K)] {
                let cols = self.linears[i].shape.0;
                let x = ViewMut { memory, offset: from * cols, rows: *rows, cols };
                backend.rope_for_attention(x, batch.rotations.table(self.rotations[i]), tokens);
            }
            let outs = [&mut attended, &mut logsumexp];
            self.attend_cached(backend, (outs, [&q, &k, &v]), (cache, tokens), from..from + *rows);
            from += *rows;
        }
        let attended = self.beside_sinks(backend, attended, &logsumexp, t);
        let gated = self.through_gate(backend, (&attended, beside[0].as_ref()), batch);
        let read = (&x, gated.as_ref().unwrap_or(&attended));
        let (mut mid, output) = self.after_attention(backend, read, &mut h, batch);
        let fed = self.feed_forward(backend, &mut mid, (&mut inv_rms, &mut h), batch);
        let (last, fault) = fed.map_or_else(|fault| (None, Some(fault)), |last| (last, None));
        let norms = norms.map(|n| [n.q, n.k, n.q_inv, n.k_inv]).into_iter().flatten();
        let outputs = [output, last].into_iter().flatten().flat_map(|o| [o.y, o.inv_rms]);
        let done = [x, inv_rms, q, k, v, attended, logsumexp].into_iter().chain(normed).chain(gated);
        let done = done.chain(h.into_iter().chain(beside).flatten()).chain(norms).chain(outputs);
        done.for_each(|m| backend.recycle(m));
        match fault {
            None => Ok(mid),
            Some(fault) => {
                backend.recycle(mid);
                Err(fault)
            }
        }
    }

    /// mid += the output of the feed-forward.
    fn feed_forward(
        &self,
        backend: &mut B,
        mid: &mut B::Memory,
        (inv_rms, h): (&mut B::Memory, &mut [Option<B::Memory>; COUNT]),
        batch: &Batch<B>,
    ) -> Result<Option<Output<B::Memory>>, Fault> {
        let Inner { gate, up, routes, shared } = self.inner(backend, mid, (inv_rms, &mut *h), None, batch)?;
        let routes = routes.as_ref();
        let act = self.activated(backend, (&gate, &up, routes), Reader::Projections, batch);
        let input = shared.as_ref().map(|shared| self.shared_input(backend, shared, batch));
        shared.into_iter().for_each(|shared| shared.recycle(backend));
        let last;
        let read = Last { projection: DOWN, x: &act, routes, shared: input.as_ref() };
        (h[DOWN], last) = self.add_output(backend, mid, read, batch);
        [gate, up, act].into_iter().chain(input).for_each(|m| backend.recycle(m));
        Ok(last)
    }

    /// Attends as in training in the first pass of a text, and to all its cached tokens in later passes.
    fn attend_cached(
        &self,
        backend: &mut B,
        ([attended, logsumexp], [q, k, v]): ([&mut B::Memory; 2], [&B::Memory; 3]),
        (cache, tokens): (&mut Cache<B::Memory>, &B::Tokens),
        new: Range<usize>,
    ) {
        let (t, wide, n) = (new.len(), self.linears[Q].shape.0, self.linears[K].shape.0);
        let part = |memory, cols| View { memory, offset: new.start * cols, rows: t, cols };
        let (q, k, v) = (part(q, wide), part(k, n), part(v, n));
        let past = cache.len;
        for (memory, new) in cache.parts.iter_mut().zip([k, v]) {
            backend.copy(ViewMut { memory, offset: past * n, rows: t, cols: n }, new);
        }
        cache.len += t;
        let out = ViewMut { memory: attended, offset: new.start * wide, rows: t, cols: wide };
        let h = self.heads.query;
        let lse = ViewMut { memory: logsumexp, offset: new.start * h, rows: t, cols: h };
        if past == 0 {
            backend.attention(out, lse, Qkv { q, k, v }, self.heads_over(t), tokens);
        } else {
            let all = |i: usize| View { memory: &cache.parts[i], offset: 0, rows: cache.len, cols: n };
            let heads = self.heads_over(cache.len);
            backend.attention_cached(out, lse, Qkv { q, k: all(0), v: all(1) }, heads);
        }
    }
}
