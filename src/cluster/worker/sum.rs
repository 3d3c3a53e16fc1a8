//! The running sum of a process: what its devices were granted and the coordinator has not got yet. Devices add up
//! here before anything is sent; one lone microbatch stays as it came, in f32, which is half the work on both sides.
//!
//! Gradients wait as they are, and are added several at a time: a cell of the sum is then read and written once for
//! all of them. What still waits when the sum is asked for is added while it is packed, and what is packed is said
//! while the rest is being packed: nobody waits for more than one pass over memory.

use crate::cluster::message::{Hash, LeaseId, ToCoordinator};
use crate::cluster::piece;
use crate::model::stage::Traffic;
use crate::numeric::fixed::{self, CELL};
use crate::train::sum::{Scalars, Sums};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// A microbatch that was computed and checked.
#[derive(Debug)]
pub(super) struct Finished {
    pub gradient: Vec<f32>,
    pub scalars: Scalars,
    /// What it took.
    pub traffic: Traffic,
}

/// Gradients that are added in one pass.
const TOGETHER: usize = 3;

/// Cells that are packed before the first of them is said.
const GROUP: usize = 8;

/// Whether the devices of a process have something to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Devices {
    /// One of them computes: what is done meanwhile delays no sum.
    Busy,
    /// The sum may be asked for next.
    Idle,
}

#[derive(Debug)]
pub(super) struct Running {
    /// Step and parameters of everything in it.
    step: u64,
    parameters: Hash,
    leases: Vec<LeaseId>,
    scalars: Scalars,
    traffic: Traffic,
    /// Gradients that were granted last and are not in `sums`.
    waiting: Vec<Vec<f32>>,
    /// All before them, if there are any: else what another sum has left.
    sums: Sums,
    /// How many are in `sums`.
    folded: usize,
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
            waiting: Vec::new(),
            sums: Sums::new(0),
            folded: 0,
            next: 1,
            kept: BTreeMap::new(),
        }
    }

    /// Nothing of this step yet; what is left of another one is forgotten. Returns gradients' memory that is free
    /// again.
    pub fn begin(&mut self, step: u64, parameters: Hash) -> Vec<Vec<f32>> {
        (self.step, self.parameters) = (step, parameters);
        self.kept.clear();
        self.forget()
    }

    fn forget(&mut self) -> Vec<Vec<f32>> {
        self.leases.clear();
        self.scalars = Scalars::default();
        self.traffic = Traffic::default();
        self.folded = 0;
        std::mem::take(&mut self.waiting)
    }

    /// Adds what was granted; returns gradients' memory that is free again.
    pub fn add(&mut self, lease: LeaseId, finished: Finished, devices: Devices) -> Vec<Vec<f32>> {
        self.leases.push(lease);
        let s = &mut self.scalars;
        s.loss += finished.scalars.loss;
        s.weight += finished.scalars.weight;
        s.targets += finished.scalars.targets;
        self.traffic.add(&finished.traffic);
        self.waiting.push(finished.gradient);
        // While nobody computes this may have been the last, and the sum is about to be asked for.
        let most = if devices == Devices::Busy { TOGETHER } else { 2 * TOGETHER };
        if self.waiting.len() < most { Vec::new() } else { self.fold() }
    }

    /// One pass for all that wait.
    fn fold(&mut self) -> Vec<Vec<f32>> {
        let gradients = std::mem::take(&mut self.waiting);
        self.sums.reset_len(gradients.first().map_or(0, Vec::len));
        let before = self.folded;
        self.folded += gradients.len();
        let cells = self.sums.cells_mut().par_iter_mut().enumerate();
        cells.for_each(|(index, cell)| {
            let span = span(index, cell.len());
            let mut parts = gradients.iter().map(|gradient| &gradient[span.clone()]);
            // The first of all overwrites what another sum has left.
            if before == 0
                && let Some(first) = parts.next()
            {
                fixed::set_checked(cell, first);
            }
            parts.for_each(|values| fixed::add_checked(cell, values));
        });
        gradients
    }

    /// Whether there is something that was not sent.
    pub fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    /// Says everything that was added since the last time, as messages, which are kept until they are taken; returns
    /// gradients' memory that is free again.
    pub fn flush(&mut self, say: &mut dyn FnMut(&ToCoordinator)) -> Vec<Vec<f32>> {
        let sum = self.next;
        self.next += 1;
        let (waiting, folded) = (&self.waiting, self.folded);
        let cells = if folded == 0 { &[][..] } else { self.sums.cells() };
        let len = waiting.first().map_or_else(|| cells.iter().map(Vec::len).sum(), Vec::len);
        let pack = |total: &mut Vec<i64>, index| {
            let span = span(index, piece::cell_len(len, index));
            let mut parts = waiting.iter().map(|gradient| &gradient[span.clone()]);
            let total = &mut total[..span.len()];
            match (cells.get(index), parts.next()) {
                (None, Some(lone)) if waiting.len() == 1 => return piece::single(sum, index, lone),
                (Some(cell), None) => return piece::fixed(sum, index, cell),
                (Some(cell), Some(first)) => {
                    total.copy_from_slice(cell);
                    fixed::add_checked(total, first);
                }
                (None, Some(first)) => fixed::set_checked(total, first),
                (None, None) => total.fill(0),
            }
            parts.for_each(|values| fixed::add_checked(total, values));
            piece::fixed(sum, index, total)
        };
        let mut messages = packed(len.div_ceil(CELL), pack, say);
        let end = ToCoordinator::Sum {
            sum,
            step: self.step,
            leases: std::mem::take(&mut self.leases),
            loss: self.scalars.loss,
            weight: self.scalars.weight,
            targets: self.scalars.targets,
            parameters: self.parameters,
            traffic: self.traffic,
        };
        say(&end);
        messages.push(end);
        self.kept.insert(sum, messages);
        self.forget()
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

/// Where a cell of so many values lies in a flat layout.
fn span(index: usize, len: usize) -> std::ops::Range<usize> {
    index * CELL..index * CELL + len
}

/// Packs so many cells, in groups, and says those of one while those of the next are being packed. What is packed out
/// of more than one place is added up in a thread's own cell, which stays in its cache: nobody needs it after.
fn packed(
    count: usize,
    pack: impl Fn(&mut Vec<i64>, usize) -> ToCoordinator + Sync,
    say: &mut dyn FnMut(&ToCoordinator),
) -> Vec<ToCoordinator> {
    let (done, ready) = std::sync::mpsc::channel::<Vec<ToCoordinator>>();
    let mut messages = Vec::with_capacity(count + 1);
    let group = GROUP.max(2 * rayon::current_num_threads());
    rayon::in_place_scope(|scope| {
        scope.spawn(|_| {
            let done = done;
            for from in (0..count).step_by(group) {
                let cells = (from..count.min(from + group)).into_par_iter();
                // Whoever takes them does so to the end.
                let _ = done.send(cells.map_init(|| vec![0; CELL], &pack).collect());
            }
        });
        for message in ready.iter().flatten() {
            say(&message);
            messages.push(message);
        }
    });
    messages
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::stage::LossSums;

    fn finished(seed: u32, len: usize) -> Finished {
        let value =
            |i: usize| ((i as u32).wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) as f32 * 1e-6 - 8.0;
        let loss = LossSums { loss: f64::from(seed) + 0.5, weight: 3.0, targets: 3, predictions: Vec::new() };
        Finished {
            gradient: (0..len).map(value).collect(),
            scalars: Scalars::of(&loss).unwrap(),
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
    fn sum_of_any_number_of_microbatches_arrives() {
        for len in [1, 63, CELL, CELL + 1, 20 * CELL + 17] {
            [Devices::Busy, Devices::Idle].into_iter().for_each(|devices| sums_of(len, devices));
        }
    }

    /// Sums of fewer than are added together, of as many, of more; each after one that has left its cells full.
    fn sums_of(len: usize, devices: Devices) {
        let mut running = Running::new();
        running.begin(1, [7; 32]);
        let (mut first, counts) = (0, [1u32, 2, 3, 8, 4, 1, 6]);
        {
            for count in counts {
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
                    running.add(i.into(), one, devices);
                }
                let mut messages = Vec::new();
                let free = running.flush(&mut |message| messages.push(message.clone()));
                assert!(free.iter().all(|gradient| gradient.len() == len));
                let (sums, leases) = total(&messages, len);
                assert_eq!(running.kept().last().map(|(_, kept)| kept), Some(messages.as_slice()));
                assert!(sums == expected, "{count} of {len}");
                assert_eq!(leases, (first..first + count).map(u64::from).collect::<Vec<_>>());
                assert!(running.is_empty());
                first += count;
            }
            assert_eq!(running.kept().map(|(sum, _)| sum).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6, 7]);
            running.taken(2);
            assert_eq!(running.kept().count(), 6);
            running.begin(2, [8; 32]);
            assert_eq!(running.kept().count(), 0);
        }
    }

    /// What is granted while others compute costs no pass over memory when the sum is asked for; what is granted last
    /// costs none before.
    #[test]
    fn gradients_are_added_in_groups_and_the_rest_when_packed() {
        let mut running = Running::new();
        running.begin(1, [7; 32]);
        let mut freed =
            |devices| (0..6).map(|i| running.add(i, finished(9, 40), devices).len()).collect::<Vec<_>>();
        assert_eq!(freed(Devices::Busy), [0, 0, 3, 0, 0, 3]);
        assert_eq!(freed(Devices::Idle), [0, 0, 0, 0, 0, 6]);
        running.add(9, finished(9, 40), Devices::Idle);
        assert_eq!(running.flush(&mut |_| ()).len(), 1);
    }

    /// The second group is packed when something of the first was said, or never.
    #[test]
    fn packed_group_is_sent_before_the_next_is_packed() {
        let group = GROUP.max(2 * rayon::current_num_threads());
        let (tell, told) = std::sync::mpsc::channel();
        let told = std::sync::Mutex::new(told);
        let pack = |_: &mut Vec<i64>, index| {
            if index == group {
                let said = told.lock().unwrap().recv_timeout(std::time::Duration::from_secs(20));
                said.expect("the first group was not said");
            }
            piece::single(1, index, &[])
        };
        let mut said = Vec::new();
        let messages = packed(2 * group, pack, &mut |message| {
            tell.send(()).unwrap();
            said.push(message.clone());
        });
        assert!(messages.len() == 2 * group && messages == said, "in order");
    }
}
