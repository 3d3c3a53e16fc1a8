//! The devices that compute a run, and what is known of them before the first step.

use crate::train::Compute;
use crate::train::event::Takes;

/// The devices that compute a run.
pub struct Team<'a> {
    /// Computes the steps.
    pub compute: &'a mut dyn Compute,
    /// Numeric classes that are known before the first step.
    pub classes: Vec<String>,
    /// Name in events and hardware of each device of this process.
    pub hardware: Vec<(String, String)>,
    /// Estimated memory of the only device, where known before measurement.
    pub takes: Option<Takes>,
}
