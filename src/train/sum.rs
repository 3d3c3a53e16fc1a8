//! The sums of one step: gradient, loss and weight in fixed point, so that any grouping and any order of microbatches
//! gives the same bits. The only division by the weight is in [`Sums::mean`].
//!
//! Loss and weight are two numbers per microbatch: they are added in 128 bits, so their only limit is the range of the
//! fixed-point format, not a cap per microbatch.

use super::event;
use crate::model::layout::Layout;
use crate::model::preference;
use crate::model::stage::LossSums;
use crate::numeric::fixed::CELL;
use crate::numeric::fixed::{self, BadValue};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// The sums over the microbatches of a step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sums {
    /// [`CELL`] values each; the last cell may be shorter.
    cells: Vec<Vec<i64>>,
    len: usize,
    loss: i128,
    weight: i128,
    /// Number of supervised targets (for a classifier: rows).
    pub targets: u64,
    rewards: RewardSums,
}

/// Loss, weight and targets of microbatches: all sums except the gradient.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Scalars {
    /// Sum of the losses, in fixed point.
    pub loss: i128,
    /// Sum of the weights, in fixed point.
    pub weight: i128,
    /// Number of supervised targets (for a classifier: rows).
    pub targets: u64,
    /// Rewards of answers, where a loss compares them.
    pub rewards: RewardSums,
}

/// Sums of rewards.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RewardSums {
    /// Sums of the rewards of chosen and of rejected answers, in fixed point.
    pub sums: [i128; 2],
    /// Numbers of these answers.
    pub counts: [u64; 2],
    /// Number of pairs among them.
    pub pairs: u64,
    /// Pairs whose chosen answer has the higher reward.
    pub right: u64,
    /// The lowest and the highest reward in fixed point, where a head gives them.
    pub range: Option<[i64; 2]>,
}

impl RewardSums {
    /// Adds the rewards of other microbatches.
    pub fn add(&mut self, other: &RewardSums) {
        for side in 0..2 {
            self.sums[side] = self.sums[side].wrapping_add(other.sums[side]);
            self.counts[side] = self.counts[side].wrapping_add(other.counts[side]);
        }
        self.pairs = self.pairs.wrapping_add(other.pairs);
        self.right = self.right.wrapping_add(other.right);
        self.range = match (self.range, other.range) {
            (Some([a, b]), Some([least, most])) => Some([a.min(least), b.max(most)]),
            (one, other) => one.or(other),
        };
    }

    /// The share of pairs whose chosen answer has the higher reward.
    pub fn accuracy(&self) -> Option<f64> {
        (self.pairs > 0).then(|| self.right as f64 / self.pairs as f64)
    }

    /// The means, where there are answers.
    pub fn means(&self) -> event::Rewards {
        let unit = 2f64.powi(fixed::FRACTION_BITS as i32);
        let mean = |side: usize| {
            let count = self.counts[side];
            (count > 0).then(|| self.sums[side] as f64 / unit / count as f64)
        };
        let (chosen, rejected) = (mean(0), mean(1));
        event::Rewards {
            rewards_chosen: chosen,
            rewards_rejected: rejected,
            margin: chosen.zip(rejected).map(|(chosen, rejected)| chosen - rejected),
            min_reward: self.range.map(|[least, _]| least as f64 / unit),
            max_reward: self.range.map(|[_, most]| most as f64 / unit),
        }
    }
}

/// Means over a step or an evaluation, each rounded once.
#[derive(Debug, Clone, PartialEq)]
pub struct Mean {
    /// Loss sum over weight.
    pub loss: f64,
    /// Gradient sum over weight.
    pub gradient: Vec<f32>,
}

impl Scalars {
    /// Adds those of other microbatches.
    pub fn add(&mut self, other: &Scalars) {
        self.loss = self.loss.wrapping_add(other.loss);
        self.weight = self.weight.wrapping_add(other.weight);
        self.targets = self.targets.wrapping_add(other.targets);
        self.rewards.add(&other.rewards);
    }

    /// The scalars of one microbatch. The error is a value that is not finite or outside the range of the format.
    pub fn of(sums: &LossSums) -> Result<Self, BadValue> {
        let fixed = |value| fixed::to_fixed(value, i64::MAX).ok_or(BadValue { index: 0, value });
        let (loss, weight) = (fixed(sums.loss)?, fixed(sums.weight)?);
        // Rewards are only shown: large ones do not end a run.
        let reward = |value: f64| fixed(value.clamp(-8e6, 8e6));
        let preference::Rewards { sums: [chosen, rejected], counts, pairs, right, range } = sums.rewards;
        let both = [reward(chosen)?.into(), reward(rejected)?.into()];
        let range = match range {
            Some([least, most]) => Some([reward(least)?, reward(most)?]),
            None => None,
        };
        let rewards = RewardSums { sums: both, counts, pairs, right, range };
        Ok(Scalars { loss: loss.into(), weight: weight.into(), targets: sums.targets, rewards })
    }
}

impl Sums {
    /// Empty sums over a flat layout of `len` values (0 for an evaluation).
    pub fn new(len: usize) -> Self {
        Sums { cells: empty_cells(len), len, ..Sums::default() }
    }

    /// Sets all sums to zero and keeps the memory.
    pub fn reset(&mut self, len: usize) {
        if self.len == len {
            self.cells.par_iter_mut().for_each(|cell| cell.fill(0));
        }
        self.reset_len(len);
        self.set_scalars(Scalars::default());
    }

    /// Resizes the cells to `len` values for a caller that overwrites all of them; existing values stay if the size is
    /// equal.
    pub fn reset_len(&mut self, len: usize) {
        if self.len != len {
            (self.cells, self.len) = (empty_cells(len), len);
        }
    }

    /// Number of values in the flat layout.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The gradient in cells of [`CELL`] values; the last cell may be shorter.
    pub fn cells(&self) -> &[Vec<i64>] {
        &self.cells
    }

    /// The gradient's cells, for additions in place.
    pub fn cells_mut(&mut self) -> &mut [Vec<i64>] {
        &mut self.cells
    }

    /// All sums except the gradient.
    pub fn scalars(&self) -> Scalars {
        Scalars { loss: self.loss, weight: self.weight, targets: self.targets, rewards: self.rewards }
    }

    /// Replaces all sums except the gradient.
    pub fn set_scalars(&mut self, scalars: Scalars) {
        (self.loss, self.weight, self.targets) = (scalars.loss, scalars.weight, scalars.targets);
        self.rewards = scalars.rewards;
    }

    /// Adds the loss of a microbatch; a value that is not finite or outside the range changes nothing.
    pub fn add_loss(&mut self, sums: &LossSums) -> Result<(), BadValue> {
        let one = Scalars::of(sums)?;
        self.add_scalars(one);
        Ok(())
    }

    /// Adds values that [`fixed::check`] accepts, with their scalars.
    pub(super) fn add_accepted(&mut self, values: &[f32], scalars: Scalars) {
        self.add_checked(values);
        self.add_scalars(scalars);
    }

    fn add_scalars(&mut self, one: Scalars) {
        let mut all = self.scalars();
        all.add(&one);
        self.set_scalars(all);
    }

    /// Adds the gradient of a microbatch, all or nothing; the error's index is that of the flat layout.
    pub fn add_gradient(&mut self, gradient: &[f32], cap: i64) -> Result<(), BadValue> {
        check_values(gradient, cap)?;
        self.add_checked(gradient);
        Ok(())
    }

    /// Adds gradient and loss of a microbatch, all or nothing.
    pub fn add(&mut self, loss: &LossSums, gradient: &[f32], cap: i64) -> Result<(), Refused> {
        let scalars = check(loss, gradient, cap)?;
        self.add_accepted(gradient, scalars);
        Ok(())
    }

    fn add_checked(&mut self, gradient: &[f32]) {
        assert_eq!(self.len, gradient.len(), "sum and gradient share one layout");
        let cells = self.cells.par_iter_mut().zip(gradient.par_chunks(CELL));
        cells.for_each(|(sum, values)| fixed::add_checked(sum, values));
    }

    /// The means of loss and gradient, the only division. A weight of zero (class weights may be zero) gives all zeros.
    pub fn mean(&self) -> Mean {
        let mut gradient = vec![0.0; self.len];
        gradient.par_chunks_mut(CELL).enumerate().for_each(|(index, out)| self.mean_of(index, 0, out));
        Mean { loss: self.mean_loss(), gradient }
    }

    /// The means of one cell from value `from` on, as many as `out` holds.
    pub(super) fn mean_of(&self, cell: usize, from: usize, out: &mut [f32]) {
        let over = self.over_weight();
        out.iter_mut()
            .zip(&self.cells[cell][from..])
            .for_each(|(mean, &sum)| *mean = over(sum as f64) as f32);
    }

    /// Loss sum over weight.
    pub(super) fn mean_loss(&self) -> f64 {
        self.over_weight()(self.loss as f64)
    }

    fn over_weight(&self) -> impl Fn(f64) -> f64 + use<> {
        let weight = self.weight as f64;
        move |sum| if weight == 0.0 { 0.0 } else { sum / weight }
    }
}

/// A value of a microbatch that a sum cannot hold.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Refused {
    /// The value, with its index in the flat layout if it is in the gradient.
    pub value: BadValue,
    /// Whether it is the loss.
    pub loss: bool,
}

impl Refused {
    /// The tensor whose gradient has the value, or [`THE_LOSS`].
    pub fn tensor(&self, layout: &Layout) -> String {
        if self.loss { THE_LOSS.into() } else { layout.name_at(self.value.index) }
    }
}

/// Stands for the name of a tensor where the loss is meant.
pub const THE_LOSS: &str = "the loss";

/// Returns the scalars of a microbatch whose gradient, like its loss, may enter a sum.
pub fn check(loss: &LossSums, gradient: &[f32], cap: i64) -> Result<Scalars, Refused> {
    // A bad loss is reported before the bad gradients that it causes.
    let scalars = Scalars::of(loss).map_err(|value| Refused { value, loss: true })?;
    check_values(gradient, cap).map_err(|value| Refused { value, loss: false })?;
    Ok(scalars)
}

/// Returns the first value that a sum cannot hold as an error; its index is that of the flat layout.
pub fn check_values(gradient: &[f32], cap: i64) -> Result<(), BadValue> {
    let bad = |(i, values): (usize, &[f32])| {
        fixed::check(values, cap).err().map(|bad| BadValue { index: bad.index + i * CELL, ..bad })
    };
    gradient.par_chunks(CELL).enumerate().find_map_first(bad).map_or(Ok(()), Err)
}

fn empty_cells(len: usize) -> Vec<Vec<i64>> {
    (0..len).step_by(CELL).map(|at| vec![0; CELL.min(len - at)]).collect()
}
