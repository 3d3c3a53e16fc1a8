//! Rows whose answers count as wholes: pairs of a chosen and a rejected answer, and single answers that are wanted or
//! not. The forward pass gives the log-probability of each answer; the loss of the pairs gives a weight for each row;
//! the gradient of a token's cross-entropy is linear in its weight, so it is multiplied by that of its row.

mod loss;
mod ranking;

pub use loss::{Loss, Objective, Pair, Value};
pub use ranking::Ranking;

use super::stage::{LossSums, Microbatch};
use serde::{Deserialize, Serialize};

/// The answers of a microbatch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Answers {
    /// First token of each row's answer, as a position in the microbatch. An answer ends with its row.
    pub begins: Vec<u32>,
    /// What is asked of the answers.
    pub aim: Aim,
}

/// What is asked of answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Aim {
    /// Their log-probabilities alone.
    Score,
    /// A loss.
    Learn(Lesson),
}

/// The loss of a microbatch's answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Lesson {
    /// The loss.
    pub objective: Objective,
    /// Log-probability of each answer under the reference; empty if the loss has none.
    pub reference: Vec<f64>,
    /// Weight of the loss of each token of the chosen answers, beside that of the pairs.
    pub nll: f64,
    /// Whether each answer is wanted. Empty for pairs: a chosen row, then a rejected one.
    pub wanted: Vec<bool>,
}

/// Sums of rewards.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Rewards {
    /// Sums of the rewards of chosen and of rejected answers.
    pub sums: [f64; 2],
    /// Numbers of these answers.
    pub counts: [u64; 2],
    /// Number of pairs among them.
    pub pairs: u64,
    /// Pairs whose chosen answer has the higher reward.
    pub right: u64,
    /// The lowest and the highest reward, where a head gives them.
    pub range: Option<[f64; 2]>,
}

/// A token whose loss is computed.
struct Token {
    /// Position of the token before it.
    at: u32,
    id: u32,
    row: usize,
    /// Whether it belongs to the answer; else to the prompt.
    answers: bool,
}

impl Answers {
    /// The positions of which a loss is computed, ascending, and the tokens that they predict.
    pub fn asked(&self, batch: &Microbatch) -> (Vec<u32>, Vec<u32>) {
        self.tokens(batch).map(|token| (token.at, token.id)).unzip()
    }

    fn tokens<'a>(&'a self, batch: &'a Microbatch) -> impl Iterator<Item = Token> + 'a {
        let rows = batch.bounds.windows(2).zip(&self.begins).enumerate();
        rows.flat_map(move |(row, (bounds, &begin))| {
            let first = if self.learns_prompt(row) { bounds[0] + 1 } else { begin.max(bounds[0] + 1) };
            (first..bounds[1]).map(move |at| Token {
                at: at - 1,
                id: batch.ids[at as usize],
                row,
                answers: at >= begin,
            })
        })
    }

    /// Whether the tokens of the row count beside the loss of its pair.
    fn is_chosen(&self, row: usize) -> bool {
        matches!(&self.aim, Aim::Learn(lesson) if lesson.wanted.is_empty() && row.is_multiple_of(2))
    }

    fn learns_prompt(&self, row: usize) -> bool {
        let orpo = matches!(&self.aim, Aim::Learn(lesson) if lesson.objective.loss == Loss::Orpo);
        orpo && self.is_chosen(row)
    }

    /// Returns the weight of each token of [`Answers::asked`], given their losses, and the sums.
    pub fn weigh(&self, batch: &Microbatch, losses: &[f32]) -> (Vec<f32>, LossSums) {
        let mut scores = vec![0.0; batch.rows.len()];
        for (token, loss) in self.tokens(batch).zip(losses).filter(|(token, _)| token.answers) {
            scores[token.row] -= f64::from(*loss);
        }
        let targets = losses.len() as u64;
        let Aim::Learn(lesson) = &self.aim else {
            let loss = -scores.iter().sum::<f64>();
            let sums =
                LossSums { loss, weight: targets as f64, targets, rows: scores, ..LossSums::default() };
            return (vec![1.0; losses.len()], sums);
        };
        // As in TRL, the losses without a reference do not count the first token of a row, which nothing predicts.
        let unpredicted = u32::from(!lesson.objective.loss.has_reference());
        let count = |(bounds, &begin): (&[u32], &u32)| {
            f64::from((bounds[1] - begin.max(bounds[0] + unpredicted)).max(1))
        };
        let counts: Vec<f64> = batch.bounds.windows(2).zip(&self.begins).map(count).collect();
        let (mut sums, slopes) = lesson.taught(&scores, &counts);
        sums.targets = targets;
        let weights = self.tokens(batch).zip(losses).map(|(token, loss)| {
            let beside = if self.is_chosen(token.row) { lesson.nll } else { 0.0 };
            sums.loss += beside * f64::from(*loss);
            // A loss is a negative log-probability.
            (beside - if token.answers { slopes[token.row] } else { 0.0 }) as f32
        });
        let weights = weights.collect();
        (weights, sums)
    }

    /// Why the answers do not fit the microbatch; `None` if they do.
    pub fn misfit(&self, batch: &Microbatch) -> Option<&'static str> {
        let rows = batch.rows.len();
        let inside = |(bounds, &begin): (&[u32], &u32)| (bounds[0]..bounds[1]).contains(&begin);
        if self.begins.len() != rows || !batch.bounds.windows(2).zip(&self.begins).all(inside) {
            return Some("answers do not fit the microbatch's rows");
        }
        let Aim::Learn(lesson) = &self.aim else { return None };
        let unpaired = lesson.objective.loss == Loss::ApoZeroUnpaired;
        if lesson.wanted.len() != if unpaired { rows } else { 0 } || !(unpaired || rows.is_multiple_of(2)) {
            return Some("rows do not fit the loss of pairs");
        }
        let known = if lesson.objective.loss.has_reference() { rows } else { 0 };
        (lesson.reference.len() != known).then_some("the reference does not fit the microbatch's rows")
    }
}

impl Lesson {
    /// The sums of the loss of all answers, and its derivative in the log-probability of each.
    fn taught(&self, scores: &[f64], tokens: &[f64]) -> (LossSums, Vec<f64>) {
        let (mut sums, mut slopes) = (LossSums::default(), vec![0.0; scores.len()]);
        let reference = |row: usize| self.reference.get(row).copied().unwrap_or(0.0);
        if self.wanted.is_empty() {
            for row in (0..scores.len() / 2).map(|pair| 2 * pair) {
                let rows = [row, row + 1];
                let pair = Pair {
                    policy: rows.map(|r| scores[r]),
                    reference: rows.map(reference),
                    tokens: rows.map(|r| tokens[r]),
                };
                let value = self.objective.at(&pair);
                sums.loss += value.loss;
                sums.weight += 1.0;
                rows.iter().zip(value.slopes).for_each(|(&row, slope)| slopes[row] = slope);
                (0..2).for_each(|side| sums.rewards.add(side, value.rewards[side]));
                sums.rewards.pairs += 1;
                sums.rewards.right += u64::from(value.rewards[0] > value.rewards[1]);
            }
            return (sums, slopes);
        }
        for (row, wanted) in self.wanted.iter().enumerate() {
            // The missing answer has the log-ratio 0: it adds the constant 0.5, which is subtracted.
            let side = usize::from(!wanted);
            let mut pair = Pair { policy: [0.0; 2], reference: [0.0; 2], tokens: [1.0; 2] };
            (pair.policy[side], pair.reference[side]) = (scores[row], reference(row));
            let value = self.objective.at(&pair);
            sums.loss += value.loss - 0.5;
            sums.weight += 1.0;
            slopes[row] = value.slopes[side];
            sums.rewards.add(side, value.rewards[side]);
        }
        (sums, slopes)
    }
}

impl Rewards {
    fn add(&mut self, side: usize, reward: f64) {
        self.sums[side] += reward;
        self.counts[side] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::stage::Targets;

    fn batch(answers: Answers) -> Microbatch {
        let (ids, bounds) = ((10..20).collect(), vec![0, 4, 7, 10]);
        Microbatch { step: 1, rows: vec![0, 0, 1], ids, bounds, targets: Targets::Answers(answers) }
    }

    fn objective(loss: Loss) -> Objective {
        Objective { loss, beta: 0.5, smoothing: 0.0, gamma: 0.0, nll: 0.0 }
    }

    fn lesson(loss: Loss, reference: Vec<f64>, nll: f64, wanted: Vec<bool>) -> Aim {
        Aim::Learn(Lesson { objective: objective(loss), reference, nll, wanted })
    }

    #[test]
    fn scores_are_sums_over_the_tokens_of_answers() {
        let answers = Answers { begins: vec![2, 5, 7], aim: Aim::Score };
        let batch = batch(answers.clone());
        // The first token of the last row has no predecessor.
        assert_eq!(answers.asked(&batch), (vec![1, 2, 4, 5, 7, 8], vec![12, 13, 15, 16, 18, 19]));
        let (_, sums) = answers.weigh(&batch, &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0]);
        assert_eq!((sums.rows, sums.loss, sums.targets), (vec![-3.0, -12.0, -48.0], 63.0, 6));
    }

    /// The weights are the central differences of the sum of losses in each token's loss.
    #[test]
    fn weights_are_derivatives_in_the_loss_of_each_token() {
        let cases = [
            (Loss::Sigmoid, vec![-3.0, -9.0], 0.0, vec![], 2),
            (Loss::Ipo, vec![-3.0, -9.0], 0.25, vec![], 2),
            (Loss::Orpo, vec![], 0.125, vec![], 2),
            (Loss::Cpo, vec![], 0.25, vec![], 2),
            (Loss::ApoZeroUnpaired, vec![-3.0, -9.0, -40.0], 0.0, vec![true, false, false], 3),
        ];
        for (loss, reference, nll, wanted, rows) in cases {
            let aim = lesson(loss, reference, nll, wanted);
            let answers = Answers { begins: vec![2, 5, 8][..rows].to_vec(), aim };
            let mut batch = batch(answers.clone());
            batch.rows.truncate(rows);
            batch.bounds.truncate(rows + 1);
            assert_eq!(answers.misfit(&batch), None);
            let n = answers.asked(&batch).0.len();
            let losses: Vec<f32> = (0..n).map(|i| 0.5 + i as f32).collect();
            let (weights, _) = answers.weigh(&batch, &losses);
            for i in 0..n {
                let moved = |by: f32| {
                    let mut there = losses.clone();
                    there[i] += by;
                    answers.weigh(&batch, &there).1.loss
                };
                let want = (moved(1.0 / 1024.0) - moved(-1.0 / 1024.0)) * 512.0;
                assert!((f64::from(weights[i]) - want).abs() < 1e-6, "{loss:?} {i}: {}, {want}", weights[i]);
            }
        }
    }

    #[test]
    fn rewards_are_those_of_both_sides() {
        let aim = lesson(Loss::Sigmoid, vec![-4.0, -10.0], 0.0, vec![]);
        let answers = Answers { begins: vec![2, 5], aim };
        let mut batch = batch(answers.clone());
        (batch.rows, batch.bounds) = (vec![0, 0], vec![0, 4, 7]);
        let (_, sums) = answers.weigh(&batch, &[1.0, 2.0, 4.0, 8.0]);
        // Scores are -3 and -12.
        let rewards = Rewards { sums: [0.5, -1.0], counts: [1, 1], pairs: 1, right: 1, range: None };
        assert_eq!((sums.rewards, sums.weight), (rewards, 1.0));
    }

    /// Two rows whose answers begin them: both means are over three of four tokens.
    #[test]
    fn means_leave_out_a_token_that_nothing_predicts() {
        let answers = Answers { begins: vec![0, 4], aim: lesson(Loss::SimPo, vec![], 0.0, vec![]) };
        let mut batch = batch(answers.clone());
        (batch.rows, batch.bounds) = (vec![0, 0], vec![0, 4, 8]);
        let (_, sums) = answers.weigh(&batch, &[1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
        assert_eq!(sums.rewards.sums, [-0.5, -1.0]);
    }

    #[test]
    fn answers_that_do_not_fit_are_named() {
        let misfit = |begins: Vec<u32>, aim| {
            let answers = Answers { begins, aim };
            answers.misfit(&batch(answers.clone()))
        };
        assert_eq!(misfit(vec![2, 5, 7], Aim::Score), None);
        assert!(misfit(vec![2, 5], Aim::Score).is_some_and(|why| why.contains("rows")));
        assert!(misfit(vec![4, 5, 7], Aim::Score).is_some_and(|why| why.contains("rows")));
        let pairs = lesson(Loss::Orpo, vec![], 0.0, vec![]);
        assert!(misfit(vec![2, 5, 7], pairs).is_some_and(|why| why.contains("pairs")));
        let unknown = lesson(Loss::ApoZeroUnpaired, vec![-1.0], 0.0, vec![true; 3]);
        assert!(misfit(vec![2, 5, 7], unknown).is_some_and(|why| why.contains("reference")));
    }
}
