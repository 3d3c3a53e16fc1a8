//! What a run asks of its data and its plan: microbatches by step, and those of an evaluation. The plan fixes
//! them from the seed alone; nothing here depends on who computes.

use crate::model::stage::Microbatch;

/// Rows cut into steps and microbatches.
pub trait Work {
    /// Optimizer steps of the whole run.
    fn total_steps(&self) -> u64;
    /// Steps of one pass over the rows.
    fn steps_per_epoch(&self) -> u64;
    /// Rows that are trained on.
    fn rows(&self) -> u64;
    /// The microbatches of a step, from 1.
    fn step(&self, step: u64) -> Vec<Microbatch>;
    /// Rows that are evaluated on; 0 switches evaluation off.
    fn eval_rows(&self) -> u64;
    /// Microbatches of an evaluation.
    fn eval_len(&self) -> usize;
    /// One of them; `step` says after how many steps it is scored (dropout is off, so nothing depends on it).
    fn eval(&self, index: usize, step: u64) -> Microbatch;
}
