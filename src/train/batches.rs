//! Converts rows and plan to microbatches. This is the only link between `data`, which has no model types, and
//! [`Microbatch`].

use super::work::Work;
use crate::data::plan::Plan;
use crate::data::samples::Samples;
use crate::model::stage::{IGNORE, Microbatch, Targets};

/// The work of a run on tokenised rows.
pub struct Batches<'a> {
    rows: &'a Samples,
    plan: &'a Plan,
    eval: Option<&'a Samples>,
    eval_plan: Vec<Vec<usize>>,
}

impl<'a> Batches<'a> {
    /// `eval`: the rows to evaluate on. They are packed with the microbatch size of the plan.
    pub fn new(rows: &'a Samples, plan: &'a Plan, eval: Option<&'a Samples>) -> Self {
        let eval_plan = eval.map_or_else(Vec::new, |rows| Plan::eval(rows, plan.micro_batch_tokens()));
        Batches { rows, plan, eval, eval_plan }
    }
}

impl Work for Batches<'_> {
    fn total_steps(&self) -> u64 {
        self.plan.total_steps()
    }

    fn steps_per_epoch(&self) -> u64 {
        self.plan.steps_per_epoch()
    }

    fn rows(&self) -> u64 {
        self.rows.len() as u64
    }

    fn step(&self, step: u64) -> Vec<Microbatch> {
        let planned = self.plan.step(step).microbatches;
        planned.iter().map(|indices| microbatch(self.rows, indices, step)).collect()
    }

    fn eval_rows(&self) -> u64 {
        self.eval.map_or(0, |rows| rows.len() as u64)
    }

    fn eval_len(&self) -> usize {
        self.eval_plan.len()
    }

    fn eval(&self, index: usize, step: u64) -> Microbatch {
        // Without evaluation rows the plan is empty, so no index is valid and `self.rows` is never used.
        microbatch(self.eval.unwrap_or(self.rows), &self.eval_plan[index], step)
    }
}

/// Concatenates rows. The target of a token is the next token of its row, if that token is supervised; a row with a
/// class has the class as its only target.
pub fn microbatch(samples: &Samples, indices: &[usize], step: u64) -> Microbatch {
    let (mut ids, mut targets, mut labels) = (Vec::new(), Vec::new(), Vec::new());
    let (mut rows, mut bounds) = (Vec::with_capacity(indices.len()), vec![0]);
    for &index in indices {
        let sample = samples.get(index);
        let next = |i: usize| if sample.supervised(i) { sample.ids[i] } else { IGNORE };
        targets.extend((1..sample.ids.len()).map(next));
        targets.push(IGNORE);
        ids.extend_from_slice(sample.ids);
        bounds.push(ids.len() as u32);
        rows.push(sample.row);
        labels.extend(sample.label);
    }
    let targets = if labels.is_empty() { Targets::Tokens(targets) } else { Targets::Labels(labels) };
    Microbatch { step, rows, ids, bounds, targets }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::samples::Encoded;

    fn samples(rows: &[(u64, &[u32], &[u8])], label: Option<u32>) -> Samples {
        let mut samples = Samples::default();
        for (row, ids, mask) in rows {
            let mask = mask.iter().map(|&m| m == 1).collect();
            samples.push(*row, &Encoded { ids: ids.to_vec(), mask }, label);
        }
        samples
    }

    #[test]
    fn targets_are_next_supervised_tokens_of_the_same_row() {
        let samples =
            samples(&[(4, &[10, 11, 12], &[1, 0, 1]), (9, &[20], &[1]), (2, &[30, 31], &[1, 1])], None);
        let batch = microbatch(&samples, &[2, 0, 1], 7);
        assert_eq!(batch.rows, [2, 4, 9]);
        assert_eq!(batch.ids, [30, 31, 10, 11, 12, 20]);
        assert_eq!(batch.bounds, [0, 2, 5, 6]);
        // The first token of a row has no predecessor: 10 and 20 are no targets, although they are supervised.
        assert_eq!(batch.targets, Targets::Tokens(vec![31, IGNORE, IGNORE, 12, IGNORE, IGNORE]));
        assert_eq!(batch.step, 7);
    }

    #[test]
    fn classes_are_the_only_targets() {
        let samples = samples(&[(0, &[1, 2], &[0, 0]), (1, &[3], &[0])], Some(2));
        assert_eq!(microbatch(&samples, &[0, 1], 1).targets, Targets::Labels(vec![2, 2]));
    }
}
