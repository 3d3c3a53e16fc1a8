//! The running sum of a process: gradients that were granted and not yet sent. Devices' gradients are added here
//! before anything is sent. A single microbatch stays in f32, which halves the work on both sides, unless its gradient was
//! rounded: then it is smaller in fixed point.
//!
//! Gradients wait unchanged and are added several at a time, so that each cell of the sum is read and written once
//! for all of them. Gradients still waiting when the sum is requested are added while it is packed, and packed cells
//! are sent while the rest is being packed: sending waits for at most one pass over memory.

use crate::cluster::message::{Hash, LeaseId, ToCoordinator};
use crate::cluster::sum_chunk;
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
    /// Device traffic of this microbatch.
    pub traffic: Traffic,
}

/// Number of gradients that are added in one pass.
const TOGETHER: usize = 3;

/// Cells that are packed before the first of them is sent.
const GROUP: usize = 8;

/// Whether the devices of a process have work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Devices {
    /// At least one device computes: folding now delays no sum.
    Busy,
    /// None computes: the sum may be requested next.
    Idle,
}

/// How a sum of one microbatch is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// In f32.
    Single,
    /// Packed, like any other sum.
    Fixed,
}

#[derive(Debug)]
pub(super) struct Running {
    form: Form,
    /// Step and parameters of all gradients in the sum.
    step: u64,
    parameters: Hash,
    leases: Vec<LeaseId>,
    scalars: Scalars,
    traffic: Traffic,
    /// The newest granted gradients, not yet added to `sums`.
    waiting: Vec<Vec<f32>>,
    /// The sum of all earlier gradients of this step; old values if there are none.
    sums: Sums,
    /// Number of gradients in `sums`.
    folded: usize,
    /// Sent sums that are not taken yet, by number.
    kept: BTreeMap<u64, Vec<ToCoordinator>>,
}

impl Running {
    pub fn new(form: Form) -> Self {
        Running {
            form,
            step: 0,
            parameters: [0; 32],
            leases: Vec::new(),
            scalars: Scalars::default(),
            traffic: Traffic::default(),
            waiting: Vec::new(),
            sums: Sums::new(0),
            folded: 0,
            kept: BTreeMap::new(),
        }
    }

    /// Starts an empty sum for a step and drops the previous one. Returns gradient buffers that are free again.
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

    /// Adds a granted gradient. Returns gradient buffers that are free again.
    pub fn add(&mut self, lease: LeaseId, finished: Finished, devices: Devices) -> Vec<Vec<f32>> {
        self.leases.push(lease);
        let s = &mut self.scalars;
        s.loss += finished.scalars.loss;
        s.weight += finished.scalars.weight;
        s.targets += finished.scalars.targets;
        s.rewards.add(&finished.scalars.rewards);
        self.traffic.add(&finished.traffic);
        self.waiting.push(finished.gradient);
        // While no device computes, this may be the last grant, and the request for the sum may follow at once.
        let most = if devices == Devices::Busy { TOGETHER } else { 2 * TOGETHER };
        if self.waiting.len() < most { Vec::new() } else { self.fold() }
    }

    /// Sends a granted gradient as a sum of its own with this number, which is kept until it is taken.
    pub fn single(
        &mut self,
        sum: u64,
        (lease, finished): (LeaseId, &Finished),
        say: &mut dyn FnMut(&ToCoordinator),
    ) {
        let mut messages: Vec<ToCoordinator> = match self.form {
            Form::Single => sum_chunk::of_gradient(sum, &finished.gradient).collect(),
            Form::Fixed => sum_chunk::of_rounded(sum, &finished.gradient).collect(),
        };
        let Scalars { loss, weight, targets, rewards } = finished.scalars;
        let (step, parameters, traffic) = (self.step, self.parameters, finished.traffic);
        let leases = vec![lease];
        messages.push(ToCoordinator::Sum {
            sum,
            step,
            leases,
            loss,
            weight,
            targets,
            rewards,
            parameters,
            traffic,
            relays: None,
        });
        messages.iter().for_each(say);
        self.kept.insert(sum, messages);
    }

    /// Adds all waiting gradients to `sums` in one pass.
    fn fold(&mut self) -> Vec<Vec<f32>> {
        let gradients = std::mem::take(&mut self.waiting);
        self.sums.reset_len(gradients.first().map_or(0, Vec::len));
        let before = self.folded;
        self.folded += gradients.len();
        let cells = self.sums.cells_mut().par_iter_mut().enumerate();
        cells.for_each(|(index, cell)| {
            let span = span(index, cell.len());
            let mut parts = gradients.iter().map(|gradient| &gradient[span.clone()]);
            // The first gradient of a step overwrites the values of the previous sum.
            if before == 0
                && let Some(first) = parts.next()
            {
                fixed::set_checked(cell, first);
            }
            parts.for_each(|values| fixed::add_checked(cell, values));
        });
        gradients
    }

    /// Whether all granted gradients were sent.
    pub fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    /// Sends everything added since the last flush as messages of the sum with this number, which are kept until the sum
    /// is taken. To relays the last message comes first, and the cells in the order of `relays`. Returns gradient buffers
    /// that are free again.
    pub fn flush(
        &mut self,
        sum: u64,
        relays: Option<&[usize]>,
        say: &mut dyn FnMut(&ToCoordinator),
    ) -> Vec<Vec<f32>> {
        let (waiting, folded, form) = (&self.waiting, self.folded, self.form);
        let cells = if folded == 0 { &[][..] } else { self.sums.cells() };
        let len = waiting.first().map_or_else(|| cells.iter().map(Vec::len).sum(), Vec::len);
        let pack = |total: &mut Vec<i64>, index| {
            let span = span(index, sum_chunk::cell_len(len, index));
            let mut parts = waiting.iter().map(|gradient| &gradient[span.clone()]);
            let total = &mut total[..span.len()];
            match (cells.get(index), parts.next()) {
                (None, Some(lone)) if waiting.len() == 1 && form == Form::Single => {
                    return sum_chunk::single(sum, index, lone);
                }
                (Some(cell), None) => return sum_chunk::fixed(sum, index, cell),
                (Some(cell), Some(first)) => {
                    total.copy_from_slice(cell);
                    fixed::add_checked(total, first);
                }
                (None, Some(first)) => fixed::set_checked(total, first),
                (None, None) => total.fill(0),
            }
            parts.for_each(|values| fixed::add_checked(total, values));
            sum_chunk::fixed(sum, index, total)
        };
        let end = ToCoordinator::Sum {
            sum,
            step: self.step,
            leases: std::mem::take(&mut self.leases),
            loss: self.scalars.loss,
            weight: self.scalars.weight,
            targets: self.scalars.targets,
            rewards: self.scalars.rewards,
            parameters: self.parameters,
            traffic: self.traffic,
            relays: None,
        };
        let mut messages = match relays {
            Some(order) => {
                say(&end);
                let mut messages = packed(order, pack, say);
                messages.sort_by_key(|message| match message {
                    ToCoordinator::SumPiece { offset, .. } => *offset,
                    _ => u64::MAX,
                });
                messages
            }
            None => {
                let messages = packed(&(0..len.div_ceil(CELL)).collect::<Vec<_>>(), pack, say);
                say(&end);
                messages
            }
        };
        messages.push(end);
        self.kept.insert(sum, messages);
        self.forget()
    }

    /// The coordinator has taken a sum.
    pub fn taken(&mut self, sum: u64) {
        self.kept.remove(&sum);
    }

    /// The sums that were sent and not taken.
    pub fn kept(&self) -> impl Iterator<Item = (u64, &[ToCoordinator])> {
        self.kept.iter().map(|(sum, messages)| (*sum, messages.as_slice()))
    }

    /// The step of everything in the sum.
    pub fn step(&self) -> u64 {
        self.step
    }
}

/// The values of a cell in the flat layout.
fn span(index: usize, len: usize) -> std::ops::Range<usize> {
    index * CELL..index * CELL + len
}

/// Packs cells in this order in groups, and sends the cells of one group while the next is being packed. Sums of several
/// sources are added in a buffer of the thread, which stays in its cache.
fn packed(
    order: &[usize],
    pack: impl Fn(&mut Vec<i64>, usize) -> ToCoordinator + Sync,
    say: &mut dyn FnMut(&ToCoordinator),
) -> Vec<ToCoordinator> {
    let (done, ready) = std::sync::mpsc::channel::<Vec<ToCoordinator>>();
    let mut messages = Vec::with_capacity(order.len() + 1);
    let group = GROUP.max(2 * rayon::current_num_threads());
    rayon::in_place_scope(|scope| {
        scope.spawn(|_| {
            let done = done;
            for cells in order.chunks(group) {
                let cells = cells.par_iter().copied();
                // The receiver below takes every group.
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
    use crate::model::preference;
    use crate::model::stage::LossSums;
    use crate::train::sum::RewardSums;

    fn added(mut one: RewardSums, other: RewardSums) -> RewardSums {
        one.add(&other);
        one
    }

    fn finished(seed: u32, len: usize) -> Finished {
        let value =
            |i: usize| ((i as u32).wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) as f32 * 1e-6 - 8.0;
        let rewards = preference::Rewards {
            sums: [f64::from(seed), -1.5],
            counts: [2, 1],
            pairs: 1,
            right: u64::from(seed % 2),
            range: seed.is_multiple_of(3).then_some([-2.5, f64::from(seed)]),
        };
        let (loss, weight, targets) = (f64::from(seed) + 0.5, 3.0, 3);
        let loss = LossSums { loss, weight, targets, rewards, ..LossSums::default() };
        Finished {
            gradient: (0..len).map(value).collect(),
            scalars: Scalars::of(&loss).unwrap(),
            traffic: Traffic { submissions: 1, ..Traffic::default() },
        }
    }

    /// The total of a sum's messages.
    fn total(messages: &[ToCoordinator], len: usize) -> (Sums, Vec<LeaseId>) {
        let (mut sums, mut of) = (Sums::new(len), Vec::new());
        for message in messages {
            match message {
                ToCoordinator::SumPiece { offset, len, packed, .. } => {
                    let cell = &mut sums.cells_mut()[*offset as usize / CELL];
                    assert_eq!(cell.len(), *len as usize);
                    sum_chunk::add(packed, cell, i64::MAX).unwrap();
                }
                ToCoordinator::Sum { leases, loss, weight, targets, rewards, traffic, .. } => {
                    assert_eq!(traffic.submissions, leases.len() as u64, "what each of them took");
                    sums.set_scalars(Scalars {
                        loss: *loss,
                        weight: *weight,
                        targets: *targets,
                        rewards: *rewards,
                    });
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
            for form in [Form::Single, Form::Fixed] {
                [Devices::Busy, Devices::Idle].into_iter().for_each(|devices| sums_of(len, form, devices));
            }
        }
    }

    /// Sums of fewer gradients than are added together, of as many, and of more; each after one that filled all
    /// cells.
    fn sums_of(len: usize, form: Form, devices: Devices) {
        let mut running = Running::new(form);
        running.begin(1, [7; 32]);
        let (mut first, mut sum, counts) = (0, 0, [1u32, 2, 3, 8, 4, 1, 6]);
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
                        rewards: added(s.0.rewards, s.1.rewards),
                    });
                    running.add(i.into(), one, devices);
                }
                let mut messages = Vec::new();
                sum += 1;
                let free = running.flush(sum, None, &mut |message| messages.push(message.clone()));
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

    /// Gradients granted while devices compute cost no pass over memory when the sum is requested; those granted
    /// last cost none before.
    #[test]
    fn gradients_are_added_in_groups_and_the_rest_when_packed() {
        let mut running = Running::new(Form::Single);
        running.begin(1, [7; 32]);
        let mut freed =
            |devices| (0..6).map(|i| running.add(i, finished(9, 40), devices).len()).collect::<Vec<_>>();
        assert_eq!(freed(Devices::Busy), [0, 0, 3, 0, 0, 3]);
        assert_eq!(freed(Devices::Idle), [0, 0, 0, 0, 0, 6]);
        running.add(9, finished(9, 40), Devices::Idle);
        assert_eq!(running.flush(1, None, &mut |_| ()).len(), 1);
    }

    /// The second group is packed only after a message of the first was sent; otherwise the test times out.
    #[test]
    fn packed_group_is_sent_before_the_next_is_packed() {
        let group = GROUP.max(2 * rayon::current_num_threads());
        let (send, sent) = std::sync::mpsc::channel();
        let sent = std::sync::Mutex::new(sent);
        let pack = |_: &mut Vec<i64>, index| {
            if index == group {
                let said = sent.lock().unwrap().recv_timeout(std::time::Duration::from_secs(20));
                said.expect("the first group was not said");
            }
            sum_chunk::single(1, index, &[])
        };
        let mut said = Vec::new();
        let order: Vec<usize> = (0..2 * group).collect();
        let messages = packed(&order, pack, &mut |message| {
            send.send(()).unwrap();
            said.push(message.clone());
        });
        assert!(messages.len() == 2 * group && messages == said, "in order");
    }
}
