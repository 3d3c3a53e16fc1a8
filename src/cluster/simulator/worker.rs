//! A worker's side of the conversation, from `Ready` to the end of one connection (docs/explain/protocol.md).
//! The worker gets messages and the ends of computations, and returns what to send and to start.

use super::super::machine::Purpose;
use super::super::message::{
    Bye, Device, Hash, Lease, LeaseId, Packed, ToCoordinator, ToWorker, Trouble, Work,
};
use super::truth::{self, Plan, Values, WIDTH};
use super::{MILLI, Micros};
use crate::model::stage::Traffic;
use crate::train::sum::RewardSums;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// An action of a worker.
pub enum Effect {
    Send(Box<ToCoordinator>),
    /// A device starts to compute; the world reports the end.
    Start {
        device: usize,
        lease: LeaseId,
        tokens: u64,
    },
    /// The conversation is over.
    Over(Bye),
}

/// A fault of a device in its next computation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Ill {
    /// An error. The device returns slower by this factor, as another class, or never.
    Error(Option<f64>),
    /// A value that is not finite.
    Bad,
    /// A computation that never ends, unless it is cancelled.
    Hang,
}

/// Whether a worker breaks the protocol, to check that the oracles notice it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Cheats {
    No,
    Yes,
}

/// How a worker's results are wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forgery {
    Scaled,
    Stale,
    Random,
    Flipped,
    /// A bit of every third result: a faulty device.
    Bit,
    /// Only what it computes again for others is wrong.
    AsChecker,
}

impl Forgery {
    /// The result in place of the true one.
    fn of(self, values: Values, lease: LeaseId, purpose: Purpose) -> Values {
        match self {
            Forgery::Scaled => values.map(|v| v.wrapping_mul(2)),
            Forgery::Stale => truth::gradient(&truth::initial(), &truth::old()),
            Forgery::Random => values.map(|v| v ^ (lease as i64) << 7),
            Forgery::Flipped => values.map(|v| -v),
            Forgery::Bit if lease.is_multiple_of(3) => [values[0] ^ 1, values[1], values[2], values[3]],
            Forgery::AsChecker if purpose == Purpose::Verify => values.map(|v| v ^ 1),
            Forgery::Bit | Forgery::AsChecker => values,
        }
    }
}

/// A device. It survives a lost connection; its leases do not.
#[derive(Debug, Clone)]
pub struct Engine {
    pub class: String,
    pub micros_per_token: f64,
    pub ill: Option<Ill>,
    pub gone: bool,
    queue: VecDeque<Lease>,
    current: Option<(Lease, Micros)>,
}

impl Engine {
    pub fn new(class: &str, micros_per_token: f64) -> Self {
        let (queue, current) = (VecDeque::new(), None);
        Engine { class: class.into(), micros_per_token, ill: None, gone: false, queue, current }
    }

    fn named(&self) -> Device {
        Device { name: "device".into(), class: self.class.clone() }
    }
}

struct Waiting {
    values: Values,
    loss: i128,
    step: u64,
    /// Hash of the parameters of its lease.
    parameters: Hash,
    /// Its announcement, repeated unchanged.
    announce: ToCoordinator,
    said: Micros,
}

/// A sum of a step.
#[derive(Default)]
struct Sum {
    /// Its number, once it was sent.
    number: u64,
    step: u64,
    leases: Vec<LeaseId>,
    values: Values,
    loss: i128,
    parameters: Hash,
}

/// The step that a lease is of; for an evaluation the one before.
fn step_of(lease: &Lease) -> u64 {
    match &lease.work {
        Work::Train(batch) | Work::Recheck(batch) | Work::Verify(batch) => batch.step,
        _ => lease.after,
    }
}

pub struct Worker {
    plan: Plan,
    pub engines: Vec<Engine>,
    /// Whether idle devices repeat `Ask`, because an `Ask` may be lost.
    pub asks_again: bool,
    /// Whether denied gradients are added.
    pub cheats: Cheats,
    /// How its results are wrong.
    pub forgery: Option<Forgery>,
    /// Number of its results for training that it altered.
    pub forgeries: u64,
    /// Whether its copy of the parameters is damaged.
    pub damaged: bool,
    pieces: Vec<i64>,
    /// Parameters by their steps, the newest last.
    held: Vec<(u64, Values)>,
    seen: BTreeSet<LeaseId>,
    waiting: BTreeMap<LeaseId, Waiting>,
    /// The running sum of each step.
    running: BTreeMap<u64, Sum>,
    untaken: Option<Sum>,
    /// Sums of one microbatch that are not taken.
    singles: Vec<Sum>,
    sums: u64,
    /// The step whose sum was requested.
    flush: Option<u64>,
    out: Vec<Effect>,
}

impl Worker {
    pub fn new(plan: &Plan, mut engines: Vec<Engine>) -> Self {
        engines.iter_mut().for_each(|e| (e.current, e.queue) = (None, VecDeque::new()));
        engines.retain(|e| !e.gone);
        Worker {
            plan: plan.clone(),
            engines,
            asks_again: false,
            cheats: Cheats::No,
            forgery: None,
            forgeries: 0,
            damaged: false,
            pieces: vec![],
            held: vec![],
            seen: BTreeSet::new(),
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            untaken: None,
            singles: vec![],
            sums: 0,
            flush: None,
            out: vec![],
        }
    }

    pub fn ready(&self) -> ToCoordinator {
        ToCoordinator::Ready { devices: self.engines.iter().map(Engine::named).collect(), refused: vec![] }
    }

    fn send(&mut self, message: ToCoordinator) {
        self.out.push(Effect::Send(Box::new(message)));
    }

    pub fn hears(&mut self, message: ToWorker, now: Micros) -> Vec<Effect> {
        match message {
            ToWorker::ParametersPiece { bytes, .. } => self.pieces.extend(truth::values(&bytes)),
            ToWorker::Parameters { step, hash } => self.parameters((step, hash), now),
            ToWorker::Lease(lease) => self.lease(*lease, now),
            ToWorker::Grant { lease } => {
                if let Some(w) = self.waiting.remove(&lease) {
                    self.add(lease, &w);
                }
                self.flush_if_due();
            }
            ToWorker::Deliver { lease } => {
                if let Some(Waiting { values, loss, step, parameters, .. }) = self.waiting.remove(&lease) {
                    self.sums += 1;
                    let (number, leases) = (self.sums, vec![lease]);
                    self.singles.push(Sum { number, step, leases, values, loss, parameters });
                    self.send_sum(Some(self.singles.len() - 1));
                }
            }
            ToWorker::Deny { lease } => {
                if let Some(w) = self.waiting.remove(&lease).filter(|_| self.cheats == Cheats::Yes) {
                    truth::add(&mut self.running.entry(w.step).or_default().values, &w.values);
                }
                self.flush_if_due();
            }
            ToWorker::Cancel { lease } => self.cancel(lease, now),
            ToWorker::Flush { step, .. } => self.flush(step),
            ToWorker::SumTaken { sum } => {
                self.untaken.take_if(|u| u.number == sum);
                self.singles.retain(|u| u.number != sum);
                self.flush_if_due();
            }
            ToWorker::Bye(bye) => self.out.push(Effect::Over(bye)),
            ToWorker::Welcome(_)
            | ToWorker::Piece { .. }
            | ToWorker::Ping { .. }
            | ToWorker::Below { .. }
            | ToWorker::Sit(_)
            // The driver here rounds nothing, and has no relays.
            | ToWorker::ParametersChange { .. }
            | ToWorker::Listen
            | ToWorker::Relay(_)
            | ToWorker::Combine { .. }
            | ToWorker::Spread { .. } => {}
        }
        std::mem::take(&mut self.out)
    }

    /// Adds a granted gradient to the sum of its step.
    fn add(&mut self, lease: LeaseId, w: &Waiting) {
        let sum = self.running.entry(w.step).or_default();
        (sum.step, sum.parameters) = (w.step, w.parameters);
        truth::add(&mut sum.values, &w.values);
        sum.loss += w.loss;
        sum.leases.push(lease);
    }

    /// New parameters: all unfinished work of steps up to theirs is over.
    fn parameters(&mut self, (step, hash): (u64, Hash), now: Micros) {
        let values: Values = std::mem::take(&mut self.pieces).try_into().expect("all pieces came, in order");
        assert_eq!(truth::hash(&values), hash, "the parameters arrived whole");
        self.held.retain(|(held, _)| *held < step && held + self.plan.delay >= step);
        self.held.push((step, values));
        self.running.retain(|of, _| *of > step);
        self.flush.take_if(|of| *of <= step);
        self.untaken.take_if(|sum| sum.step <= step);
        self.singles.retain(|sum| sum.step > step);
        self.waiting.retain(|_, w| w.step > step);
        self.seen.clear();
        for engine in &mut self.engines {
            engine.current.take_if(|(lease, _)| step_of(lease) <= step);
            engine.queue.retain(|lease| step_of(lease) > step);
        }
        for device in 0..self.engines.len() {
            self.ask(device);
            self.next(device, now);
        }
        self.flush_if_due();
    }

    fn ask(&mut self, device: usize) {
        if !self.engines[device].gone {
            self.send(ToCoordinator::Ask {
                device: device as u16,
                room: 16,
                together: 1 + device as u16 % 3,
            });
        }
    }

    fn lease(&mut self, lease: Lease, now: Micros) {
        if self.held.iter().all(|(step, _)| *step != lease.after) || !self.seen.insert(lease.lease) {
            return;
        }
        let device = usize::from(lease.device);
        if self.engines[device].gone {
            return self.send(ToCoordinator::Stopped { lease: lease.lease, micros: 0 });
        }
        self.engines[device].queue.push_back(lease);
        self.next(device, now);
    }

    /// Starts the first lease of the queue.
    fn next(&mut self, device: usize, now: Micros) {
        let engine = &mut self.engines[device];
        if engine.current.is_none()
            && let Some(lease) = engine.queue.pop_front()
        {
            self.out.push(Effect::Start { device, lease: lease.lease, tokens: size(&lease.work) });
            engine.current = Some((lease, now));
        }
    }

    /// A computation ends; a lease that is no longer current was cancelled.
    pub fn finished(&mut self, device: usize, lease: LeaseId, now: Micros) -> Vec<Effect> {
        if let Some((held, began)) = self.engines[device].current.take_if(|(l, _)| l.lease == lease) {
            self.result(device, held, now - began, now);
            self.next(device, now);
        }
        std::mem::take(&mut self.out)
    }

    fn result(&mut self, device: usize, held: Lease, micros: u64, now: Micros) {
        let (lease, step) = (held.lease, step_of(&held));
        let with = self.held.iter().find(|(step, _)| *step == held.after);
        let mut values = with.expect("leases follow parameters").1;
        let whole = truth::hash(&values);
        if self.damaged {
            values[1] ^= 1 << 40;
        }
        let parameters = truth::hash(&values);
        match self.engines[device].ill.take() {
            Some(Ill::Error(back)) => return self.fails(device, lease, back),
            Some(Ill::Bad) if !matches!(held.work, Work::Prompt { .. }) => return self.send(bad(lease)),
            _ => {}
        }
        match held.work {
            Work::Train(batch) | Work::Recheck(batch) | Work::Verify(batch) if self.plan.is_bad(&batch) => {
                self.send(bad(lease));
            }
            Work::Verify(batch) => {
                let (loss, values) = (truth::loss(&values, &batch), truth::gradient(&values, &batch));
                let values =
                    self.forgery.map_or(values, |forgery| forgery.of(values, lease, Purpose::Verify));
                let digest = truth::digest(&values, loss);
                self.send(ToCoordinator::Verified { lease, digest, parameters, micros, memory: 0 });
            }
            Work::Train(batch) | Work::Recheck(batch) => {
                let (loss, values) = (truth::loss(&values, &batch), truth::gradient(&values, &batch));
                let given = self.forgery.map_or(values, |forgery| forgery.of(values, lease, Purpose::Round));
                self.forgeries += u64::from(given != values);
                let values = given;
                let announce = ToCoordinator::Announce { lease, parameters, micros, memory: 0 };
                let (parameters, said) = (whole, now);
                let waiting = Waiting { values, loss, step, parameters, announce: announce.clone(), said };
                self.waiting.insert(lease, waiting);
                self.send(announce);
            }
            Work::Eval(batch) | Work::Predict(batch) => {
                let sums = truth::score(&values, &batch);
                self.send(ToCoordinator::Score { lease, sums, parameters, micros });
            }
            Work::Prompt { ids, .. } => {
                let ids = truth::answer(&values, &ids);
                self.send(ToCoordinator::Answer { lease, ids, parameters });
            }
            Work::Island(_) | Work::RecheckIsland(_) | Work::VerifyIsland(_) => {
                unreachable!("no plan of the simulator has islands")
            }
        }
    }

    fn fails(&mut self, device: usize, lease: LeaseId, back: Option<f64>) {
        let reason = String::from("device lost");
        self.send(ToCoordinator::Fault { lease, fault: Trouble::Device { reason: reason.clone() } });
        let engine = &mut self.engines[device];
        match back {
            Some(slower) => {
                engine.class.push_str("-slow");
                engine.micros_per_token *= slower;
                let now = engine.named();
                self.send(ToCoordinator::Fallback { device: device as u16, now, reason });
            }
            None => {
                engine.gone = true;
                let queue = std::mem::take(&mut engine.queue);
                let stopped = |l: Lease| ToCoordinator::Stopped { lease: l.lease, micros: 0 };
                queue.into_iter().for_each(|l| self.send(stopped(l)));
                if self.engines.iter().all(|e| e.gone) {
                    self.send(ToCoordinator::Leave { reason: "no device is left".into() });
                }
            }
        }
    }

    fn cancel(&mut self, lease: LeaseId, now: Micros) {
        for device in 0..self.engines.len() {
            let engine = &mut self.engines[device];
            let current = engine.current.take_if(|(l, _)| l.lease == lease);
            let queued = engine.queue.iter().position(|l| l.lease == lease);
            queued.map(|at| engine.queue.remove(at));
            if current.is_some() || queued.is_some() {
                engine.ill.take_if(|ill| *ill == Ill::Hang && current.is_some());
                let micros = current.map_or(0, |(_, began)| now - began);
                self.send(ToCoordinator::Stopped { lease, micros });
            }
            self.next(device, now);
        }
    }

    fn flush(&mut self, step: u64) {
        if self.held.last().is_none_or(|(after, _)| step <= *after) {
            return;
        }
        self.flush = Some(step);
        (0..self.singles.len()).for_each(|at| self.send_sum(Some(at)));
        if self.untaken.is_some() {
            return self.send_sum(None);
        }
        self.flush_if_due();
    }

    fn flush_if_due(&mut self) {
        let Some(step) = self.flush else { return };
        if self.untaken.is_some() || self.waiting.values().any(|w| w.step == step) {
            return;
        }
        self.flush = None;
        if self.running.get(&step).is_none_or(|sum| sum.leases.is_empty()) {
            return;
        }
        self.sums += 1;
        self.untaken = self.running.remove(&step).map(|sum| Sum { number: self.sums, ..sum });
        self.send_sum(None);
    }

    /// Sends the untaken sum, or a sum of one microbatch.
    fn send_sum(&mut self, single: Option<usize>) {
        let untaken = single.map_or(self.untaken.as_ref(), |at| self.singles.get(at));
        let Some(u) = untaken else { return };
        let parameters = u.parameters;
        let targets = u.leases.len() as u64;
        let (sum, step, leases, loss) = (u.number, u.step, u.leases.clone(), u.loss);
        let (first, second) = u.values.split_at(WIDTH / 2);
        let piece = |offset: usize, part: &[i64]| ToCoordinator::SumPiece {
            sum,
            offset: offset as u64,
            len: part.len() as u32,
            packed: Packed::Fixed(truth::bytes(part).into()),
        };
        let pieces = [piece(0, first), piece(WIDTH / 2, second)];
        pieces.into_iter().for_each(|p| self.send(p));
        self.send(ToCoordinator::Sum {
            sum,
            step,
            leases,
            loss,
            weight: 0,
            targets,
            rewards: RewardSums::default(),
            parameters,
            traffic: Traffic::default(),
            relays: None,
        });
    }

    /// Twice a second: repeats unanswered announcements and the `Ask` of idle devices.
    pub fn nudge(&mut self, now: Micros) -> Vec<Effect> {
        let mut again = vec![];
        for w in self.waiting.values_mut().filter(|w| now - w.said >= 700 * MILLI) {
            w.said = now;
            again.push(w.announce.clone());
        }
        again.into_iter().for_each(|m| self.send(m));
        for device in 0..self.engines.len() {
            let engine = &self.engines[device];
            if self.asks_again && !self.held.is_empty() && engine.current.is_none() && engine.queue.is_empty()
            {
                self.ask(device);
            }
        }
        std::mem::take(&mut self.out)
    }

    /// Leaves by its own decision and hands back unfinished leases.
    pub fn leave(&mut self, now: Micros) -> Vec<Effect> {
        for device in 0..self.engines.len() {
            let engine = &mut self.engines[device];
            let current = engine.current.take().map(|(l, began)| (l, now - began));
            let queue = std::mem::take(&mut engine.queue).into_iter().map(|l| (l, 0));
            for (lease, micros) in current.into_iter().chain(queue) {
                self.send(ToCoordinator::Stopped { lease: lease.lease, micros });
            }
        }
        self.send(ToCoordinator::Leave { reason: "SIGTERM".into() });
        std::mem::take(&mut self.out)
    }
}

fn bad(lease: LeaseId) -> ToCoordinator {
    ToCoordinator::Fault { lease, fault: Trouble::Value { tensor: "q".into(), value: f64::INFINITY } }
}

fn size(work: &Work) -> u64 {
    match work {
        Work::Train(batch) | Work::Recheck(batch) | Work::Verify(batch) => 3 * batch.ids.len() as u64,
        Work::Eval(batch) | Work::Predict(batch) => batch.ids.len() as u64,
        Work::Prompt { ids, .. } => 10 * ids.len() as u64,
        _ => unreachable!("no plan of the simulator has islands"),
    }
}
