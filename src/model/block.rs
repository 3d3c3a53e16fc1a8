//! One decoder block: the forward pass, and the handwritten backward pass in the submodule `backward`.
//!
//! Cheap values are not kept: the backward pass computes the normed inputs and the gated product again with the same
//! verbs, so the bits are equal. A [`Saved`] holds the kept values; recomputing a block creates a new one.

mod backward;
mod convolution;
mod decode;
mod delta;
mod experts;
mod heads;
mod output_gate;
mod saved;
mod shared;
mod sinks;

use super::config::Config;
use super::linear::{Adapter, Batch, Linear};
use super::rotation;
use super::routes::Routes;
use super::weights::{ModelError, Weights};
use crate::backend::{Activation, Backend, Fault, Fused, Heads, Qkv, View, ViewMut, Write, view, view_mut};
use crate::families::tensors::{BETA, COUNT, DECAY, OUTPUT_GATE};
use crate::families::{HeadNorms as Normed, Norms};
pub use backward::{Below, Streams};
use convolution::Convolution;
pub use decode::Cache;
use delta::DeltaRule;
use experts::Experts;
pub use saved::{HeadNorms, Hold, Output, Saved};
use shared::Shared;

/// Index of a projection in a block's array.
pub(super) const Q: usize = 0;
pub(super) const K: usize = 1;
pub(super) const V: usize = 2;
const O: usize = 3;
const GATE: usize = 4;
const UP: usize = 5;
const DOWN: usize = 6;

/// Consumer of a normed stream or of the gated product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reader {
    /// Frozen products, which may read another number format, and adapters.
    Projections,
    /// Adapters' products only: the value is computed again for their gradients.
    Adapters,
}

/// The gains of the norms around one half of a block [1, C].
struct Gains<M> {
    /// Norm of the half's input.
    before: Option<M>,
    /// Norm of the half's output, before the addition to the residual stream.
    after: Option<M>,
}

/// The frozen weights of one layer, and the offsets of its adapters.
pub struct Block<B: Backend> {
    attention_gains: Gains<B::Memory>,
    mlp_gains: Gains<B::Memory>,
    /// Gains of q's and k's norms, of a head [1, D] or of the whole projection.
    head_gains: Option<[B::Memory; 2]>,
    /// Their sizes.
    head_norms: [usize; 2],
    /// Seven; in a sparse layer those of attention and, if there is one, of the expert that computes every token. Then those
    /// of the output's gate and of a delta rule.
    linears: Vec<Linear<B>>,
    /// In the place of attention.
    convolution: Option<Convolution<B::Memory>>,
    /// In the place of attention.
    delta_rule: Option<DeltaRule<B::Memory>>,
    /// The feed-forward of a sparse layer.
    experts: Option<Experts<B>>,
    /// What the output of an expert that computes every token is multiplied by [1, C].
    share: Option<B::Memory>,
    /// The sinks of the query heads, negative [1, H].
    sinks: Option<B::Memory>,
    heads: Heads,
    /// Indices of the rotation tables of q and k.
    rotations: [usize; 2],
    activation: Activation,
    hidden: usize,
    /// Of an expert in a sparse layer.
    feed_forward: usize,
    eps: f32,
    /// Of the norms before each half.
    stream_eps: f32,
}

/// What is not computed again: attention's output and logsumexp, and the experts of each token.
type Known<M> = (Option<(M, M)>, Option<Routes>);

/// Gate and up of the feed-forward; in a sparse layer of each pair of `Routes`.
struct Inner<M> {
    gate: M,
    up: M,
    routes: Option<Routes>,
    shared: Option<Shared<M>>,
}

impl<M> Inner<M> {
    /// The values, or nothing in their place and the fault.
    fn or_nothing<B: Backend<Memory = M>>(
        backend: &mut B,
        computed: Result<Self, Fault>,
    ) -> (Self, Option<Fault>) {
        let nothing = |fault| {
            let [gate, up] = [(); 2].map(|()| backend.memory(0));
            (Inner { gate, up, routes: None, shared: None }, Some(fault))
        };
        computed.map_or_else(nothing, |inner| (inner, None))
    }
}

/// What the last projection of a half (O or DOWN) reads.
struct Last<'a, M> {
    projection: usize,
    x: &'a M,
    /// In a sparse layer x has a row for each pair.
    routes: Option<&'a Routes>,
    /// For an expert that computes every token.
    shared: Option<&'a M>,
}

impl<B: Fused> Block<B> {
    /// Reads the weights of layer `layer`.
    pub fn load(
        backend: &mut B,
        weights: &Weights,
        config: &Config,
        layer: usize,
        adapters: [Option<Adapter>; COUNT],
    ) -> Result<Self, ModelError> {
        let norm = |backend: &mut B, name: &str, len| {
            let name = weights.name(&format!("layers.{layer}.{name}.weight"));
            weights.gain(backend, &name, len, config.family.gain_offset)
        };
        let gains = |backend: &mut B, Norms { before, after }: Norms| {
            let mut gain = |name: Option<&str>| name.map(|n| norm(backend, n, config.hidden)).transpose();
            Ok::<_, ModelError>(Gains { before: gain(before)?, after: gain(after)? })
        };
        let heads = config.attention(layer).supported()?;
        let head_norms = config.head_norms(layer);
        let order = config.head_order().filter(|_| config.family.head_norms == Normed::Each);
        let head_gain = |backend: &mut B, name: &str, size| match &order {
            None => norm(backend, name, size),
            Some(order) => {
                let name = weights.name(&format!("layers.{layer}.{name}.weight"));
                weights.head_gain(backend, &name, order, config.family.gain_offset)
            }
        };
        let head_gains = match (head_norms, config.family.head_norm_names) {
            (Some([q, k]), [of_q, of_k]) => {
                let q = head_gain(backend, of_q, q)?;
                Some([q, head_gain(backend, of_k, k)?])
            }
            (None, _) => None,
        };
        let linears = Linear::of_layer(backend, weights, config, layer, adapters)?;
        let experts = match config.experts_of(layer) {
            Some(of) => Some(Experts::load(backend, weights, (config, of), layer)?),
            None => None,
        };
        let feed_forward = config.experts_of(layer).map_or(config.feed_forward, |of| of.feed_forward);
        Ok(Block {
            attention_gains: gains(backend, config.family.attention_norms)?,
            mlp_gains: gains(backend, config.family.mlp_norms)?,
            head_gains,
            head_norms: head_norms.unwrap_or_default(),
            linears,
            convolution: Convolution::load(backend, weights, config, layer)?,
            delta_rule: DeltaRule::load(backend, weights, config, layer)?,
            experts,
            share: shared::load(backend, weights, config, layer)?,
            sinks: sinks::load(backend, weights, config, layer)?,
            heads,
            rotations: rotation::of_layer(config, layer),
            activation: config.family.activation,
            hidden: config.hidden,
            feed_forward,
            eps: config.eps,
            stream_eps: config.stream_eps(),
        })
    }

    /// The numbers of the experts that are on the device. Passes of a few tokens read few of them.
    pub fn experts(&self) -> Vec<usize> {
        self.experts.as_ref().map_or(Vec::new(), Experts::held)
    }

    /// Reads the experts of the backward pass that are not on the device.
    pub fn read_experts(&self, backend: &mut B, saved: &Saved<B::Memory>) -> Result<(), Fault> {
        match (&self.experts, &saved.routes) {
            (Some(experts), Some(routes)) => experts.read(backend, routes).map_err(|e| e.into_fault(backend)),
            _ => Ok(()),
        }
    }

    /// Frees the weights.
    pub fn unload(self, backend: &mut B) {
        let gains = [self.attention_gains, self.mlp_gains].map(|gains| [gains.before, gains.after]);
        let gains = gains.into_iter().flatten().flatten();
        let heads = self.head_gains.into_iter().flatten();
        let taps = self.convolution.map(Convolution::unload);
        let rule = self.delta_rule.into_iter().flat_map(DeltaRule::unload);
        let small = gains.chain(heads).chain(taps).chain(rule).chain(self.sinks).chain(self.share);
        small.for_each(|m| backend.recycle(m));
        for linear in self.linears {
            let bias = linear.unload(backend);
            bias.into_iter().for_each(|m| backend.recycle(m));
        }
        self.experts.into_iter().for_each(|experts| experts.unload(backend));
    }

    /// Returns the block's output [T, C] and the values that its backward pass needs. Consumes `x`.
    pub fn forward(
        &self,
        backend: &mut B,
        x: B::Memory,
        batch: &Batch<B>,
    ) -> Result<(B::Memory, Saved<B::Memory>), Fault> {
        let (t, c) = (batch.rows, self.hidden);
        let mut saved = self.attention(backend, x, (None, None), batch)?;
        let mut out = backend.memory(t * c);
        backend.copy(view_mut(&mut out, t, c), view(&saved.mid, t, c));
        let act = self.activation(backend, &saved, Reader::Projections, batch);
        let shared = saved.shared.as_ref().map(|shared| self.shared_input(backend, shared, batch));
        let read = Last { projection: DOWN, x: &act, routes: saved.routes.as_ref(), shared: shared.as_ref() };
        (saved.h[DOWN], saved.outputs[1]) = self.add_output(backend, &mut out, read, batch);
        shared.into_iter().chain([act]).for_each(|m| backend.recycle(m));
        Ok((out, saved))
    }

    /// Rebuilds the values of [`Block::forward`] from the part that was kept.
    pub fn restore(
        &self,
        backend: &mut B,
        mut saved: Saved<B::Memory>,
        hold: Hold,
        batch: &Batch<B>,
    ) -> Result<Saved<B::Memory>, Fault> {
        match hold {
            Hold::Everything => Ok(saved),
            Hold::NarrowOnes => {
                let (norm, routes) = ((&mut saved.inv_rms[1], &mut saved.h), saved.routes.take());
                let Inner { gate, up, routes, shared } =
                    self.inner(backend, &saved.mid, norm, routes, batch)?;
                let old = [std::mem::replace(&mut saved.gate, gate), std::mem::replace(&mut saved.up, up)];
                old.into_iter().for_each(|m| backend.recycle(m));
                Ok(Saved { routes, shared, ..saved })
            }
            Hold::Attended => {
                let (mut h, [_, output]) = (saved.h, saved.outputs);
                let down = h[DOWN].take();
                let known = (Some((saved.attended, saved.logsumexp)), saved.routes);
                let mut again = self.attention(backend, saved.x, known, batch)?;
                (again.h[DOWN], again.outputs[1]) = (down, output);
                Ok(again)
            }
            Hold::Input => self.recompute(backend, saved.x, saved.routes, batch),
        }
    }

    /// Recomputes everything from the block's input except the last frozen product, which only a norm after it needs.
    fn recompute(
        &self,
        backend: &mut B,
        x: B::Memory,
        routes: Option<Routes>,
        batch: &Batch<B>,
    ) -> Result<Saved<B::Memory>, Fault> {
        let mut saved = self.attention(backend, x, (None, routes), batch)?;
        if let Some(gain) = &self.mlp_gains.after {
            let act = self.activation(backend, &saved, Reader::Projections, batch);
            let shared = saved.shared.as_ref().map(|shared| self.shared_input(backend, shared, batch));
            let routes = saved.routes.as_ref();
            let read = Last { projection: DOWN, x: &act, routes, shared: shared.as_ref() };
            let (normed, h, output) = self.normed_output(backend, gain, read, batch);
            (saved.h[DOWN], saved.outputs[1]) = (h, Some(output));
            shared.into_iter().chain([act, normed]).for_each(|m| backend.recycle(m));
        } else if self.adapted(&[DOWN]) {
            let act = match &saved.shared {
                Some(shared) => self.shared_input(backend, shared, batch),
                None => self.activation(backend, &saved, Reader::Adapters, batch),
            };
            let down = &self.linears[DOWN];
            saved.h[DOWN] = down.h(backend, view(&act, batch.rows, down.shape.1), batch);
            backend.recycle(act);
        }
        Ok(saved)
    }

    /// Computes everything up to gate and up. Attention's output and logsumexp, and the choice of experts, are reused
    /// where they are kept.
    fn attention(
        &self,
        backend: &mut B,
        x: B::Memory,
        (known, routes): Known<B::Memory>,
        batch: &Batch<B>,
    ) -> Result<Saved<B::Memory>, Fault> {
        let (t, c) = (batch.rows, self.hidden);
        let (mut inv_rms, mut h) = ([backend.memory(t), backend.memory(t)], Saved::no_h());
        let normed = (&x, &self.attention_gains);
        let normed = self.normed(backend, normed, &mut inv_rms[0], Reader::Projections, batch);
        let input = view(normed.as_ref().unwrap_or(&x), t, c);
        let (q, head_norms) = self.queries_and_keys(backend, input, &mut h, batch);
        let [q, k] = q;
        let v = self.project(backend, V, input, &mut h, batch);
        let beside = self.beside(backend, input, &mut h, batch);
        normed.into_iter().for_each(|m| backend.recycle(m));
        let (wide, narrow) = (self.linears[Q].shape.0, self.linears[K].shape.0);
        let (attended, logsumexp) = known.unwrap_or_else(|| {
            let (attended, logsumexp) = self.attend(backend, [&q, &k, &v], &beside, batch);
            // A gate reads f32.
            let settles = beside[0].is_none();
            (if settles { backend.settle(attended, t, wide) } else { attended }, logsumexp)
        });
        // The gradients of convolutions read f32.
        let settles = self.convolution.is_none() && self.delta_rule.is_none();
        let settle = |(x, n)| if settles { backend.settle(x, t, n) } else { x };
        let [q, k, v] = [(q, wide), (k, narrow), (v, narrow)].map(settle);
        let gated = self.through_gate(backend, (&attended, beside[0].as_ref()), batch);
        let read = (&x, gated.as_ref().unwrap_or(&attended));
        let (mid, output) = self.after_attention(backend, read, &mut h, batch);
        gated.into_iter().for_each(|m| backend.recycle(m));
        let norm = (&mut inv_rms[1], &mut h);
        let inner = self.inner(backend, &mid, norm, routes, batch);
        let (Inner { gate, up, routes, shared }, fault) = Inner::or_nothing(backend, inner);
        let outputs = [output, None];
        let saved = Saved {
            x,
            inv_rms,
            head_norms,
            q,
            k,
            v,
            beside,
            attended,
            logsumexp,
            outputs,
            mid,
            routes,
            gate,
            up,
            shared,
            h,
        };
        saved.unless(backend, fault)
    }

    /// The projections of the output's gate and of a delta rule, where there are such.
    fn beside(
        &self,
        backend: &mut B,
        input: View<B::Memory>,
        h: &mut [Option<B::Memory>; COUNT],
        batch: &Batch<B>,
    ) -> [Option<B::Memory>; 3] {
        [OUTPUT_GATE, BETA, DECAY].map(|i| {
            let has = i < self.linears.len();
            has.then(|| self.project(backend, i, input, h, batch))
        })
    }

    /// Returns attention's output and logsumexp; of a convolution its output alone, of a delta rule its output and errors.
    fn attend(
        &self,
        backend: &mut B,
        [q, k, v]: [&B::Memory; 3],
        beside: &[Option<B::Memory>; 3],
        batch: &Batch<B>,
    ) -> (B::Memory, B::Memory) {
        if let Some(of) = &self.delta_rule {
            return self.rule(backend, of, [q, k, v], beside, batch);
        }
        if let Some(convolution) = &self.convolution {
            return (self.convolve(backend, convolution, [q, k, v], batch), backend.memory(0));
        }
        let (t, heads) = (batch.rows, self.heads.query);
        let (wide, narrow) = (self.linears[Q].shape.0, self.linears[K].shape.0);
        let (mut attended, mut logsumexp) = (backend.memory(t * wide), backend.memory(t * heads));
        let qkv = Qkv { q: view(q, t, wide), k: view(k, t, narrow), v: view(v, t, narrow) };
        let lse = view_mut(&mut logsumexp, t, heads);
        backend.attention(view_mut(&mut attended, t, wide), lse, qkv, self.heads_over(t), batch.tokens);
        (self.beside_sinks(backend, attended, &logsumexp, t), logsumexp)
    }

    /// The heads of an attention over that many keys: without a window that all of them are in.
    fn heads_over(&self, keys: usize) -> Heads {
        Heads { window: self.heads.window.filter(|window| *window < keys), ..self.heads }
    }

    /// Returns the residual stream after attention, and what the norm of attention's output needs.
    fn after_attention(
        &self,
        backend: &mut B,
        (x, attended): (&B::Memory, &B::Memory),
        h: &mut [Option<B::Memory>; COUNT],
        batch: &Batch<B>,
    ) -> (B::Memory, Option<Output<B::Memory>>) {
        let (t, c) = (batch.rows, self.hidden);
        let mut mid = backend.memory(t * c);
        backend.copy(view_mut(&mut mid, t, c), view(x, t, c));
        let output;
        let read = Last { projection: O, x: attended, routes: None, shared: None };
        (h[O], output) = self.add_output(backend, &mut mid, read, batch);
        (mid, output)
    }

    /// Computes gate and up of the feed-forward; `known` is the choice of experts, if it was made before.
    fn inner(
        &self,
        backend: &mut B,
        mid: &B::Memory,
        (inv_rms, h): (&mut B::Memory, &mut [Option<B::Memory>; COUNT]),
        known: Option<Routes>,
        batch: &Batch<B>,
    ) -> Result<Inner<B::Memory>, Fault> {
        let normed = self.normed(backend, (mid, &self.mlp_gains), inv_rms, Reader::Projections, batch);
        let x = view(normed.as_ref().unwrap_or(mid), batch.rows, self.hidden);
        let inner = match &self.experts {
            None => {
                let [gate, up] = [GATE, UP].map(|i| self.project(backend, i, x, h, batch));
                Ok(Inner { gate, up, routes: None, shared: None })
            }
            Some(experts) => experts.inner(backend, x, known).map(|inner| {
                let shared = self.shared(backend, x, h, batch);
                Inner { shared, ..inner }
            }),
        };
        normed.into_iter().for_each(|m| backend.recycle(m));
        inner
    }

    /// out += a half's output: its last projection, normed where the family norms it. Returns h of the projection and the
    /// values that the norm's gradient needs.
    fn add_output(
        &self,
        backend: &mut B,
        out: &mut B::Memory,
        read: Last<B::Memory>,
        batch: &Batch<B>,
    ) -> (Option<B::Memory>, Option<Output<B::Memory>>) {
        let gains = if read.projection == O { &self.attention_gains } else { &self.mlp_gains };
        let out = view_mut(out, batch.rows, self.hidden);
        let Some(gain) = &gains.after else {
            return (self.last(backend, (out, Write::Add), read, batch), None);
        };
        let (normed, h, output) = self.normed_output(backend, gain, read, batch);
        backend.add(out, view(&normed, batch.rows, self.hidden));
        backend.recycle(normed);
        (h, Some(output))
    }

    /// Returns the normed output of a half, h of its last projection, and the values that the norm's gradient needs.
    fn normed_output(
        &self,
        backend: &mut B,
        gain: &B::Memory,
        read: Last<B::Memory>,
        batch: &Batch<B>,
    ) -> (B::Memory, Option<B::Memory>, Output<B::Memory>) {
        let (t, c) = (batch.rows, self.hidden);
        let [mut y, mut normed, mut inv_rms] = [t * c, t * c, t].map(|len| backend.memory(len));
        let h = self.last(backend, (view_mut(&mut y, t, c), Write::Set), read, batch);
        let (out, inv) = (view_mut(&mut normed, t, c), view_mut(&mut inv_rms, t, 1));
        backend.rmsnorm(out, inv, view(&y, t, c), view(gain, 1, c), self.eps);
        (normed, h, Output { y, inv_rms })
    }

    /// out (=|+=) the last product of a half; returns its h.
    fn last(
        &self,
        backend: &mut B,
        (mut out, write): (ViewMut<B::Memory>, Write),
        Last { projection, x, routes, shared }: Last<B::Memory>,
        batch: &Batch<B>,
    ) -> Option<B::Memory> {
        let linear = self.linears.get(projection);
        let (read, write) = match (&self.experts, routes) {
            (Some(experts), Some(routes)) => {
                experts.output(backend, (out.again(), write), x, routes);
                (shared?, Write::Add)
            }
            _ => (x, write),
        };
        linear?.forward(backend, (out, write), view(read, batch.rows, linear?.shape.1), batch)
    }

    /// Computes projection i of x into new memory.
    pub(super) fn project(
        &self,
        backend: &mut B,
        i: usize,
        x: View<B::Memory>,
        h: &mut [Option<B::Memory>; COUNT],
        batch: &Batch<B>,
    ) -> B::Memory {
        let n = self.linears[i].shape.0;
        let inner = [GATE, UP].contains(&i);
        let whole = inner && !self.linears[i].is_biased();
        let mut y = if whole { backend.short(batch.rows, n) } else { backend.memory(batch.rows * n) };
        h[i] = self.linears[i].forward(backend, (view_mut(&mut y, batch.rows, n), Write::Set), x, batch);
        if inner && !whole { backend.settle(y, batch.rows, n) } else { y }
    }

    /// Returns the normed input of a half; `None` where the half reads the residual stream itself.
    fn normed(
        &self,
        backend: &mut B,
        (x, gains): (&B::Memory, &Gains<B::Memory>),
        inv_rms: &mut B::Memory,
        reader: Reader,
        batch: &Batch<B>,
    ) -> Option<B::Memory> {
        let gain = gains.before.as_ref()?;
        let (t, c) = (batch.rows, self.hidden);
        // Rows for experts are gathered.
        let gathered = self.experts.is_some() && std::ptr::eq(gains, &self.mlp_gains);
        let mut memory = if gathered { backend.memory(t * c) } else { backend.short(t, c) };
        let (out, inv_rms) = (view_mut(&mut memory, t, c), view_mut(inv_rms, t, 1));
        let (x, gain) = (view(x, t, c), view(gain, 1, c));
        match reader {
            Reader::Projections => backend.rmsnorm_for_linear(out, inv_rms, x, gain, self.stream_eps),
            Reader::Adapters => backend.rmsnorm(out, inv_rms, x, gain, self.stream_eps),
        }
        Some(memory)
    }

    /// The input of the last projection of the feed-forward; in a sparse layer that of each pair.
    fn activation(
        &self,
        backend: &mut B,
        Saved { gate, up, routes, .. }: &Saved<B::Memory>,
        reader: Reader,
        batch: &Batch<B>,
    ) -> B::Memory {
        self.activated(backend, (gate, up, routes.as_ref()), reader, batch)
    }

    fn activated(
        &self,
        backend: &mut B,
        (gate, up, routes): (&B::Memory, &B::Memory, Option<&Routes>),
        reader: Reader,
        batch: &Batch<B>,
    ) -> B::Memory {
        let (t, f) = (routes.map_or(batch.rows, Routes::pairs), self.feed_forward);
        let mut act = if routes.is_some() { backend.memory(t * f) } else { backend.short(t, f) };
        let (out, gate, up) = (view_mut(&mut act, t, f), view(gate, t, f), view(up, t, f));
        match reader {
            Reader::Projections if routes.is_none() => {
                backend.gated_for_linear(out, gate, up, self.activation);
            }
            // Products of experts read a scaled copy.
            _ => backend.gated(out, gate, up, self.activation),
        }
        act
    }

    fn adapted(&self, modules: &[usize]) -> bool {
        modules.iter().any(|&i| self.linears.get(i).is_some_and(|linear| linear.adapter.is_some()))
    }
}
