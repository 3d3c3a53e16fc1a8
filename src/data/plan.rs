//! Which rows make up step s, and how they are packed into microbatches: a pure function of the rows'
//! lengths, the configuration and the seed. It knows nothing of workers.
//!
//! Epoch e is a permutation keyed by (seed, e). A step is the next `batch_size` rows of it; no step spans
//! epochs, so an epoch's last step may be short. Packing lays the step's own rows into microbatches, first-fit
//! in plan order, and never changes which rows make a step. Steps are computed when they are asked for:
//! what is held is 4 bytes a row, and 4 more for the current epoch's order.

use crate::data::samples::Samples;
use crate::numeric::rng;
use std::sync::{Mutex, PoisonError};

/// Distinguishes the plan's draws from others under the same seed.
const ORDER: u64 = 0x6f72_6465_7200_0001;
/// Rows of an evaluation are packed within windows of this many, so that packing stays linear in the rows.
const EVAL_WINDOW: usize = 256;

/// What the plan depends on beside the rows.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanOptions {
    /// Rows per optimizer step, over all workers; at least 1.
    pub batch_size: usize,
    /// Passes over the rows, unless `max_steps` says otherwise.
    pub epochs: u64,
    /// Number of steps; wins over `epochs` and wraps over them.
    pub max_steps: Option<u64>,
    /// Tokens that a microbatch may hold; None for the default rule.
    pub micro_batch_tokens: Option<usize>,
    /// Several rows in one microbatch; without it each row is a microbatch of its own.
    pub packing: bool,
    /// A new order in each epoch; without it the order of the data.
    pub shuffle: bool,
    /// Keys the order.
    pub seed: u64,
}

impl PlanOptions {
    /// How many rows from the start of the data are enough, where the plan does not depend on the rest:
    /// no shuffling, a number of steps, and a microbatch size that needs no mean.
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
    /// From 0.
    pub epoch: u64,
    /// Sample indices, each exactly once in an epoch; no microbatch is empty.
    pub microbatches: Vec<Vec<usize>>,
}

impl Step {
    /// Sample indices of all microbatches.
    pub fn rows(&self) -> impl Iterator<Item = usize> {
        self.microbatches.iter().flatten().copied()
    }
}

/// The whole run's steps.
#[derive(Debug)]
pub struct Plan {
    options: PlanOptions,
    lengths: Vec<u32>,
    budget: usize,
    total: u64,
    /// The order of the epoch that was asked for last.
    order: Mutex<Option<(u64, Vec<u32>)>>,
}

impl Plan {
    /// A plan over rows, of which there must be at least one, and `batch_size` at least 1.
    pub fn new(samples: &Samples, options: &PlanOptions) -> Plan {
        Plan::of_lengths((0..samples.len()).map(|i| samples.tokens(i) as u32).collect(), options)
    }

    /// A plan over rows of these lengths.
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
        Plan { options, lengths, budget, total, order: Mutex::new(None) }
    }

    /// Steps of the whole run: the length of the learning rate's schedule.
    pub fn total_steps(&self) -> u64 {
        self.total
    }

    /// Steps of one pass over the rows.
    pub fn steps_per_epoch(&self) -> u64 {
        self.lengths.len().div_ceil(self.options.batch_size) as u64
    }

    /// Tokens that a microbatch may hold, given or by the default rule.
    pub fn micro_batch_tokens(&self) -> usize {
        self.budget
    }

    /// Step s, from 1; steps beyond the last one continue over further epochs. No rows: no microbatches.
    pub fn step(&self, s: u64) -> Step {
        let per_epoch = self.steps_per_epoch();
        if per_epoch == 0 {
            return Step { epoch: 0, microbatches: Vec::new() };
        }
        let (epoch, within) = ((s.max(1) - 1) / per_epoch, (s.max(1) - 1) % per_epoch);
        let start = within as usize * self.options.batch_size;
        let end = (start + self.options.batch_size).min(self.lengths.len());
        let rows: Vec<usize> =
            if self.options.shuffle { self.shuffled(epoch, start..end) } else { (start..end).collect() };
        let microbatches = if self.options.packing {
            first_fit(&rows, |i| self.lengths[i] as usize, self.budget)
        } else {
            rows.into_iter().map(|i| vec![i]).collect()
        };
        Step { epoch, microbatches }
    }

    fn shuffled(&self, epoch: u64, range: std::ops::Range<usize>) -> Vec<usize> {
        let mut held = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        if held.as_ref().is_none_or(|(e, _)| *e != epoch) {
            *held = None; // never two epochs' orders in memory
            *held = Some((epoch, rng::permutation(self.lengths.len(), &[self.options.seed, ORDER, epoch])));
        }
        held.as_ref().map_or(Vec::new(), |(_, order)| order[range].iter().map(|&i| i as usize).collect())
    }

    /// All rows once, in order, for an evaluation: packed first-fit within windows of 256 rows.
    pub fn eval(samples: &Samples, micro_batch_tokens: usize) -> Vec<Vec<usize>> {
        let rows: Vec<usize> = (0..samples.len()).collect();
        rows.chunks(EVAL_WINDOW)
            .flat_map(|w| first_fit(w, |i| samples.tokens(i), micro_batch_tokens))
            .collect()
    }
}

/// Each row into the first microbatch that has room, else into a new one. A row longer than the budget
/// finds no room and leaves none, so it stays alone.
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

/// What is left in every microbatch, as a tree of maxima, so that the first with enough room is found in the
/// logarithm of their number: a step of 100,000 long rows would else compare billions of times.
struct Room {
    /// Node i has the children 2i and 2i + 1; the microbatches are the second half. None: no microbatch, or one
    /// over the budget.
    nodes: Vec<Option<usize>>,
}

impl Room {
    fn new(bins: usize) -> Self {
        Room { nodes: vec![None; 2 * bins.next_power_of_two()] }
    }

    /// The first microbatch that has room for `n` tokens, and its room.
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

/// A power of two near (mean tokens per step) / 16, within 256 ..= 4096: the smallest p that the sixteenth
/// exceeds by no more than sqrt(2), in integers, so that it is the same everywhere.
fn default_budget(tokens: u64, steps: u64) -> usize {
    // tokens / (16 steps) <= p sqrt(2) is tokens^2 <= 2 (16 steps p)^2
    let tokens = u128::from(tokens);
    let fits = |p: &u128| {
        let bound = 16 * u128::from(steps) * p;
        tokens.saturating_mul(tokens) <= bound.saturating_mul(bound).saturating_mul(2)
    };
    [256, 512, 1024, 2048].into_iter().find(fits).unwrap_or(4096) as usize
}
