//! The sums of one step: gradient, loss and weight in fixed point, so that any grouping and any order of
//! microbatches gives the same bits. The division by the weight happens once, in [`Sums::mean`].
//!
//! Loss and weight are two numbers per microbatch: they are added in 128 bits and so have no cap per
//! microbatch, only the format's own range.

use crate::model::stage::LossSums;
use crate::numeric::fixed::{self, BadValue};
use rayon::prelude::*;

/// Values per unit of work of a thread. Integer sums do not care where the cuts are.
const CHUNK: usize = 1 << 16;

/// What the microbatches of a step amount to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sums {
    gradient: Vec<i64>,
    loss: i128,
    weight: i128,
    /// Supervised targets (for a classifier: rows).
    pub targets: u64,
}

/// Means over a step or an evaluation, each rounded once.
#[derive(Debug, Clone, PartialEq)]
pub struct Mean {
    /// Loss sum over weight.
    pub loss: f64,
    /// Gradient sum over weight.
    pub gradient: Vec<f32>,
}

impl Sums {
    /// Nothing yet, over a flat layout of `len` values (0 for an evaluation).
    pub fn new(len: usize) -> Self {
        Sums { gradient: vec![0; len], loss: 0, weight: 0, targets: 0 }
    }

    /// Nothing again, in the same memory.
    pub fn reset(&mut self, len: usize) {
        self.gradient.clear();
        self.gradient.resize(len, 0);
        (self.loss, self.weight, self.targets) = (0, 0, 0);
    }

    /// Adds a microbatch's loss; what is not finite or outside the format's range changes nothing.
    pub fn add_loss(&mut self, sums: &LossSums) -> Result<(), BadValue> {
        let fixed = |value| fixed::to_fixed(value, i64::MAX).ok_or(BadValue { index: 0, value });
        let (loss, weight) = (fixed(sums.loss)?, fixed(sums.weight)?);
        self.loss += i128::from(loss);
        self.weight += i128::from(weight);
        self.targets += sums.targets;
        Ok(())
    }

    /// Adds a microbatch's gradient, all or nothing; the error's index is one of the flat layout.
    pub fn add_gradient(&mut self, gradient: &[f32], cap: i64) -> Result<(), BadValue> {
        assert_eq!(self.gradient.len(), gradient.len(), "sum and gradient share one layout");
        let bad = |(i, values): (usize, &[f32])| {
            fixed::check(values, cap).err().map(|bad| BadValue { index: bad.index + i * CHUNK, ..bad })
        };
        if let Some(bad) = gradient.par_chunks(CHUNK).enumerate().find_map_first(bad) {
            return Err(bad);
        }
        let chunks = self.gradient.par_chunks_mut(CHUNK).zip(gradient.par_chunks(CHUNK));
        chunks.for_each(|(sum, values)| fixed::add_checked(sum, values));
        Ok(())
    }

    /// The one division. A weight of zero (class weights may be) leaves nothing to learn from: all zero.
    pub fn mean(&self) -> Mean {
        let weight = self.weight as f64;
        let over = |sum: f64| if weight == 0.0 { 0.0 } else { sum / weight };
        let gradient = self.gradient.par_iter().with_min_len(CHUNK).map(|&g| over(g as f64) as f32).collect();
        Mean { loss: over(self.loss as f64), gradient }
    }
}
