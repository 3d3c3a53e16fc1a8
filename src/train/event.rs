//! The run speaks once: these are all that it says. metrics.jsonl is this stream, one JSON object a line with
//! its kind under `event`; terminal, page and report are pure functions of it, so an event carries whatever
//! they need and nothing that only one of them would want.

use super::best::Best;
use crate::model::memory::Used;
use crate::model::stage::Traffic;
use crate::numeric::line::{Line, Points};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// One thing that happened, in the order in which it happened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event {
    /// The run begins or goes on; always first.
    Run(RunStart),
    /// An optimizer step was taken.
    Step(Step),
    /// The model was scored on the evaluation rows.
    Eval(Eval),
    /// The best evaluation so far; again where a run that keeps it is resumed.
    Best(Best),
    /// The model answered a prompt.
    Sample(Sample),
    /// A checkpoint is safe on disk.
    Checkpoint(Saved),
    /// A worker or one of its devices came, went or changed.
    Device(Change),
    /// What a device was measured to need.
    Speed(Speed),
    /// How fast and how long the run is expected to be.
    Forecast(Forecast),
    /// The run halts.
    Fault(Halt),
    /// The run takes no further step, because its evaluations got no better.
    Early(Early),
    /// The run ended; always last, unless it halted.
    Done(Done),
}

impl Event {
    /// The optimizer step that it belongs to: the last finished one; 0 before the first.
    pub fn step(&self) -> u64 {
        match self {
            Event::Run(e) => e.first_step.saturating_sub(1),
            Event::Step(e) => e.step,
            Event::Eval(e) => e.step,
            Event::Best(e) => e.step,
            Event::Sample(e) => e.step,
            Event::Checkpoint(e) => e.step,
            Event::Device(e) => e.step,
            Event::Speed(e) => e.step,
            Event::Forecast(e) => e.step,
            Event::Fault(e) => e.step,
            Event::Early(e) => e.step,
            Event::Done(e) => e.step,
        }
    }
}

/// What is about to be trained on what.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RunStart {
    /// Optimizer steps of the whole run.
    pub total_steps: u64,
    /// Steps of one pass over the rows.
    pub steps_per_epoch: u64,
    /// The step that comes next: 1, or the one after a checkpoint's.
    pub first_step: u64,
    /// Rows that are trained on.
    pub rows: u64,
    /// Rows that are scored at every evaluation.
    pub eval_rows: u64,
    /// Trained values.
    pub parameters: u64,
    /// Numeric classes that take part, those of now last; two only where a checkpoint came from another one.
    pub classes: Vec<String>,
    /// Names of a classifier's classes, by their number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<String>,
    /// Lines about the run that its starter wants shown (model, counts of truncated and dropped rows ...).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// One optimizer step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// From 1.
    pub step: u64,
    /// Mean over the supervised targets of the step, before its update.
    pub loss: f64,
    /// L2 norm over the whole flat layout, before clipping.
    pub grad_norm: f64,
    /// Learning rate of this update.
    pub lr: f64,
    /// Supervised targets (for a classifier: rows) of this step.
    pub tokens: u64,
    /// All tokens of this step.
    pub total_tokens: u64,
    /// Wall time of this step.
    pub seconds: f64,
    /// Passes over the rows when it ended; 1.5 is the middle of the second.
    pub epoch: f64,
    /// How it was shared out; None where one device did it all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<Shared>,
    /// When the one device computed each microbatch, a pair of seconds since it was given the step's work, cut off to
    /// milliseconds; of several devices, [`Shared`] says it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spans: Vec<(f64, f64)>,
    /// What went to the device and back for all its microbatches; None of what computes in place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic: Option<Traffic>,
    /// Bytes of memory that the process of the run holds; None where its system does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
}

/// How the microbatches of a step were shared out, and what that cost.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Shared {
    /// Microbatches that count, by the numeric class that computed them.
    pub classes: BTreeMap<String, u64>,
    /// What each device did.
    pub devices: Vec<Part>,
    /// Microbatches that were given to a second device because it should have finished first.
    pub repeats: u64,
    /// Microbatches that a device was told to stop working on.
    pub cancels: u64,
    /// Tokens that were computed for nothing.
    pub wasted_tokens: u64,
    /// Seconds in which sums or parameters were under way.
    pub sync_seconds: f64,
    /// The part of them in which some device computed.
    pub hidden_seconds: f64,
    /// Another part: from the parameters' leaving, before the first microbatch, to the first device that has them.
    #[serde(default)]
    pub parameter_seconds: f64,
    /// Bytes of sums that arrived.
    pub bytes_in: u64,
    /// Bytes of parameters that were sent.
    pub bytes_out: u64,
}

/// What the coordinator's own process is called where it computes too.
pub const HERE: &str = "here";

/// A device's part in a step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// Its worker's name.
    pub worker: String,
    /// Its own.
    pub device: String,
    /// Its microbatches that count.
    pub microbatches: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Seconds that it computed, what did not count included.
    pub busy: f64,
    /// When, a pair of seconds for each microbatch, since the step's work was given out; rounded to milliseconds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spans: Vec<(f64, f64)>,
}

/// One evaluation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Eval {
    /// Steps that were taken before it.
    pub step: u64,
    /// Sum of losses over sum of weights, dropout off.
    pub eval_loss: f64,
    /// exp(eval_loss); None for a classifier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<f64>,
    /// Share of rows whose most probable class is right.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// Mean F1 over the classes that occur, as scikit-learn's `f1_score(average="macro")` has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub macro_f1: Option<f64>,
    /// Rows of class i that were called j; None for a language model, and above 100 classes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confusion: Option<Vec<Vec<u64>>>,
    /// Supervised targets (for a classifier: rows).
    pub tokens: u64,
    /// Wall time.
    pub seconds: f64,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Steps that were taken before it.
    pub step: u64,
    /// As it was typed.
    pub prompt: String,
    /// What the model added.
    pub text: String,
}

/// A checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    /// The last step that it contains.
    pub step: u64,
    /// Its directory.
    pub path: PathBuf,
}

/// What happened to a worker or a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum What {
    /// It takes part from now on.
    Joined,
    /// It left of its own will.
    Left,
    /// Its connection ended, or it fell silent.
    Lost,
    /// It may not take part.
    Refused,
    /// It was taken out for a wrong result.
    Expelled,
    /// It computes on another backend now.
    Fallback,
    /// It gave an error: what it did is done again.
    Failed,
    /// The run has not begun: it waits for devices.
    Waiting,
    /// Too few are left: the run waits.
    Paused,
    /// Enough are there (again).
    Resumed,
    /// Something worth knowing about who takes part.
    Note,
}

/// A worker or a device changed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// Steps that were taken before it.
    pub step: u64,
    /// What happened.
    pub what: What,
    /// The worker's name; empty where the run as a whole is meant.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub worker: String,
    /// Its devices that this is about, with their numeric classes: `cpu 0 (cpu-avx512-f32)`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<String>,
    /// Why, in one line.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// What a device was measured to need for training microbatches: when it was admitted, and so far.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Speed {
    /// Steps that were taken before it.
    pub step: u64,
    /// The worker's name; empty where one device does it all.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub worker: String,
    /// Its own.
    pub device: String,
    /// Its numeric class.
    pub class: String,
    /// Seconds that a microbatch takes by its tokens: the line of least squares.
    pub line: Line,
    /// What it was fitted to: microbatches, their tokens and seconds.
    pub points: Points,
    /// Of them, those that were computed for nothing but this measurement.
    #[serde(default)]
    pub trials: u64,
    /// How it is reached, where it is on another machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<Link>,
    /// What they took of its memory; None where nobody counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Used>,
}

/// A network between a worker and its coordinator.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Bytes a second.
    pub bandwidth: f64,
    /// Seconds there and back.
    pub round_trip: f64,
}

/// What is expected of a run, or of what is left of it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Forecast {
    /// Steps that were taken before it.
    pub step: u64,
    /// All tokens of its steps over their wall time.
    pub tokens_per_second: f64,
    /// Wall time from the beginning of the process's work to the end.
    pub seconds: f64,
    /// How good that is: `measured`, `scaled by FLOPs`, `a guess`.
    pub basis: String,
    /// What each device should take of its memory, where that is known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory: Vec<Takes>,
}

/// What a device should take of its memory.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Takes {
    /// The worker's name; empty where one device does it all.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub worker: String,
    /// Its own.
    pub device: String,
    /// Bytes in use at once, without the frozen weights, for the longest microbatch of the run.
    pub bytes: u64,
    /// How good that is: `measured`, `scaled` from what was measured elsewhere, `estimated`.
    pub basis: String,
}

/// Why a run halts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Halt {
    /// The last finished step.
    pub step: u64,
    /// The exit code: 3 for a value that is not finite or out of range, 75 where the state is saved and the run can
    /// go on, 1 otherwise.
    #[serde(default = "failure")]
    pub code: u8,
    /// One line.
    pub reason: String,
}

fn failure() -> u8 {
    1
}

/// Why a run ends before its last step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Early {
    /// The last step that was taken.
    pub step: u64,
    /// Evaluations since the best one.
    pub evals: u64,
}

/// The end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Done {
    /// Steps that were taken, those before a resume included.
    pub step: u64,
    /// False where a signal ended the run before its last step.
    pub complete: bool,
    /// Where the adapter (of a stopped run: the checkpoint) lies.
    pub path: PathBuf,
    /// Wall time since the run began, or went on.
    pub seconds: f64,
}

/// What two runs of several numeric classes have in common.
pub fn mixed<'a>(classes: impl IntoIterator<Item = &'a String>) -> String {
    let names: Vec<&str> = classes.into_iter().map(String::as_str).collect();
    let (n, names) = (names.len(), names.join(", "));
    format!("bits: {n} classes ({names}): loss within 1 %, not byte-equal between runs")
}

/// What one worker has done of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Share {
    /// Steps that the run has taken.
    pub step: u64,
    /// Steps of the whole run.
    pub steps: u64,
    /// This worker's microbatches that count.
    pub microbatches: u64,
    /// Their tokens.
    pub tokens: u64,
}
