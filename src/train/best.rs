//! Selects the best evaluation and decides early stopping, with the rules of transformers' `load_best_model_at_end` and
//! `EarlyStoppingCallback` with threshold 0. Both follow from the scores alone, whose bits are the same for any number
//! of workers. The evaluation before the first step does not count.

use super::event::Eval;
use serde::{Deserialize, Serialize};

/// The score by which evaluations are compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// The lowest loss is the best.
    #[default]
    Loss,
    /// The highest accuracy is the best; only for classifiers.
    Accuracy,
    /// The highest macro F1 is the best; only for classifiers.
    MacroF1,
    /// The highest F1 of entities is the best; only where classes of words mark them.
    F1,
}

impl Metric {
    /// The name of the metric in output.
    pub fn name(self) -> &'static str {
        match self {
            Metric::Loss => "loss",
            Metric::Accuracy => "accuracy",
            Metric::MacroF1 => "macro F1",
            Metric::F1 => "F1",
        }
    }

    /// The value of the metric; None if the evaluation has none.
    fn of(self, eval: &Eval) -> Option<f64> {
        match self {
            Metric::Loss => Some(eval.eval_loss),
            Metric::Accuracy => eval.accuracy,
            Metric::MacroF1 => eval.macro_f1,
            Metric::F1 => eval.f1,
        }
    }

    fn improves(self, new: f64, old: f64) -> bool {
        match self {
            Metric::Loss => new < old,
            Metric::Accuracy | Metric::MacroF1 | Metric::F1 => new > old,
        }
    }
}

/// What a run decides by its evaluations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Choice {
    /// The score that decides.
    pub metric: Metric,
    /// Keeps the best adapter as the result of the run.
    pub keep: bool,
    /// Number of evaluations in a row without improvement after which the run ends; None: the run takes all its steps.
    pub patience: Option<u64>,
}

/// The best evaluation so far.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Steps taken before the evaluation.
    pub step: u64,
    /// The metric that selected the evaluation.
    pub metric: Metric,
    /// Value of the metric.
    pub value: f64,
    /// Number of later evaluations, none of which is better.
    pub since: u64,
    /// Whether the adapter is kept: the checkpoint of this step is not removed.
    pub kept: bool,
}

impl Choice {
    /// The best evaluation after `eval`.
    pub fn judge(&self, best: Option<Best>, eval: &Eval) -> Option<Best> {
        let asked = self.keep || self.patience.is_some();
        let Some(value) = self.metric.of(eval).filter(|_| asked && eval.step > 0) else { return best };
        match best {
            Some(best) if !self.metric.improves(value, best.value) => {
                Some(Best { since: best.since + 1, ..best })
            }
            _ => Some(Best { step: eval.step, metric: self.metric, value, since: 0, kept: self.keep }),
        }
    }

    /// The best evaluation of a checkpoint, unless another metric selected it, or its adapter is required and was not
    /// kept.
    pub fn recall(&self, best: Option<Best>) -> Option<Best> {
        let asked = self.keep || self.patience.is_some();
        best.filter(|b| asked && b.metric == self.metric && (b.kept || !self.keep))
    }

    /// True if the number of evaluations without improvement reaches the patience.
    pub fn ends(&self, best: Option<Best>) -> bool {
        best.zip(self.patience).is_some_and(|(best, patience)| best.since >= patience)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the evaluation after which the run ends (0: none) and the best evaluation, both counted from 1.
    fn check(metric: Metric, values: &[f64], patience: u64, want: (u64, u64)) {
        let choice = Choice { metric, keep: true, patience: Some(patience) };
        let (mut best, mut end) = (None, 0);
        for (step, value) in (1..).zip(values) {
            let score = Some(*value);
            let eval = Eval { step, eval_loss: *value, accuracy: score, macro_f1: score, ..Eval::default() };
            best = choice.judge(best, &eval);
            if choice.ends(best) {
                end = step;
                break;
            }
        }
        assert_eq!((end, best.map_or(0, |b| b.step)), want, "{metric:?} {values:?}, patience {patience}");
    }

    /// The expected values come from the methods `check_metric_value`, `on_evaluate` and `_determine_best_metric` of
    /// transformers 5.23.0, run on these sequences.
    #[test]
    fn early_stopping_equals_that_of_transformers() {
        let near_two = [2.0, 2.0000000000000004, 1.9999999999999998];
        /// Losses, and for patience 1, 2 and 3 the evaluation that ends the run (0: none) and the best evaluation.
        type Case<'a> = (&'a [f64], [(u64, u64); 3]);
        let losses: [Case; 11] = [
            (&[3.0, 2.0, 1.0], [(0, 3), (0, 3), (0, 3)]),
            (&[1.0, 2.0, 3.0], [(2, 1), (3, 1), (0, 1)]),
            (&[1.0, 1.0, 1.0], [(2, 1), (3, 1), (0, 1)]),
            (&[3.0, 2.0, 2.5, 2.5, 1.0], [(3, 2), (4, 2), (0, 5)]),
            (&[3.0, 2.0, 2.5, 1.9, 2.0, 2.0, 1.0], [(3, 2), (6, 4), (0, 7)]),
            (&[2.0, 3.0, 1.5, 1.6, 1.6, 1.4], [(2, 1), (5, 3), (0, 6)]),
            (&[1.0], [(0, 1), (0, 1), (0, 1)]),
            (&[5.0, 4.0, 4.0, 4.0, 4.0, 3.0], [(3, 2), (4, 2), (5, 2)]),
            (&near_two, [(2, 1), (0, 3), (0, 3)]),
            (&[3.0, 2.0, 3.0, 2.0, 3.0, 2.0], [(3, 2), (4, 2), (5, 2)]),
            (&[0.5, 0.4, 0.3, 0.35, 0.34, 0.33, 0.32, 0.31], [(4, 3), (5, 3), (6, 3)]),
        ];
        for (values, wants) in losses {
            (1..).zip(wants).for_each(|(patience, want)| check(Metric::Loss, values, patience, want));
        }
        for metric in [Metric::Accuracy, Metric::MacroF1] {
            check(metric, &[0.5, 0.6, 0.6, 0.7, 0.6], 1, (3, 2));
            check(metric, &[0.5, 0.6, 0.6, 0.7, 0.6], 2, (0, 4));
            check(metric, &[0.9, 0.8, 0.95, 0.9], 1, (2, 1));
            check(metric, &[0.9, 0.8, 0.95, 0.9], 2, (0, 3));
        }
    }

    #[test]
    fn eval_before_the_first_step_does_not_count() {
        let eval = |step, eval_loss| Eval { step, eval_loss, ..Eval::default() };
        let choice = Choice { keep: true, patience: Some(1), ..Choice::default() };
        assert_eq!(choice.judge(None, &eval(0, 1.0)), None);
        let best = choice.judge(None, &eval(4, 2.0));
        assert_eq!(best.map(|b| (b.step, b.since, b.kept)), Some((4, 0, true)));
        assert_eq!(Choice::default().judge(None, &eval(4, 2.0)), None, "nothing was asked for");
    }

    #[test]
    fn best_of_another_metric_is_dropped() {
        let keep = Choice { keep: true, ..Choice::default() };
        let stops = Choice { patience: Some(2), ..Choice::default() };
        let best = |kept| Some(Best { step: 3, metric: Metric::Loss, value: 1.0, since: 0, kept });
        assert_eq!(keep.recall(best(true)), best(true));
        assert_eq!(keep.recall(best(false)), None, "its checkpoint may be gone");
        assert_eq!(stops.recall(best(false)), best(false));
        assert_eq!(Choice { metric: Metric::Accuracy, ..stops }.recall(best(true)), None);
        assert_eq!(Choice::default().recall(best(true)), None);
    }
}
