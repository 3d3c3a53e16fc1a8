//! Fused operations, spelled in verbs. A backend overrides one when it has something faster; the spelling
//! here stays as its slow reference, and a test compares the two.

use super::{Activation, Backend, Product, Transpose, View, ViewMut, Write, view, view_mut};

/// The arguments of [`Fused::lm_head_loss`].
#[derive(Debug)]
pub struct LmHeadLoss<'a, M, W> {
    /// Hidden states of the supervised positions, after the last norm [n, C].
    pub x: View<'a, M>,
    /// The head [V, C].
    pub head: &'a W,
    /// V.
    pub vocab: usize,
    /// Their targets, all n on the host: chunks are uploaded as they are used.
    pub targets: &'a [u32],
    /// Rows of logits that may exist at a time.
    pub chunk: usize,
}

/// The arguments of [`Fused::lora_grad`]; dx is written apart because not everyone needs it.
#[derive(Debug)]
pub struct LoraGrad<'a, M> {
    /// Gradient of A [R, K], and right behind it that of B [N, R], as in the flat layout; written (=).
    pub dab: ViewMut<'a, M>,
    /// Gradient of the output [T, N].
    pub dy: View<'a, M>,
    /// The input [T, K], as [`Fused::lora`] saw it.
    pub x: View<'a, M>,
    /// x aᵀ [T, R], as [`Fused::lora`] left it.
    pub h: View<'a, M>,
    /// A [R, K] and B [N, R].
    pub ab: (View<'a, M>, View<'a, M>),
    /// alpha / R, or alpha / sqrt(R).
    pub scale: f32,
}

/// The adapter's part of [`Fused::lora_linear`].
#[derive(Debug)]
pub struct LoraPart<'a, M> {
    /// x aᵀ [T, R], written (=) and kept for the gradient.
    pub h: ViewMut<'a, M>,
    /// The input as the adapter sees it [T, K]: masked, where there is dropout.
    pub x: View<'a, M>,
    /// A [R, K] and B [N, R].
    pub ab: (View<'a, M>, View<'a, M>),
    /// alpha / R, or alpha / sqrt(R).
    pub scale: f32,
}

/// Compositions of verbs that a backend may replace.
pub trait Fused: Backend + Sized {
    /// h[T, R] = x[T, K] aᵀ with a [R, K], as [`Fused::lora_linear`] makes it.
    fn lora_down(&mut self, h: ViewMut<Self::Memory>, x: View<Self::Memory>, a: View<Self::Memory>) {
        self.matmul(h, Write::Set, Product { a: x, b: a, transpose: Transpose::Right, scale: 1.0 });
    }

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

    /// dA = dhᵀ x, dB = scale * dyᵀ h, and dx[T, K] (=|+=) dh a where asked for, with dh = scale * dy b.
    fn lora_grad(&mut self, dx: Option<(ViewMut<Self::Memory>, Write)>, args: LoraGrad<Self::Memory>) {
        let (a, rows, rank) = (args.ab.0, args.dy.rows, args.h.cols);
        let dh = lora_grad_of_factors(self, args);
        if let Some((dx, write)) = dx {
            let left = view(&dh, rows, rank);
            self.matmul(dx, write, Product { a: left, b: a, transpose: Transpose::Neither, scale: 1.0 });
        }
        self.recycle(dh);
    }

    /// y[T, N] (=|+=) x[T, K] wᵀ + scale * h bᵀ: a projection with its adapter, in one pass over y.
    fn lora_linear(
        &mut self,
        y: (ViewMut<Self::Memory>, Write),
        x: View<Self::Memory>,
        w: &Self::Weight,
        lora: LoraPart<Self::Memory>,
    ) {
        lora_linear_in_verbs(self, y, x, w, lora);
    }

    /// out[T, C] (=|+=) the sum of `x[rows[j][t], C]` in the order of j: the gradient of a gather whose rows repeat.
    fn sum_rows(
        &mut self,
        out: ViewMut<Self::Memory>,
        write: Write,
        x: View<Self::Memory>,
        rows: &[Self::Ids],
    ) {
        sum_rows_in_verbs(self, (out, write), x, rows);
    }

    /// [`Backend::rmsnorm`] of what projections read next: who reads their input in another form makes it on the way.
    fn rmsnorm_for_linear(
        &mut self,
        out: ViewMut<Self::Memory>,
        inv_rms: ViewMut<Self::Memory>,
        x: View<Self::Memory>,
        gain: View<Self::Memory>,
        eps: f32,
    ) {
        self.rmsnorm(out, inv_rms, x, gain, eps);
    }

    /// [`Backend::gated`] of what a projection reads next.
    fn gated_for_linear(
        &mut self,
        out: ViewMut<Self::Memory>,
        gate: View<Self::Memory>,
        up: View<Self::Memory>,
        activation: Activation,
    ) {
        self.gated(out, gate, up, activation);
    }

    /// [`Backend::rope`] of what attention reads next.
    fn rope_for_attention(
        &mut self,
        x: ViewMut<Self::Memory>,
        table: View<Self::Memory>,
        tokens: &Self::Tokens,
    ) {
        self.rope(x, table, tokens);
    }

    /// The gradient of [`Fused::lora_linear`] without dropout: [`Fused::lora_grad`], and
    /// dx[T, K] (=|+=) dy w + dh a.
    fn lora_linear_grad(
        &mut self,
        dx: (ViewMut<Self::Memory>, Write),
        w: &Self::Weight,
        args: LoraGrad<Self::Memory>,
    ) {
        lora_linear_grad_in_verbs(self, dx, w, args);
    }

    /// losses[n, 1] = cross-entropy of x headᵀ against the targets; dx[n, C] = gradient of their sum in x,
    /// where asked for. Never holds more than chunk x V logits.
    fn lm_head_loss(
        &mut self,
        losses: ViewMut<Self::Memory>,
        dx: Option<ViewMut<Self::Memory>>,
        args: LmHeadLoss<Self::Memory, Self::Weight>,
    ) {
        lm_head_loss_in_chunks(self, losses, dx, args);
    }
}

/// [`Fused::lora_linear`] spelled in verbs.
pub(super) fn lora_linear_in_verbs<B: Fused>(
    backend: &mut B,
    (mut y, write): (ViewMut<B::Memory>, Write),
    x: View<B::Memory>,
    w: &B::Weight,
    lora: LoraPart<B::Memory>,
) {
    backend.linear(y.again(), write, x, w);
    backend.lora(y, lora.h, lora.x, lora.ab, lora.scale);
}

/// [`Fused::lora_linear_grad`] spelled in verbs.
pub(super) fn lora_linear_grad_in_verbs<B: Fused>(
    backend: &mut B,
    (mut dx, write): (ViewMut<B::Memory>, Write),
    w: &B::Weight,
    args: LoraGrad<B::Memory>,
) {
    backend.linear_grad(dx.again(), write, args.dy, w);
    backend.lora_grad(Some((dx, Write::Add)), args);
}

/// The part of [`Fused::lora_grad`] that every way to make dx has: dA and dB are written (=), and dh [T, R] is given.
pub(super) fn lora_grad_of_factors<B: Backend>(backend: &mut B, args: LoraGrad<B::Memory>) -> B::Memory {
    let LoraGrad { dab, dy, x, h, ab: (a, b), scale } = args;
    let (rows, rank) = (dy.rows, h.cols);
    let (memory, offset) = (dab.memory, dab.offset);
    let mut dh = backend.memory(rows * rank);
    let out = view_mut(&mut dh, rows, rank);
    backend.matmul(out, Write::Set, Product { a: dy, b, transpose: Transpose::Neither, scale });
    let db = ViewMut { memory: &mut *memory, offset: offset + a.len(), rows: b.rows, cols: b.cols };
    backend.matmul(db, Write::Set, Product { a: dy, b: h, transpose: Transpose::Left, scale });
    let left = view(&dh, rows, rank);
    let da = ViewMut { memory, offset, rows: a.rows, cols: a.cols };
    backend.matmul(da, Write::Set, Product { a: left, b: x, transpose: Transpose::Left, scale: 1.0 });
    dh
}

/// [`Fused::sum_rows`] spelled in verbs.
pub(super) fn sum_rows_in_verbs<B: Backend>(
    backend: &mut B,
    (mut out, write): (ViewMut<B::Memory>, Write),
    x: View<B::Memory>,
    rows: &[B::Ids],
) {
    let (t, c) = (out.rows, out.cols);
    if write == Write::Set {
        backend.fill(out.again(), 0.0);
    }
    let mut some = backend.memory(t * c);
    for rows in rows {
        backend.gather_rows(view_mut(&mut some, t, c), x, rows);
        backend.add(out.again(), view(&some, t, c));
    }
    backend.recycle(some);
}

/// [`Fused::lm_head_loss`] spelled in verbs; the logits of a chunk at a time.
pub(super) fn lm_head_loss_in_chunks<B: Backend>(
    backend: &mut B,
    losses: ViewMut<B::Memory>,
    dx: Option<ViewMut<B::Memory>>,
    args: LmHeadLoss<B::Memory, B::Weight>,
) {
    let (mut losses, mut dx) = (losses, dx);
    let n = args.targets.len();
    let mut logits = backend.memory(args.chunk.min(n) * args.vocab);
    for from in (0..n).step_by(args.chunk) {
        let rows = args.chunk.min(n - from);
        let targets = backend.ids(&args.targets[from..from + rows]);
        backend.linear(
            view_mut(&mut logits, rows, args.vocab),
            Write::Set,
            args.x.rows(from, rows),
            args.head,
        );
        let out = view_mut(&mut logits, rows, args.vocab);
        backend.cross_entropy(losses.again().rows(from, rows), out, &targets, None);
        if let Some(dx) = dx.as_mut() {
            let dlogits = view(&logits, rows, args.vocab);
            backend.linear_grad(dx.again().rows(from, rows), Write::Set, dlogits, args.head);
        }
    }
    backend.recycle(logits);
}
