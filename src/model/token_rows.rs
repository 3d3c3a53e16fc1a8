//! Rows of the embedding and of the head that are trained whole (`trainable_token_indices` of PEFT). The trained row of a
//! token takes the place of the frozen one; the rest of the matrix stays frozen.

use super::config::Config;
use super::layout::{EMBEDDING_ROWS, HEAD_ROWS, Layout};
use super::lora::LoraSpec;
use super::weights::{ModelError, Weights};
use crate::backend::{Backend, Fused, LmHeadLoss, Product, Transpose, View, ViewMut, Write, view, view_mut};
use std::collections::BTreeMap;

/// Trained rows of the embedding.
pub struct EmbeddingRows<B: Backend> {
    /// The row of each token.
    rows: BTreeMap<u32, u32>,
    /// First value in the vector on the device.
    pub offset: usize,
    /// Factor of embeddings, and the same for each row [m, 1].
    scale: (f32, B::Memory),
}

/// Ids that are embedded.
pub struct Embedded<'a, B: Backend> {
    /// The frozen embedding.
    pub table: &'a B::Weight,
    /// The ids on the device.
    pub tokens: &'a B::Tokens,
    /// The same ids.
    pub ids: &'a [u32],
    /// Trained values on the device.
    pub params: &'a B::Memory,
}

impl<B: Backend> EmbeddingRows<B> {
    /// The rows of `tokens`, at `offset` of the vector on the device.
    pub fn new(backend: &mut B, scale: f32, (tokens, offset): (&[u32], usize)) -> Self {
        let mut scales = backend.memory(tokens.len());
        backend.fill(view_mut(&mut scales, tokens.len(), 1), scale);
        EmbeddingRows { rows: tokens.iter().copied().zip(0..).collect(), offset, scale: (scale, scales) }
    }

    /// out[T, C] = scale * the rows of the ids.
    pub fn embed(&self, backend: &mut B, out: ViewMut<B::Memory>, of: Embedded<B>) {
        let (t, m, c) = (out.rows, self.rows.len(), out.cols);
        let mut both = backend.memory((t + m) * c);
        backend.embed(view_mut(&mut both, t + m, c).rows(0, t), of.table, of.tokens, self.scale.0);
        let trained = View { memory: of.params, offset: self.offset, rows: m, cols: c };
        backend.scale_rows(view_mut(&mut both, t + m, c).rows(t, m), trained, view(&self.scale.1, m, 1));
        let from = |(at, id): (u32, &u32)| self.rows.get(id).map_or(at, |row| t as u32 + row);
        let from: Vec<u32> = (0..).zip(of.ids).map(from).collect();
        let from = backend.ids(&from);
        backend.gather_rows(out, view(&both, t + m, c), &from);
        backend.recycle(both);
    }

    /// The gradient of the rows (=|+=) from that of the embeddings of `ids`, dx [T, C].
    pub fn gradient(
        &self,
        backend: &mut B,
        (grads, write): (&mut B::Memory, Write),
        dx: View<B::Memory>,
        ids: &[u32],
    ) {
        let (t, m) = (ids.len(), self.rows.len());
        let mut of_row = vec![0.0; t * m];
        for (id, of_row) in ids.iter().zip(of_row.chunks_exact_mut(m)) {
            self.rows.get(id).into_iter().for_each(|row| of_row[*row as usize] = 1.0);
        }
        let mut chosen = backend.memory(t * m);
        backend.upload(view_mut(&mut chosen, t, m), &of_row);
        let out = ViewMut { memory: grads, offset: self.offset, rows: m, cols: dx.cols };
        let (a, transpose) = (view(&chosen, t, m), Transpose::Left);
        backend.matmul(out, write, Product { a, b: dx, transpose, scale: self.scale.0 });
        backend.recycle(chosen);
    }
}

/// Trained rows of a head over a vocabulary, as a change of the frozen matrix: logits + x (rows - frozen)ᵀ placesᵀ.
pub struct HeadRows<B: Backend> {
    /// First value in the vector on the device.
    pub offset: usize,
    /// m, and the hidden size C.
    shape: (usize, usize),
    /// The frozen rows, multiplied by -1 [m, C].
    frozen: B::Memory,
    /// [V, m]: 1 where a row of the vocabulary is that of the trained row, else 0.
    places: B::Memory,
}

impl<B: Fused> HeadRows<B> {
    /// The rows of `tokens` of the matrix `name`, at `offset` of the vector on the device.
    pub fn new(
        backend: &mut B,
        weights: &Weights,
        config: &Config,
        name: &str,
        (tokens, offset): (&[u32], usize),
    ) -> Result<Self, ModelError> {
        let (v, c, m) = (config.vocab, config.hidden, tokens.len());
        let [mut frozen, mut places] = [m * c, v * m].map(|len| backend.memory(len));
        if backend.has_data() {
            let rows = weights.some_rows(name, c, tokens)?;
            let negative: Vec<f32> = rows.iter().map(|x| -x).collect();
            backend.upload(view_mut(&mut frozen, m, c), &negative);
            let mut of_token = vec![0.0; v * m];
            tokens.iter().enumerate().for_each(|(row, token)| of_token[*token as usize * m + row] = 1.0);
            backend.upload(view_mut(&mut places, v, m), &of_token);
        }
        Ok(HeadRows { offset, shape: (m, c), frozen, places })
    }

    /// Number of trained values.
    pub fn len(&self) -> usize {
        self.shape.0 * self.shape.1
    }

    /// What the trained rows add to the frozen ones [m, C].
    fn change(&self, backend: &mut B, params: &B::Memory) -> B::Memory {
        let (m, c) = self.shape;
        let mut change = backend.memory(m * c);
        let trained = View { memory: params, offset: self.offset, rows: m, cols: c };
        backend.copy(view_mut(&mut change, m, c), trained);
        backend.add(view_mut(&mut change, m, c), view(&self.frozen, m, c));
        change
    }

    /// logits[n, V] += the change of the logits of x[n, C].
    fn add(&self, backend: &mut B, logits: ViewMut<B::Memory>, x: View<B::Memory>, change: &B::Memory) {
        let ((m, c), n, v) = (self.shape, logits.rows, logits.cols);
        let mut h = backend.memory(n * m);
        let factors = (view(change, m, c), view(&self.places, v, m));
        backend.lora(logits, view_mut(&mut h, n, m), x, factors, 1.0);
        backend.recycle(h);
    }

    /// The same with the trained values.
    pub fn add_to(
        &self,
        backend: &mut B,
        logits: ViewMut<B::Memory>,
        x: View<B::Memory>,
        params: &B::Memory,
    ) {
        let change = self.change(backend, params);
        self.add(backend, logits, x, &change);
        backend.recycle(change);
    }

    /// [`Fused::lm_head_loss`] with the trained rows. Returns the derivatives of the losses in the logits of these rows
    /// [n, m], where dx is asked for.
    pub fn loss(
        &self,
        backend: &mut B,
        (mut losses, mut dx): (ViewMut<B::Memory>, Option<ViewMut<B::Memory>>),
        args: LmHeadLoss<B::Memory, B::Weight>,
        params: &B::Memory,
    ) -> Option<B::Memory> {
        let ((m, c), n, v) = (self.shape, args.targets.len(), args.vocab);
        let change = self.change(backend, params);
        let mut logits = backend.memory(args.chunk.min(n) * v);
        let mut slopes = dx.is_some().then(|| backend.memory(n * m));
        for from in (0..n).step_by(args.chunk) {
            let rows = args.chunk.min(n - from);
            let targets = backend.ids(&args.targets[from..from + rows]);
            let x = args.x.rows(from, rows);
            backend.linear(view_mut(&mut logits, rows, v), Write::Set, x, args.head);
            self.add(backend, view_mut(&mut logits, rows, v), x, &change);
            let out = view_mut(&mut logits, rows, v);
            backend.cross_entropy(losses.again().rows(from, rows), out, &targets, None);
            if let (Some(dx), Some(slopes)) = (dx.as_mut(), slopes.as_mut()) {
                let dlogits = view(&logits, rows, v);
                let mut dx = dx.again().rows(from, rows);
                backend.linear_grad(dx.again(), Write::Set, dlogits, args.head);
                let of = |a, b| Product { a, b, transpose: Transpose::Neither, scale: 1.0 };
                let own = view_mut(slopes, n, m).rows(from, rows);
                backend.matmul(own, Write::Set, of(dlogits, view(&self.places, v, m)));
                let own = view(slopes, n, m).rows(from, rows);
                backend.matmul(dx, Write::Add, of(own, view(&change, m, c)));
            }
        }
        [logits, change].into_iter().for_each(|memory| backend.recycle(memory));
        slopes
    }

    /// The gradient of the rows (=) from the derivatives in their logits [n, m] of x [n, C].
    pub fn gradient(
        &self,
        backend: &mut B,
        out: &mut B::Memory,
        slopes: View<B::Memory>,
        x: View<B::Memory>,
    ) {
        let (m, c) = self.shape;
        let product = Product { a: slopes, b: x, transpose: Transpose::Left, scale: 1.0 };
        backend.matmul(view_mut(out, m, c), Write::Set, product);
    }
}

/// Puts the rows of the base in their places of `flat`.
pub fn take_from_base(
    flat: &mut [f32],
    layout: &Layout,
    lora: &LoraSpec,
    weights: &Weights,
) -> Result<(), ModelError> {
    let embedding = weights.name("embed_tokens.weight");
    let parts =
        [(EMBEDDING_ROWS, &*embedding, &lora.rows.embedding), (HEAD_ROWS, "lm_head.weight", &lora.rows.head)];
    for (end, name, tokens) in parts {
        let Some(entry) = layout.ending(end) else { continue };
        flat[entry.range()].copy_from_slice(&weights.some_rows(name, entry.cols, tokens)?);
    }
    Ok(())
}
