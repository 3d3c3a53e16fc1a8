//! The loss of a reward model: the outputs of a head with one output are rewards, and that of the chosen row is to be
//! above that of the rejected one (Bradley and Terry 1952). The formula is that of TRL's RewardTrainer.

use super::loss::{logistic, softplus};
use crate::model::stage::{LossSums, Microbatch};
use serde::{Deserialize, Serialize};

/// Pairs of rows, in which the first row is preferred.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ranking {
    /// Margin of each pair, finite: what the first reward should exceed the second one by.
    pub margins: Vec<f32>,
    /// Weight of the square of the sum of both rewards, which keeps rewards around 0.
    pub centre: f64,
}

impl Ranking {
    /// The derivatives of the loss in each output, and its sums.
    pub fn weigh(&self, outputs: &[f32]) -> (Vec<f32>, LossSums) {
        let (mut sums, mut slopes) = (LossSums::default(), Vec::with_capacity(outputs.len()));
        for (pair, &margin) in outputs.chunks_exact(2).zip(&self.margins) {
            let [chosen, rejected] = [pair[0], pair[1]].map(f64::from);
            let (above, both) = (chosen - rejected - f64::from(margin), chosen + rejected);
            sums.loss += softplus(-above) + self.centre * both * both;
            let (apart, centred) = (-logistic(-above), 2.0 * self.centre * both);
            slopes.extend([centred + apart, centred - apart].map(|slope| slope as f32));
            [chosen, rejected]
                .into_iter()
                .enumerate()
                .for_each(|(side, reward)| sums.rewards.add(side, reward));
            sums.rewards.pairs += 1;
            sums.rewards.right += u64::from(chosen > rejected);
        }
        let extreme = |of: fn(f64, f64) -> f64| outputs.iter().map(|output| f64::from(*output)).reduce(of);
        sums.rewards.range = extreme(f64::min).zip(extreme(f64::max)).map(|(least, most)| [least, most]);
        sums.weight = self.margins.len() as f64;
        sums.targets = outputs.len() as u64;
        (slopes, sums)
    }

    /// Why the pairs do not fit the microbatch; `None` if they do.
    pub fn misfit(&self, batch: &Microbatch) -> Option<&'static str> {
        match batch.rows.len() == 2 * self.margins.len() {
            false => Some("rows do not fit the pairs"),
            true if !(self.centre.is_finite() && self.margins.iter().all(|margin| margin.is_finite())) => {
                Some("a margin of pairs is not finite")
            }
            true => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Rewards;
    use super::*;

    #[test]
    fn slopes_of_rewards_are_central_differences() {
        let ranking = Ranking { margins: vec![0.5, -1.0, 0.0], centre: 0.25 };
        let outputs = [0.25, 1.0, -2.0, 0.5, 30.0, -30.0];
        let (slopes, sums) = ranking.weigh(&outputs);
        for (i, slope) in slopes.iter().enumerate() {
            let moved = |by: f32| {
                let mut there = outputs;
                there[i] += by;
                ranking.weigh(&there).1.loss
            };
            let want = (moved(1.0 / 1024.0) - moved(-1.0 / 1024.0)) * 512.0;
            assert!((f64::from(*slope) - want).abs() < 1e-6, "{i}: {slope}, {want}");
        }
        let rewards =
            Rewards { sums: [28.25, -28.5], counts: [3, 3], pairs: 3, right: 1, range: Some([-30.0, 30.0]) };
        assert_eq!((sums.rewards, sums.weight, sums.targets), (rewards, 3.0, 6));
    }
}
