//! Rows of the embedding and of the head that are trained whole (`trainable_token_indices` of PEFT). The trained row of a
//! token takes the place of the frozen one; the rest of the matrix stays frozen.

use super::config::Config;
use super::layout::{EMBEDDING_ROWS, HEAD_ROWS, Layout};
use super::lora::LoraSpec;
use super::weights::{ModelError, Weights};
use crate::backend::{Backend, Product, Transpose, View, ViewMut, Write, view, view_mut};
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
    /// The rows that this layout on the device has.
    pub fn of(backend: &mut B, config: &Config, lora: &LoraSpec, on_device: &Layout) -> Option<Self> {
        let offset = on_device.ending(EMBEDDING_ROWS)?.offset;
        let (tokens, scale) = (&lora.rows.embedding, config.stream_scale());
        let mut scales = backend.memory(tokens.len());
        backend.fill(view_mut(&mut scales, tokens.len(), 1), scale);
        let rows = tokens.iter().copied().zip(0..).collect();
        Some(EmbeddingRows { rows, offset, scale: (scale, scales) })
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
