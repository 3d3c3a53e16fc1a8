//! Fused operations, spelled in verbs. A backend overrides one when it has something faster; the spelling
//! here stays as its slow twin, and a test compares the two.

use super::{Backend, Product, Transpose, View, ViewMut, Write, view, view_mut};

/// The arguments of [`Fused::lm_head_loss`].
#[derive(Debug)]
pub struct LmHeadLoss<'a, B: Backend> {
    /// Hidden states of the supervised positions, after the last norm [n, C].
    pub x: View<'a, B::Memory>,
    /// The head [V, C].
    pub head: &'a B::Weight,
    /// V.
    pub vocab: usize,
    /// Their targets, all n on the host: chunks are uploaded as they are used.
    pub targets: &'a [u32],
    /// Rows of logits that may exist at a time.
    pub chunk: usize,
}

/// Compositions of verbs that a backend may replace.
pub trait Fused: Backend + Sized {
    /// y[T, N] += scale * (x[T, K] aᵀ) bᵀ with a [R, K], b [N, R]; h[T, R] = x aᵀ is kept for the gradient.
    /// (Hu et al. 2021, arXiv:2106.09685, section 4.1)
    fn lora(
        &mut self,
        y: ViewMut<Self::Memory>,
        mut h: ViewMut<Self::Memory>,
        x: View<Self::Memory>,
        ab: (View<Self::Memory>, View<Self::Memory>),
        scale: f32,
    ) {
        let (a, b) = ab;
        let (rows, cols) = (h.rows, h.cols);
        self.matmul(h.again(), Write::Set, Product { a: x, b: a, transpose: Transpose::Right, scale: 1.0 });
        let h = View { memory: &*h.memory, offset: h.offset, rows, cols };
        self.matmul(y, Write::Add, Product { a: h, b, transpose: Transpose::Right, scale });
    }

    /// losses[n, 1] = cross-entropy of x headᵀ against the targets; dx[n, C] = gradient of their sum in x,
    /// where asked for. Never holds more than chunk x V logits.
    fn lm_head_loss(
        &mut self,
        losses: ViewMut<Self::Memory>,
        dx: Option<ViewMut<Self::Memory>>,
        args: LmHeadLoss<Self>,
    ) {
        let (mut losses, mut dx) = (losses, dx);
        let n = args.targets.len();
        let mut logits = self.memory(args.chunk.min(n) * args.vocab);
        for from in (0..n).step_by(args.chunk) {
            let rows = args.chunk.min(n - from);
            let targets = self.ids(&args.targets[from..from + rows]);
            self.linear(
                view_mut(&mut logits, rows, args.vocab),
                Write::Set,
                args.x.rows(from, rows),
                args.head,
            );
            let out = view_mut(&mut logits, rows, args.vocab);
            self.cross_entropy(losses.again().rows(from, rows), out, &targets, None);
            if let Some(dx) = dx.as_mut() {
                let dlogits = view(&logits, rows, args.vocab);
                self.linear_grad(dx.again().rows(from, rows), Write::Set, dlogits, args.head);
            }
        }
        self.recycle(logits);
    }
}
