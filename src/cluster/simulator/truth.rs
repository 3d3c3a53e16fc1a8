//! The correct results of a run: gradients, parameters and plan as integers.

use super::super::message::Hash;
use super::Draws;
use crate::model::stage::{LossSums, Microbatch, Targets};

/// Values in a gradient.
pub const WIDTH: usize = 4;
pub type Values = [i64; WIDTH];

fn stir(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The hidden states of a microbatch below the first layer.
pub fn begun(batch: &Microbatch) -> u64 {
    batch.rows.iter().fold(stir(batch.step), |h, &r| stir(h ^ r))
}

/// Hidden states above layers with these parameters.
pub fn above(hidden: u64, parameters: &[i64]) -> u64 {
    parameters.iter().fold(hidden, |h, &p| stir(h ^ p as u64))
}

fn key(parameters: &Values, batch: &Microbatch) -> u64 {
    above(begun(batch), parameters)
}

pub fn gradient(parameters: &Values, batch: &Microbatch) -> Values {
    gradient_of(key(parameters, batch))
}

/// The gradient of a microbatch with these hidden states above the last layer.
pub fn gradient_of(hidden: u64) -> Values {
    std::array::from_fn(|i| stir(hidden ^ i as u64) as i64 >> 16)
}

pub fn loss(parameters: &Values, batch: &Microbatch) -> i128 {
    loss_of(key(parameters, batch))
}

pub fn loss_of(hidden: u64) -> i128 {
    i128::from(stir(hidden ^ 99) >> 32)
}

pub fn score(parameters: &Values, batch: &Microbatch) -> LossSums {
    score_of(key(parameters, batch))
}

pub fn score_of(hidden: u64) -> LossSums {
    LossSums { loss: loss_of(hidden) as f64, weight: 1.0, targets: 1, ..LossSums::default() }
}

/// Tokens of an answer.
pub const TEXT: usize = 3;

pub fn answer(parameters: &Values, prompt: &[u32]) -> Vec<u32> {
    let mut new = vec![];
    (0..TEXT).for_each(|_| new.push(token(above(0, parameters), prompt, &new)));
    new
}

/// The token after `ids` and `new`, where hidden states are those above the last layer.
pub fn token(hidden: u64, ids: &[u32], new: &[u32]) -> u32 {
    ids.iter().chain(new).fold(hidden, |h, &id| stir(h ^ u64::from(id))) as u32
}

pub fn hash(parameters: &Values) -> Hash {
    *blake3::hash(&bytes(parameters)).as_bytes()
}

/// The hash of a microbatch's result.
pub fn digest(values: &[i64], loss: i128) -> Hash {
    *blake3::Hasher::new().update(&bytes(values)).update(&loss.to_le_bytes()).finalize().as_bytes()
}

/// A microbatch of no run.
pub fn old() -> Microbatch {
    Microbatch { step: 0, rows: vec![77], ids: vec![], bounds: vec![], targets: Targets::Labels(vec![]) }
}

pub fn bytes(values: &[i64]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub fn values(bytes: &[u8]) -> Vec<i64> {
    bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
}

pub fn add(sum: &mut [i64], values: &[i64]) {
    sum.iter_mut().zip(values).for_each(|(s, v)| *s = s.wrapping_add(*v));
}

pub fn subtract(sum: &mut [i64], values: &[i64]) {
    sum.iter_mut().zip(values).for_each(|(s, v)| *s = s.wrapping_sub(*v));
}

/// The work of a run, step by step.
#[derive(Clone)]
pub struct Plan {
    pub seed: u64,
    pub steps: u64,
    pub items: usize,
    pub evals: usize,
    pub prompts: usize,
    /// The step and item whose values are bad on every device.
    pub bad: Option<(u64, usize)>,
    /// Number of steps by which gradients are delayed.
    pub delay: u64,
}

impl Plan {
    /// The microbatches of a step; the evaluation after a step has a number of its own.
    fn batches(&self, step: u64, count: usize) -> Vec<Microbatch> {
        let mut draws = Draws::new(self.seed, 1000 + step);
        let batch = |i: usize| {
            // Most are full; some are the rest of a packing.
            let tokens = if draws.chance(0.8) { 32 } else { draws.between(1, 33) };
            let ids = vec![1; tokens as usize];
            Microbatch { step, rows: vec![i as u64], ids, bounds: vec![], targets: Targets::Labels(vec![]) }
        };
        (0..count).map(batch).collect()
    }

    pub fn train(&self, step: u64) -> Vec<Microbatch> {
        let short = step == self.steps && self.items > 3;
        self.batches(step, if short { self.items / 3 } else { self.items })
    }

    pub fn eval(&self, after: u64) -> Vec<Microbatch> {
        self.batches(1_000_000 + after, self.evals)
    }

    pub fn prompt(&self, index: usize) -> Vec<u32> {
        vec![index as u32; 5]
    }

    pub fn is_bad(&self, batch: &Microbatch) -> bool {
        self.bad == Some((batch.step, batch.rows[0] as usize))
    }

    /// The parameters that a single worker computes.
    pub fn alone(&self) -> Values {
        let (mut before, mut now) = (initial(), initial());
        for step in 1..=self.steps {
            let with = if self.delay > 0 { before } else { now };
            (before, now) = (now, stepped(&now, &self.whole(&with, step).0));
        }
        now
    }

    /// The gradient and loss of a step, by one worker in order.
    pub fn whole(&self, parameters: &Values, step: u64) -> (Values, i128) {
        let (mut sum, mut losses) = ([0; WIDTH], 0);
        for batch in self.train(step) {
            add(&mut sum, &gradient(parameters, &batch));
            losses += loss(parameters, &batch);
        }
        (sum, losses)
    }

    pub fn tokens(&self) -> u64 {
        (1..=self.steps).flat_map(|s| self.train(s)).map(|b| b.ids.len() as u64).sum()
    }
}

pub fn initial() -> Values {
    [1, 2, 3, 4]
}

pub fn stepped(parameters: &Values, sum: &Values) -> Values {
    std::array::from_fn(|i| (stir(parameters[i] as u64) ^ stir(sum[i] as u64)) as i64)
}
