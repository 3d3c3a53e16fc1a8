//! What a run is between two steps, and how it is kept: `OUT/checkpoint-{step}/` holds the PEFT adapter, the
//! moments, `trainer_state.json` for people and tools, and `run_state.json`, which says what it may be resumed
//! with. `blake3sums` names every file with its hash; a directory that does not match it is no checkpoint.
//!
//! A checkpoint appears whole or not at all, and older ones go only after it is safe: whatever fails, the
//! previous one survives.

mod identity;
mod read;
mod write;

pub use identity::{Identity, OTHER_STEPS, differences};
pub use read::{Checkpoint, find, recover};
pub use write::Saving;

use super::best::Best;
use super::event::Event;
use super::optim::{AdamW, Options};
use serde_json::{Value, json};

const MOMENTS: &str = "optimizer.safetensors";
const TRAINER_STATE: &str = "trainer_state.json";
const RUN_STATE: &str = "run_state.json";
const SUMS: &str = "blake3sums";
const ADAPTER: &str = crate::format::peft::WEIGHTS;

/// A run between two steps. Together with model, rows and configuration it decides everything that follows.
#[derive(Debug, Clone, PartialEq)]
pub struct State {
    /// Optimizer steps taken.
    pub step: u64,
    /// Trained values in the flat layout.
    pub parameters: Vec<f32>,
    /// Moments.
    pub optimizer: AdamW,
    /// `log_history` as transformers' trainer_state.json has it.
    pub history: Vec<Value>,
    /// The step after which evaluation and prompts were last done.
    pub looked: Option<u64>,
    /// Numeric classes that took part so far.
    pub classes: Vec<String>,
    /// The best evaluation so far, where that decides anything.
    pub best: Option<Best>,
}

impl State {
    /// Before the first step.
    pub fn new(parameters: Vec<f32>, options: Options) -> Self {
        let optimizer = AdamW::new(options, parameters.len());
        let (history, classes) = (Vec::new(), Vec::new());
        State { step: 0, parameters, optimizer, history, looked: None, classes, best: None }
    }

    /// Adds steps and evaluations to the history; other events leave no trace in it.
    pub fn remember(&mut self, event: &Event, steps_per_epoch: u64) {
        let epoch = event.step() as f64 / steps_per_epoch.max(1) as f64;
        match event {
            Event::Step(e) => self.history.push(json!({
                "epoch": epoch, "grad_norm": e.grad_norm, "learning_rate": e.lr, "loss": e.loss, "step": e.step,
            })),
            Event::Eval(e) => {
                let mut entry = json!({ "epoch": epoch, "eval_loss": e.eval_loss, "step": e.step });
                for (name, score) in [("eval_accuracy", e.accuracy), ("eval_macro_f1", e.macro_f1)] {
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
