//! What training changes of the embedding, whose matrix stays frozen: rows of some tokens (`trainable_token_indices` of
//! PEFT), or a LoRA adapter (`lora_embedding_A` and `lora_embedding_B`).

use super::config::Config;
use super::layout::{EMBEDDING_A, EMBEDDING_ROWS, HEAD_ROWS, Layout};
use super::lora::LoraSpec;
use super::weights::{ModelError, Weights};
use crate::backend::{Backend, Fused, Product, Transpose, View, ViewMut, Write, view, view_mut};
use std::collections::BTreeMap;

/// The change of the embedding.
pub enum EmbeddingChange<B: Backend> {
    /// Trained rows take the place of frozen ones.
    Rows(Rows<B>),
    /// An adapter adds scale * b a of each id.
    Lora(Lora),
}

/// Trained rows [m, C].
pub struct Rows<B: Backend> {
    /// The row of each token.
    of_token: BTreeMap<u32, u32>,
    /// First value in the vector on the device.
    offset: usize,
    /// Factor of embeddings, and the same for each row [m, 1].
    scale: (f32, B::Memory),
}

/// a [V, R] and b [C, R], directly after it.
pub struct Lora {
    /// First value in the vector on the device.
    offset: usize,
    /// V, C, and R.
    shape: (usize, usize, usize),
    /// Factor of embeddings, and that of b a.
    scales: (f32, f32),
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

impl<B: Fused> EmbeddingChange<B> {
    /// The change that this layout on the device has.
    pub fn of(backend: &mut B, config: &Config, lora: &LoraSpec, on_device: &Layout) -> Option<Self> {
        let factor = config.stream_scale();
        if let Some(rows) = on_device.ending(EMBEDDING_ROWS) {
            let tokens = &lora.rows.embedding;
            let mut scales = backend.memory(tokens.len());
            backend.fill(view_mut(&mut scales, tokens.len(), 1), factor);
            let of_token = tokens.iter().copied().zip(0..).collect();
            return Some(Self::Rows(Rows { of_token, offset: rows.offset, scale: (factor, scales) }));
        }
        let (a, numbers) = (on_device.ending(EMBEDDING_A)?, lora.ends.embedding?);
        let shape = (config.vocab, config.hidden, numbers.rank);
        let scales = (factor, factor * lora.scale_of(numbers));
        Some(Self::Lora(Lora { offset: a.offset, shape, scales }))
    }

    /// First trained value in the vector on the device.
    pub fn offset(&self) -> usize {
        match self {
            Self::Rows(rows) => rows.offset,
            Self::Lora(lora) => lora.offset,
        }
    }

    /// out[T, C] = the embeddings of the ids.
    pub fn embed(&self, backend: &mut B, out: ViewMut<B::Memory>, of: Embedded<B>) {
        match self {
            Self::Rows(rows) => rows.embed(backend, out, of),
            Self::Lora(lora) => lora.embed(backend, out, of),
        }
    }

    /// The gradient of the trained values (=; of rows =|+=) from that of the embeddings of `ids`, dx [T, C].
    pub fn gradient(
        &self,
        backend: &mut B,
        (grads, write): (&mut B::Memory, Write),
        dx: View<B::Memory>,
        (ids, params): (&[u32], &B::Memory),
    ) {
        match self {
            Self::Rows(rows) => rows.gradient(backend, (grads, write), dx, ids),
            Self::Lora(lora) => lora.gradient(backend, grads, dx, (ids, params)),
        }
    }
}

impl<B: Backend> Rows<B> {
    fn embed(&self, backend: &mut B, out: ViewMut<B::Memory>, of: Embedded<B>) {
        let (t, m, c) = (out.rows, self.of_token.len(), out.cols);
        let mut both = backend.memory((t + m) * c);
        backend.embed(view_mut(&mut both, t + m, c).rows(0, t), of.table, of.tokens, self.scale.0);
        let trained = View { memory: of.params, offset: self.offset, rows: m, cols: c };
        backend.scale_rows(view_mut(&mut both, t + m, c).rows(t, m), trained, view(&self.scale.1, m, 1));
        let from = |(at, id): (u32, &u32)| self.of_token.get(id).map_or(at, |row| t as u32 + row);
        let from: Vec<u32> = (0..).zip(of.ids).map(from).collect();
        let from = backend.ids(&from);
        backend.gather_rows(out, view(&both, t + m, c), &from);
        backend.recycle(both);
    }

    fn gradient(
        &self,
        backend: &mut B,
        (grads, write): (&mut B::Memory, Write),
        dx: View<B::Memory>,
        ids: &[u32],
    ) {
        let (t, m) = (ids.len(), self.of_token.len());
        let mut of_row = vec![0.0; t * m];
        for (id, of_row) in ids.iter().zip(of_row.chunks_exact_mut(m)) {
            self.of_token.get(id).into_iter().for_each(|row| of_row[*row as usize] = 1.0);
        }
        let mut chosen = backend.memory(t * m);
        backend.upload(view_mut(&mut chosen, t, m), &of_row);
        let out = ViewMut { memory: grads, offset: self.offset, rows: m, cols: dx.cols };
        let (a, transpose) = (view(&chosen, t, m), Transpose::Left);
        backend.matmul(out, write, Product { a, b: dx, transpose, scale: self.scale.0 });
        backend.recycle(chosen);
    }
}

impl Lora {
    fn b<'a, M>(&self, params: &'a M) -> View<'a, M> {
        let (v, c, r) = self.shape;
        View { memory: params, offset: self.offset + v * r, rows: c, cols: r }
    }

    /// The rows of a of the ids [T, R].
    fn low<B: Backend>(&self, backend: &mut B, ids: &[u32], params: &B::Memory) -> B::Memory {
        let (v, _, r) = self.shape;
        let mut h = backend.memory(ids.len() * r);
        let rows = backend.ids(ids);
        let a = View { memory: params, offset: self.offset, rows: v, cols: r };
        backend.gather_rows(view_mut(&mut h, ids.len(), r), a, &rows);
        h
    }

    fn embed<B: Backend>(&self, backend: &mut B, mut out: ViewMut<B::Memory>, of: Embedded<B>) {
        backend.embed(out.again(), of.table, of.tokens, self.scales.0);
        let h = self.low(backend, of.ids, of.params);
        let (a, b) = (view(&h, of.ids.len(), self.shape.2), self.b(of.params));
        let product = Product { a, b, transpose: Transpose::Right, scale: self.scales.1 };
        backend.matmul(out, Write::Add, product);
        backend.recycle(h);
    }

    fn gradient<B: Fused>(
        &self,
        backend: &mut B,
        grads: &mut B::Memory,
        dx: View<B::Memory>,
        (ids, params): (&[u32], &B::Memory),
    ) {
        let ((v, c, r), t, scale) = (self.shape, ids.len(), self.scales.1);
        let h = self.low(backend, ids, params);
        let db = ViewMut { memory: &mut *grads, offset: self.offset + v * r, rows: c, cols: r };
        let product = Product { a: dx, b: view(&h, t, r), transpose: Transpose::Left, scale };
        backend.matmul(db, Write::Set, product);
        backend.recycle(h);
        let mut dh = backend.memory((t + 1) * r);
        let product = Product { a: dx, b: self.b(params), transpose: Transpose::Neither, scale };
        backend.matmul(view_mut(&mut dh, t + 1, r).rows(0, t), Write::Set, product);
        let (sums, distinct) = sums_by_id(backend, dh, (ids, r));
        let rows = backend.ids(&distinct);
        let da = ViewMut { memory: grads, offset: self.offset, rows: v, cols: r };
        backend.gather_rows_grad(da, view(&sums, distinct.len(), r), &rows);
        backend.recycle(sums);
    }
}

/// The sum of the rows of each id, and the distinct ids in ascending order. x has a row of `cols` values for each id, and
/// room for one more. Each pass adds pairs of rows, so that the number of passes is the logarithm of that of equal ids.
fn sums_by_id<B: Fused>(
    backend: &mut B,
    mut x: B::Memory,
    (ids, cols): (&[u32], usize),
) -> (B::Memory, Vec<u32>) {
    let mut places: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    (0..).zip(ids).for_each(|(at, id)| places.entry(*id).or_default().push(at));
    let mut n = ids.len();
    loop {
        // What has no partner is added to zeros.
        backend.fill(view_mut(&mut x, n + 1, cols).rows(n, 1), 0.0);
        let (mut left, mut right) = (Vec::new(), Vec::new());
        for rows in places.values_mut() {
            let from = left.len() as u32;
            left.extend(rows.iter().step_by(2));
            right.extend(rows.chunks(2).map(|pair| pair.get(1).copied().unwrap_or(n as u32)));
            *rows = (from..left.len() as u32).collect();
        }
        let (m, pairs) = (left.len(), [backend.ids(&left), backend.ids(&right)]);
        let mut sums = backend.memory((m + 1) * cols);
        let out = view_mut(&mut sums, m + 1, cols).rows(0, m);
        backend.sum_rows(out, Write::Set, view(&x, n + 1, cols), &pairs);
        backend.recycle(x);
        if m == places.len() {
            return (sums, places.into_keys().collect());
        }
        (x, n) = (sums, m);
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
        if let Some(entry) = layout.ending(end) {
            flat[entry.range()].copy_from_slice(&weights.some_rows(name, entry.cols, tokens)?);
        }
    }
    Ok(())
}
