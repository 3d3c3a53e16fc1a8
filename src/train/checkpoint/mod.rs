//! The state of a run between two steps, and its files: `OUT/checkpoint-{step}/` contains the PEFT adapter, the
//! moments, `trainer_state.json` for users and tools, and `run_state.json` with the [`Identity`] that a resume must
//! match. `blake3sums` contains the hash of every file; a directory that does not match it is not a checkpoint.
//!
//! Behind the steps the state is also written into a [`Journal`].
//!
//! A checkpoint is written completely or not at all, and older ones are removed only after it is safe: after any
//! failure the previous checkpoint still exists.

mod identity;
mod journal;
mod read;
mod write;

pub use identity::{DELAY, Identity, OTHER_STEPS, OUTER_MOMENTUM, differences};
pub use journal::Journal;
pub use read::{Checkpoint, find, is_one, newest_adapter, recover};
pub use write::Saving;

use super::best::Best;
use super::event::Event;
use super::optim::{AdamW, Options};
use serde_json::{Value, json};

/// Folder of the step journal in the folder of a run.
pub const JOURNAL: &str = "journal";
const MOMENTS: &str = "optimizer.safetensors";
/// Tensor of [`State::before`] in that file.
const BEFORE: &str = "parameters_before";
const TRAINER_STATE: &str = "trainer_state.json";
const RUN_STATE: &str = "run_state.json";
const SUMS: &str = "blake3sums";
const ADAPTER: &str = crate::format::peft::WEIGHTS;

/// A run between two steps. Together with model, rows and configuration it determines all later steps.
#[derive(Debug, Clone, PartialEq)]
pub struct State {
    /// Optimizer steps taken.
    pub step: u64,
    /// Trained values in the flat layout.
    pub parameters: Vec<f32>,
    /// Moments of the optimizer.
    pub optimizer: AdamW,
    /// Velocity of the outer optimizer of islands, in the flat layout; empty without its momentum.
    pub velocity: Vec<f32>,
    /// Trained values before the last step, if gradients are delayed; else empty.
    pub before: Vec<f32>,
    /// `log_history` in the format of transformers' trainer_state.json.
    pub history: Vec<Value>,
    /// The last step whose evaluation and prompts are complete.
    pub looked: Option<u64>,
    /// Numeric classes that have taken part.
    pub classes: Vec<String>,
    /// The best evaluation so far, if it decides anything.
    pub best: Option<Best>,
}

impl State {
    /// The state before the first step.
    pub fn new(parameters: Vec<f32>, options: Options) -> Self {
        let optimizer = AdamW::new(options, parameters.len());
        let (history, classes) = (Vec::new(), Vec::new());
        State {
            step: 0,
            parameters,
            optimizer,
            velocity: Vec::new(),
            before: Vec::new(),
            history,
            looked: None,
            classes,
            best: None,
        }
    }

    /// Adds steps and evaluations to the history; other events are not recorded.
    pub fn remember(&mut self, event: &Event, steps_per_epoch: u64) {
        let epoch = event.step() as f64 / steps_per_epoch.max(1) as f64;
        match event {
            Event::Step(e) => self.history.push(json!({
                "epoch": epoch, "grad_norm": e.grad_norm, "learning_rate": e.lr, "loss": e.loss, "step": e.step,
            })),
            Event::Eval(e) => {
                let mut entry = json!({ "epoch": epoch, "eval_loss": e.eval_loss, "step": e.step });
                let scores =
                    [("eval_accuracy", e.accuracy), ("eval_macro_f1", e.macro_f1), ("eval_f1", e.f1)];
                for (name, score) in scores {
                    if let Some(score) = score {
                        entry[name] = json!(score);
                    }
                }
                self.history.push(entry);
            }
            _ => {}
        }
    }
}
