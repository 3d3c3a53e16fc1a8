//! The interface of a run to the devices that compute it.

use super::Job;
use crate::config::refusal::Refusal;
use crate::train::event::{Change, Takes};
use crate::train::{Compute, Finished};
use std::path::Path;

/// The devices that compute a run.
pub trait Team {
    /// Numeric classes that are known before the first step.
    fn classes(&self) -> Vec<String>;

    /// Runs the training loop with this team's computation.
    fn train(&mut self, run: Steps) -> Result<Finished, Refusal>;

    /// Name in events and hardware of each device of this process.
    fn hardware(&self) -> Vec<(String, String)>;

    /// Estimated memory of the team's only device, where known before measurement.
    fn takes(&self) -> Option<Takes> {
        None
    }

    /// Notes about other machines after the last step.
    fn remarks(&self) -> Vec<Change> {
        vec![]
    }

    /// Refuses an adapter whose values on disk differ from those in memory, as far as this team can compare them.
    fn compare(&mut self, job: &Job, values: Values, dir: &Path) -> Result<(), Refusal>;
}

/// The training loop, generic over the computation.
pub type Steps<'a> = &'a mut dyn FnMut(&mut dyn Compute) -> Result<Finished, Refusal>;

/// An adapter's values from two sources.
pub struct Values<'a> {
    /// The values in the run's memory.
    pub memory: &'a [f32],
    /// The values written and read back.
    pub disk: &'a [f32],
}
