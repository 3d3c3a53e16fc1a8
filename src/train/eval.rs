//! Evaluates on held-out rows: forward passes only, dropout off, with sums as exact as those of a step.

use super::compute::{Compute, Say, Scoring};
use super::entities::{Entities, mark_entities};
use super::error::TrainError;
use super::event;
use super::sum::{Sums, THE_LOSS};
use super::work::Work;
use crate::model::stage::{IGNORE, LossSums, Microbatch, Targets};
use crate::numeric::correlation::{pearson, spearman};
use crate::numeric::fixed::BadValue;
use std::collections::BTreeMap;
use std::time::Instant;

/// Largest number of classes whose confusion matrix is part of an event, which keeps lines of metrics.jsonl short.
const SHOWN_CLASSES: usize = 100;

/// Sums over one set of rows.
struct Part {
    sums: Sums,
    confusion: Confusion,
    tokens: Hits,
    numbers: Numbers,
    /// Entities, where classes of words mark them.
    entities: Option<Entities>,
}

/// The labels and the predictions of each row's words.
fn tagged<'a>(batch: &'a Microbatch, out: &'a LossSums) -> impl Iterator<Item = Vec<(u32, u32)>> + 'a {
    let all = if let Targets::Classes(classes) = &batch.targets { &classes[..] } else { &[] };
    let rows = batch.bounds.windows(2).filter_map(|row| all.get(row[0] as usize..row[1] as usize));
    let mut predictions = out.predictions.iter();
    rows.map(move |row| {
        let labels = row.iter().copied().filter(|class| *class != IGNORE);
        labels.zip(predictions.by_ref().copied()).collect()
    })
}

/// Counts the entities of a microbatch.
fn count_entities(entities: &mut Entities, tags: &[String], (batch, out): (&Microbatch, &LossSums)) {
    let name = |class: u32| tags.get(class as usize).map_or("O", |name| name);
    for row in tagged(batch, out) {
        let (labels, predictions): (Vec<_>, Vec<_>) =
            row.into_iter().map(|(label, prediction)| (name(label), name(prediction))).unzip();
        entities.add(&labels, &predictions);
    }
}

/// Outputs and the numbers that they should be, by microbatch: their order decides the last bits of a correlation.
#[derive(Debug, Default, Clone)]
struct Numbers(BTreeMap<usize, Vec<(f64, f64)>>);

impl Numbers {
    fn add(&mut self, index: usize, batch: &Microbatch, out: &LossSums) {
        if let Targets::Numbers(numbers) = &batch.targets {
            let numbers = numbers.iter().map(|number| f64::from(*number));
            self.0.insert(index, out.rows.iter().copied().zip(numbers).collect());
        }
    }
}

/// Number of predicted tokens, and of those that are the targets.
#[derive(Debug, Default, Clone, Copy)]
struct Hits {
    right: u64,
    all: u64,
}

impl Hits {
    fn add(&mut self, batch: &Microbatch, out: &LossSums) {
        if let Targets::Tokens(targets) = &batch.targets {
            let targets = targets.iter().filter(|target| **target != IGNORE);
            self.all += out.predictions.len() as u64;
            self.right +=
                targets.zip(&out.predictions).filter(|(target, token)| target == token).count() as u64;
        }
    }
}

/// Evaluates the model after `step` steps; None if a signal ended the evaluation early. The numbers of the event are
/// those of the first set.
pub fn evaluate(
    compute: &mut dyn Compute,
    work: &dyn Work,
    step: u64,
    say: Say,
) -> Result<Option<event::Eval>, TrainError> {
    let (began, sets) = (Instant::now(), work.eval_sets());
    let part = |_| Part {
        sums: Sums::new(0),
        confusion: Confusion::default(),
        tokens: Hits::default(),
        numbers: Numbers::default(),
        entities: mark_entities(work.tags()).then(Entities::default),
    };
    let mut parts: Vec<Part> = (0..sets.len().max(1)).map(part).collect();
    let mut each = |index, batch: &Microbatch, out: &LossSums| {
        let (rows, finding) = (|| batch.rows.clone(), None);
        let bad = |bad: BadValue| TrainError::Evaluation {
            step,
            rows: rows(),
            tensor: THE_LOSS.into(),
            value: bad.value,
            finding,
        };
        let of = sets.iter().position(|(_, microbatches)| microbatches.contains(&index));
        let Part { sums, confusion, tokens, numbers, entities } = &mut parts[of.unwrap_or(0)];
        sums.add_loss(out).map_err(bad)?;
        confusion.add(batch, out);
        tokens.add(batch, out);
        numbers.add(index, batch, out);
        entities.iter_mut().for_each(|entities| count_entities(entities, work.tags(), (batch, out)));
        Ok(())
    };
    let predict = work.predicts();
    let scoring =
        Scoring { count: work.eval_len(), predict, batch: &|index| work.eval(index, step), each: &mut each };
    let Some(()) = compute.losses(step, scoring, say)? else { return Ok(None) };
    let mut scored = parts.into_iter().map(|part| score(part, step));
    let first = scored.next().unwrap_or_default();
    let all = std::iter::once(first.clone()).chain(scored);
    let named = |((name, _), eval): (&(String, _), event::Eval)| event::Set::of(name.clone(), &eval);
    let sets = sets.iter().zip(all).map(named).collect();
    Ok(Some(event::Eval { sets, seconds: began.elapsed().as_secs_f64(), ..first }))
}

/// The scores of one set.
fn score(Part { sums, confusion, tokens, numbers, entities }: Part, step: u64) -> event::Eval {
    let loss = sums.mean().loss;
    let (scores, rewards) = (confusion.scores(), sums.scalars().rewards);
    let predicts_text = scores.is_none() && rewards.counts == [0; 2] && numbers.0.is_empty();
    let numbers: Vec<(f64, f64)> = numbers.0.into_values().flatten().collect();
    event::Eval {
        step,
        eval_loss: loss,
        rewards: rewards.means(),
        perplexity: predicts_text.then(|| libm::exp(loss)),
        accuracy: scores.as_ref().map(|s| s.accuracy).or(rewards.accuracy()),
        macro_f1: scores.as_ref().map(|s| s.macro_f1),
        f1: entities.map(|entities| entities.f1()),
        token_accuracy: (tokens.all > 0).then(|| tokens.right as f64 / tokens.all as f64),
        pearson: pearson(&numbers),
        spearman: spearman(&numbers),
        confusion: scores.and_then(shown_matrix),
        tokens: sums.targets,
        ..event::Eval::default()
    }
}

fn shown_matrix(scores: Scores) -> Option<Vec<Vec<u64>>> {
    Some(scores.confusion).filter(|matrix| matrix.len() <= SHOWN_CLASSES)
}

/// Counts of rows, or of words, by label and prediction.
#[derive(Debug, Default, Clone)]
pub struct Confusion {
    counts: Vec<Vec<u64>>,
}

/// Scores of a confusion matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct Scores {
    /// Share of rows on the diagonal.
    pub accuracy: f64,
    /// Mean F1 over the classes that occur as label or as prediction (scikit-learn's `average="macro"`).
    pub macro_f1: f64,
    /// Number of rows by `[label][prediction]`, a square matrix.
    pub confusion: Vec<Vec<u64>>,
}

impl Confusion {
    /// Counts the rows or words of a microbatch; a language model predicts no classes and adds nothing.
    pub fn add(&mut self, batch: &Microbatch, out: &LossSums) {
        for (label, prediction) in tagged(batch, out).flatten() {
            self.count(label as usize, prediction as usize);
        }
        if let Targets::Labels(labels) = &batch.targets {
            labels.iter().zip(&out.predictions).for_each(|(&l, &p)| self.count(l as usize, p as usize));
        }
    }

    /// Counts one row.
    pub fn count(&mut self, label: usize, prediction: usize) {
        let classes = self.counts.len().max(label + 1).max(prediction + 1);
        self.counts.iter_mut().for_each(|row| row.resize(classes, 0));
        self.counts.resize(classes, vec![0; classes]);
        self.counts[label][prediction] += 1;
    }

    /// The scores; None if no row was counted.
    pub fn scores(self) -> Option<Scores> {
        let total: u64 = self.counts.iter().flatten().sum();
        if total == 0 {
            return None;
        }
        let classes = 0..self.counts.len();
        let hits: u64 = classes.clone().map(|c| self.counts[c][c]).sum();
        let f1 = |c: usize| {
            let labelled: u64 = self.counts[c].iter().sum();
            let predicted: u64 = self.counts.iter().map(|row| row[c]).sum();
            (labelled + predicted > 0).then(|| 2.0 * self.counts[c][c] as f64 / (labelled + predicted) as f64)
        };
        let scores: Vec<f64> = classes.filter_map(f1).collect();
        Some(Scores {
            accuracy: hits as f64 / total as f64,
            macro_f1: scores.iter().sum::<f64>() / scores.len() as f64,
            confusion: self.counts,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_confusion_matrix_is_not_in_the_event() {
        for (classes, shown) in [(SHOWN_CLASSES, true), (SHOWN_CLASSES + 1, false)] {
            let mut c = Confusion::default();
            c.count(classes - 1, 0);
            assert_eq!(c.scores().map(shown_matrix).is_some_and(|m| m.is_some()), shown, "{classes}");
        }
    }

    #[test]
    fn scores_equal_those_of_scikit_learn() {
        // sklearn.metrics.f1_score([0,0,1,2,2,2], [0,1,1,2,2,0], average="macro") = 0.6555...; class 3 is absent
        let mut c = Confusion::default();
        for (label, prediction) in [(0, 0), (0, 1), (1, 1), (2, 2), (2, 2), (2, 0)] {
            c.count(label, prediction);
        }
        let s = c.scores().unwrap();
        assert!((s.accuracy - 4.0 / 6.0).abs() < 1e-15);
        let by_hand = (2.0 * 1.0 / 4.0 + 2.0 / 3.0 + 2.0 * 2.0 / 5.0) / 3.0;
        assert!((s.macro_f1 - by_hand).abs() < 1e-15);
        assert_eq!(s.confusion, vec![vec![1, 1, 0], vec![0, 1, 0], vec![1, 0, 2]]);
        assert_eq!(Confusion::default().scores(), None);
    }
}
