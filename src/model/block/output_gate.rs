//! The gate of the output of a layer's first half: attention's output times the sigmoid of the gate, or a delta rule's
//! output, normed within each head, times the silu of it.

use super::super::linear::Batch;
use super::delta::DeltaRule;
use super::saved::Saved;
use super::{Activation, Block, O};
use crate::backend::{Fused, Norm, Write, view, view_mut};

impl<B: Fused> Block<B> {
    /// The input of the last projection of the first half, where its output `x` [T, N] has a gate.
    pub(super) fn through_gate(
        &self,
        backend: &mut B,
        (x, gate): (&B::Memory, Option<&B::Memory>),
        batch: &Batch<B>,
    ) -> Option<B::Memory> {
        let (t, n) = (batch.rows, self.linears[O].shape.1);
        let gate = view(gate?, t, n);
        let mut out = backend.memory(t * n);
        match &self.delta_rule {
            None => {
                backend.gated(view_mut(&mut out, t, n), gate, view(x, t, n), Activation::Sigmoid);
            }
            Some(of) => {
                let (normed, inv_rms) = self.normed_heads(backend, of, x, t);
                backend.gated(view_mut(&mut out, t, n), gate, view(&normed, t, n), Activation::SwiGlu);
                [normed, inv_rms].into_iter().for_each(|m| backend.recycle(m));
            }
        }
        Some(out)
    }

    /// The gradient of the output of the first half, given that of its last projection's input. The gate becomes its own
    /// gradient.
    pub(super) fn gate_backward(
        &self,
        backend: &mut B,
        dgated: B::Memory,
        saved: &mut Saved<B::Memory>,
        batch: &Batch<B>,
    ) -> B::Memory {
        let (t, n) = (batch.rows, self.linears[O].shape.1);
        let [Some(gate), ..] = &mut saved.beside else { return dgated };
        let (gate, x) = (view_mut(gate, t, n), view(&saved.attended, t, n));
        let mut dx = backend.memory(t * n);
        match &self.delta_rule {
            None => {
                backend.copy(view_mut(&mut dx, t, n), x);
                let dout = view(&dgated, t, n);
                backend.gated_grad(gate, view_mut(&mut dx, t, n), dout, Activation::Sigmoid);
            }
            Some(of) => {
                let (mut normed, inv_rms) = self.normed_heads(backend, of, &saved.attended, t);
                let up = view_mut(&mut normed, t, n);
                backend.gated_grad(gate, up, view(&dgated, t, n), Activation::SwiGlu);
                let d = of.heads.value_size;
                let norm = Norm { gain: view(&of.gain, 1, d), inv_rms: view(&inv_rms, t, n / d) };
                let dy = view(&normed, t, n);
                backend.rmsnorm_grad(view_mut(&mut dx, t, n), Write::Set, dy, x, norm);
                [normed, inv_rms].into_iter().for_each(|m| backend.recycle(m));
            }
        }
        backend.recycle(dgated);
        dx
    }

    /// The normed output of a delta rule, and what its gradient needs.
    fn normed_heads(
        &self,
        backend: &mut B,
        of: &DeltaRule<B::Memory>,
        x: &B::Memory,
        t: usize,
    ) -> (B::Memory, B::Memory) {
        let (n, d) = (self.linears[O].shape.1, of.heads.value_size);
        let (mut out, mut inv) = (backend.memory(t * n), backend.memory(t * (n / d)));
        let (normed, inv_rms) = (view_mut(&mut out, t, n), view_mut(&mut inv, t, n / d));
        backend.rmsnorm(normed, inv_rms, view(x, t, n), view(&of.gain, 1, d), self.eps);
        (out, inv)
    }
}
