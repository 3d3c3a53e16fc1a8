//! What a block keeps of its forward pass for its backward pass: its input, the outputs of all products, and
//! the few small vectors that norms and softmax leave behind.

use crate::backend::Backend;

/// Kept by one block; T rows each.
pub struct Saved<M> {
    /// The block's input `[C]`.
    pub x: M,
    /// Of both norms `[1]`.
    pub inv_rms: [M; 2],
    /// Where q and k have norms of their own.
    pub head_norms: Option<HeadNorms<M>>,
    /// As attention takes it: normed and rotated `[H*D]`.
    pub q: M,
    /// As attention takes it `[G*D]`.
    pub k: M,
    /// `[G*D]`
    pub v: M,
    /// Attention's output `[H*D]`.
    pub attended: M,
    /// `[H]`
    pub logsumexp: M,
    /// The residual stream between attention and feed-forward `[C]`.
    pub mid: M,
    /// `[F]`
    pub gate: M,
    /// `[F]`
    pub up: M,
    /// x aᵀ of each projection with an adapter `[R]`.
    pub h: [Option<M>; 7],
}

/// Inputs of q's and k's norms.
pub struct HeadNorms<M> {
    /// q as it was projected `[H*D]`.
    pub q: M,
    /// k as it was projected `[G*D]`.
    pub k: M,
    /// `[H]`
    pub q_inv: M,
    /// `[G]`
    pub k_inv: M,
}

impl<M> Saved<M> {
    /// Seven times nothing.
    pub fn no_h() -> [Option<M>; 7] {
        [const { None }; 7]
    }

    /// Gives everything back but the block's input.
    pub fn into_input<B: Backend<Memory = M>>(self, backend: &mut B) -> M {
        let norms = self.head_norms.map(|n| [n.q, n.k, n.q_inv, n.k_inv]);
        let rest = [self.q, self.k, self.v, self.attended, self.logsumexp, self.mid, self.gate, self.up];
        let small = self.inv_rms.into_iter().chain(self.h.into_iter().flatten());
        rest.into_iter().chain(small).chain(norms.into_iter().flatten()).for_each(|m| backend.recycle(m));
        self.x
    }

    /// Gives everything back.
    pub fn recycle<B: Backend<Memory = M>>(self, backend: &mut B) {
        let x = self.into_input(backend);
        backend.recycle(x);
    }
}
