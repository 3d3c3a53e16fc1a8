//! Determines the rows of each step and their packing into microbatches: a pure function of row lengths, configuration
//! and seed, independent of the workers.
//!
//! Epoch e is a permutation keyed by (seed, e). With weights of sets of rows (`mixed`), an epoch has as many rows as
//! without; each set gets a share of them by its weight, and its rows are drawn again for each epoch, keyed by
//! (seed, e, set). A step takes the next `batch_size` rows of the permutation; no step spans two epochs, so the last step
//! of an epoch may be short. Packing distributes the rows of one step over microbatches, first-fit in plan order, and
//! never moves a row to another step. Steps are computed on demand: the plan holds 4 bytes per row, and 4 more for the
//! order of the current epoch.

use crate::data::samples::Samples;
use crate::numeric::rng;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Distinguishes the random numbers of the plan from others with the same seed.
const ORDER: u64 = 0x6f72_6465_7200_0001;
const DRAW: u64 = 0x6472_6177_0000_0001;
/// Evaluation rows are packed in windows of this size, so that the time for packing is linear in the number of rows.
const EVAL_WINDOW: usize = 256;

/// Parameters of a plan, apart from the rows.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanOptions {
    /// Rows per optimizer step over all workers; at least 1.
    pub batch_size: usize,
    /// Passes over the rows; ignored if `max_steps` is set.
    pub epochs: u64,
    /// Number of steps; overrides `epochs` and may span several epochs.
    pub max_steps: Option<u64>,
    /// Maximum number of tokens in a microbatch; None for the default rule.
    pub micro_batch_tokens: Option<usize>,
    /// Packs several rows into one microbatch; without packing each row is a microbatch of its own.
    pub packing: bool,
    /// Uses a new order in each epoch; otherwise the order of the data.
    pub shuffle: bool,
    /// Seed of the order.
    pub seed: u64,
}

impl PlanOptions {
    /// Number of leading rows that determine the plan, if the others have no influence: no shuffling, a fixed number of
    /// steps, and a given microbatch size.
    pub fn rows_needed(&self) -> Option<usize> {
        match (self.shuffle, self.max_steps, self.micro_batch_tokens) {
            (false, Some(steps), Some(_)) => {
                Some(usize::try_from(steps).unwrap_or(usize::MAX).saturating_mul(self.batch_size))
            }
            _ => None,
        }
    }
}

/// One optimizer step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Epoch number, from 0.
    pub epoch: u64,
    /// Sample indices; each occurs once per epoch (in a mixture, as often as it is drawn). No microbatch is empty.
    pub microbatches: Vec<Vec<usize>>,
}

impl Step {
    /// Sample indices of all microbatches.
    pub fn rows(&self) -> impl Iterator<Item = usize> {
        self.microbatches.iter().flatten().copied()
    }
}

/// The steps of a run.
#[derive(Debug)]
pub struct Plan {
    options: PlanOptions,
    lengths: Vec<u32>,
    budget: usize,
    total: u64,
    /// Sets of rows, and how many rows of each an epoch has; empty: an epoch has each row once.
    shares: Vec<(Range<usize>, usize)>,
    /// The order of the last requested epoch.
    order: Mutex<Option<(u64, Vec<u32>)>>,
}

impl Plan {
    /// A plan for `samples`, which must have at least one row; `batch_size` must be at least 1.
    pub fn new(samples: &Samples, options: &PlanOptions) -> Plan {
        Plan::of_lengths((0..samples.len()).map(|i| samples.tokens(i) as u32).collect(), options)
    }

    /// A plan for rows with these lengths.
    pub fn of_lengths(lengths: Vec<u32>, options: &PlanOptions) -> Plan {
        let mut options = options.clone();
        options.batch_size = options.batch_size.max(1);
        let tokens: u64 = lengths.iter().map(|&l| u64::from(l)).sum();
        let per_epoch = lengths.len().div_ceil(options.batch_size) as u64;
        let budget = options.micro_batch_tokens.unwrap_or_else(|| default_budget(tokens, per_epoch));
        let total = if per_epoch == 0 {
            0
        } else {
            options.max_steps.unwrap_or(options.epochs.saturating_mul(per_epoch))
        };
        Plan { options, lengths, budget, total, shares: Vec::new(), order: Mutex::new(None) }
    }

    /// The same plan with sets of rows, each with a weight above 0. Together they have all rows, and none is empty.
    #[must_use]
    pub fn mixed(mut self, sets: &[(Range<usize>, f64)]) -> Plan {
        let counts = shares(self.lengths.len(), &sets.iter().map(|(_, weight)| *weight).collect::<Vec<_>>());
        self.shares = sets.iter().map(|(rows, _)| rows.clone()).zip(counts).collect();
        if self.options.micro_batch_tokens.is_none() {
            let mean = |(rows, count): &(Range<usize>, usize)| {
                let tokens: u64 = self.lengths[rows.clone()].iter().map(|&l| u64::from(l)).sum();
                (u128::from(tokens) * *count as u128 / rows.len().max(1) as u128) as u64
            };
            self.budget = default_budget(self.shares.iter().map(mean).sum(), self.steps_per_epoch());
        }
        self
    }

    /// Number of steps of the run, which is the length of the learning rate schedule.
    pub fn total_steps(&self) -> u64 {
        self.total
    }

    /// Number of steps in one pass over the rows.
    pub fn steps_per_epoch(&self) -> u64 {
        self.lengths.len().div_ceil(self.options.batch_size) as u64
    }

    /// Maximum number of tokens in a microbatch, as given or by the default rule.
    pub fn micro_batch_tokens(&self) -> usize {
        self.budget
    }

    /// Step `s`, from 1; steps beyond the last one continue with further epochs. Without rows a step has no
    /// microbatches.
    pub fn step(&self, s: u64) -> Step {
        let per_epoch = self.steps_per_epoch();
        if per_epoch == 0 {
            return Step { epoch: 0, microbatches: Vec::new() };
        }
        let (epoch, within) = ((s.max(1) - 1) / per_epoch, (s.max(1) - 1) % per_epoch);
        let start = within as usize * self.options.batch_size;
        let end = (start + self.options.batch_size).min(self.lengths.len());
        let rows: Vec<usize> = match self.options.shuffle || !self.shares.is_empty() {
            true => self.ordered(epoch, start..end),
            false => (start..end).collect(),
        };
        let microbatches = if self.options.packing {
            first_fit(&rows, |i| self.lengths[i] as usize, self.budget)
        } else {
            rows.into_iter().map(|i| vec![i]).collect()
        };
        Step { epoch, microbatches }
    }

    fn ordered(&self, epoch: u64, range: Range<usize>) -> Vec<usize> {
        let mut held = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        if held.as_ref().is_none_or(|(e, _)| *e != epoch) {
            *held = None; // never two epochs' orders in memory
            *held = Some((epoch, self.order(epoch)));
        }
        held.as_ref().map_or(Vec::new(), |(_, order)| order[range].iter().map(|&i| i as usize).collect())
    }

    /// The rows of an epoch.
    fn order(&self, epoch: u64) -> Vec<u32> {
        let mut drawn = self.drawn(epoch);
        if !self.options.shuffle {
            drawn.sort_unstable();
            return drawn;
        }
        let order = rng::permutation(self.lengths.len(), &[self.options.seed, ORDER, epoch]);
        if drawn.is_empty() { order } else { order.into_iter().map(|i| drawn[i as usize]).collect() }
    }

    /// The rows of an epoch of a mixture, set by set: each row of a set as often as the share has the whole set, and
    /// for the rest different rows.
    fn drawn(&self, epoch: u64) -> Vec<u32> {
        let mut drawn = Vec::new();
        for (set, (rows, count)) in self.shares.iter().enumerate() {
            let (first, n) = (rows.start as u32, rows.len());
            for _ in 0..count / n {
                drawn.extend(first..first + n as u32);
            }
            let rest = rng::permutation(n, &[self.options.seed, DRAW, epoch, set as u64]);
            drawn.extend(rest.iter().take(count % n).map(|row| first + row));
        }
        drawn
    }

    /// All rows once and in order, for an evaluation, packed first-fit within windows of 256 rows.
    pub fn eval(samples: &Samples, micro_batch_tokens: usize) -> Vec<Vec<usize>> {
        let rows: Vec<usize> = (0..samples.len()).collect();
        Plan::in_order(&rows, samples, micro_batch_tokens)
    }

    /// The rows of all steps, ascending.
    pub fn rows(&self) -> Vec<usize> {
        if self.total >= self.steps_per_epoch() && self.shares.is_empty() {
            return (0..self.lengths.len()).collect();
        }
        let mut rows: Vec<usize> =
            (1..=self.total).flat_map(|s| self.step(s).rows().collect::<Vec<_>>()).collect();
        rows.sort_unstable();
        rows.dedup();
        rows
    }

    /// These rows in order, packed like those of an evaluation.
    pub fn in_order(rows: &[usize], samples: &Samples, micro_batch_tokens: usize) -> Vec<Vec<usize>> {
        rows.chunks(window(samples))
            .flat_map(|w| first_fit(w, |i| samples.tokens(i), micro_batch_tokens))
            .collect()
    }
}

/// Rows that are packed together: fewer where each has several numbers, whose squared errors must fit into the exact sums.
fn window(samples: &Samples) -> usize {
    (EVAL_WINDOW / samples.width().max(1)).max(1)
}

/// Puts each row into the first microbatch with enough room, else into a new one. A row longer than the budget gets its
/// own microbatch, which is then full.
fn first_fit(rows: &[usize], length: impl Fn(usize) -> usize, budget: usize) -> Vec<Vec<usize>> {
    let mut bins: Vec<Vec<usize>> = Vec::new();
    let mut room = Room::new(rows.len());
    for &row in rows {
        let n = length(row);
        match room.first(n) {
            Some((bin, left)) => {
                bins[bin].push(row);
                room.set(bin, Some(left - n));
            }
            None => {
                room.set(bins.len(), budget.checked_sub(n));
                bins.push(vec![row]);
            }
        }
    }
    bins
}

/// The room of all microbatches as a tree of maxima, so that the first one with enough room is found in logarithmic
/// time. A linear search would need billions of comparisons for a step of 100,000 long rows.
struct Room {
    /// Node i has the children 2i and 2i + 1; the second half are the microbatches. None: no microbatch, or one over
    /// the budget.
    nodes: Vec<Option<usize>>,
}

impl Room {
    fn new(bins: usize) -> Self {
        Room { nodes: vec![None; 2 * bins.next_power_of_two()] }
    }

    /// The first microbatch with room for `n` tokens, and its room.
    fn first(&self, n: usize) -> Option<(usize, usize)> {
        let (fits, half) =
            (|node: usize| self.nodes[node].is_some_and(|left| left >= n), self.nodes.len() / 2);
        let mut node = 1;
        if !fits(node) {
            return None;
        }
        while node < half {
            node = 2 * node + usize::from(!fits(2 * node));
        }
        self.nodes[node].map(|left| (node - half, left))
    }

    fn set(&mut self, bin: usize, left: Option<usize>) {
        let mut node = self.nodes.len() / 2 + bin;
        self.nodes[node] = left;
        while node > 1 {
            node /= 2;
            self.nodes[node] = self.nodes[2 * node].max(self.nodes[2 * node + 1]);
        }
    }
}

/// `n` rows by weight: rounded down, and the rows that are left to the largest fractions, the first among equals.
pub fn shares(n: usize, weights: &[f64]) -> Vec<usize> {
    let sum: f64 = weights.iter().sum();
    let exact: Vec<f64> = weights.iter().map(|weight| n as f64 * (weight / sum)).collect();
    let mut counts: Vec<usize> = exact.iter().map(|share| share.floor() as usize).collect();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|&a, &b| exact[b].fract().total_cmp(&exact[a].fract()));
    let left = n.saturating_sub(counts.iter().sum());
    order.iter().cycle().take(left).for_each(|&set| counts[set] += 1);
    counts
}

/// A power of two near (mean tokens per step) / 16, within 256 ..= 4096: the smallest p with mean / 16 <= p sqrt(2).
/// Computed with integers, so that the result is the same on every machine.
fn default_budget(tokens: u64, steps: u64) -> usize {
    // tokens / (16 steps) <= p sqrt(2) is equivalent to tokens^2 <= 2 (16 steps p)^2.
    let tokens = u128::from(tokens);
    let fits = |p: &u128| {
        let bound = 16 * u128::from(steps) * p;
        tokens.saturating_mul(tokens) <= bound.saturating_mul(bound).saturating_mul(2)
    };
    [256, 512, 1024, 2048].into_iter().find(fits).unwrap_or(4096) as usize
}
