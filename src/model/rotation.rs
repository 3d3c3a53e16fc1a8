//! Tables of rotary embedding on the device: one for each kind in the layers. The factor gives scores another scale than
//! the backends' own: queries are rotated by a table multiplied by the factor, and by the growth with the position.

use super::config::{Config, Rope};
use crate::backend::{Backend, View, view_mut};

/// A rotary embedding, the factor of its cosines and sines, and whether they grow with the position.
type Kind = (Rope, f32, bool);

/// The tables of a model [positions, D].
pub struct Rotations<M> {
    kinds: Vec<Kind>,
    tables: Vec<M>,
    positions: usize,
    size: usize,
    rotary: usize,
    /// See [`TokenRows::short`](crate::backend::TokenRows::short).
    short: u32,
}

/// A table for heads of `size` values, of which `rotary` are rotated; the others have cosines 1 and sines 0.
fn widened(table: Vec<f32>, rotary: usize, size: usize) -> Vec<f32> {
    if rotary == size {
        return table;
    }
    let mut wide = Vec::with_capacity(table.len() / rotary * size);
    for half in table.chunks_exact(rotary / 2).enumerate() {
        wide.extend(half.1);
        let rest = if half.0 % 2 == 0 { 1.0 } else { 0.0 };
        wide.extend(std::iter::repeat_n(rest, (size - rotary) / 2));
    }
    wide
}

/// Indices of the tables that rotate q and k of a layer.
pub fn of_layer(config: &Config, layer: usize) -> [usize; 2] {
    let kinds = kinds(config);
    of(config, layer).map(|own| kinds.iter().position(|kind| *kind == own).unwrap_or_default())
}

/// The kinds of q and k of a layer.
fn of(config: &Config, layer: usize) -> [Kind; 2] {
    let rope = config.rope_of(layer);
    let grows = rope.grows();
    [(rope.clone(), config.attention(layer).query_factor(), grows), (rope, 1.0, false)]
}

/// The kinds of all layers, so that a stage of some layers numbers them like the whole model.
fn kinds(config: &Config) -> Vec<Kind> {
    let mut kinds = Vec::new();
    for layer in 0..config.layers {
        for kind in of(config, layer) {
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
    }
    kinds
}

impl<M> Rotations<M> {
    /// Creates tables without positions.
    pub fn new<B: Backend<Memory = M>>(backend: &mut B, config: &Config) -> Self {
        let kinds = kinds(config);
        let tables = kinds.iter().map(|_| backend.memory(0)).collect();
        let short = config.rope.short_rows().and_then(|rows| u32::try_from(rows).ok()).unwrap_or(u32::MAX);
        Rotations { kinds, tables, positions: 0, size: config.heads.size, rotary: config.rotary, short }
    }

    /// Tokens up to which rows are rotated by the first rows of the tables.
    pub fn short(&self) -> u32 {
        self.short
    }

    /// Extends the tables to rows of `tokens`. Lengths double, so that extensions are rare.
    pub fn reach<B: Backend<Memory = M>>(&mut self, backend: &mut B, tokens: usize) {
        let short = self.short as usize;
        let positions = if tokens > short { short + tokens } else { tokens };
        if self.positions >= positions {
            return;
        }
        let (positions, d) = (positions.next_power_of_two().max(256), self.size);
        for ((rope, factor, grows), table) in self.kinds.iter().zip(&mut self.tables) {
            let mut memory = backend.memory(positions * d);
            if backend.has_data() {
                let mut values = widened(rope.table(positions, self.rotary), self.rotary, d);
                if *factor != 1.0 {
                    values.iter_mut().for_each(|x| *x *= factor);
                }
                if *grows {
                    for (position, row) in values.chunks_exact_mut(d).enumerate() {
                        let growth = rope.growth_at(position);
                        row.iter_mut().for_each(|x| *x *= growth);
                    }
                }
                backend.upload(view_mut(&mut memory, positions, d), &values);
            }
            backend.recycle(std::mem::replace(table, memory));
        }
        self.positions = positions;
    }

    /// One of the tables.
    pub fn table(&self, index: usize) -> View<'_, M> {
        View { memory: &self.tables[index], offset: 0, rows: self.positions, cols: self.size }
    }
}
