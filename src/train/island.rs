//! Islands (`--islands`): between two exchanges of parameters each island takes several optimizer steps on its own
//! microbatches, then the changes of all islands are averaged (local SGD, Stich 2019, arXiv:1805.09767; with AdamW: Local
//! Adam, Cheng and Glasgow 2025, arXiv:2409.13155). An island is a part of the plan, not a machine: the parameters and
//! both moments are its input and its result, so any device computes it, and any device computes it again. The mean change
//! of the parameters goes through an outer optimizer, whose velocity stays with the loop.
//!
//! What travels is a vector of three layouts, one after the other: the parameters (back: their changes), the first moments,
//! and the square roots of the second moments, which have the range of gradients and so fit the fixed point of sums.

use super::checkpoint::State;
use super::optim::Options;
use super::optimizer_step::{self, Means};
use super::sum::{Refused, Scalars, Sums, check_values};
use crate::model::layout::Layout;
use crate::model::stage::{Fault, Microbatch, Stage};
use crate::numeric::fixed::{self, CELL};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::fmt;

/// Vectors of the flat layout that travel.
pub const VECTORS: usize = 3;

/// Most bytes for each trained value that islands were seen to take, on a worker and at the coordinator, beyond those of a
/// run without islands (docs/journal/2026-11-engines.md).
pub const MEMORY: [u64; 2] = [87, 71];

/// How the steps of a run are divided.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Islands {
    /// Number of islands.
    pub count: usize,
    /// Steps between two exchanges.
    pub inner: u64,
    /// What an exchange does with the mean change of the parameters.
    pub outer: Outer,
}

/// The outer optimizer: SGD with Nesterov momentum, whose gradient is the negative mean change of the islands' parameters
/// (DiLoCo, Douillard et al. 2023, arXiv:2311.08105).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outer {
    /// Learning rate.
    pub rate: f64,
    /// Momentum, at least 0 and below 1 in f32.
    pub momentum: f64,
}

impl Outer {
    /// The parameters become the mean of the islands' parameters.
    pub const MEAN: Outer = Outer { rate: 1.0, momentum: 0.0 };

    /// The velocity before the first exchange; empty without momentum.
    pub fn velocity(self, len: usize) -> Vec<f32> {
        vec![0.0; if self.momentum > 0.0 { len } else { 0 }]
    }
}

impl fmt::Display for Islands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}, each with its microbatches of every step; adapters are averaged every {} steps",
            self.count, self.inner
        )?;
        match self.outer {
            Outer::MEAN => Ok(()),
            Outer { rate, momentum } => {
                write!(f, ", with an outer learning rate of {rate} and momentum of {momentum}")
            }
        }
    }
}

/// The work of an island between two exchanges.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Island {
    /// The optimizer.
    pub options: Options,
    /// Its steps before these.
    pub after: u64,
    /// The steps, in order.
    pub steps: Vec<InnerStep>,
}

/// A step of an island.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InnerStep {
    /// The learning rate.
    pub rate: f64,
    /// Its microbatches; without any the parameters stay.
    pub batches: Vec<Microbatch>,
}

/// Why an island has no result.
#[derive(Debug)]
pub enum Failed {
    /// The device failed, or the work was cancelled.
    Fault(Fault),
    /// A value is not finite, or larger than sums can hold.
    Value {
        /// What it is: a text that begins with `the`.
        what: String,
        /// The value.
        value: f64,
    },
}

impl From<Fault> for Failed {
    fn from(fault: Fault) -> Self {
        Failed::Fault(fault)
    }
}

impl Island {
    /// All microbatches.
    pub fn batches(&self) -> impl Iterator<Item = &Microbatch> {
        self.steps.iter().flat_map(|step| &step.batches)
    }

    /// The tokens of all microbatches.
    pub fn tokens(&self) -> u64 {
        self.batches().map(|batch| batch.ids.len() as u64).sum()
    }

    /// The rows of all microbatches.
    pub fn rows(&self) -> Vec<u64> {
        self.batches().flat_map(|batch| batch.rows.iter().copied()).collect()
    }

    /// Takes the steps from `start`, which is replaced by the result. `go_on` is asked before each microbatch. No value of
    /// the result exceeds `cap` in fixed point. The model is left with parameters of an inner step.
    pub fn compute(
        &self,
        model: &mut (impl Stage + ?Sized),
        start: &mut [f32],
        (cap, go_on): (i64, &dyn Fn() -> bool),
    ) -> Result<Scalars, Failed> {
        let layout = model.layout().clone();
        let (places, len) = (layout.places(), layout.len());
        let mut state = state(start, (self.options, self.after), len);
        let (mut sums, mut total) = (Sums::default(), Scalars::default());
        for step in &self.steps {
            let Some(first) = step.batches.first() else {
                state.optimizer.step += 1;
                continue;
            };
            model.set_parameters(&state.parameters)?;
            add_up(model, &step.batches, &mut sums, go_on, &layout)?;
            total.add(&sums.scalars());
            let norm = Means::of(&sums).grad_norm;
            let updated = optimizer_step::update(&mut state, &sums, (norm, step.rate), &places, &mut |_| ());
            updated.map_err(|(index, value)| Failed::Value {
                what: format!("the update of {} in step {}", layout.name_at(index), first.step),
                value: value.into(),
            })?;
        }
        let (before, moments) = start.split_at_mut(len);
        before.par_iter_mut().zip(&state.parameters).for_each(|(change, after)| *change = after - *change);
        let (first, roots) = moments.split_at_mut(len);
        first.copy_from_slice(&state.optimizer.exp_avg);
        roots.par_iter_mut().zip(&state.optimizer.exp_avg_sq).for_each(|(root, v)| *root = v.sqrt());
        match check_values(start, cap) {
            Ok(()) => Ok(total),
            Err(bad) => {
                let vector = ["change", "first moment", "second moment"][(bad.index / len).min(VECTORS - 1)];
                let what = format!("the {vector} of {} after an island", layout.name_at(bad.index % len));
                Err(Failed::Value { what, value: bad.value })
            }
        }
    }
}

/// Fills `sums` with the gradients of all microbatches.
fn add_up(
    model: &mut (impl Stage + ?Sized),
    batches: &[Microbatch],
    sums: &mut Sums,
    go_on: &dyn Fn() -> bool,
    layout: &Layout,
) -> Result<(), Failed> {
    sums.reset(layout.len());
    let (cap, mut given, bad) = (fixed::cap(batches.len()), 0, Cell::new(None::<(usize, Refused)>));
    let mut next = batches.iter().cloned();
    let next = &mut || if bad.get().is_none() && go_on() { next.next() } else { None };
    model.gradients(next, &mut |index, loss, gradient| {
        given += 1;
        if bad.get().is_none() {
            bad.set(sums.add(loss, gradient, cap).err().map(|refused| (index, refused)));
        }
    })?;
    if let Some((index, refused)) = bad.get() {
        let (tensor, batch) = (refused.tensor(layout), &batches[index]);
        let of = if refused.loss { tensor } else { format!("the gradient of {tensor}") };
        let what = format!("{of} in step {}", batch.step);
        return Err(Failed::Value { what, value: refused.value.value });
    }
    if given == batches.len() { Ok(()) } else { Err(Failed::Fault(Fault::Cancelled)) }
}

/// The state that the vectors hold.
fn state(vectors: &[f32], (options, steps): (Options, u64), len: usize) -> State {
    let mut state = State::new(vectors[..len].to_vec(), options);
    state.optimizer.step = steps;
    state.optimizer.exp_avg.copy_from_slice(&vectors[len..2 * len]);
    let roots = state.optimizer.exp_avg_sq.iter_mut().zip(&vectors[2 * len..]);
    roots.for_each(|(v, root)| *v = root * root);
    state
}

/// The vectors of a state.
pub fn vectors(state: &State) -> Vec<f32> {
    let optimizer = &state.optimizer;
    let roots = optimizer.exp_avg_sq.iter().map(|v| v.sqrt());
    state.parameters.iter().chain(&optimizer.exp_avg).copied().chain(roots).collect()
}

/// Divides the microbatches of the next steps among k islands: number n of step s goes to island n + s modulo k, so that
/// no island always gets the fewest.
pub fn divide(
    steps: Vec<(f64, Vec<Microbatch>)>,
    islands: usize,
    (options, after): (Options, u64),
) -> Vec<Island> {
    let mut out = vec![Island { options, after, steps: Vec::with_capacity(steps.len()) }; islands];
    for (step, (rate, batches)) in (after + 1..).zip(steps) {
        let turn = (step % islands as u64) as usize;
        out.iter_mut().for_each(|island| island.steps.push(InnerStep { rate, batches: Vec::new() }));
        for (index, batch) in batches.into_iter().enumerate() {
            let steps = &mut out[(index + turn) % islands].steps;
            steps.last_mut().into_iter().for_each(|own| own.batches.push(batch.clone()));
        }
    }
    out
}

/// Takes the outer step and the mean moments of the islands' results, of which `sums` is the sum, as the state after `steps`
/// more steps. Returns the norm of the mean change of the parameters.
pub fn merge(state: &mut State, sums: &Sums, (islands, steps): (Islands, u64)) -> f64 {
    let len = state.parameters.len();
    let mean = |index: usize| fixed::to_f64(sums.cells()[index / CELL][index % CELL]) / islands.count as f64;
    let (rate, momentum) = (islands.outer.rate as f32, islands.outer.momentum as f32);
    let optimizer = &mut state.optimizer;
    let values = state.parameters.iter_mut().zip(&mut optimizer.exp_avg).zip(&mut optimizer.exp_avg_sq);
    let mut squares = 0.0;
    for (index, ((p, m), v)) in values.enumerate() {
        let (change, root) = (mean(index), mean(2 * len + index) as f32);
        squares += change * change;
        // Operations and their order are those of torch.optim.SGD.
        let change = change as f32;
        let ahead = state.velocity.get_mut(index).map_or(change, |velocity| {
            *velocity = *velocity * momentum + change;
            change + *velocity * momentum
        });
        *p += ahead * rate;
        *m = mean(len + index) as f32;
        *v = root * root;
    }
    state.step += steps;
    optimizer.step += steps;
    squares.sqrt()
}
