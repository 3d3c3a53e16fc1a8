//! A seat's side of the conversation (docs/explain/protocol.md, section Lines), and its rule: what comes from above goes
//! first, else a forward pass, if fewer than its depth wait for their backward pass. Hidden states are one number, a hash
//! of the microbatch and of all parameters below.

use super::super::truth::{self, Plan};
use super::super::worker::Cheats;
use crate::cluster::message::{Hash, Lease, LeaseId, ToCoordinator, ToWorker, Trouble, Work};
use crate::cluster::sum_chunk;
use crate::model::split::depth;
use crate::model::stage::Traffic;
use crate::train::sum::RewardSums;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

/// What goes from a seat to a neighbour.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Carried {
    Hidden(LeaseId, u64),
    Gradient(LeaseId, u64),
    Token(LeaseId, u32),
    Drop(LeaseId),
}

/// An action of a seat.
pub enum Effect {
    Up(Box<ToCoordinator>),
    Above(Carried),
    Below(Carried),
    /// It computes this many tokens in each of its layers; the world reports the end.
    Start(u64),
}

/// Parameters of its layers.
struct Held {
    step: u64,
    values: Vec<i64>,
    hash: Hash,
}

#[derive(Clone)]
struct Job {
    lease: Lease,
    held: Arc<Held>,
    /// The tokens after a prompt.
    new: Vec<u32>,
}

/// What the device computes.
enum Pass {
    Forward(Box<Job>, Option<u64>),
    Backward(LeaseId, u64),
    Speak(LeaseId, Option<u64>),
}

pub struct Seat {
    plan: Plan,
    place: usize,
    of: usize,
    /// Its values of the parameters, one for each layer.
    values: Range<usize>,
    /// Whether denied gradients are added.
    pub cheats: Cheats,
    /// Whether its copy of the parameters is damaged.
    pub damaged: bool,
    /// Whether the next pass fails.
    pub ill: bool,
    pieces: Vec<u8>,
    held: Option<Arc<Held>>,
    queue: VecDeque<Job>,
    newest: LeaseId,
    open: BTreeMap<LeaseId, Job>,
    called_back: BTreeSet<LeaseId>,
    hidden: VecDeque<(LeaseId, u64)>,
    back: VecDeque<Carried>,
    pass: Option<Pass>,
    /// A lease of an older step, before the end of which it takes no other.
    late: Option<LeaseId>,
    waiting: BTreeMap<LeaseId, (Vec<i64>, i128)>,
    sum: Vec<i64>,
    loss: i128,
    leases: Vec<LeaseId>,
    sums: u64,
    out: Vec<Effect>,
}

/// The numbers that a value has in a sum of a line: its lower and its upper half.
fn halves(value: i64) -> [i64; 2] {
    [i64::from(value as u32), value >> 32]
}

/// The values of such numbers.
pub fn joined(numbers: &[i64]) -> Vec<i64> {
    numbers.as_chunks::<2>().0.iter().map(|[low, high]| low.wrapping_add(high << 32)).collect()
}

impl Job {
    fn trains(&self) -> bool {
        matches!(self.lease.work, Work::Train(_) | Work::Recheck(_))
    }

    fn is_prompt(&self) -> bool {
        self.lease.work.batch().is_none()
    }

    fn tokens(&self) -> u64 {
        self.lease.work.batch().map_or(5, |batch| batch.ids.len() as u64)
    }
}

impl Seat {
    pub fn new(plan: &Plan, (place, of): (usize, usize), values: Range<usize>) -> Self {
        Seat {
            plan: plan.clone(),
            place,
            of,
            sum: vec![0; 2 * values.len()],
            values,
            cheats: Cheats::No,
            damaged: false,
            ill: false,
            pieces: vec![],
            held: None,
            queue: VecDeque::new(),
            newest: 0,
            open: BTreeMap::new(),
            called_back: BTreeSet::new(),
            hidden: VecDeque::new(),
            back: VecDeque::new(),
            pass: None,
            late: None,
            waiting: BTreeMap::new(),
            loss: 0,
            leases: vec![],
            sums: 0,
            out: vec![],
        }
    }

    fn last(&self) -> bool {
        self.place + 1 == self.of
    }

    fn depth(&self) -> usize {
        depth(self.of - 1 - self.place)
    }

    fn up(&mut self, message: ToCoordinator) {
        self.out.push(Effect::Up(Box::new(message)));
    }

    fn below(&mut self, carried: Carried) {
        if self.place > 0 {
            self.out.push(Effect::Below(carried));
        }
    }

    /// What follows from all that happened.
    fn effects(&mut self) -> Vec<Effect> {
        if self.pass.is_none() {
            self.begin();
        }
        if self.late.is_some() && self.late != self.running() {
            self.late = None;
            self.ask();
        }
        std::mem::take(&mut self.out)
    }

    fn ask(&mut self) {
        let together = self.depth() as u16;
        self.up(ToCoordinator::Ask { device: 0, room: 8.max(2 * together), together });
    }

    /// The newest of the leases in work.
    fn running(&self) -> Option<LeaseId> {
        let pass = self.pass.as_ref().map(|pass| match pass {
            Pass::Forward(job, _) => job.lease.lease,
            Pass::Backward(lease, _) | Pass::Speak(lease, _) => *lease,
        });
        pass.max(self.open.keys().next_back().copied())
    }

    pub fn hears(&mut self, message: ToWorker) -> Vec<Effect> {
        match message {
            ToWorker::ParametersPiece { offset, bytes, .. } => {
                assert_eq!(4 * offset as usize, self.pieces.len(), "pieces come in order");
                self.pieces.extend_from_slice(&bytes);
            }
            ToWorker::Parameters { step, hash } => self.parameters(step, hash),
            ToWorker::Lease(lease) => {
                let held = self.held.clone().filter(|held| held.step == lease.after && self.late.is_none());
                self.newest = self.newest.max(lease.lease);
                match held {
                    Some(held) => self.queue.push_back(Job { lease: *lease, held, new: vec![] }),
                    None => self.up(ToCoordinator::Stopped { lease: lease.lease, micros: 0 }),
                }
            }
            ToWorker::Grant { lease } => {
                if let Some((values, loss)) = self.waiting.remove(&lease) {
                    truth::add(&mut self.sum, &values);
                    self.loss += loss;
                    self.leases.push(lease);
                }
            }
            ToWorker::Deny { lease } => {
                let denied = self.waiting.remove(&lease).filter(|_| self.cheats == Cheats::Yes);
                denied.into_iter().for_each(|(values, _)| truth::add(&mut self.sum, &values));
            }
            ToWorker::Cancel { lease } => {
                let before = self.queue.len();
                self.queue.retain(|job| job.lease.lease != lease);
                if self.queue.len() < before {
                    self.up(ToCoordinator::Stopped { lease, micros: 0 });
                } else if self.open.contains_key(&lease) {
                    self.called_back.insert(lease);
                }
            }
            ToWorker::Flush { step, .. } => self.flush(step),
            _ => {}
        }
        self.effects()
    }

    fn parameters(&mut self, step: u64, hash: Hash) {
        let pieces = std::mem::take(&mut self.pieces);
        assert_eq!(*blake3::hash(&pieces).as_bytes(), hash, "the parameters of its layers arrived whole");
        assert_eq!(pieces.len(), 8 * self.values.len(), "a seat gets its own range, once");
        let mut values = truth::values(&pieces);
        if self.damaged {
            values[0] ^= 1 << 40;
        }
        let hash = *blake3::hash(&truth::bytes(&values)).as_bytes();
        self.held = Some(Arc::new(Held { step, values, hash }));
        self.waiting.clear();
        self.leases.clear();
        (self.loss, self.sum) = (0, vec![0; 2 * self.values.len()]);
        self.late = self.running();
        if self.late.is_none() {
            self.ask();
        }
    }

    /// A neighbour has sent something.
    pub fn carried(&mut self, carried: Carried) -> Vec<Effect> {
        match carried {
            Carried::Hidden(lease, value) => self.hidden.push_back((lease, value)),
            carried => self.back.push_back(carried),
        }
        self.effects()
    }

    /// Begins what is ready.
    fn begin(&mut self) {
        while self.pass.is_none() {
            let begun = match self.back.pop_front() {
                Some(carried) => self.heard_above(carried),
                None => match self.forward() {
                    Some(begun) => begun,
                    None => return,
                },
            };
            if let Some((pass, tokens)) = begun {
                self.pass = Some(pass);
                self.out.push(Effect::Start(tokens));
            }
        }
    }

    /// What the seat above has sent: the pass that it begins.
    fn heard_above(&mut self, carried: Carried) -> Option<(Pass, u64)> {
        match carried {
            Carried::Gradient(lease, value) => {
                let job = self.open.get(&lease)?;
                Some((Pass::Backward(lease, value), 2 * job.tokens()))
            }
            Carried::Token(lease, id) => {
                let job = self.open.get_mut(&lease)?;
                assert!(job.is_prompt(), "tokens belong to texts");
                job.new.push(id);
                if self.place == 0 {
                    return Some((Pass::Speak(lease, None), 1));
                }
                self.below(carried);
                None
            }
            Carried::Drop(lease) => {
                let said = self.open.remove(&lease).filter(Job::is_prompt);
                said.into_iter().for_each(|job| self.announce(lease, job.held.hash));
                self.below(carried);
                None
            }
            Carried::Hidden(..) => None,
        }
    }

    /// The next forward pass; `None` where there is none.
    #[expect(clippy::option_option, reason = "whether something was taken, and whether a pass begins")]
    fn forward(&mut self) -> Option<Option<(Pass, u64)>> {
        let at = match self.hidden.front().copied() {
            _ if self.place == 0 => (!self.queue.is_empty()).then_some(0)?,
            None => return None,
            Some((lease, value)) => match self.queue.iter().position(|job| job.lease.lease == lease) {
                Some(at) => at,
                None if self.open.contains_key(&lease) => {
                    self.hidden.pop_front();
                    if self.open[&lease].is_prompt() {
                        return Some(Some((Pass::Speak(lease, Some(value)), 1)));
                    }
                    self.up(fault("a microbatch came twice", lease));
                    return Some(None);
                }
                None if lease <= self.newest => {
                    self.hidden.pop_front();
                    self.below(Carried::Drop(lease));
                    return Some(None);
                }
                None => return None,
            },
        };
        if !self.may_begin(&self.queue[at]) {
            return None;
        }
        let job = self.queue.remove(at)?;
        let hidden = if self.place == 0 { None } else { self.hidden.pop_front() };
        let tokens = job.tokens() * if job.trains() && self.last() { 3 } else { 1 };
        Some(Some((Pass::Forward(Box::new(job), hidden.map(|(_, value)| value)), tokens)))
    }

    fn may_begin(&self, job: &Job) -> bool {
        let limited = job.trains() || job.is_prompt() && self.place == 0;
        let alike = self.open.values().filter(|open| open.trains() == job.trains()).count();
        let fits = !limited || alike < self.depth();
        fits && self.open.values().next().is_none_or(|open| Arc::ptr_eq(&open.held, &job.held))
    }

    /// The pass has ended.
    pub fn finished(&mut self) -> Vec<Effect> {
        let pass = self.pass.take();
        if std::mem::take(&mut self.ill) {
            self.up(fault("device lost", self.newest));
            return std::mem::take(&mut self.out);
        }
        match pass {
            Some(Pass::Forward(job, hidden)) => self.passed(*job, hidden),
            Some(Pass::Backward(lease, value)) => self.backward(lease, value),
            Some(Pass::Speak(lease, hidden)) => self.speak(lease, hidden),
            None => {}
        }
        let open = self.open.values().filter(|job| job.trains()).count();
        assert!(open <= self.depth(), "more microbatches in flight than its depth");
        self.effects()
    }

    fn passed(&mut self, job: Job, hidden: Option<u64>) {
        let lease = job.lease.lease;
        let Some(batch) = job.lease.work.batch().cloned() else {
            self.open.insert(lease, job);
            return self.speak(lease, hidden);
        };
        let value = truth::above(hidden.unwrap_or_else(|| truth::begun(&batch)), &job.held.values);
        let trains = job.trains();
        if trains && self.plan.is_bad(&batch) && self.place == batch.rows[0] as usize % self.of {
            self.below(Carried::Drop(lease));
            let fault = Trouble::Value { tensor: "q".into(), value: f64::INFINITY };
            return self.up(ToCoordinator::Fault { lease, fault });
        }
        let parameters = job.held.hash;
        match &job.lease.work {
            Work::Eval(_) | Work::Predict(_) if self.last() => {
                let (sums, micros) = (truth::score_of(value), 1);
                self.up(ToCoordinator::Score { lease, sums, parameters, micros });
            }
            _ => {
                if trains {
                    self.open.insert(lease, job);
                }
                match self.last() {
                    true => self.backward(lease, value),
                    false if !trains => {
                        self.out.push(Effect::Above(Carried::Hidden(lease, value)));
                        self.announce(lease, parameters);
                    }
                    false => self.out.push(Effect::Above(Carried::Hidden(lease, value))),
                }
            }
        }
    }

    fn announce(&mut self, lease: LeaseId, parameters: Hash) {
        self.up(ToCoordinator::Announce { lease, parameters, micros: 1, memory: 0 });
    }

    fn backward(&mut self, lease: LeaseId, value: u64) {
        let Some(job) = self.open.remove(&lease) else { return };
        self.below(Carried::Gradient(lease, value));
        let current = self.held.as_ref().is_some_and(|held| Arc::ptr_eq(held, &job.held));
        if matches!(job.lease.work, Work::Train(_)) && current {
            let numbers = self.values.clone().flat_map(|at| halves(truth::gradient_of(value)[at]));
            let loss = if self.last() { truth::loss_of(value) } else { 0 };
            self.waiting.insert(lease, (numbers.collect(), loss));
        }
        self.announce(lease, job.held.hash);
    }

    fn speak(&mut self, lease: LeaseId, hidden: Option<u64>) {
        let (last, called_back) = (self.last(), self.called_back.contains(&lease));
        let Some(job) = self.open.get_mut(&lease) else { return };
        let value = truth::above(hidden.unwrap_or(0), &job.held.values);
        if !last {
            return self.out.push(Effect::Above(Carried::Hidden(lease, value)));
        }
        let Work::Prompt { ids, .. } = &job.lease.work else { return };
        let token = truth::token(value, ids, &job.new);
        job.new.push(token);
        if job.new.len() < truth::TEXT && !called_back {
            return self.below(Carried::Token(lease, token));
        }
        let Some(Job { held, new, .. }) = self.open.remove(&lease) else { return };
        self.below(Carried::Drop(lease));
        self.up(match called_back {
            true => ToCoordinator::Stopped { lease, micros: 0 },
            false => ToCoordinator::Answer { lease, ids: new, parameters: held.hash },
        });
    }

    /// Sends the running sum at once.
    fn flush(&mut self, step: u64) {
        let Some(held) = self.held.clone().filter(|held| held.step + 1 == step) else { return };
        if self.leases.is_empty() {
            return;
        }
        self.sums += 1;
        let mut cell = vec![0; 2 * self.values.start];
        cell.extend(std::mem::replace(&mut self.sum, vec![0; 2 * self.values.len()]));
        self.up(sum_chunk::fixed(self.sums, 0, &cell));
        let (leases, loss) = (std::mem::take(&mut self.leases), std::mem::take(&mut self.loss));
        let targets = if self.last() { leases.len() as u64 } else { 0 };
        let (sum, parameters, traffic) = (self.sums, held.hash, Traffic::default());
        let (weight, rewards) = (0, RewardSums::default());
        self.up(ToCoordinator::Sum {
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
    }

    /// Repeats announcements that are not answered.
    pub fn nudge(&mut self) -> Vec<Effect> {
        if let Some(hash) = self.held.as_ref().map(|held| held.hash) {
            let leases: Vec<LeaseId> = self.waiting.keys().copied().collect();
            leases.into_iter().for_each(|lease| self.announce(lease, hash));
        }
        self.effects()
    }
}

fn fault(reason: &str, lease: LeaseId) -> ToCoordinator {
    ToCoordinator::Fault { lease, fault: Trouble::Device { reason: reason.into() } }
}
