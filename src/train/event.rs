//! The events of a run. metrics.jsonl is this stream, one JSON object per line with its kind under `event`; terminal
//! output, page and report are pure functions of it. An event carries what these need, and nothing that only one of
//! them needs.

use super::best::Best;
use crate::model::memory::Used;
use crate::model::stage::Traffic;
use crate::numeric::line::{Line, Points};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// One event of a run; events come in the order in which they happen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event {
    /// The run starts or resumes; always the first event.
    Run(RunStart),
    /// An optimizer step was taken.
    Step(Step),
    /// The model was scored on the evaluation rows.
    Eval(Eval),
    /// A new best evaluation; repeated when a run with a best evaluation is resumed.
    Best(Best),
    /// The model answered a prompt.
    Sample(Sample),
    /// A checkpoint is safe on disk.
    Checkpoint(Saved),
    /// A worker or a device joined, left or changed.
    Device(Change),
    /// Workers hold the model together from now on.
    Line(LineFormed),
    /// Measured costs of a device.
    Speed(Speed),
    /// Expected speed and duration of the run.
    Forecast(Forecast),
    /// The run halts.
    Fault(Halt),
    /// The run ends early, because its evaluations stopped improving.
    Early(Early),
    /// The run ended; always the last event, unless the run halted.
    Done(Done),
}

impl Event {
    /// The optimizer step of the event: the last finished one, or 0 before the first step.
    pub fn step(&self) -> u64 {
        match self {
            Event::Run(e) => e.first_step.saturating_sub(1),
            Event::Step(e) => e.step,
            Event::Eval(e) => e.step,
            Event::Best(e) => e.step,
            Event::Sample(e) => e.step,
            Event::Checkpoint(e) => e.step,
            Event::Device(e) => e.step,
            Event::Line(e) => e.step,
            Event::Speed(e) => e.step,
            Event::Forecast(e) => e.step,
            Event::Fault(e) => e.step,
            Event::Early(e) => e.step,
            Event::Done(e) => e.step,
        }
    }
}

/// The start of a run: sizes of model, data and plan.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RunStart {
    /// Optimizer steps of the whole run.
    pub total_steps: u64,
    /// Steps of one pass over the rows.
    pub steps_per_epoch: u64,
    /// The next step: 1, or the step after a checkpoint.
    pub first_step: u64,
    /// Number of training rows.
    pub rows: u64,
    /// Number of rows in each evaluation.
    pub eval_rows: u64,
    /// Number of trained values.
    pub parameters: u64,
    /// Numeric classes that have taken part, the current ones last.
    pub classes: Vec<String>,
    /// Class names of a classifier, in the order of the class numbers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<String>,
    /// Lines about the run for display (model, counts of truncated and dropped rows ...).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// One optimizer step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Step number, from 1.
    pub step: u64,
    /// Mean over the supervised targets of the step, before its update.
    pub loss: f64,
    /// L2 norm over the whole flat layout, before clipping.
    pub grad_norm: f64,
    /// Learning rate of this update.
    pub lr: f64,
    /// Rewards of the answers, where a loss compares them.
    #[serde(flatten)]
    pub rewards: Rewards,
    /// Share of pairs whose chosen answer has the higher reward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// Number of supervised targets (for a classifier: rows) in this step.
    pub tokens: u64,
    /// All tokens of this step.
    pub total_tokens: u64,
    /// Wall time of this step in seconds.
    pub seconds: f64,
    /// Passes over the rows at the end of the step; 1.5 is the middle of the second pass.
    pub epoch: f64,
    /// Distribution over devices; None if one device did all the work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<Shared>,
    /// Start and end of each microbatch on the only device, in seconds since the start of the step's work, rounded down
    /// to milliseconds. With several devices, [`Shared`] has these times.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spans: Vec<(f64, f64)>,
    /// Transfers between host and device for all microbatches; None for a backend that computes in host memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic: Option<Traffic>,
    /// Bytes of memory that the process holds; None if the system does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
}

/// Mean rewards of answers. All are absent where no loss compares answers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Rewards {
    /// Mean reward of the chosen answers, or of those that are wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rewards_chosen: Option<f64>,
    /// Mean reward of the other answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rewards_rejected: Option<f64>,
    /// The difference of the two.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub margin: Option<f64>,
    /// The lowest reward, where a head gives them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_reward: Option<f64>,
    /// The highest reward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_reward: Option<f64>,
}

/// Distribution of a step's microbatches over devices, and its costs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Shared {
    /// Microbatches that count, by numeric class.
    pub classes: BTreeMap<String, u64>,
    /// Work of each device.
    pub devices: Vec<Part>,
    /// The workers of those devices that are several workers together.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lines: Vec<LinePart>,
    /// Microbatches that were given to a second device because the first one was late.
    pub repeats: u64,
    /// Microbatches that a device was asked to stop computing.
    pub cancels: u64,
    /// Tokens of computations that do not count.
    pub wasted_tokens: u64,
    /// Seconds in which sums or parameters were in transit.
    pub sync_seconds: f64,
    /// The part of `sync_seconds` in which at least one device computed.
    pub hidden_seconds: f64,
    /// The part of `sync_seconds` from sending the parameters, before the first microbatch, to the first device that
    /// has them; 0 if devices computed meanwhile.
    #[serde(default)]
    pub parameter_seconds: f64,
    /// Bytes of received sums.
    pub bytes_in: u64,
    /// Bytes of sent parameters.
    pub bytes_out: u64,
}

/// Worker name of the coordinator's own process, if it also computes.
pub const HERE: &str = "here";

/// The work of a device in a step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// Name of the worker.
    pub worker: String,
    /// Name of the device.
    pub device: String,
    /// Microbatches that count.
    pub microbatches: u64,
    /// Tokens of these microbatches.
    pub tokens: u64,
    /// Seconds of computation, including work that does not count.
    pub busy: f64,
    /// Start and end of each microbatch, in seconds since the start of the step's work, rounded to milliseconds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spans: Vec<(f64, f64)>,
}

/// The work of workers that hold the model together, in a step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LinePart {
    /// Their name as one worker.
    pub worker: String,
    /// The workers, in the order of their layers.
    pub seats: Vec<SeatPart>,
}

/// The work of one of them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SeatPart {
    /// Name of the worker.
    pub worker: String,
    /// Name of its device.
    pub device: String,
    /// Microbatches of which it computed its layers.
    pub microbatches: u64,
    /// Seconds of computation.
    pub busy: f64,
    /// Start and end of each forward and backward pass, as in [`Part::spans`].
    pub spans: Vec<(f64, f64)>,
}

/// One evaluation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Eval {
    /// Steps taken before the evaluation.
    pub step: u64,
    /// Sum of losses over sum of weights, dropout off.
    pub eval_loss: f64,
    /// Rewards of the answers, where a loss compares them; the accuracy is below.
    #[serde(flatten)]
    pub rewards: Rewards,
    /// exp(eval_loss); None where no text is predicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<f64>,
    /// Share of rows or words whose most probable class is the label, or of pairs whose chosen answer has the higher
    /// reward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// Share of supervised tokens that are the most probable ones, where it is asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_accuracy: Option<f64>,
    /// Mean F1 over the classes that occur, as in scikit-learn's `f1_score(average="macro")`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub macro_f1: Option<f64>,
    /// F1 of the entities that classes of words mark, as seqeval computes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub f1: Option<f64>,
    /// Pearson's correlation of the outputs and the numbers that they should be, for a regression.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pearson: Option<f64>,
    /// Spearman's correlation of the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spearman: Option<f64>,
    /// Number of rows, or words, with label i and prediction j; None for a language model, and above 100 classes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confusion: Option<Vec<Vec<u64>>>,
    /// Number of supervised targets (for a classifier of rows: rows).
    pub tokens: u64,
    /// Scores of each named set of rows; the numbers above are those of the first one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sets: Vec<Set>,
    /// Wall time in seconds, for all sets.
    pub seconds: f64,
}

/// Scores of a named set of rows.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Set {
    /// Its name.
    pub name: String,
    /// As in [`Eval`].
    pub eval_loss: f64,
    /// As in [`Eval`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<f64>,
    /// As in [`Eval`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// As in [`Eval`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub macro_f1: Option<f64>,
    /// As in [`Eval`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub f1: Option<f64>,
    /// As in [`Eval`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_accuracy: Option<f64>,
    /// As in [`Eval`].
    pub tokens: u64,
}

impl Set {
    /// A set with the numbers of its evaluation.
    pub fn of(name: String, eval: &Eval) -> Self {
        let Eval { eval_loss, perplexity, accuracy, macro_f1, f1, token_accuracy, tokens, .. } = *eval;
        Set { name, eval_loss, perplexity, accuracy, macro_f1, f1, token_accuracy, tokens }
    }
}

/// The answer to a prompt, or to a row of the evaluation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Steps taken before the answer.
    pub step: u64,
    /// The prompt as the user typed it.
    pub prompt: String,
    /// The generated text.
    pub text: String,
    /// The answer in the row, for a row of the evaluation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
    /// Whether the text is that answer, apart from spaces at its ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub right: Option<bool>,
}

/// A checkpoint that was written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    /// The last step in the checkpoint.
    pub step: u64,
    /// Directory of the checkpoint.
    pub path: PathBuf,
}

/// The kinds of changes of a worker or a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum What {
    /// The worker takes part from now on.
    Joined,
    /// The worker left by itself.
    Left,
    /// The connection ended or timed out.
    Lost,
    /// The worker may not take part.
    Refused,
    /// The worker was removed because of a wrong result.
    Expelled,
    /// A device computes on another backend now.
    Fallback,
    /// A device failed; its work is repeated.
    Failed,
    /// The run has not begun: it waits for devices.
    Waiting,
    /// Too few devices are left: the run waits.
    Paused,
    /// Enough devices are present again.
    Resumed,
    /// Other information about workers.
    Note,
}

/// A change of a worker or a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// Steps taken before the change.
    pub step: u64,
    /// What happened.
    pub what: What,
    /// Name of the worker; empty if the change concerns the whole run.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub worker: String,
    /// The devices concerned, with their numeric classes: `cpu 0 (cpu-avx512-f32)`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<String>,
    /// Reason, in one line.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// Workers that hold the model together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LineFormed {
    /// Steps taken before.
    pub step: u64,
    /// Their name as one worker.
    pub worker: String,
    /// The workers, in the order of their layers.
    pub seats: Vec<Seat>,
    /// Bytes of hidden states, and of their gradients, that go from one to the next for a token.
    pub token_bytes: u64,
}

/// A worker that holds a part of the model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seat {
    /// Name of the worker.
    pub worker: String,
    /// Name of its device.
    pub device: String,
    /// Its first layer.
    pub first_layer: u64,
    /// Number of its layers.
    pub layers: u64,
    /// Number of those that it reads again for each pass.
    #[serde(default)]
    pub streamed: u64,
    /// Bytes of memory that it needs at least.
    pub memory: u64,
    /// Bytes of memory that it may use; `None` where unknown.
    pub limit: Option<u64>,
}

impl Seat {
    /// `layers 0 to 14`
    pub fn range(&self) -> String {
        match self.layers {
            1 => format!("layer {}", self.first_layer),
            layers => {
                format!("layers {} to {}", self.first_layer, (self.first_layer + layers).saturating_sub(1))
            }
        }
    }
}

/// Measured costs of training microbatches on a device: at its admission, and later with all microbatches so far.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Speed {
    /// Steps taken before the measurement.
    pub step: u64,
    /// Name of the worker; empty if one device does all the work.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub worker: String,
    /// Name of the device.
    pub device: String,
    /// Numeric class of the device.
    pub class: String,
    /// Fitted time of a microbatch: seconds as a linear function of its tokens (least squares).
    pub line: Line,
    /// The measured points: tokens and seconds of microbatches.
    pub points: Points,
    /// Number of these microbatches that were computed only for the measurement.
    #[serde(default)]
    pub trials: u64,
    /// The network to the device, if it is on another machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<Link>,
    /// Measured memory of these microbatches; None if the backend does not measure it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Used>,
}

/// The network between a worker and its coordinator.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Bytes per second.
    pub bandwidth: f64,
    /// Round-trip time in seconds.
    pub round_trip: f64,
}

/// Expected speed and duration of a run, or of its remaining steps.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Forecast {
    /// Steps taken before the forecast.
    pub step: u64,
    /// All tokens of the steps over their wall time.
    pub tokens_per_second: f64,
    /// Wall time from the start of the process's work to the end.
    pub seconds: f64,
    /// Source of the forecast: `measured`, `scaled by FLOPs`, `a guess`.
    pub basis: String,
    /// Expected memory of each device, if known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory: Vec<Takes>,
}

/// Expected memory of a device.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Takes {
    /// Name of the worker; empty if one device does all the work.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub worker: String,
    /// Name of the device.
    pub device: String,
    /// Peak bytes in use, without the frozen weights, for the longest microbatch of the run.
    pub bytes: u64,
    /// Source of the value: `measured`, `scaled` from measurements of other devices, `estimated`.
    pub basis: String,
}

/// Why a run halts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Halt {
    /// The last finished step.
    pub step: u64,
    /// Exit code: 3 for a value that is not finite or out of range, 75 if the state is saved and the run can be
    /// resumed, otherwise 1.
    #[serde(default = "failure")]
    pub code: u8,
    /// Reason, in one line.
    pub reason: String,
}

fn failure() -> u8 {
    1
}

/// Why a run ends before its last step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Early {
    /// The last step taken.
    pub step: u64,
    /// Evaluations since the best one.
    pub evals: u64,
}

/// The end of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Done {
    /// Steps taken, including those before a resume.
    pub step: u64,
    /// False if a signal ended the run before its last step.
    pub complete: bool,
    /// Path of the adapter; of the checkpoint if the run was stopped.
    pub path: PathBuf,
    /// Wall time since the start or the last resume.
    pub seconds: f64,
}

/// The line about a run with several numeric classes: how far two such runs agree.
pub fn mixed<'a>(classes: impl IntoIterator<Item = &'a String>) -> String {
    let names: Vec<&str> = classes.into_iter().map(String::as_str).collect();
    let (n, names) = (names.len(), names.join(", "));
    format!("bits: {n} classes ({names}): loss within 1 %, not byte-equal between runs")
}

/// The share of one worker in a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Share {
    /// Steps that the run has taken.
    pub step: u64,
    /// Steps of the whole run.
    pub steps: u64,
    /// Microbatches of this worker that count.
    pub microbatches: u64,
    /// Tokens of these microbatches.
    pub tokens: u64,
}
