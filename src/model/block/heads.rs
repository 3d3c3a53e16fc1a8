//! q and k as attention reads them.

use super::super::linear::Batch;
use super::saved::HeadNorms;
use super::{Block, K, Q};
use crate::backend::{Fused, View, view, view_mut};
use crate::families::tensors::COUNT;

impl<B: Fused> Block<B> {
    /// Returns q and k as attention reads them: projected, normed per head where the model does so, rotated; or the gates of
    /// a convolution.
    pub(super) fn queries_and_keys(
        &self,
        backend: &mut B,
        normed: View<B::Memory>,
        h: &mut [Option<B::Memory>; COUNT],
        batch: &Batch<B>,
    ) -> ([B::Memory; 2], Option<HeadNorms<B::Memory>>) {
        let (mut qk, norms) = self.unrotated(backend, normed, h, batch);
        if self.convolution.is_some() || self.delta_rule.is_some() {
            return (qk, norms);
        }
        for (x, i) in qk.iter_mut().zip([Q, K]) {
            let x = view_mut(x, batch.rows, self.linears[i].shape.0);
            backend.rope_for_attention(x, batch.rotations.table(self.rotations[i]), batch.tokens);
        }
        (qk, norms)
    }

    /// Returns q and k before their rotation.
    pub(super) fn unrotated(
        &self,
        backend: &mut B,
        normed: View<B::Memory>,
        h: &mut [Option<B::Memory>; COUNT],
        batch: &Batch<B>,
    ) -> ([B::Memory; 2], Option<HeadNorms<B::Memory>>) {
        let mut qk = [Q, K].map(|i| self.project(backend, i, normed, h, batch));
        let mut norms = None;
        if let Some([q_gain, k_gain]) = &self.head_gains {
            let [q, k] = qk;
            let (q_normed, q_inv) = self.head_norm(backend, (&q, q_gain), Q, batch);
            let (k_normed, k_inv) = self.head_norm(backend, (&k, k_gain), K, batch);
            norms = Some(HeadNorms { q, k, q_inv, k_inv });
            qk = [q_normed, k_normed];
        }
        (qk, norms)
    }

    fn head_norm(
        &self,
        backend: &mut B,
        (x, gain): (&B::Memory, &B::Memory),
        i: usize,
        batch: &Batch<B>,
    ) -> (B::Memory, B::Memory) {
        let (t, n, d) = (batch.rows, self.linears[i].shape.0, self.head_norms[i]);
        let (mut out, mut inv) = (backend.memory(t * n), backend.memory(t * (n / d)));
        let inv_view = view_mut(&mut inv, t, n / d);
        backend.rmsnorm(view_mut(&mut out, t, n), inv_view, view(x, t, n), view(gain, 1, d), self.eps);
        (out, inv)
    }
}
