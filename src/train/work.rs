//! The interface of a run to its data and plan: microbatches by step, and those of an evaluation. The plan depends on
//! the seed alone, not on the devices that compute.

use crate::model::stage::Microbatch;
use std::ops::Range;

/// Rows divided into steps and microbatches.
pub trait Work {
    /// Optimizer steps of the whole run.
    fn total_steps(&self) -> u64;
    /// Steps of one pass over the rows.
    fn steps_per_epoch(&self) -> u64;
    /// Number of training rows.
    fn rows(&self) -> u64;
    /// The microbatches of step `step`, counted from 1.
    fn step(&self, step: u64) -> Vec<Microbatch>;
    /// Number of evaluation rows; 0 disables evaluation.
    fn eval_rows(&self) -> u64;
    /// Number of microbatches in an evaluation.
    fn eval_len(&self) -> usize;
    /// Names of the evaluation's sets with their microbatches, the deciding set first; empty for rows without a name.
    fn eval_sets(&self) -> Vec<(String, Range<usize>)> {
        Vec::new()
    }
    /// Whether evaluations count the most probable tokens that are the targets.
    fn predicts(&self) -> bool {
        false
    }
    /// Names of the classes of words; empty where words have none.
    fn tags(&self) -> &[String] {
        &[]
    }
    /// Number of microbatches that the reference scores before the next step; 0 where none is needed, or all are known.
    fn unscored(&self) -> usize {
        0
    }
    /// Microbatch `index` of those.
    fn unscored_at(&self, index: usize, step: u64) -> Microbatch {
        self.eval(index, step)
    }
    /// Takes the log-probabilities of the answers of microbatch `index` under the reference.
    fn scored(&self, _index: usize, _answers: &[f64]) {}
    /// Microbatch `index` of an evaluation after `step` steps (dropout is off, so the numbers do not depend on `step`).
    fn eval(&self, index: usize, step: u64) -> Microbatch;
}
