//! One projection: a frozen matrix, with an optional bias and an optional adapter. With dropout the mask of the
//! adapter's input is not kept: the key generates it again wherever it is needed.

use super::config::Config;
use super::layout;
use super::rotation::Rotations;
use super::rows::Rows;
use super::weights::{ModelError, Weights};
use crate::backend::{Backend, DropoutKey, Fused, LoraGrad, LoraPart, View, ViewMut, Write, view, view_mut};
use crate::families::tensors::COUNT;

/// A projection y[T, N] = x[T, K] wᵀ (+ bias) (+ scale * (dropout(x) aᵀ) bᵀ).
pub struct Linear<B: Backend> {
    weight: B::Weight,
    bias: Option<B::Memory>,
    /// N and K.
    pub shape: (usize, usize),
    /// The adapter, where the projection is a target.
    pub adapter: Option<Adapter>,
}

/// Offsets of an adapter's A and B in the flat vector of the stage.
#[derive(Debug, Clone, Copy)]
pub struct Adapter {
    /// First element of A [R, K].
    pub a: usize,
    /// First element of B [N, R], directly after A.
    pub b: usize,
    /// R.
    pub rank: usize,
    /// Factor of B A.
    pub scale: f32,
    /// Index of the module among all those of the whole model, in model order (keys dropout).
    pub module: u64,
}

/// Data that all layers of a microbatch share.
pub struct Batch<'a, B: Backend> {
    /// T.
    pub rows: usize,
    /// The microbatch's integers on the device.
    pub tokens: &'a B::Tokens,
    /// The flat parameters on the device.
    pub params: &'a B::Memory,
    /// The tables of rotary embedding.
    pub rotations: &'a Rotations<B::Memory>,
    /// `None` in evaluation, and where p is 0. The projection sets the module.
    pub dropout: Option<DropoutKey<'a>>,
}

/// Arguments of a projection's backward pass.
pub struct LinearGrad<'a, M> {
    /// The flat gradient on the device: the part of the adapter is overwritten.
    pub grads: &'a mut M,
    /// Gradient of the output [T, N].
    pub dy: View<'a, M>,
    /// The input [T, K]; only an adapter needs it.
    pub x: Option<View<'a, M>>,
    /// x aᵀ [T, R] of the forward pass, where there is an adapter.
    pub h: Option<&'a M>,
}

impl Adapter {
    fn views<'a, M>(&self, params: &'a M, (n, k): (usize, usize)) -> (View<'a, M>, View<'a, M>) {
        let a = View { memory: params, offset: self.a, rows: self.rank, cols: k };
        (a, View { memory: params, offset: self.b, rows: n, cols: self.rank })
    }
}

impl<B: Fused> Linear<B> {
    /// Reads the projections of a layer, in model order; of a sparse layer those of attention.
    pub fn of_layer(
        backend: &mut B,
        weights: &Weights,
        config: &Config,
        layer: usize,
        adapters: [Option<Adapter>; COUNT],
    ) -> Result<Vec<Self>, ModelError> {
        let mut linears: [Option<Linear<B>>; COUNT] = [const { None }; COUNT];
        for matrix in config.matrices(layer) {
            let shape = config.shape_of(layer, &matrix);
            let path = weights.name(&layout::path(layer, &matrix));
            let (own, cols) = (matrix.projections, shape.1);
            let parts: Vec<Rows> = own.iter().map(|i| config.rows(layer, *i)).collect();
            let mut next = own.iter().zip(&parts);
            weights.matrices(backend, &format!("{path}.weight"), shape, &parts, |weight| {
                let Some((&i, part)) = next.next() else { return };
                let shape = (part.len(), cols);
                linears[i] = Some(Linear { weight, bias: None, shape, adapter: adapters[i] });
            })?;
            let biases = [config.qkv_bias, config.o_bias, config.mlp_bias];
            if biases[[0, 0, 0, 1, 2, 2, 2, 0, 0, 0][own[0]]] {
                for (&i, part) in own.iter().zip(&parts) {
                    let bias = weights.bias(backend, &format!("{path}.bias"), (shape.0, part))?;
                    if let Some(linear) = &mut linears[i] {
                        linear.bias = Some(bias);
                    }
                }
            }
        }
        Ok(linears.into_iter().flatten().collect())
    }

    /// Frees the matrix and returns the bias.
    pub fn unload(self, backend: &mut B) -> Option<B::Memory> {
        backend.release(self.weight);
        self.bias
    }

    /// Whether a bias is added to the product.
    pub fn is_biased(&self) -> bool {
        self.bias.is_some()
    }

    /// y (=|+=) the projection of x. Returns h, which the adapter's gradient needs.
    pub fn forward(
        &self,
        backend: &mut B,
        (mut y, write): (ViewMut<B::Memory>, Write),
        x: View<B::Memory>,
        batch: &Batch<B>,
    ) -> Option<B::Memory> {
        let mut h = self.adapter.map(|a| backend.memory(batch.rows * a.rank));
        match (self.adapter, h.as_mut()) {
            (Some(adapter), Some(h)) => {
                let masked = self.masked(backend, x, batch);
                let lora = LoraPart {
                    h: view_mut(h, batch.rows, adapter.rank),
                    x: masked.as_ref().map_or(x, |m| view(m, x.rows, x.cols)),
                    ab: adapter.views(batch.params, self.shape),
                    scale: adapter.scale,
                };
                backend.lora_linear((y.again(), write), x, &self.weight, lora);
                masked.into_iter().for_each(|m| backend.recycle(m));
            }
            _ => backend.linear(y.again(), write, x, &self.weight),
        }
        if let Some(bias) = &self.bias {
            backend.bias(y, view(bias, 1, self.shape.0));
        }
        h
    }

    /// Computes only h, as [`Linear::forward`] returns it. A recomputed block ends here because its y is not used.
    pub fn h(&self, backend: &mut B, x: View<B::Memory>, batch: &Batch<B>) -> Option<B::Memory> {
        let adapter = self.adapter?;
        let mut h = backend.memory(batch.rows * adapter.rank);
        let (a, _) = adapter.views(batch.params, self.shape);
        let masked = self.masked(backend, x, batch);
        let x = masked.as_ref().map_or(x, |m| view(m, x.rows, x.cols));
        backend.lora_down(view_mut(&mut h, batch.rows, adapter.rank), x, a);
        masked.into_iter().for_each(|m| backend.recycle(m));
        Some(h)
    }

    fn key<'a>(&self, batch: &Batch<'a, B>) -> Option<DropoutKey<'a>> {
        Some(DropoutKey { module: self.adapter?.module, ..batch.dropout? })
    }

    fn masked(&self, backend: &mut B, x: View<B::Memory>, batch: &Batch<B>) -> Option<B::Memory> {
        let key = self.key(batch)?;
        let mut masked = backend.memory(x.len());
        backend.dropout(view_mut(&mut masked, x.rows, x.cols), Write::Set, x, key, batch.tokens);
        Some(masked)
    }

    /// Computes the adapter's gradients (=) and, where dx is given, the gradient of the input (=|+=).
    pub fn backward(
        &self,
        backend: &mut B,
        dx: Option<(ViewMut<B::Memory>, Write)>,
        args: LinearGrad<B::Memory>,
        batch: &Batch<B>,
    ) {
        let (Some(adapter), Some(h), Some(x)) = (self.adapter, args.h, args.x) else {
            if let Some((dx, write)) = dx {
                backend.linear_grad(dx, write, args.dy, &self.weight);
            }
            return;
        };
        let (n, k) = self.shape;
        let ab = adapter.views(batch.params, self.shape);
        let masked = self.masked(backend, x, batch);
        let x = masked.as_ref().map_or(x, |m| view(m, x.rows, k));
        let (memory, cols) = (args.grads, adapter.rank * (n + k));
        let lora = LoraGrad {
            dab: ViewMut { memory, offset: adapter.a, rows: 1, cols },
            dy: args.dy,
            x,
            h: view(h, batch.rows, adapter.rank),
            ab,
            scale: adapter.scale,
        };
        match (self.key(batch), dx) {
            (Some(key), Some((mut dx, write))) => {
                backend.linear_grad(dx.again(), write, args.dy, &self.weight);
                let mut through = backend.memory(batch.rows * k);
                backend.lora_grad(Some((view_mut(&mut through, batch.rows, k), Write::Set)), lora);
                backend.dropout(dx, Write::Add, view(&through, batch.rows, k), key, batch.tokens);
                backend.recycle(through);
            }
            (None, Some(dx)) => backend.lora_linear_grad(dx, &self.weight, lora),
            (_, None) => backend.lora_grad(None, lora),
        }
        masked.into_iter().for_each(|m| backend.recycle(m));
    }
}
