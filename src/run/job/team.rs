//! Who computes a run, as the run sees it.

use super::Job;
use crate::config::refusal::Refusal;
use crate::train::event::{Change, Takes};
use crate::train::{Compute, Finished};
use std::path::Path;

/// Who computes a run.
pub trait Team {
    /// Numeric classes that are known before the first step.
    fn classes(&self) -> Vec<String>;

    /// Gives the loop somebody who computes.
    fn train(&mut self, run: Steps) -> Result<Finished, Refusal>;

    /// What the devices of this process are called in events, and which hardware each is.
    fn hardware(&self) -> Vec<(String, String)>;

    /// What the one device of it should take of its memory, where that is known before it is measured.
    fn takes(&self) -> Option<Takes> {
        None
    }

    /// What is to be said of the others once the last step is done.
    fn remarks(&self) -> Vec<Change> {
        vec![]
    }

    /// Refuses an adapter whose values on disk are not those in memory, as far as this team can tell.
    fn compare(&mut self, job: &Job, values: Values, dir: &Path) -> Result<(), Refusal>;
}

/// The loop, which only wants to know who computes.
pub type Steps<'a> = &'a mut dyn FnMut(&mut dyn Compute) -> Result<Finished, Refusal>;

/// An adapter's values twice.
pub struct Values<'a> {
    /// As the run holds them.
    pub memory: &'a [f32],
    /// As they were written and read back.
    pub disk: &'a [f32],
}
