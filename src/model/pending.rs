//! Losses of a head that a backend computes, until they are read.

use super::stage::LossSums;
use crate::backend::{Backend, Fault, View, view};

/// Losses that are recorded but not yet read.
pub struct Pending<M> {
    /// [n, 1]
    pub(super) losses: M,
    /// [n, outputs], of a classifier.
    pub(super) logits: Option<M>,
    pub(super) rows: usize,
    pub(super) outputs: usize,
    pub(super) weight: f64,
}

impl<M> Pending<M> {
    /// Reads the sums and the additional buffers in one wait.
    pub fn read<B: Backend<Memory = M>>(
        self,
        backend: &mut B,
        beside: Option<(View<M>, &mut [f32])>,
    ) -> Result<LossSums, Fault> {
        let mut losses = vec![0.0; self.rows];
        let mut logits = vec![0.0; if self.logits.is_some() { self.rows * self.outputs } else { 0 }];
        let mut parts = vec![(view(&self.losses, self.rows, 1), &mut losses[..])];
        if let Some(memory) = &self.logits {
            parts.push((view(memory, self.rows, self.outputs), &mut logits[..]));
        }
        parts.extend(beside);
        let read = backend.read_all(&mut parts);
        let (weight, targets) = (self.weight, self.rows as u64);
        let outputs = self.outputs;
        self.recycle(backend);
        read?;
        let loss = losses.iter().map(|&l| f64::from(l)).sum();
        let predictions = logits.chunks_exact(outputs).map(|row| argmax(row) as u32).collect();
        Ok(LossSums { loss, weight, targets, predictions, ..LossSums::default() })
    }

    /// Reads the loss of each row.
    pub fn losses<B: Backend<Memory = M>>(self, backend: &mut B) -> Result<Vec<f32>, Fault> {
        let mut losses = vec![0.0; self.rows];
        let read = backend.read(view(&self.losses, self.rows, 1), &mut losses);
        self.recycle(backend);
        read.map(|()| losses)
    }

    /// Frees the memory without reading.
    pub fn recycle<B: Backend<Memory = M>>(self, backend: &mut B) {
        [self.losses].into_iter().chain(self.logits).for_each(|m| backend.recycle(m));
    }
}

/// Index of the largest value, the lowest of equals.
pub fn argmax(values: &[f32]) -> usize {
    values.iter().enumerate().fold(0, |best, (i, v)| if *v > values[best] { i } else { best })
}
