//! Converts rows and plan to microbatches. This is the only link between `data`, which has no model types, and
//! [`Microbatch`].

use super::work::Work;
use crate::data::plan::Plan;
use crate::data::samples::{Sample, Samples};
use crate::model::preference::{Aim, Answers, Lesson, Loss, Objective, Ranking};
use crate::model::stage::{IGNORE, Microbatch, Targets};
use std::cell::{OnceCell, RefCell};
use std::ops::Range;

/// The work of a run on tokenised rows.
pub struct Batches<'a> {
    rows: &'a Samples,
    plan: &'a Plan,
    eval: Option<&'a Samples>,
    eval_plan: Vec<Vec<usize>>,
    eval_sets: Vec<(String, Range<usize>)>,
    predicts: bool,
    compared: Option<Compared<'a>>,
    /// As in [`Ranking`], where pairs train a reward.
    centre: Option<f64>,
    tags: &'a [String],
}

/// Log-probabilities of answers under the reference, those of a row together; NaN where they are not known. First
/// those of the training rows, then those of the evaluation.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Known(pub [Vec<f64>; 2]);

/// A loss that compares answers.
struct Compared<'a> {
    objective: Objective,
    known: &'a RefCell<Known>,
    /// Rows that the reference scores: whether they are of the evaluation, and their indices.
    unscored: Vec<(bool, Vec<usize>)>,
    eval_nll: OnceCell<f64>,
}

impl<'a> Batches<'a> {
    /// Compares answers by `objective`. `known` holds the log-probabilities under the reference, and takes missing ones.
    #[must_use]
    pub fn comparing(mut self, objective: Objective, known: &'a RefCell<Known>) -> Self {
        let mut unscored = Vec::new();
        if objective.loss.has_reference() {
            let empty = Samples::default();
            let sides = [(self.rows, self.plan.rows()), (self.eval.unwrap_or(&empty), Vec::new())];
            for (side, (samples, rows)) in sides.into_iter().enumerate() {
                let rows = if side == 0 { rows } else { (0..samples.len()).collect() };
                let all = &mut known.borrow_mut().0[side];
                all.resize(answers(samples) * samples.len(), f64::NAN);
                let lacks = |row: &usize| reference(all, samples, *row).iter().any(|value| value.is_nan());
                if rows.iter().any(lacks) {
                    let packed = Plan::in_order(&rows, samples, self.plan.micro_batch_tokens());
                    unscored.extend(packed.into_iter().map(|rows| (side == 1, rows)));
                }
            }
        }
        self.compared = Some(Compared { objective, known, unscored, eval_nll: OnceCell::new() });
        self
    }

    /// A microbatch whose answers are compared; `nll` is the weight of a token of the chosen ones.
    fn lesson(
        &self,
        compared: &Compared,
        (rows, step): (&[usize], u64),
        (eval, nll): (bool, f64),
    ) -> Microbatch {
        let samples = if eval { self.eval.unwrap_or(self.rows) } else { self.rows };
        let (objective, known) = (compared.objective, compared.known.borrow());
        let of_row = |&row: &usize| reference(&known.0[usize::from(eval)], samples, row).to_vec();
        let has = objective.loss.has_reference();
        let reference = if has { rows.iter().flat_map(of_row).collect() } else { Vec::new() };
        let wanted = rows.iter().filter_map(|&row| samples.get(row).label.map(|label| label == 1)).collect();
        let lesson = Lesson { objective, reference, nll, wanted };
        answering(samples, rows, (step, Aim::Learn(lesson)))
    }

    /// `eval`: the rows to evaluate on. They are packed with the microbatch size of the plan.
    pub fn new(rows: &'a Samples, plan: &'a Plan, eval: Option<&'a Samples>) -> Self {
        let eval_plan = eval.map_or_else(Vec::new, |rows| Plan::eval(rows, plan.micro_batch_tokens()));
        Batches {
            rows,
            plan,
            eval,
            eval_plan,
            eval_sets: Vec::new(),
            predicts: false,
            compared: None,
            centre: None,
            tags: &[],
        }
    }

    /// Counts the most probable tokens that are the targets of an evaluation.
    #[must_use]
    pub fn predicting(self) -> Self {
        Batches { predicts: true, ..self }
    }

    /// Trains a reward on the pairs; `centre` as in [`Ranking`].
    #[must_use]
    pub fn ranking(self, centre: f64) -> Self {
        Batches { centre: Some(centre), ..self }
    }

    /// Evaluates classes of words by the entities that they mark, where the names of the classes do so.
    #[must_use]
    pub fn tagging(self, tags: &'a [String]) -> Self {
        Batches { tags, ..self }
    }

    /// A microbatch whose answers are not compared as texts.
    fn plain(&self, samples: &Samples, indices: &[usize], step: u64) -> Microbatch {
        match self.centre {
            Some(centre) => ranked(samples, indices, (step, centre)),
            None => microbatch(samples, indices, step),
        }
    }

    /// Divides the rows to evaluate on into sets, each with its name and number of rows. No microbatch has rows of two.
    #[must_use]
    pub fn in_sets(mut self, sets: &[(String, usize)]) -> Self {
        let Some(samples) = self.eval.filter(|_| !sets.is_empty()) else { return self };
        let mut from = 0;
        self.eval_plan.clear();
        for (name, rows) in sets {
            let (indices, before): (Vec<usize>, _) = ((from..from + rows).collect(), self.eval_plan.len());
            self.eval_plan.extend(Plan::in_order(&indices, samples, self.plan.micro_batch_tokens()));
            self.eval_sets.push((name.clone(), before..self.eval_plan.len()));
            from += rows;
        }
        self
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
        let Some(compared) = &self.compared else {
            let weigh =
                |indices: &Vec<usize>| weighted(self.plain(self.rows, indices, step), self.rows, indices);
            return planned.iter().map(weigh).collect();
        };
        let nll = beside(&compared.objective, self.rows, planned.iter().flatten());
        planned.iter().map(|rows| self.lesson(compared, (rows, step), (false, nll))).collect()
    }

    fn eval_rows(&self) -> u64 {
        self.eval.map_or(0, |rows| rows.len() as u64)
    }

    fn eval_len(&self) -> usize {
        self.eval_plan.len()
    }

    fn predicts(&self) -> bool {
        self.predicts
    }

    fn eval_sets(&self) -> Vec<(String, Range<usize>)> {
        self.eval_sets.clone()
    }

    fn eval(&self, index: usize, step: u64) -> Microbatch {
        // Without evaluation rows the plan is empty, so no index is valid and `self.rows` is never used.
        let samples = self.eval.unwrap_or(self.rows);
        match &self.compared {
            None => self.plain(samples, &self.eval_plan[index], step),
            Some(compared) => {
                let nll = || beside(&compared.objective, samples, &(0..samples.len()).collect::<Vec<_>>());
                let nll = *compared.eval_nll.get_or_init(nll);
                self.lesson(compared, (&self.eval_plan[index], step), (true, nll))
            }
        }
    }

    fn tags(&self) -> &[String] {
        self.tags
    }

    fn unscored(&self) -> usize {
        self.compared.as_ref().map_or(0, |compared| compared.unscored.len())
    }

    fn unscored_at(&self, index: usize, step: u64) -> Microbatch {
        let unscored = self.compared.as_ref().and_then(|compared| compared.unscored.get(index));
        let (eval, rows) = unscored.map_or((false, &[][..]), |(eval, rows)| (*eval, rows));
        let samples = if eval { self.eval.unwrap_or(self.rows) } else { self.rows };
        answering(samples, rows, (step, Aim::Score))
    }

    fn scored(&self, index: usize, scores: &[f64]) {
        let Some(compared) = &self.compared else { return };
        let Some((eval, rows)) = compared.unscored.get(index) else { return };
        let samples = if *eval { self.eval.unwrap_or(self.rows) } else { self.rows };
        let (each, mut known) = (answers(samples), compared.known.borrow_mut());
        for (&row, scores) in rows.iter().zip(scores.chunks(each)) {
            known.0[usize::from(*eval)][row * each..][..scores.len()].copy_from_slice(scores);
        }
    }
}

/// Answers of each row.
fn answers(samples: &Samples) -> usize {
    if samples.is_empty() { 1 } else { samples.get(0).rows().count() }
}

/// The log-probabilities of the answers of a row.
fn reference<'k>(known: &'k [f64], samples: &Samples, row: usize) -> &'k [f64] {
    let each = answers(samples);
    &known[row * each..][..each]
}

/// First token of the answer in the row with these tokens.
fn begin(sample: &Sample, row: &Range<usize>) -> usize {
    row.clone().find(|&i| sample.supervised(i)).unwrap_or(row.end - 1)
}

/// Tokens of a pair whose mean loss counts beside that of the pair.
fn nll_tokens(objective: &Objective, sample: &Sample) -> usize {
    let chosen = 0..sample.second.unwrap_or(0);
    let first = if objective.loss == Loss::Orpo { 1 } else { begin(sample, &chosen).max(1) };
    chosen.len().saturating_sub(first)
}

/// The weight of each of these tokens that gives their mean over all rows the weight of the objective: sums are divided
/// by the number of pairs.
fn beside<'r>(objective: &Objective, samples: &Samples, rows: impl IntoIterator<Item = &'r usize>) -> f64 {
    if objective.nll == 0.0 {
        return 0.0;
    }
    let (mut pairs, mut tokens) = (0, 0);
    for &row in rows {
        pairs += 1;
        tokens += nll_tokens(objective, &samples.get(row));
    }
    if tokens == 0 { 0.0 } else { objective.nll * f64::from(pairs) / tokens as f64 }
}

/// Concatenates rows with answers.
fn answering(samples: &Samples, indices: &[usize], (step, aim): (u64, Aim)) -> Microbatch {
    let (mut ids, mut begins, mut rows, mut bounds) = (Vec::new(), Vec::new(), Vec::new(), vec![0]);
    for &index in indices {
        let sample = samples.get(index);
        for row in sample.rows() {
            begins.push((ids.len() + begin(&sample, &row) - row.start) as u32);
            ids.extend_from_slice(&sample.ids[row]);
            bounds.push(ids.len() as u32);
            rows.push(sample.row);
        }
    }
    Microbatch { step, rows, ids, bounds, targets: Targets::Answers(Answers { begins, aim }) }
}

/// Concatenates pairs of rows whose outputs are rewards.
fn ranked(samples: &Samples, indices: &[usize], (step, centre): (u64, f64)) -> Microbatch {
    let margin = |&index: &usize| samples.get(index).values.first().copied().unwrap_or(0.0);
    let targets = Targets::Ranked(Ranking { margins: indices.iter().map(margin).collect(), centre });
    Microbatch { targets, ..answering(samples, indices, (step, Aim::Score)) }
}

/// Concatenates rows. The target of a token is the next token of its row, if that token is supervised; a row with a
/// class or with numbers has these as its only targets, and so have words with classes.
pub fn microbatch(samples: &Samples, indices: &[usize], step: u64) -> Microbatch {
    let (mut ids, mut targets, mut labels, mut values) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut rows, mut bounds) = (Vec::with_capacity(indices.len()), vec![0]);
    let mut classes = Vec::new();
    for &index in indices {
        let sample = samples.get(index);
        let next = |i: usize| if sample.supervised(i) { sample.ids[i] } else { IGNORE };
        targets.extend((1..sample.ids.len()).map(next));
        targets.push(IGNORE);
        ids.extend_from_slice(sample.ids);
        bounds.push(ids.len() as u32);
        rows.push(sample.row);
        labels.extend(sample.label);
        values.extend_from_slice(sample.values);
        classes.extend_from_slice(sample.classes);
    }
    let targets = match (labels.is_empty(), values.is_empty()) {
        (true, true) if !classes.is_empty() => Targets::Classes(classes),
        (true, true) => Targets::Tokens(targets),
        (true, false) => Targets::Numbers(values),
        (false, _) => Targets::Labels(labels),
    };
    Microbatch { step, rows, ids, bounds, targets }
}

/// The microbatch of these rows with their weights, which count in training alone.
fn weighted(batch: Microbatch, samples: &Samples, indices: &[usize]) -> Microbatch {
    let weights: Vec<f32> = indices.iter().map(|&index| samples.get(index).weight).collect();
    match batch.targets {
        Targets::Tokens(targets) if weights.iter().any(|weight| *weight != 1.0) => {
            Microbatch { targets: Targets::Weighted { targets, weights }, ..batch }
        }
        _ => batch,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::samples::Encoded;

    fn samples(rows: &[(u64, &[u32], &[u8])], label: Option<u32>) -> Samples {
        let mut samples = Samples::default();
        for (row, ids, mask) in rows {
            let mask = mask.iter().map(|&m| m == 1).collect();
            samples.push(*row, &Encoded::new(mask, ids.to_vec()), label);
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
