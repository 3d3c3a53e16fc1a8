//! A complete run, accumulated from its events, for pictures and the page: every step is kept, in order. Running
//! numbers (pace, time left, shares of devices) are in [`Progress`].

use super::progress::Progress;
use crate::train::event::{
    Change, Done, Eval, Event, Halt, LineFormed, Part, Rewards, RunStart, Sample, Seat, SeatPart, Shared,
    Step,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Number of steps that the lanes show; device activity of earlier steps is dropped.
pub const LANE_STEPS: usize = 24;
/// Limit for stored changes of workers and devices: unknown peers can cause any number of changes.
const MOST_CHANGES: usize = 4096;

/// The state of a run so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct History {
    /// The last start or resume.
    pub start: Option<RunStart>,
    /// All steps.
    pub steps: Vec<Point>,
    /// All evaluations.
    pub evals: Vec<Eval>,
    /// All answers to prompts.
    pub samples: Vec<Sample>,
    /// Changes of workers and devices.
    pub changes: Vec<Change>,
    /// Why the run halted.
    pub halt: Option<Halt>,
    /// Workers that hold the model together, by their name as one worker.
    pub lines: BTreeMap<String, LineFormed>,
    /// The lanes of seats, also of earlier splits: the line, and the name of the lane.
    seat_lanes: BTreeSet<(String, String)>,
    /// How the run ended.
    pub done: Option<Done>,
    /// Pairs of worker and device, in the order of their first activity.
    pub devices: Vec<(String, String)>,
    /// The last value of each running number.
    pub progress: Progress,
    /// Index in [`History::changes`] at which the changes of the current process begin.
    since: usize,
    /// Number of changes at the last event that was not a change.
    quiet: usize,
}

/// A history that grows while others read it: a reader takes a snapshot and does not block the writer.
#[derive(Debug, Clone, Default)]
pub struct Live(Arc<Mutex<Arc<History>>>);

impl Live {
    /// A history that begins with the events of a resumed run.
    pub fn of(events: &[Event]) -> Self {
        Live(Arc::new(Mutex::new(Arc::new(History::of(events)))))
    }

    /// Adds an event.
    pub fn see(&self, event: &Event) {
        Arc::make_mut(&mut self.lock()).see(event);
    }

    /// A snapshot.
    pub fn now(&self) -> Arc<History> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Arc<History>> {
        // A panic while the lock is held leaves valid numbers.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One step of the curves.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    /// Step number, from 1.
    pub step: u64,
    /// Training loss.
    pub loss: f64,
    /// Training loss, averaged over about ten steps.
    pub smooth: f64,
    /// L2 norm of the gradient, before clipping.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Mean rewards of the answers, where a loss compares them.
    pub rewards: Rewards,
    /// All tokens of the step over its wall time.
    pub tokens_per_second: f64,
    /// Wall time of the step in seconds.
    pub seconds: f64,
    /// Wall time of all earlier steps in seconds.
    pub began: f64,
    /// Seconds at the start of the step in which parameters were in transit and no device computed.
    pub parameters: f64,
    /// Seconds at the end of the step in which sums were in transit and no device computed.
    pub sync: f64,
    /// Work of each device, by its index in [`History::devices`]; only for the last `LANE_STEPS` steps.
    pub parts: Vec<(usize, Part)>,
}

/// State of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunState {
    /// No event has arrived.
    Waiting,
    /// The run takes steps.
    Running,
    /// The run waits for devices.
    Paused,
    /// The run took all its steps.
    Complete,
    /// A signal, or a lack of devices, ended the run; its state is saved.
    Stopped,
    /// A value that is not finite or out of range ended the run.
    Halted,
    /// Another error ended the run.
    Failed,
}

impl RunState {
    /// The state in one word.
    pub fn word(self) -> &'static str {
        match self {
            RunState::Waiting => "waiting",
            RunState::Running => "running",
            RunState::Paused => "paused",
            RunState::Complete => "complete",
            RunState::Stopped => "stopped",
            RunState::Halted => "halted",
            RunState::Failed => "failed",
        }
    }
}

impl History {
    /// The history of `events`.
    pub fn of(events: &[Event]) -> Self {
        let mut history = History::default();
        events.iter().for_each(|event| history.see(event));
        history
    }

    /// Adds an event.
    pub fn see(&mut self, event: &Event) {
        self.progress.see(event);
        match event {
            Event::Run(run) => self.begin(run),
            Event::Step(step) => self.step(step),
            Event::Eval(eval) => self.evals.push(eval.clone()),
            Event::Sample(sample) => self.samples.push(sample.clone()),
            Event::Device(change) => self.change(change),
            Event::Best(_) | Event::Early(_) => {} // handled by Progress
            Event::Checkpoint(_) | Event::Speed(_) | Event::Forecast(_) => {}
            Event::Line(formed) => {
                let lanes = formed.seats.iter().map(|seat| (formed.worker.clone(), lane(seat)));
                self.seat_lanes.extend(lanes);
                self.lines.insert(formed.worker.clone(), formed.clone());
            }
            Event::Fault(halt) => self.halt = Some(halt.clone()),
            Event::Done(done) => self.done = Some(done.clone()),
        }
        if !matches!(event, Event::Device(_)) {
            self.quiet = self.changes.len();
        }
    }

    /// Starts a process. Workers that joined after the last other event belong to this process; earlier ones do not.
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
        let parts = shared.map_or_else(|| self.alone(step), |s| self.lanes(s));
        let parts = parts.into_iter().map(|part| (self.place(&part), part)).collect();
        self.steps.push(Point {
            step: step.step,
            loss: step.loss,
            smooth: self.progress.smooth_loss().unwrap_or(step.loss),
            grad_norm: step.grad_norm,
            lr: step.lr,
            rewards: step.rewards,
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

    /// The work of each device; of workers that hold the model together, that of each worker.
    fn lanes(&self, shared: &Shared) -> Vec<Part> {
        let seats = |part: &Part| -> Vec<Part> {
            let line = shared.lines.iter().find(|line| line.worker == part.worker);
            let seats = line.iter().flat_map(|line| &line.seats);
            let of = |seat: &SeatPart| Part {
                device: self.seat(&part.worker, &seat.worker).unwrap_or_else(|| seat.worker.clone()),
                microbatches: seat.microbatches,
                busy: seat.busy,
                spans: seat.spans.clone(),
                ..part.clone()
            };
            let seats: Vec<Part> = seats.map(of).collect();
            if seats.is_empty() { vec![part.clone()] } else { seats }
        };
        shared.devices.iter().flat_map(seats).collect()
    }

    /// The name of the lane of a worker's seat in a line.
    fn seat(&self, line: &str, worker: &str) -> Option<String> {
        self.lines.get(line)?.seats.iter().find(|seat| seat.worker == worker).map(lane)
    }

    /// Whether a lane is that of a seat of this line.
    pub fn is_seat(&self, line: &str, lane: &str) -> bool {
        self.seat_lanes.contains(&(line.to_owned(), lane.to_owned()))
    }

    /// The work of a single device in one process, which has no worker name.
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

    /// Whether one device in one process does all the work.
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

    /// The current state.
    pub fn state(&self) -> RunState {
        use crate::train::event::What;
        let changes = &self.changes[self.since..];
        let waits = changes.iter().rev().find_map(|c| match c.what {
            What::Paused | What::Waiting => Some(true),
            What::Resumed => Some(false),
            _ => None,
        });
        match (&self.start, &self.halt, &self.done) {
            (_, Some(halt), _) => match halt.code {
                3 => RunState::Halted,
                75 => RunState::Stopped,
                _ => RunState::Failed,
            },
            (_, _, Some(done)) if done.complete => RunState::Complete,
            (_, _, Some(_)) => RunState::Stopped,
            (None, ..) => RunState::Waiting,
            _ if waits == Some(true) && self.changes.last().is_some_and(|c| c.step >= self.progress.step) => {
                RunState::Paused
            }
            _ => RunState::Running,
        }
    }

    /// The evaluation with the lowest loss; the first one if several are equal.
    pub fn best_eval(&self) -> Option<&Eval> {
        self.evals.iter().min_by(|a, b| a.eval_loss.total_cmp(&b.eval_loss))
    }

    /// The text of a start note with first word `name`: `model`, `output`.
    pub fn note(&self, name: &str) -> Option<&str> {
        let notes = &self.start.as_ref()?.notes;
        notes.iter().find_map(|note| Some(note.strip_prefix(name)?.trim())).filter(|text| !text.is_empty())
    }

    /// The times at which a worker joined and left, in seconds of the run; None if it joined earlier, or has not left.
    pub fn presence(&self, worker: &str) -> (Option<f64>, Option<f64>) {
        use crate::train::event::What;
        let (mut from, mut to) = (None, None);
        for change in self.changes[self.since..].iter().filter(|c| c.worker == worker) {
            // A change after a step belongs to the next step.
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

    /// All workers of the current process with their devices, by name.
    pub fn members(&self) -> BTreeMap<&str, Member<'_>> {
        use crate::train::event::What;
        let mut members: BTreeMap<&str, Member> = BTreeMap::new();
        for (worker, device) in &self.devices {
            members.entry(worker).or_default().devices.push(device);
        }
        for change in self.changes[self.since..].iter().filter(|c| !c.worker.is_empty()) {
            // A peer that was refused is not a member.
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

/// A worker, as known from events.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Member<'a> {
    /// Devices of the worker that did work.
    pub devices: Vec<&'a str>,
    /// True once the worker left, was lost or was removed.
    pub gone: bool,
    /// Reason for leaving.
    pub reason: &'a str,
}
/// The name of the lane of a seat: its worker and layers.
fn lane(seat: &Seat) -> String {
    format!("{}, {}", seat.worker, seat.range())
}
