//! The expert of a sparse layer that computes every token beside the chosen ones. Its projections may have adapters. Its
//! output is multiplied by the sigmoid of a product of the token's input; as with the chosen experts' weights, the input of
//! its last product is multiplied instead.

use super::super::linear::{Batch, LinearGrad};
use super::{Block, DOWN, GATE, UP};
use crate::backend::{Activation, Backend, Fused, Product, Transpose, View, ViewMut, Write, view, view_mut};
use crate::families::tensors::{COUNT, SHARE};
use crate::model::config::Config;
use crate::model::weights::{ModelError, Weights};

/// x aᵀ of each projection with an adapter.
type Hs<M> = [Option<M>; COUNT];

/// What its forward pass keeps.
pub struct Shared<M> {
    /// `[F]`
    gate: M,
    /// `[F]`
    up: M,
    /// What the sigmoid is taken of `[1]`.
    share: M,
}

/// Arguments of its backward pass.
pub struct SharedGrad<'a, M> {
    /// Gradient of the input [T, C] (+=).
    pub dx: ViewMut<'a, M>,
    /// The flat gradient: the parts of the adapters are overwritten.
    pub grads: &'a mut M,
    /// Gradient of the output [T, C].
    pub dy: View<'a, M>,
    /// The input [T, C], where gate or up has an adapter.
    pub x: Option<View<'a, M>>,
    /// x aᵀ of the adapters, from the forward pass.
    pub h: &'a Hs<M>,
}

/// Reads what the output of such an expert is multiplied by; `None` in a layer without one.
pub fn load<B: Backend>(
    backend: &mut B,
    weights: &Weights,
    config: &Config,
    layer: usize,
) -> Result<Option<B::Memory>, ModelError> {
    if !config.family.shared_expert || config.experts_of(layer).is_none() {
        return Ok(None);
    }
    let name = weights.name(&format!("layers.{layer}.{}.weight", SHARE.1));
    weights.values(backend, &name, &[1, config.hidden]).map(Some)
}

/// The input of its last product.
struct Scaled<M> {
    /// The activation [T, F].
    act: M,
    /// Its factors [T, 1].
    by: M,
    /// Their product.
    scaled: M,
}

impl<M> Shared<M> {
    /// Frees all values.
    pub fn recycle<B: Backend<Memory = M>>(self, backend: &mut B) {
        [self.gate, self.up, self.share].into_iter().for_each(|m| backend.recycle(m));
    }
}

impl<B: Fused> Block<B> {
    /// Computes the values up to the activation for the normed rows x [T, C].
    pub(super) fn shared(
        &self,
        backend: &mut B,
        x: View<B::Memory>,
        h: &mut Hs<B::Memory>,
        batch: &Batch<B>,
    ) -> Option<Shared<B::Memory>> {
        let weight = self.share.as_ref()?;
        let t = batch.rows;
        let [gate, up] = [GATE, UP].map(|i| {
            let n = self.linears[i].shape.0;
            let mut y = backend.memory(t * n);
            h[i] = self.linears[i].forward(backend, (view_mut(&mut y, t, n), Write::Set), x, batch);
            y
        });
        let mut share = backend.memory(t);
        let b = view(weight, 1, self.hidden);
        let product = Product { a: x, b, transpose: Transpose::Right, scale: 1.0 };
        backend.matmul(view_mut(&mut share, t, 1), Write::Set, product);
        Some(Shared { gate, up, share })
    }

    /// The input of the last product.
    pub(super) fn shared_input(
        &self,
        backend: &mut B,
        shared: &Shared<B::Memory>,
        batch: &Batch<B>,
    ) -> B::Memory {
        let Scaled { act, by, scaled } = self.scaled(backend, shared, batch);
        [act, by].into_iter().for_each(|m| backend.recycle(m));
        scaled
    }

    fn scaled(&self, backend: &mut B, shared: &Shared<B::Memory>, batch: &Batch<B>) -> Scaled<B::Memory> {
        let (t, f) = (batch.rows, self.linears[DOWN].shape.1);
        let [mut act, mut scaled] = [(); 2].map(|()| backend.memory(t * f));
        let mut by = backend.memory(t);
        let (gate, up) = (view(&shared.gate, t, f), view(&shared.up, t, f));
        backend.gated(view_mut(&mut act, t, f), gate, up, self.activation);
        let ones = self.ones(backend, t);
        let (share, one) = (view(&shared.share, t, 1), view(&ones, t, 1));
        backend.gated(view_mut(&mut by, t, 1), share, one, Activation::Sigmoid);
        backend.recycle(ones);
        backend.scale_rows(view_mut(&mut scaled, t, f), view(&act, t, f), view(&by, t, 1));
        Scaled { act, by, scaled }
    }

    fn ones(&self, backend: &mut B, t: usize) -> B::Memory {
        let mut ones = backend.memory(t);
        backend.fill(view_mut(&mut ones, t, 1), 1.0);
        ones
    }

    /// Adds the gradient of the input; `weight` is what the share is a product with.
    pub(super) fn shared_backward(
        &self,
        backend: &mut B,
        SharedGrad { mut dx, grads, dy, x, h }: SharedGrad<B::Memory>,
        (mut shared, weight): (Shared<B::Memory>, &B::Memory),
        batch: &Batch<B>,
    ) {
        let (t, f) = (batch.rows, self.linears[DOWN].shape.1);
        let Scaled { act, by, scaled } = self.scaled(backend, &shared, batch);
        let [mut dact, mut dby] = [t * f, t].map(|len| backend.memory(len));
        let input = Some(view(&scaled, t, f));
        let args = LinearGrad { grads: &mut *grads, dy, x: input, h: h[DOWN].as_ref() };
        self.linears[DOWN].backward(backend, Some((view_mut(&mut dact, t, f), Write::Set)), args, batch);
        let (d, dscales) = (view_mut(&mut dact, t, f), view_mut(&mut dby, t, 1));
        backend.scale_rows_grad(d, dscales, view(&act, t, f), view(&by, t, 1));
        let (dgate, dup) = (view_mut(&mut shared.gate, t, f), view_mut(&mut shared.up, t, f));
        backend.gated_grad(dgate, dup, view(&dact, t, f), self.activation);
        let mut ones = self.ones(backend, t);
        let (dshare, done) = (view_mut(&mut shared.share, t, 1), view_mut(&mut ones, t, 1));
        backend.gated_grad(dshare, done, view(&dby, t, 1), Activation::Sigmoid);
        for (i, dy) in [(GATE, &shared.gate), (UP, &shared.up)] {
            let args = LinearGrad { grads: &mut *grads, dy: view(dy, t, f), x, h: h[i].as_ref() };
            self.linears[i].backward(backend, Some((dx.again(), Write::Add)), args, batch);
        }
        let (a, b) = (view(&shared.share, t, 1), view(weight, 1, self.hidden));
        backend.matmul(dx, Write::Add, Product { a, b, transpose: Transpose::Neither, scale: 1.0 });
        shared.recycle(backend);
        [act, by, scaled, dact, dby, ones].into_iter().for_each(|m| backend.recycle(m));
    }
}
