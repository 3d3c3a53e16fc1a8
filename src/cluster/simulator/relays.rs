//! Relays in a random order of all messages, with members that die: the coordinator's part, the workers' part and the
//! reducer are the real ones; the links between them are queues.

use super::Draws;
use crate::cluster::coordinator::UseOfRelays;
use crate::cluster::coordinator::relays::{Candidate, Cause, Offer, Relays, TOTALS};
use crate::cluster::machine::MemberId;
use crate::cluster::message::{Packed, RelayPlan, ToCoordinator, ToWorker};
use crate::cluster::reduce::{Claim, Holds, Reducer, Report};
use crate::cluster::sum_chunk;
use crate::cluster::worker::relay::{Relay, cells, check};
use crate::model::stage::Traffic;
use crate::numeric::fixed::CELL;
use crate::train::sum::{RewardSums, Scalars, Sums};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// What is on its way: each queue keeps its order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Queue {
    ToCoordinator(usize),
    ToWorker(usize),
    Between(usize, usize),
}

enum Sent {
    Up(ToCoordinator),
    Down(ToWorker),
    Cell(u64, u64, Packed),
}

/// A sum of a worker.
struct Made {
    sum: u64,
    values: Sums,
    counted: bool,
}

struct Worker {
    alive: bool,
    plan: Option<RelayPlan>,
    relay: Option<Relay>,
    made: Vec<Made>,
}

struct World {
    draws: Draws,
    len: usize,
    relays: Relays,
    reducer: Reducer,
    reports: Receiver<Report>,
    workers: Vec<Worker>,
    queues: BTreeMap<Queue, VecDeque<Sent>>,
    /// Sums that the coordinator has heard of.
    heard: BTreeSet<(usize, u64)>,
    totals: usize,
}

fn member(worker: usize) -> MemberId {
    MemberId(worker as u64 + 1)
}

/// The last message of a sum; its number is its lease too.
fn end(worker: usize, sum: u64) -> ToCoordinator {
    ToCoordinator::Sum {
        sum,
        step: 1,
        leases: vec![100 * worker as u64 + sum],
        loss: 1,
        weight: 1 << 40,
        targets: 1,
        rewards: RewardSums::default(),
        parameters: [0; 32],
        traffic: Traffic::default(),
        relays: Some(1),
    }
}

fn scalars() -> Scalars {
    Scalars { loss: 1, weight: 1 << 40, targets: 1, rewards: RewardSums::default() }
}

impl World {
    fn new(seed: u64) -> Self {
        let mut draws = Draws::new(seed, 91);
        let of = 2 + draws.between(0, 4) as usize;
        let len = 1 + draws.between(0, 4 * CELL as u64) as usize;
        let (report, reports) = channel();
        let reducer = Reducer::new(len, (2, Holds::Two), move |r| drop(report.send(r))).unwrap();
        reducer.begin(2 * of);
        let worker = |_| Worker { alive: true, plan: None, relay: None, made: Vec::new() };
        World {
            draws,
            len,
            relays: Relays::new(len, UseOfRelays::Always),
            reducer,
            reports,
            workers: (0..of).map(worker).collect(),
            queues: BTreeMap::new(),
            heard: BTreeSet::new(),
            totals: 0,
        }
    }

    fn put(&mut self, queue: Queue, sent: Sent) {
        self.queues.entry(queue).or_default().push_back(sent);
    }

    fn down(&mut self, messages: Vec<(MemberId, ToWorker)>) {
        for (member, message) in messages {
            self.put(Queue::ToWorker(member.0 as usize - 1), Sent::Down(message));
        }
    }

    /// Forms a set of all workers.
    fn forms(&mut self) {
        let candidate = |worker| Candidate { member: member(worker), host: String::new(), link: None };
        let candidates = (0..self.workers.len()).map(candidate).collect();
        let messages = self.relays.consider(candidates, Duration::ZERO);
        self.down(messages);
        while self.relays.set_of(member(0)).is_none() {
            assert!(self.turn(), "nothing is on its way, and no set has formed");
        }
    }

    /// Every worker makes one or two sums, and sends their cells to the relays.
    fn make(&mut self) {
        for worker in 0..self.workers.len() {
            for sum in 1..=1 + self.draws.between(0, 2) {
                let mut values = Sums::new(self.len);
                let gradient: Vec<f32> =
                    (0..self.len).map(|i| ((i * 7 + worker) % 13) as f32 - 5.5).collect();
                values.add_gradient(&gradient, i64::MAX).unwrap();
                self.put(Queue::ToCoordinator(worker), Sent::Up(end(worker, sum)));
                let plan = self.workers[worker].plan.clone().unwrap();
                for message in sum_chunk::of_gradient(sum, &gradient) {
                    let ToCoordinator::SumPiece { offset, packed, .. } = message else { continue };
                    let place = plan.ranges.iter().position(|&(from, to)| (from..to).contains(&offset));
                    self.put(Queue::Between(worker, place.unwrap()), Sent::Cell(sum, offset, packed));
                }
                self.workers[worker].made.push(Made { sum, values, counted: false });
            }
        }
    }

    /// One message arrives. False: none is on its way.
    fn turn(&mut self) -> bool {
        let full: Vec<Queue> = self.queues.iter().filter(|(_, q)| !q.is_empty()).map(|(k, _)| *k).collect();
        if full.is_empty() {
            return false;
        }
        let queue = full[self.draws.between(0, full.len() as u64) as usize];
        let sent = self.queues.get_mut(&queue).and_then(VecDeque::pop_front).unwrap();
        match (queue, sent) {
            (Queue::ToWorker(at), Sent::Down(message)) => self.at_worker(at, message),
            (Queue::ToCoordinator(from), Sent::Up(message)) => self.at_coordinator(from, message),
            (Queue::Between(from, to), Sent::Cell(sum, offset, packed)) if self.workers[to].alive => {
                let relay = self.workers[to].relay.as_mut().unwrap();
                relay.keep((from as u16, sum), offset, packed).unwrap();
                self.adds(to);
            }
            _ => {}
        }
        true
    }

    fn adds(&mut self, at: usize) {
        while let Some(piece) = self.workers[at].relay.as_mut().and_then(Relay::next) {
            self.put(Queue::ToCoordinator(at), Sent::Up(piece.unwrap()));
        }
    }

    fn at_worker(&mut self, at: usize, message: ToWorker) {
        match message {
            ToWorker::Listen => {
                self.put(Queue::ToCoordinator(at), Sent::Up(ToCoordinator::Seated { port: 9 }))
            }
            ToWorker::Relay(Some(plan)) => {
                check(&plan, self.len).unwrap();
                assert!(cells(plan.ranges[at]).end <= self.len.div_ceil(CELL));
                self.workers[at].relay = Some(Relay::new(self.len, plan.ranges[at]));
                self.workers[at].plan = Some(*plan);
                self.put(Queue::ToCoordinator(at), Sent::Up(ToCoordinator::Linked));
            }
            ToWorker::Combine { total, of, sums } => {
                self.workers[at].relay.as_mut().unwrap().combine(total, of, sums);
                self.adds(at);
            }
            other => panic!("{other:?}"),
        }
    }

    fn at_coordinator(&mut self, from: usize, message: ToCoordinator) {
        match message {
            ToCoordinator::Seated { port } => {
                let messages = self.relays.listens(member(from), port, [7; 16]);
                self.down(messages);
            }
            ToCoordinator::Linked => drop(self.relays.linked(member(from))),
            message @ ToCoordinator::Sum { sum, .. } => {
                self.heard.insert((from, sum));
                assert!(self.relays.offer(Offer { member: member(from), message: message.clone() }));
                assert!(!self.relays.offer(Offer { member: member(from), message }), "a lease counts twice");
                self.combines();
            }
            message => {
                for piece in self.relays.piece(member(from), message, Duration::ZERO).unwrap() {
                    let ToCoordinator::SumPiece { sum, offset, len, packed } = piece else { continue };
                    self.reducer.piece(TOTALS, sum, (offset, len), packed).unwrap();
                }
                if let Some(claim) = self.relays.claim() {
                    self.reducer.finish(TOTALS, claim);
                    self.total_comes(claim.sum);
                }
            }
        }
    }

    /// In some runs a total begins before all workers have handed over what they have.
    fn combines(&mut self) {
        let early = self.draws.between(0, 4) == 0;
        let (workers, heard) = (&self.workers, &self.heard);
        let ready = |m: MemberId| {
            let at = m.0 as usize - 1;
            early || workers[at].made.iter().all(|made| heard.contains(&(at, made.sum)))
        };
        let messages = self.relays.combine(ready, 2 * self.workers.len() as u32, Duration::ZERO);
        self.down(messages);
    }

    fn total_comes(&mut self, total: u64) {
        let report = self.reports.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!((report.member, report.sum, report.result), (TOTALS, total, Ok(())));
        let offers = self.relays.counts(total, Duration::ZERO).unwrap();
        assert!(self.reducer.take(TOTALS, total));
        for Offer { member, message } in offers {
            let ToCoordinator::Sum { sum, .. } = message else { continue };
            let made = &mut self.workers[member.0 as usize - 1].made;
            let made = made.iter_mut().find(|made| made.sum == sum).unwrap();
            assert!(!std::mem::replace(&mut made.counted, true), "a sum counts twice");
        }
        self.totals += 1;
        self.combines();
    }

    /// A worker dies: the others send what does not count yet to the coordinator.
    fn dies(&mut self, at: usize) {
        self.workers[at].alive = false;
        let parted = self.relays.part(Cause::Other, Duration::ZERO).unwrap();
        assert_eq!(parted.members.len(), self.workers.len());
        assert!(!self.relays.has_offers());
        self.reducer.take_back(TOTALS);
        self.queues.clear();
        for worker in (0..self.workers.len()).filter(|worker| *worker != at) {
            for made in self.workers[worker].made.iter_mut().filter(|made| !made.counted) {
                for piece in sum_chunk::of_sum(made.sum, &made.values) {
                    let ToCoordinator::SumPiece { sum, offset, len, packed } = piece else { continue };
                    self.reducer.piece(member(worker).0, sum, (offset, len), packed).unwrap();
                }
                self.reducer.finish(member(worker).0, Claim { sum: made.sum, leases: 1, scalars: scalars() });
                let report = self.reports.recv_timeout(Duration::from_secs(20)).unwrap();
                assert_eq!(report.result, Ok(()));
                assert!(self.reducer.take(member(worker).0, made.sum));
                made.counted = true;
            }
        }
    }
}

#[test]
fn totals_are_right_in_any_order_and_after_deaths() {
    let (mut died, mut totals) = (0, 0);
    for seed in 0..200 {
        let mut world = World::new(seed);
        world.forms();
        world.make();
        let dying = (seed % 2 == 1).then(|| world.draws.between(0, 60));
        let mut turns = 0;
        while world.turn() {
            turns += 1;
            if dying == Some(turns) {
                let at = world.draws.between(0, world.workers.len() as u64) as usize;
                world.dies(at);
                died += 1;
            }
        }
        let mut expected = Sums::new(world.len);
        let (mut of, mut all) = (0u32, 0u32);
        for made in world.workers.iter().flat_map(|worker| &worker.made) {
            all += 1;
            if made.counted {
                of += 1;
                for (total, cell) in expected.cells_mut().iter_mut().zip(made.values.cells()) {
                    total.iter_mut().zip(cell).for_each(|(total, value)| *total += value);
                }
            }
        }
        let gone = world.workers.iter().any(|worker| !worker.alive);
        assert!(of == all || gone, "seed {seed}: {of} of {all} sums count");
        let Scalars { loss, weight, targets, rewards } = scalars();
        let times = i128::from(of);
        let targets = targets * u64::from(of);
        expected.set_scalars(Scalars { loss: loss * times, weight: weight * times, targets, rewards });
        let mut total = Sums::new(0);
        world.reducer.total(&mut total);
        assert!(total == expected, "seed {seed}");
        totals += world.totals;
    }
    assert!(died > 20 && totals > 150, "{died} died, {totals} totals");
}
