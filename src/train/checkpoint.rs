//! What a run is between two steps, and how it is kept.

use super::error::TrainError;
use super::event::Event;
use super::optim::{AdamW, Options};
use std::path::{Path, PathBuf};

/// A run between two steps. Together with model, rows and configuration it decides everything that follows.
#[derive(Debug, Clone, PartialEq)]
pub struct State {
    /// Optimizer steps taken.
    pub step: u64,
    /// Trained values in the flat layout.
    pub parameters: Vec<f32>,
    /// Moments.
    pub optimizer: AdamW,
    /// Step and eval events so far.
    pub history: Vec<Event>,
    /// The step after which evaluation and prompts were last done.
    pub looked: Option<u64>,
    /// Numeric classes that took part so far.
    pub classes: Vec<String>,
}

impl State {
    /// Before the first step.
    pub fn new(parameters: Vec<f32>, options: Options) -> Self {
        let optimizer = AdamW::new(options, parameters.len());
        State { step: 0, parameters, optimizer, history: Vec::new(), looked: None, classes: Vec::new() }
    }
}

/// Writes a PEFT adapter of the given parameters into a directory; an error is one line.
pub type WriteAdapter<'a> = &'a dyn Fn(&Path, &[f32]) -> Result<(), String>;

/// When and how checkpoints are written.
pub struct Saving<'a> {
    /// OUT: checkpoints are `OUT/checkpoint-{step}`.
    pub output: PathBuf,
    /// A checkpoint every so many steps; 0 for none but the last.
    pub every: u64,
    /// How many stay; the oldest goes once a new one is safe.
    pub limit: Option<usize>,
    /// Names what a checkpoint may be resumed with: (name, value) pairs of model, rows and every option that
    /// changes the numbers.
    pub identity: Vec<(String, String)>,
    /// Writes the adapter.
    pub adapter: WriteAdapter<'a>,
    /// The newest one of this run.
    pub last: Option<(u64, PathBuf)>,
}

impl Saving<'_> {
    /// The newest checkpoint of this run.
    pub fn newest(&self) -> Option<PathBuf> {
        self.last.as_ref().map(|(_, path)| path.clone())
    }

    /// Writes a checkpoint of `state`; None where that step has one.
    pub fn write(&mut self, state: &State) -> Result<Option<PathBuf>, TrainError> {
        if self.last.as_ref().is_some_and(|(step, _)| *step == state.step) {
            return Ok(None);
        }
        let path = self.output.join(format!("checkpoint-{}", state.step));
        self.last = Some((state.step, path.clone()));
        Ok(Some(path))
    }
}
