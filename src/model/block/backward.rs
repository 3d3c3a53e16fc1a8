//! The backward pass of a block. The gradient of the residual stream stays in one memory: on entry this is the gradient
//! of the output, each half adds the gradient of its branch, and on return this is the gradient of the input. Gradients
//! below the lowest trained adapter are not computed.

use super::super::linear::{Batch, LinearGrad};
use super::super::routes::Routes;
use super::saved::{HeadNorms, Output, Saved};
use super::shared::SharedGrad;
use super::{Block, DOWN, Experts, GATE, Gains, K, O, Q, Reader, UP, V};
use crate::backend::{AttentionSaved, Fault, Fused, Norm, Qkv, QkvGrad, Write, view, view_mut};
use crate::families::tensors::{BETA, DECAY, OUTPUT_GATE};

/// Whether layers below a block need its input gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Below {
    /// The gradient of the input is needed.
    Wanted,
    /// Nothing below is trained: only this block's adapters need gradients.
    Nothing,
}

/// The two gradients that pass down through the blocks.
pub struct Streams<'a, M> {
    /// Gradient of the residual stream [T, C], updated in place.
    pub residual: &'a mut M,
    /// The flat gradient; each adapter's part is overwritten.
    pub grads: &'a mut M,
}

/// Input of the projections of a half.
struct Input<'a, M> {
    /// The residual stream [T, C].
    stream: &'a M,
    /// The norms around the half.
    gains: &'a Gains<M>,
    /// Reciprocal root mean squares of the norm before the half, from the forward pass.
    inv_rms: &'a M,
    /// Whether the stream's gradient is wanted.
    below: Below,
}

/// A projection, the gradient of its output, and its h.
type OutputGrad<'a, M> = (usize, &'a M, &'a Option<M>);

impl<B: Fused> Block<B> {
    /// Overwrites the adapters' gradients in `grads`. `residual` is the gradient of the output on entry and the
    /// gradient of the input on return; on return its content is undefined where nothing below is trained.
    pub fn backward(
        &self,
        backend: &mut B,
        mut streams: Streams<B::Memory>,
        mut saved: Saved<B::Memory>,
        below: Below,
        batch: &Batch<B>,
    ) -> Result<(), Fault> {
        let deeper = below == Below::Wanted || self.adapted(&[O]) || self.reads_adapted();
        let half = if deeper { Below::Wanted } else { Below::Nothing };
        if let (Some(experts), Some(routes)) = (&self.experts, saved.routes.take()) {
            if deeper || self.adapted(&[GATE, UP, DOWN]) {
                self.experts_backward(backend, &mut streams, (&mut saved, experts, &routes), batch)?;
            }
        } else {
            self.feed_forward_backward(backend, &mut streams, &mut saved, half, batch);
        }
        if deeper {
            self.attention_backward(backend, &mut streams, &mut saved, below, batch);
        }
        saved.recycle(backend);
        Ok(())
    }

    /// Adds the gradient of the input of a sparse feed-forward to the residual gradient.
    fn experts_backward(
        &self,
        backend: &mut B,
        streams: &mut Streams<B::Memory>,
        (saved, experts, routes): (&mut Saved<B::Memory>, &Experts<B>, &Routes),
        batch: &Batch<B>,
    ) -> Result<(), Fault> {
        let (t, c) = (batch.rows, self.hidden);
        let act = self.activated(backend, (&saved.gate, &saved.up, Some(routes)), Reader::Adapters, batch);
        let normed = (&self.mlp_gains, &saved.outputs[1]);
        let doutput = self.output_backward(backend, streams.residual, normed, batch);
        let mut dread = backend.memory(t * c);
        let inner = (&act, [&mut saved.gate, &mut saved.up], self.activation);
        let dy = view(doutput.as_ref().unwrap_or(streams.residual), t, c);
        experts.backward(backend, view_mut(&mut dread, t, c), dy, inner, routes)?;
        if let (Some(shared), Some(weight)) = (saved.shared.take(), &self.share) {
            let x = self.adapted(&[GATE, UP]).then(|| {
                let mut again = backend.memory(t);
                let stream = (&saved.mid, &self.mlp_gains);
                let x = self.normed(backend, stream, &mut again, Reader::Adapters, batch);
                backend.recycle(again);
                x
            });
            let read = x.as_ref().map(|x| view(x.as_ref().unwrap_or(&saved.mid), t, c));
            let dx = view_mut(&mut dread, t, c);
            let args = SharedGrad { dx, grads: &mut *streams.grads, dy, x: read, h: &saved.h };
            self.shared_backward(backend, args, (shared, weight), batch);
            x.flatten().into_iter().for_each(|m| backend.recycle(m));
        }
        self.add_through_norm(
            backend,
            streams,
            (&saved.mid, &self.mlp_gains, &saved.inv_rms[1]),
            &dread,
            batch,
        );
        doutput.into_iter().chain([act, dread]).for_each(|m| backend.recycle(m));
        Ok(())
    }

    fn feed_forward_backward(
        &self,
        backend: &mut B,
        streams: &mut Streams<B::Memory>,
        saved: &mut Saved<B::Memory>,
        below: Below,
        batch: &Batch<B>,
    ) {
        let (t, f) = (batch.rows, self.feed_forward);
        let on = below == Below::Wanted;
        let act = self.adapted(&[DOWN]);
        let act = act.then(|| self.activation(backend, saved, Reader::Adapters, batch));
        let mut dact = (on || self.adapted(&[GATE, UP])).then(|| self.dact(backend, batch));
        self.last_backward(backend, streams, dact.as_mut(), (DOWN, act.as_ref(), saved), batch);
        act.into_iter().for_each(|m| backend.recycle(m));
        let Some(dact) = dact else { return };
        let dact = if batch.dropout.is_some() { backend.settle(dact, t, f) } else { dact };
        let (gate, up) = (view_mut(&mut saved.gate, t, f), view_mut(&mut saved.up, t, f));
        backend.gated_grad(gate, up, view(&dact, t, f), self.activation);
        backend.recycle(dact);
        let input = Input { stream: &saved.mid, gains: &self.mlp_gains, inv_rms: &saved.inv_rms[1], below };
        let dys = [(GATE, &saved.gate, &saved.h[GATE]), (UP, &saved.up, &saved.h[UP])];
        self.input_backward(backend, streams, input, &dys, batch);
    }

    /// Computes the gradient of the adapter of a half's last product, `O` or `DOWN`, and overwrites `dx` with the gradient of
    /// its input. `x` is this input; it may be missing where there is no adapter.
    fn last_backward(
        &self,
        backend: &mut B,
        streams: &mut Streams<B::Memory>,
        dx: Option<&mut B::Memory>,
        (i, x, saved): (usize, Option<&B::Memory>, &Saved<B::Memory>),
        batch: &Batch<B>,
    ) {
        let (t, c, width) = (batch.rows, self.hidden, self.linears[i].shape.1);
        let (gains, half) = if i == O { (&self.attention_gains, 0) } else { (&self.mlp_gains, 1) };
        let doutput = self.output_backward(backend, streams.residual, (gains, &saved.outputs[half]), batch);
        let args = LinearGrad {
            grads: &mut *streams.grads,
            dy: view(doutput.as_ref().unwrap_or(streams.residual), t, c),
            x: x.map(|m| view(m, t, width)),
            h: saved.h[i].as_ref(),
        };
        let out = dx.map(|m| (view_mut(m, t, width), Write::Set));
        self.linears[i].backward(backend, out, args, batch);
        doutput.into_iter().for_each(|m| backend.recycle(m));
    }

    /// Allocates the gradient of the gated product; with dropout the adapter's part is added to it.
    fn dact(&self, backend: &mut B, batch: &Batch<B>) -> B::Memory {
        let (t, f) = (batch.rows, self.feed_forward);
        if batch.dropout.is_some() { backend.memory(t * f) } else { backend.short(t, f) }
    }

    /// Returns the gradient of a half's last product from the gradient of the half's output; `None` where no norm is
    /// between them.
    fn output_backward(
        &self,
        backend: &mut B,
        dadded: &B::Memory,
        (gains, output): (&Gains<B::Memory>, &Option<Output<B::Memory>>),
        batch: &Batch<B>,
    ) -> Option<B::Memory> {
        let (gain, output) = (gains.after.as_ref()?, output.as_ref()?);
        let (t, c) = (batch.rows, self.hidden);
        let mut dy = backend.memory(t * c);
        let norm = Norm { gain: view(gain, 1, c), inv_rms: view(&output.inv_rms, t, 1) };
        let (out, y) = (view_mut(&mut dy, t, c), view(&output.y, t, c));
        backend.rmsnorm_grad(out, Write::Set, view(dadded, t, c), y, norm);
        Some(dy)
    }

    /// Computes the adapters' gradients of the projections that read a half's input, and adds the gradient of the input
    /// to the residual gradient where it is needed.
    fn input_backward(
        &self,
        backend: &mut B,
        streams: &mut Streams<B::Memory>,
        input: Input<B::Memory>,
        dys: &[OutputGrad<B::Memory>],
        batch: &Batch<B>,
    ) {
        let (t, c) = (batch.rows, self.hidden);
        let Input { stream, gains, inv_rms, below } = input;
        let adapted = dys.iter().any(|(i, ..)| self.adapted(&[*i]));
        let normed = adapted.then(|| {
            let mut again = backend.memory(t);
            let normed = self.normed(backend, (stream, gains), &mut again, Reader::Adapters, batch);
            backend.recycle(again);
            normed
        });
        let read = normed.as_ref().map(|normed| view(normed.as_ref().unwrap_or(stream), t, c));
        let mut dread = (below == Below::Wanted).then(|| backend.memory(t * c));
        for (nth, &(i, dy, h)) in dys.iter().enumerate() {
            let args = LinearGrad {
                grads: &mut *streams.grads,
                dy: view(dy, t, self.linears[i].shape.0),
                x: read,
                h: h.as_ref(),
            };
            let write = if nth == 0 { Write::Set } else { Write::Add };
            let out = dread.as_mut().map(|m| (view_mut(m, t, c), write));
            self.linears[i].backward(backend, out, args, batch);
        }
        if let Some(dread) = &dread {
            self.add_through_norm(backend, streams, (stream, gains, inv_rms), dread, batch);
        }
        normed.flatten().into_iter().chain(dread).for_each(|m| backend.recycle(m));
    }

    /// Adds the gradient of the residual stream to the residual gradient, given that of a half's normed input.
    fn add_through_norm(
        &self,
        backend: &mut B,
        streams: &mut Streams<B::Memory>,
        (stream, gains, inv_rms): (&B::Memory, &Gains<B::Memory>, &B::Memory),
        dread: &B::Memory,
        batch: &Batch<B>,
    ) {
        let (t, c) = (batch.rows, self.hidden);
        let (dx, dread) = (view_mut(&mut *streams.residual, t, c), view(dread, t, c));
        match &gains.before {
            Some(gain) => {
                let norm = Norm { gain: view(gain, 1, c), inv_rms: view(inv_rms, t, 1) };
                backend.rmsnorm_grad(dx, Write::Add, dread, view(stream, t, c), norm);
            }
            None => backend.add(dx, dread),
        }
    }

    /// Whether a projection of the input of the first half has an adapter.
    fn reads_adapted(&self) -> bool {
        self.adapted(&[Q, K, V, OUTPUT_GATE, BETA, DECAY])
    }

    fn attention_backward(
        &self,
        backend: &mut B,
        streams: &mut Streams<B::Memory>,
        saved: &mut Saved<B::Memory>,
        below: Below,
        batch: &Batch<B>,
    ) {
        let (t, wide) = (batch.rows, self.linears[O].shape.1);
        let inside = below == Below::Wanted || self.reads_adapted();
        let gated = self.adapted(&[O]).then_some((&saved.attended, saved.beside[0].as_ref()));
        let gated = gated.and_then(|read| self.through_gate(backend, read, batch));
        let mut dattended = inside.then(|| backend.memory(t * wide));
        let read = Some(gated.as_ref().unwrap_or(&saved.attended));
        self.last_backward(backend, streams, dattended.as_mut(), (O, read, saved), batch);
        gated.into_iter().for_each(|m| backend.recycle(m));
        let Some(dattended) = dattended else { return };
        let mut dattended = self.gate_backward(backend, dattended, saved, batch);
        let of_qkv = |grads: [B::Memory; 3]| [Q, K, V].into_iter().zip(grads).collect();
        let mut grads: Vec<(usize, B::Memory)> = match (&self.convolution, &self.delta_rule) {
            (Some(of), _) => of_qkv(self.convolution_backward(backend, of, &dattended, saved, batch)),
            (None, Some(of)) => self.rule_backward(backend, of, &dattended, saved, batch),
            (None, None) => {
                dattended = self.beside_sinks(backend, dattended, &saved.logsumexp, t);
                of_qkv(self.qkv_backward(backend, &dattended, saved, batch))
            }
        };
        grads.extend(saved.beside[0].take().map(|gate| (OUTPUT_GATE, gate)));
        backend.recycle(dattended);
        let (gains, inv_rms) = (&self.attention_gains, &saved.inv_rms[0]);
        let input = Input { stream: &saved.x, gains, inv_rms, below };
        let dys: Vec<_> = grads.iter().map(|(i, grad)| (*i, grad, &saved.h[*i])).collect();
        self.input_backward(backend, streams, input, &dys, batch);
        grads.into_iter().for_each(|(_, m)| backend.recycle(m));
    }

    /// Gradients of the outputs of the q, k and v projections.
    fn qkv_backward(
        &self,
        backend: &mut B,
        dattended: &B::Memory,
        saved: &Saved<B::Memory>,
        batch: &Batch<B>,
    ) -> [B::Memory; 3] {
        let (t, wide, narrow) = (batch.rows, self.linears[Q].shape.0, self.linears[K].shape.0);
        let [mut dq, mut dk, mut dv] = [wide, narrow, narrow].map(|n| backend.memory(t * n));
        let grad = QkvGrad {
            dq: view_mut(&mut dq, t, wide),
            dk: view_mut(&mut dk, t, narrow),
            dv: view_mut(&mut dv, t, narrow),
        };
        let saved_views = AttentionSaved {
            qkv: Qkv {
                q: view(&saved.q, t, wide),
                k: view(&saved.k, t, narrow),
                v: view(&saved.v, t, narrow),
            },
            out: view(&saved.attended, t, wide),
            logsumexp: view(&saved.logsumexp, t, self.heads.query),
        };
        let heads = self.heads_over(t);
        backend.attention_grad(grad, view(dattended, t, wide), saved_views, heads, batch.tokens);
        for (dx, i, n) in [(&mut dq, Q, wide), (&mut dk, K, narrow)] {
            let table = batch.rotations.table(self.rotations[i]);
            backend.rope_grad(view_mut(dx, t, n), table, batch.tokens);
        }
        if let (Some(norms), Some([q_gain, k_gain])) = (&saved.head_norms, &self.head_gains) {
            let HeadNorms { q, k, q_inv, k_inv } = norms;
            dq = self.head_norm_backward(backend, dq, (q, q_gain, q_inv), Q, batch);
            dk = self.head_norm_backward(backend, dk, (k, k_gain, k_inv), K, batch);
        }
        [dq, dk, dv]
    }

    fn head_norm_backward(
        &self,
        backend: &mut B,
        dy: B::Memory,
        (x, gain, inv_rms): (&B::Memory, &B::Memory, &B::Memory),
        i: usize,
        batch: &Batch<B>,
    ) -> B::Memory {
        let (t, n, d) = (batch.rows, self.linears[i].shape.0, self.head_norms[i]);
        let mut dx = backend.memory(t * n);
        let norm = Norm { gain: view(gain, 1, d), inv_rms: view(inv_rms, t, n / d) };
        backend.rmsnorm_grad(view_mut(&mut dx, t, n), Write::Set, view(&dy, t, n), view(x, t, n), norm);
        backend.recycle(dy);
        dx
    }
}
