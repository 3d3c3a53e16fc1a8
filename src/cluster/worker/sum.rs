//! The running sum of a process: what its devices were granted and the coordinator has not got yet. Devices add up
//! here before anything is sent; one lone microbatch stays as it came, in f32, which is half the work on both sides.

use crate::cluster::message::{Hash, LeaseId, ToCoordinator};
use crate::cluster::piece;
use crate::model::stage::{LossSums, Traffic};
use crate::numeric::fixed::{self, BadValue, CELL};
use crate::train::sum::{Scalars, Sums};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Loss, weight and targets of one microbatch in fixed point; the error is a value that no sum can hold.
pub fn scalars(sums: &LossSums) -> Result<Scalars, BadValue> {
    let mut one = Sums::new(0);
    one.add_loss(sums)?;
    Ok(one.scalars())
}

/// A microbatch that was computed and checked.
#[derive(Debug)]
pub(super) struct Finished {
    pub gradient: Vec<f32>,
    pub scalars: Scalars,
    /// What it took.
    pub traffic: Traffic,
}

#[derive(Debug)]
pub(super) struct Running {
    /// Step and parameters of everything in it.
    step: u64,
    parameters: Hash,
    leases: Vec<LeaseId>,
    scalars: Scalars,
    traffic: Traffic,
    /// The gradient that was granted last: it is added when the next one comes, or while the sum is packed, so that
    /// what is waited for is one pass over memory.
    last: Option<Vec<f32>>,
    /// All before it.
    sums: Sums,
    next: u64,
    /// Sent and not taken yet, by number.
    kept: BTreeMap<u64, Vec<ToCoordinator>>,
}

impl Running {
    pub fn new() -> Self {
        Running {
            step: 0,
            parameters: [0; 32],
            leases: Vec::new(),
            scalars: Scalars::default(),
            traffic: Traffic::default(),
            last: None,
            sums: Sums::new(0),
            next: 1,
            kept: BTreeMap::new(),
        }
    }

    /// Nothing of this step yet; what is left of another one is forgotten.
    pub fn begin(&mut self, step: u64, parameters: Hash) {
        (self.step, self.parameters) = (step, parameters);
        self.forget();
        self.kept.clear();
    }

    fn forget(&mut self) {
        self.leases.clear();
        self.scalars = Scalars::default();
        self.traffic = Traffic::default();
        self.last = None;
    }

    /// Adds what was granted; returns a gradient's memory that is free again.
    pub fn add(&mut self, lease: LeaseId, finished: Finished) -> Option<Vec<f32>> {
        self.leases.push(lease);
        let s = &mut self.scalars;
        s.loss += finished.scalars.loss;
        s.weight += finished.scalars.weight;
        s.targets += finished.scalars.targets;
        self.traffic.add(&finished.traffic);
        let before = self.last.replace(finished.gradient)?;
        // The first of all overwrites what another sum has left.
        let first = self.leases.len() == 2;
        if first && self.sums.cells().iter().map(Vec::len).sum::<usize>() != before.len() {
            self.sums = Sums::new(before.len());
        }
        let cells = self.sums.cells_mut().par_iter_mut().zip(before.par_chunks(CELL));
        cells.for_each(|(cell, values)| match first {
            true => fixed::set_checked(cell, values),
            false => fixed::add_checked(cell, values),
        });
        Some(before)
    }

    /// Whether there is something that was not sent.
    pub fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    /// Everything that was added since the last time, as messages, which are kept until they are taken; and a
    /// gradient's memory that is free again.
    pub fn flush(&mut self) -> (&[ToCoordinator], Option<Vec<f32>>) {
        let sum = self.next;
        self.next += 1;
        let last = self.last.take().unwrap_or_default();
        let values = last.par_chunks(CELL);
        let mut messages: Vec<ToCoordinator> = match self.leases.len() {
            1 => values.enumerate().map(|(i, cell)| piece::single(sum, i, cell)).collect(),
            _ => {
                let cells = self.sums.cells().par_iter().zip(values).enumerate();
                // The total is packed out of a thread's own cell, which stays in its cache: nobody needs it after.
                let packed = |total: &mut Vec<i64>, (i, (cell, values)): (usize, (&Vec<i64>, &[f32]))| {
                    let total = &mut total[..cell.len()];
                    fixed::total_checked(total, cell, values);
                    piece::fixed(sum, i, total)
                };
                cells.map_init(|| vec![0; CELL], packed).collect()
            }
        };
        messages.push(ToCoordinator::Sum {
            sum,
            step: self.step,
            leases: std::mem::take(&mut self.leases),
            loss: self.scalars.loss,
            weight: self.scalars.weight,
            targets: self.scalars.targets,
            parameters: self.parameters,
            traffic: self.traffic,
        });
        self.forget();
        (self.kept.entry(sum).or_insert(messages), Some(last))
    }

    /// It has arrived.
    pub fn taken(&mut self, sum: u64) {
        self.kept.remove(&sum);
    }

    /// What was sent and not taken, for whoever asks again.
    pub fn kept(&self) -> impl Iterator<Item = (u64, &[ToCoordinator])> {
        self.kept.iter().map(|(sum, messages)| (*sum, messages.as_slice()))
    }

    /// Of which everything is.
    pub fn step(&self) -> u64 {
        self.step
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finished(seed: u32, len: usize) -> Finished {
        let value =
            |i: usize| ((i as u32).wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) as f32 * 1e-6 - 8.0;
        let loss = LossSums { loss: f64::from(seed) + 0.5, weight: 3.0, targets: 3, predictions: Vec::new() };
        Finished {
            gradient: (0..len).map(value).collect(),
            scalars: scalars(&loss).unwrap(),
            traffic: Traffic { submissions: 1, ..Traffic::default() },
        }
    }

    /// What the messages of a sum add up to.
    fn total(messages: &[ToCoordinator], len: usize) -> (Sums, Vec<LeaseId>) {
        let (mut sums, mut of) = (Sums::new(len), Vec::new());
        for message in messages {
            match message {
                ToCoordinator::SumPiece { offset, len, packed, .. } => {
                    let cell = &mut sums.cells_mut()[*offset as usize / CELL];
                    assert_eq!(cell.len(), *len as usize);
                    piece::add(packed, cell, i64::MAX).unwrap();
                }
                ToCoordinator::Sum { leases, loss, weight, targets, traffic, .. } => {
                    assert_eq!(traffic.submissions, leases.len() as u64, "what each of them took");
                    sums.set_scalars(Scalars { loss: *loss, weight: *weight, targets: *targets });
                    of = leases.clone();
                }
                other => panic!("{other:?}"),
            }
        }
        (sums, of)
    }

    #[test]
    fn any_number_of_microbatches_arrives_as_its_sum() {
        for len in [1, 63, CELL, CELL + 1, 3 * CELL + 17] {
            let mut running = Running::new();
            running.begin(1, [7; 32]);
            let mut first = 0;
            for count in [1u32, 2, 5, 1] {
                let mut expected = Sums::new(len);
                for i in first..first + count {
                    let one = finished(i, len);
                    expected.add_gradient(&one.gradient, i64::MAX).unwrap();
                    let s = (expected.scalars(), one.scalars);
                    expected.set_scalars(Scalars {
                        loss: s.0.loss + s.1.loss,
                        weight: s.0.weight + s.1.weight,
                        targets: s.0.targets + s.1.targets,
                    });
                    running.add(i.into(), one);
                }
                let (sums, leases) = total(running.flush().0, len);
                assert!(sums == expected, "{count} of {len}");
                assert_eq!(leases, (first..first + count).map(u64::from).collect::<Vec<_>>());
                assert!(running.is_empty());
                first += count;
            }
            assert_eq!(running.kept().map(|(sum, _)| sum).collect::<Vec<_>>(), [1, 2, 3, 4]);
            running.taken(2);
            assert_eq!(running.kept().count(), 3);
            running.begin(2, [8; 32]);
            assert_eq!(running.kept().count(), 0);
        }
    }
}
