//! Values of a block's forward pass that its backward pass needs: the block's input, the outputs of all products, and
//! small vectors of the norms and the softmax. To save memory a block keeps fewer of them and computes the others again
//! with the same verbs, so the bits are equal.

use super::shared::Shared;
use super::{DOWN, GATE, K, O, Q, UP, V};
use crate::backend::{Backend, Fault};
use crate::families::tensors::{BETA, COUNT, DECAY, OUTPUT_GATE};
use crate::model::routes::Routes;

/// How much a block keeps, most first; the rest is computed again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hold {
    /// The outputs of all products.
    Everything,
    /// All except gate and up, the widest outputs.
    NarrowOnes,
    /// The block's input and attention's output: attention is not computed again.
    Attended,
    /// The block's input only.
    Input,
}

/// Values kept by one block; T rows each.
pub struct Saved<M> {
    /// The block's input `[C]`.
    pub x: M,
    /// Reciprocal root mean squares of both norms `[1]`.
    pub inv_rms: [M; 2],
    /// Inputs of the norms of q and k, where the model has such norms.
    pub head_norms: Option<HeadNorms<M>>,
    /// q as attention reads it: normed and rotated `[H*D]`.
    pub q: M,
    /// k as attention reads it: normed and rotated `[G*D]`.
    pub k: M,
    /// `[G*D]`
    pub v: M,
    /// Outputs of the projections of the output's gate `[H*D]`, and of a delta rule's factors and decays.
    pub beside: [Option<M>; 3],
    /// Attention's output `[H*D]`, before its gate.
    pub attended: M,
    /// `[H]`; of a delta rule its errors.
    pub logsumexp: M,
    /// Outputs of attention and of the feed-forward, where a norm follows.
    pub outputs: [Option<Output<M>>; 2],
    /// The residual stream between attention and feed-forward `[C]`.
    pub mid: M,
    /// The experts of each token, where the layer is sparse; gate and up are then of the pairs. Kept by every [`Hold`].
    pub routes: Option<Routes>,
    /// `[F]`
    pub gate: M,
    /// `[F]`
    pub up: M,
    /// Of the expert that computes every token, where there is one.
    pub shared: Option<Shared<M>>,
    /// x aᵀ of each projection with an adapter `[R]`.
    pub h: [Option<M>; COUNT],
}

/// Outputs of the projections of a layer's first half.
pub struct Projected<'a, M> {
    /// q, k and v.
    pub qkv: [&'a M; 3],
    /// Of the output's gate, the factors and the decays.
    pub beside: &'a [Option<M>; 3],
}

/// A half's output before its norm.
pub struct Output<M> {
    /// `[C]`
    pub y: M,
    /// `[1]`
    pub inv_rms: M,
}

/// Inputs of q's and k's norms.
pub struct HeadNorms<M> {
    /// Projected q before its norm `[H*D]`.
    pub q: M,
    /// Projected k before its norm `[G*D]`.
    pub k: M,
    /// `[H]`
    pub q_inv: M,
    /// `[G]`
    pub k_inv: M,
}

impl<M> Saved<M> {
    /// Returns `None` for each projection.
    pub fn no_h() -> [Option<M>; COUNT] {
        [const { None }; COUNT]
    }

    /// Frees the values that `hold` does not keep, and leaves them empty.
    pub fn shed<B: Backend<Memory = M>>(&mut self, backend: &mut B, hold: Hold) {
        let [attention, feed_forward] = &mut self.outputs;
        let outputs = [(Hold::Attended, attention), (Hold::Input, feed_forward)];
        let dropped = outputs.into_iter().filter(|(least, _)| hold >= *least);
        for output in dropped.filter_map(|(_, output)| output.take()) {
            [output.y, output.inv_rms].into_iter().for_each(|m| backend.recycle(m));
        }
        let (mut gone, mut small) = (Vec::new(), Vec::new());
        if hold >= Hold::NarrowOnes {
            gone.extend([&mut self.gate, &mut self.up]);
            small.extend([GATE, UP]);
            self.shared.take().into_iter().for_each(|shared| shared.recycle(backend));
        }
        if hold >= Hold::Attended {
            gone.extend([&mut self.q, &mut self.k, &mut self.v, &mut self.mid]);
            gone.extend(&mut self.inv_rms);
            small.extend([Q, K, V, O, OUTPUT_GATE, BETA, DECAY]);
            self.beside.iter_mut().filter_map(Option::take).for_each(|m| backend.recycle(m));
            let norms = self.head_norms.take().map(|n| [n.q, n.k, n.q_inv, n.k_inv]);
            norms.into_iter().flatten().for_each(|m| backend.recycle(m));
        }
        if hold == Hold::Input {
            gone.extend([&mut self.attended, &mut self.logsumexp]);
            small.push(DOWN);
        }
        for memory in gone {
            let nothing = backend.memory(0);
            backend.recycle(std::mem::replace(memory, nothing));
        }
        small.into_iter().filter_map(|i| self.h[i].take()).for_each(|m| backend.recycle(m));
    }

    /// The values; with a fault they are freed.
    pub fn unless<B: Backend<Memory = M>>(
        self,
        backend: &mut B,
        fault: Option<Fault>,
    ) -> Result<Self, Fault> {
        match fault {
            None => Ok(self),
            Some(fault) => {
                self.recycle(backend);
                Err(fault)
            }
        }
    }

    /// Frees all values.
    pub fn recycle<B: Backend<Memory = M>>(mut self, backend: &mut B) {
        self.shed(backend, Hold::Input);
        let rest =
            [self.x, self.q, self.k, self.v, self.attended, self.logsumexp, self.mid, self.gate, self.up];
        rest.into_iter().chain(self.inv_rms).for_each(|m| backend.recycle(m));
    }
}
