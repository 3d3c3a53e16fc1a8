//! A whole run, folded out of its events, for pictures and the page: every step is kept, in order. Running numbers
//! (pace, time left, shares of devices) are in [`Progress`].

use super::progress::Progress;
use crate::train::event::{Change, Done, Eval, Event, Halt, Part, RunStart, Sample, Step};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Steps that lanes show: what devices did in earlier ones is not kept.
pub const LANE_STEPS: usize = 24;
/// The newest changes of workers and devices that are kept: strangers can cause any number.
const MOST_CHANGES: usize = 4096;

/// A run so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct History {
    /// How it began, or went on last.
    pub start: Option<RunStart>,
    /// Every step.
    pub steps: Vec<Point>,
    /// Every evaluation.
    pub evals: Vec<Eval>,
    /// Every answer.
    pub samples: Vec<Sample>,
    /// Changes of workers and devices.
    pub changes: Vec<Change>,
    /// Why it halted.
    pub halt: Option<Halt>,
    /// How it ended.
    pub done: Option<Done>,
    /// Devices, as worker and device, in the order in which they first did something.
    pub devices: Vec<(String, String)>,
    /// The last value of every running number.
    pub progress: Progress,
    /// Where in [`History::changes`] the process that computes now begins, should it be one that went on.
    since: usize,
    /// How many changes there were when something other than a change was heard last.
    quiet: usize,
}

/// A history that grows while others read it: a reader takes a snapshot and blocks nothing.
#[derive(Debug, Clone, Default)]
pub struct Live(Arc<Mutex<Arc<History>>>);

impl Live {
    /// Begins with the events of a run that is resumed.
    pub fn of(events: &[Event]) -> Self {
        Live(Arc::new(Mutex::new(Arc::new(History::of(events)))))
    }

    /// Takes one more event into account.
    pub fn see(&self, event: &Event) {
        Arc::make_mut(&mut self.lock()).see(event);
    }

    /// As it stands.
    pub fn now(&self) -> Arc<History> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Arc<History>> {
        // A panic leaves numbers that are still right.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One step, as curves see it.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    /// From 1.
    pub step: u64,
    /// As it was.
    pub loss: f64,
    /// Over about ten steps.
    pub smooth: f64,
    /// L2, before clipping.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// All tokens over wall time.
    pub tokens_per_second: f64,
    /// Wall time of the step.
    pub seconds: f64,
    /// Wall time of all steps before it.
    pub began: f64,
    /// Seconds of parameters under way before anybody computed: they begin a step.
    pub parameters: f64,
    /// Seconds of sums under way while nobody computed: they end it.
    pub sync: f64,
    /// What each device did, by its place in [`History::devices`]; of the last `LANE_STEPS` steps.
    pub parts: Vec<(usize, Part)>,
}

/// Where a run stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Nothing was heard of it yet.
    Waiting,
    /// It takes steps.
    Running,
    /// It waits for devices.
    Paused,
    /// It took all its steps.
    Complete,
    /// A signal, or too few devices, ended it; its state is saved.
    Stopped,
    /// A value that is not finite or out of range ended it.
    Halted,
    /// Something else ended it.
    Failed,
}

impl State {
    /// One word.
    pub fn word(self) -> &'static str {
        match self {
            State::Waiting => "waiting",
            State::Running => "running",
            State::Paused => "paused",
            State::Complete => "complete",
            State::Stopped => "stopped",
            State::Halted => "halted",
            State::Failed => "failed",
        }
    }
}

impl History {
    /// Of all events.
    pub fn of(events: &[Event]) -> Self {
        let mut history = History::default();
        events.iter().for_each(|event| history.see(event));
        history
    }

    /// Takes one more event into account.
    pub fn see(&mut self, event: &Event) {
        self.progress.see(event);
        match event {
            Event::Run(run) => self.begin(run),
            Event::Step(step) => self.step(step),
            Event::Eval(eval) => self.evals.push(eval.clone()),
            Event::Sample(sample) => self.samples.push(sample.clone()),
            Event::Device(change) => self.change(change),
            Event::Best(_) | Event::Early(_) => {} // the progress knows them
            Event::Checkpoint(_) | Event::Speed(_) | Event::Forecast(_) => {}
            Event::Fault(halt) => self.halt = Some(halt.clone()),
            Event::Done(done) => self.done = Some(done.clone()),
        }
        if !matches!(event, Event::Device(_)) {
            self.quiet = self.changes.len();
        }
    }

    /// A process begins to compute. Whoever joined before it took a step is with it; whoever was with one before it
    /// is not.
    fn begin(&mut self, run: &RunStart) {
        self.start = Some(run.clone());
        (self.halt, self.done) = (None, None);
        self.since = self.quiet;
        self.devices.clear();
        self.steps.iter_mut().for_each(|point| point.parts = Vec::new());
    }

    fn step(&mut self, step: &Step) {
        let began = self.steps.last().map_or(0.0, |p| p.began + p.seconds);
        let shared = step.shared.as_ref();
        let parts = shared.map_or_else(|| self.alone(step), |s| s.devices.clone());
        let parts = parts.into_iter().map(|part| (self.place(&part), part)).collect();
        self.steps.push(Point {
            step: step.step,
            loss: step.loss,
            smooth: self.progress.smooth_loss().unwrap_or(step.loss),
            grad_norm: step.grad_norm,
            lr: step.lr,
            tokens_per_second: step.total_tokens as f64 / step.seconds.max(1e-9),
            seconds: step.seconds,
            began,
            parameters: shared.map_or(0.0, |s| s.parameter_seconds.max(0.0)),
            sync: shared.map_or(0.0, |s| (s.sync_seconds - s.hidden_seconds - s.parameter_seconds).max(0.0)),
            parts,
        });
        if let Some(old) = self.steps.len().checked_sub(LANE_STEPS + 1) {
            self.steps[old].parts = Vec::new();
        }
    }

    /// The part of the one device that did it all, which has no worker's name.
    fn alone(&self, step: &Step) -> Vec<Part> {
        if step.spans.is_empty() {
            return Vec::new();
        }
        let classes = self.start.as_ref().map(|start| &start.classes);
        let device = classes.and_then(|classes| classes.last().cloned()).unwrap_or_default();
        vec![Part {
            worker: String::new(),
            device,
            microbatches: step.spans.len() as u64,
            tokens: step.total_tokens,
            busy: step.spans.iter().map(|(from, to)| to - from).sum(),
            spans: step.spans.clone(),
        }]
    }

    /// Whether one device in one process does it all.
    pub fn is_alone(&self) -> bool {
        self.devices.iter().all(|(worker, _)| worker.is_empty())
    }

    fn change(&mut self, change: &Change) {
        if self.changes.len() >= 2 * MOST_CHANGES {
            self.changes.drain(..MOST_CHANGES);
            self.since = self.since.saturating_sub(MOST_CHANGES);
            self.quiet = self.quiet.saturating_sub(MOST_CHANGES);
        }
        self.changes.push(change.clone());
    }

    fn place(&mut self, part: &Part) -> usize {
        let name = (part.worker.clone(), part.device.clone());
        self.devices.iter().position(|known| *known == name).unwrap_or_else(|| {
            self.devices.push(name);
            self.devices.len() - 1
        })
    }

    /// Where it stands.
    pub fn state(&self) -> State {
        use crate::train::event::What;
        let changes = &self.changes[self.since..];
        let waits = changes.iter().rev().find_map(|c| match c.what {
            What::Paused | What::Waiting => Some(true),
            What::Resumed => Some(false),
            _ => None,
        });
        match (&self.start, &self.halt, &self.done) {
            (_, Some(halt), _) => match halt.code {
                3 => State::Halted,
                75 => State::Stopped,
                _ => State::Failed,
            },
            (_, _, Some(done)) if done.complete => State::Complete,
            (_, _, Some(_)) => State::Stopped,
            (None, ..) => State::Waiting,
            _ if waits == Some(true) && self.changes.last().is_some_and(|c| c.step >= self.progress.step) => {
                State::Paused
            }
            _ => State::Running,
        }
    }

    /// The evaluation with the lowest loss, the first of several.
    pub fn best_eval(&self) -> Option<&Eval> {
        self.evals.iter().min_by(|a, b| a.eval_loss.total_cmp(&b.eval_loss))
    }

    /// What a note of the start says, by its first word: `model`, `output`.
    pub fn note(&self, name: &str) -> Option<&str> {
        let notes = &self.start.as_ref()?.notes;
        notes.iter().find_map(|note| Some(note.strip_prefix(name)?.trim())).filter(|text| !text.is_empty())
    }

    /// From when until when a worker was there, in seconds of the run; None where that was before or is not over.
    pub fn presence(&self, worker: &str) -> (Option<f64>, Option<f64>) {
        use crate::train::event::What;
        let (mut from, mut to) = (None, None);
        for change in self.changes[self.since..].iter().filter(|c| c.worker == worker) {
            // What happened after a step happened in the next one.
            let began = || {
                let next = self.steps.get(self.steps.partition_point(|p| p.step <= change.step));
                next.map_or_else(|| self.steps.last().map_or(0.0, |p| p.began + p.seconds), |p| p.began)
            };
            match change.what {
                What::Joined if to.is_some() || from.is_none() => (from, to) = (Some(began()), None),
                What::Left | What::Lost | What::Expelled => to = Some(began()),
                _ => {}
            }
        }
        (from, to)
    }

    /// Whoever takes part now, by worker, with its devices.
    pub fn members(&self) -> BTreeMap<&str, Member<'_>> {
        use crate::train::event::What;
        let mut members: BTreeMap<&str, Member> = BTreeMap::new();
        for (worker, device) in &self.devices {
            members.entry(worker).or_default().devices.push(device);
        }
        for change in self.changes[self.since..].iter().filter(|c| !c.worker.is_empty()) {
            // Who only knocked is no member.
            let known = match change.what {
                What::Joined => Some(members.entry(&change.worker).or_default()),
                _ => members.get_mut(change.worker.as_str()),
            };
            let Some(member) = known else { continue };
            match change.what {
                What::Joined => (member.gone, member.reason) = (false, ""),
                What::Left | What::Lost | What::Expelled | What::Refused => {
                    (member.gone, member.reason) = (true, &change.reason);
                }
                _ => {}
            }
        }
        members
    }
}

/// A worker, as far as events tell.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Member<'a> {
    /// Its devices that did something.
    pub devices: Vec<&'a str>,
    /// True once it left, was lost or was taken out.
    pub gone: bool,
    /// Why.
    pub reason: &'a str,
}
