//! A block without a backward pass, whose keys and values stay in a cache. The block uses the verbs of the forward
//! pass; only attention over cached keys has a verb of its own.

use super::saved::Saved;
use super::{Block, DOWN, K, Q, Reader, V};
use crate::backend::{Backend, Fused, Qkv, View, ViewMut, view, view_mut};
use crate::model::linear::Batch;

/// Keys and values of one layer [capacity, G*D], keys rotated; the first `len` rows are filled.
pub struct Cache<M> {
    /// Keys.
    pub k: M,
    /// Values.
    pub v: M,
    /// Number of cached tokens.
    pub len: usize,
}

impl<M> Cache<M> {
    /// Allocates a cache for `capacity` tokens with `n` = G*D values each.
    pub fn new<B: Backend<Memory = M>>(backend: &mut B, capacity: usize, n: usize) -> Self {
        Cache { k: backend.memory(capacity * n), v: backend.memory(capacity * n), len: 0 }
    }

    /// Moves the cache to memory for `capacity` tokens.
    pub fn grow<B: Backend<Memory = M>>(&mut self, backend: &mut B, capacity: usize, n: usize) {
        let mut wide = Cache { len: self.len, ..Cache::new(backend, capacity, n) };
        backend.copy(view_mut(&mut wide.k, self.len, n), view(&self.k, self.len, n));
        backend.copy(view_mut(&mut wide.v, self.len, n), view(&self.v, self.len, n));
        let old = std::mem::replace(self, wide);
        [old.k, old.v].into_iter().for_each(|m| backend.recycle(m));
    }
}

impl<B: Fused> Block<B> {
    /// Returns the block's output for the batch's tokens, which follow the cached ones and are appended to the cache.
    pub fn decode(
        &self,
        backend: &mut B,
        x: B::Memory,
        cache: &mut Cache<B::Memory>,
        batch: &Batch<B>,
    ) -> B::Memory {
        let (t, c, f) = (batch.rows, self.hidden, self.feed_forward);
        let (mut inv_rms, mut h) = (backend.memory(t), Saved::no_h());
        let normed = (&x, &self.attention_gains);
        let normed = self.normed(backend, normed, &mut inv_rms, Reader::Projections, batch);
        let input = view(normed.as_ref().unwrap_or(&x), t, c);
        let ([q, k], norms) = self.queries_and_keys(backend, input, &mut h, batch);
        let v = self.project(backend, V, input, &mut h, batch);
        let attended = self.attend_cached(backend, [&q, &k, &v], cache, batch);
        let (mut mid, output, [gate, up]) =
            self.after_attention(backend, (&x, &attended), (&mut inv_rms, &mut h), batch);
        let act = self.activation(backend, (&gate, &up), Reader::Projections, batch);
        let last;
        (h[DOWN], last) = self.add_output(backend, &mut mid, (DOWN, view(&act, t, f)), batch);
        let norms = norms.map(|n| [n.q, n.k, n.q_inv, n.k_inv]).into_iter().flatten();
        let outputs = [output, last].into_iter().flatten().flat_map(|o| [o.y, o.inv_rms]);
        let done = [x, inv_rms, q, k, v, attended, gate, up, act].into_iter().chain(normed);
        let done = done.chain(h.into_iter().flatten()).chain(norms).chain(outputs);
        done.for_each(|m| backend.recycle(m));
        mid
    }

    /// Attends as in training in the first pass, and to all cached tokens in later passes.
    fn attend_cached(
        &self,
        backend: &mut B,
        [q, k, v]: [&B::Memory; 3],
        cache: &mut Cache<B::Memory>,
        batch: &Batch<B>,
    ) -> B::Memory {
        let (t, wide, n) = (batch.rows, self.linears[Q].shape.0, self.linears[K].shape.0);
        let past = cache.len;
        for (memory, new) in [(&mut cache.k, k), (&mut cache.v, v)] {
            backend.copy(ViewMut { memory, offset: past * n, rows: t, cols: n }, view(new, t, n));
        }
        cache.len += t;
        let mut attended = backend.memory(t * wide);
        let (out, q) = (view_mut(&mut attended, t, wide), view(q, t, wide));
        if past == 0 {
            let mut logsumexp = backend.memory(t * self.heads.query);
            let lse = view_mut(&mut logsumexp, t, self.heads.query);
            let (k, v) = (view(k, t, n), view(v, t, n));
            backend.attention(out, lse, Qkv { q, k, v }, self.heads_over(t), batch.tokens);
            backend.recycle(logsumexp);
        } else {
            let all = |memory| View { memory, offset: 0, rows: cache.len, cols: n };
            let heads = self.heads_over(cache.len);
            backend.attention_cached(out, Qkv { q, k: all(&cache.k), v: all(&cache.v) }, heads);
        }
        attended
    }
}
