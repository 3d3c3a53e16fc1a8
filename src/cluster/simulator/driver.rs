//! The coordinator around the machine: it carries out actions as the real driver does, and checks every result. A
//! violation panics; the seed is named with it.

use super::super::machine::{
    Action, Config, Event, Finding, Kind, Machine, MemberId, Note, Purpose, Round, Tally,
};
use super::super::message::{Lease, Packed, ToCoordinator, ToWorker, Work};
use super::Micros;
use super::truth::{self, Plan, Values, WIDTH};
use crate::model::stage::{LossSums, Microbatch, Sampling};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// The state that survives a killed coordinator.
#[derive(Debug, Clone)]
pub struct Disk {
    pub epoch: u64,
    pub step: u64,
    pub parameters: Values,
    /// Parameters before the last step.
    pub before: Values,
}

/// The actions that the world carries out.
pub enum Act {
    Send(MemberId, ToWorker),
    Close(MemberId),
    /// The driver is busy for a while with a checkpoint.
    Busy,
}

/// The state of the run.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    Running,
    Done(Values),
    Halted(Finding),
    Disputed,
    GaveUp,
}

/// The work of the round.
enum Task {
    Train(Vec<Microbatch>),
    Eval(Vec<Microbatch>),
    Prompt(Vec<Vec<u32>>),
}

impl Task {
    fn work(&self, item: usize, purpose: Purpose) -> Work {
        match (self, purpose) {
            (Task::Train(b) | Task::Eval(b), Purpose::Recheck) => Work::Recheck(b[item].clone()),
            (Task::Train(b), Purpose::Verify) => Work::Verify(b[item].clone()),
            (Task::Train(b), Purpose::Round) => Work::Train(b[item].clone()),
            (Task::Eval(b), _) => Work::Eval(b[item].clone()),
            (Task::Prompt(p), _) => {
                let sampling =
                    Sampling { max_new_tokens: 1, temperature: 0.0, top_p: 1.0, seed: 0, stop: vec![] };
                Work::Prompt { ids: p[item].clone(), sampling }
            }
        }
    }

    fn round(&self) -> Round {
        let tokens = |b: &[Microbatch]| b.iter().map(|b| b.ids.len() as u64).collect();
        match self {
            Task::Train(b) => Round::of(Kind::Train, tokens(b)),
            Task::Eval(b) => Round::of(Kind::Eval, tokens(b)),
            Task::Prompt(p) => Round::of(Kind::Prompt, p.iter().map(|p| p.len() as u64).collect()),
        }
    }
}

/// Added pieces of an unfinished sum, to be subtracted if it stays incomplete.
type Pieces = Vec<(usize, Vec<i64>)>;

pub struct Driver {
    pub machine: Machine,
    plan: Plan,
    pub disk: Disk,
    step: u64,
    parameters: Values,
    /// Parameters before the last step.
    before: Values,
    /// Members that have the parameters of both steps.
    served: BTreeSet<MemberId>,
    /// The microbatches of the next step, once it has begun.
    ahead: Vec<Microbatch>,
    /// Rounds of this step that are still to come.
    tasks: VecDeque<Task>,
    task: Task,
    total: Values,
    loss: i128,
    targets: u64,
    arriving: BTreeMap<(MemberId, u64), Pieces>,
    /// Loss and targets of complete sums.
    claims: BTreeMap<(MemberId, u64), (i128, u64)>,
    unhashed: Vec<(MemberId, u64)>,
    /// Whether a sum may be wrong, because not everything is checked.
    pub tolerates: bool,
    results: BTreeMap<usize, Result>,
    pub outcome: Outcome,
    /// Records for the tests.
    pub tallies: Vec<(Kind, Tally)>,
    pub notes: Vec<(Micros, Note)>,
    pub acts: Vec<Act>,
}

#[derive(Debug, PartialEq)]
enum Result {
    Score(LossSums),
    Answer(Vec<u32>),
}

impl Driver {
    /// Starts, or restarts from the state on the disk.
    pub fn new(plan: &Plan, config: Config, mut disk: Disk, now: Micros) -> Self {
        disk.epoch += 1;
        let mut driver = Driver {
            machine: Machine::new(config),
            plan: plan.clone(),
            step: disk.step,
            parameters: disk.parameters,
            before: disk.before,
            served: BTreeSet::new(),
            ahead: vec![],
            disk,
            tasks: VecDeque::new(),
            task: Task::Prompt(vec![]),
            total: [0; WIDTH],
            loss: 0,
            targets: 0,
            arriving: BTreeMap::new(),
            claims: BTreeMap::new(),
            unhashed: vec![],
            tolerates: false,
            results: BTreeMap::new(),
            outcome: Outcome::Running,
            tallies: vec![],
            notes: vec![],
            acts: vec![],
        };
        if driver.is_delayed() {
            let hash = truth::hash(&driver.before);
            driver.event(Event::Parameters { after: driver.step - 1, hash }, now);
        }
        driver.step_begins(now);
        driver
    }

    /// Applies an event and all that follows from it.
    pub fn event(&mut self, event: Event, now: Micros) {
        if self.outcome != Outcome::Running {
            return;
        }
        let message = match &event {
            Event::Said { member, message } => Some((*member, *message)),
            _ => None,
        };
        let actions = self.machine.tick(event, Duration::from_micros(now));
        self.machine.check();
        for action in actions {
            self.act(action, message, now);
        }
        for (member, sum) in std::mem::take(&mut self.unhashed) {
            let mut values = [0; WIDTH];
            let pieces = &self.arriving[&(member, sum)];
            pieces.iter().for_each(|(offset, part)| truth::add(&mut values[*offset..], part));
            let digest = truth::digest(&values, self.claims[&(member, sum)].0);
            self.event(Event::Hashed { member, sum, digest }, now);
        }
    }

    /// Pieces of a member's sums.
    fn arrived(&self, key: (MemberId, u64)) -> usize {
        self.arriving.get(&key).iter().flat_map(|p| p.iter()).map(|p| p.1.len()).sum()
    }

    /// A message, as the link passes it to the driver.
    pub fn hears(&mut self, member: MemberId, message: &ToCoordinator, now: Micros) {
        if let ToCoordinator::SumPiece { sum, offset, packed: Packed::Fixed(bytes), .. } = message {
            if !self.machine.wants_sum(member, *sum) {
                return;
            }
            self.event(Event::Said { member, message }, now);
            let (offset, values, key) = (*offset as usize, truth::values(bytes), (member, *sum));
            if offset == 0 && self.arrived(key) == WIDTH {
                self.take_back(key);
            }
            truth::add(&mut self.total[offset..], &values);
            return self.arriving.entry(key).or_default().push((offset, values));
        }
        if let ToCoordinator::Sum { sum, loss, targets, .. } = message {
            if self.machine.wants_sum(member, *sum) && self.arrived((member, *sum)) != WIDTH {
                let reason = "its sum is not whole".to_string();
                return self.event(Event::Misbehaved { member, reason }, now);
            }
            if self.machine.wants_sum(member, *sum) {
                self.claims.insert((member, *sum), (*loss, *targets));
            }
        }
        self.event(Event::Said { member, message }, now);
    }

    fn act(&mut self, action: Action, message: Option<(MemberId, &ToCoordinator)>, now: Micros) {
        match action {
            Action::SendParameters { member } => self.send_parameters(member),
            Action::Lease { device, lease, item, purpose } => {
                let (task, count) = (&self.task, self.task.round().tokens.len());
                let older = u64::from(self.is_delayed() && task.round().kind == Kind::Train);
                let (after, of, work) = match item.checked_sub(count) {
                    None => (self.step - older, count as u32, task.work(item, purpose)),
                    Some(at) => (self.step, self.ahead.len() as u32, Work::Train(self.ahead[at].clone())),
                };
                let lease = Lease { lease, device: device.index, after, of, work };
                self.acts.push(Act::Send(device.member, ToWorker::Lease(Box::new(lease))));
            }
            Action::Hash { member, sum } => self.unhashed.push((member, sum)),
            Action::Say { member, message } => self.acts.push(Act::Send(member, message)),
            Action::Close { member } => self.acts.push(Act::Close(member)),
            Action::TakeSum { member, sum } => {
                assert_eq!(self.arrived((member, sum)), WIDTH, "a whole sum is taken");
                self.arriving.remove(&(member, sum));
                let (loss, targets) = self.claims.remove(&(member, sum)).expect("its end has arrived");
                self.loss += loss;
                self.targets += targets;
            }
            Action::TakeResult { item } => {
                let result = match message {
                    Some((_, ToCoordinator::Score { sums, .. })) => Result::Score(sums.clone()),
                    Some((_, ToCoordinator::Answer { ids, .. })) => Result::Answer(ids.clone()),
                    _ => panic!("a result is taken in its own tick"),
                };
                assert!(self.results.insert(item, result).is_none(), "item {item} came twice");
            }
            Action::TakeBack { member } => {
                let keys: Vec<_> = self.arriving.keys().copied().filter(|key| key.0 == member).collect();
                keys.into_iter().for_each(|key| self.take_back(key));
            }
            Action::RoundDone(tally) => self.round_is_done(tally, now),
            Action::Dispute { .. } => self.outcome = Outcome::Disputed,
            Action::Halt(finding) => self.outcome = Outcome::Halted(finding),
            Action::GiveUp { .. } => self.outcome = Outcome::GaveUp,
            Action::Note(note) => self.notes.push((now, note)),
        }
    }

    fn take_back(&mut self, key: (MemberId, u64)) {
        self.claims.remove(&key);
        for (offset, values) in self.arriving.remove(&key).unwrap_or_default() {
            truth::subtract(&mut self.total[offset..], &values);
        }
    }

    /// Whether a step is computed with other parameters than the newest.
    fn is_delayed(&self) -> bool {
        self.plan.delay > 0 && self.step > 0
    }

    fn send_parameters(&mut self, member: MemberId) {
        let older = self.served.insert(member) && self.is_delayed();
        let older = older.then(|| (self.step - 1, self.before));
        for (step, values) in older.into_iter().chain([(self.step, self.parameters)]) {
            let (bytes, hash) = (truth::bytes(&values).into(), truth::hash(&values));
            self.acts.push(Act::Send(member, ToWorker::ParametersPiece { step, offset: 0, bytes }));
            self.acts.push(Act::Send(member, ToWorker::Parameters { step, hash }));
        }
    }

    /// Queues the rounds under the current parameters: an evaluation and prompts at some steps, then the training
    /// step.
    fn step_begins(&mut self, now: Micros) {
        if self.evaluates_after(self.step) {
            self.tasks.push_back(Task::Eval(self.plan.eval(self.step)));
            let prompts = (0..self.plan.prompts).map(|i| self.plan.prompt(i)).collect();
            self.tasks.push_back(Task::Prompt(prompts));
        }
        if self.step < self.plan.steps {
            self.tasks.push_back(Task::Train(self.plan.train(self.step + 1)));
        }
        let hash = truth::hash(&self.parameters);
        self.event(Event::Parameters { after: self.step, hash }, now);
        self.next_round(now);
    }

    fn evaluates_after(&self, step: u64) -> bool {
        step.is_multiple_of(3) && self.plan.evals > 0
    }

    /// The microbatches of the step that is computed beside the next one; none if an evaluation comes between them.
    fn step_ahead(&self) -> Vec<Microbatch> {
        let step = self.step + 1;
        let begins = self.plan.delay > 0 && step < self.plan.steps && !self.evaluates_after(step);
        if begins { self.plan.train(step + 1) } else { Vec::new() }
    }

    fn next_round(&mut self, now: Micros) {
        self.ahead.clear();
        (self.total, self.loss, self.targets) = ([0; WIDTH], 0, 0);
        self.results.clear();
        match self.tasks.pop_front() {
            Some(task) => {
                let mut round = task.round();
                if round.kind == Kind::Train {
                    self.ahead = self.step_ahead();
                    round.ahead = self.ahead.iter().map(|b| b.ids.len() as u64).collect();
                }
                self.task = task;
                self.event(Event::Begin(round), now);
            }
            None => self.outcome = Outcome::Done(self.parameters),
        }
    }

    /// The oracle: the result of the round equals that of a single worker.
    fn round_is_done(&mut self, tally: Tally, now: Micros) {
        assert!(self.arriving.values().all(Vec::is_empty), "nothing is half taken at the end of a round");
        let parameters = self.parameters;
        let (kind, counted) = (self.task.round().kind, tally.classes.values().sum::<u64>());
        assert_eq!(counted, self.task.round().tokens.len() as u64, "every item once, in the tally too");
        match &self.task {
            Task::Train(batches) => {
                let with = if self.is_delayed() { &self.before } else { &parameters };
                let (sum, loss) = self.plan.whole(with, self.step + 1);
                assert_eq!(self.targets, batches.len() as u64, "every microbatch once");
                let equal = (self.total, self.loss) == (sum, loss);
                assert!(equal || self.tolerates, "the step's sums are one worker's");
            }
            Task::Eval(batches) => {
                let all = batches.iter().map(|b| Result::Score(truth::score(&parameters, b)));
                assert!(all.eq(std::mem::take(&mut self.results).into_values()), "scores are one worker's");
            }
            Task::Prompt(prompts) => {
                let all = prompts.iter().map(|p| Result::Answer(truth::answer(&parameters, p)));
                assert!(all.eq(std::mem::take(&mut self.results).into_values()), "answers are one worker's");
            }
        }
        self.tallies.push((kind, tally));
        if kind == Kind::Train {
            self.before = parameters;
            self.parameters = truth::stepped(&parameters, &self.total);
            self.step += 1;
            if self.step.is_multiple_of(2) {
                let Driver { step, parameters, before, .. } = *self;
                self.disk = Disk { epoch: self.disk.epoch, step, parameters, before };
                self.acts.push(Act::Busy);
            }
            return self.step_begins(now);
        }
        self.next_round(now);
    }
}
