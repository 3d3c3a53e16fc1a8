//! The source of gradients: one model in this process ([`super::Local`]), or a coordinator with any number of devices.
//! The training loop asks for exact sums and does not depend on the number of devices, so step, optimizer, checkpoints
//! and events have the same code and the same bits in both cases.

use super::error::TrainError;
use super::event::{Change, Event, Shared, Speed};
use super::island::Island;
use super::optimizer_step::Stretch;
use super::sum::Sums;
use crate::model::layout::Layout;
use crate::model::stage::{LossSums, Microbatch, Sampling, Traffic};

/// Receives the events of a call.
pub type Say<'a> = &'a mut dyn FnMut(Event);

/// The microbatches of an evaluation, made on demand: the rows are not copied at once.
pub struct Scoring<'a> {
    /// Number of microbatches.
    pub count: usize,
    /// Whether the most probable tokens are asked for.
    pub predict: bool,
    /// Makes the microbatch with the given index.
    pub batch: &'a dyn Fn(usize) -> Microbatch,
    /// Receives the index, the microbatch and its sums exactly once each, in any order.
    pub each: &'a mut dyn FnMut(usize, &Microbatch, &LossSums) -> Result<(), TrainError>,
}

/// The interface between the training loop and models. Every call returns `None` if a signal ended it; partial results
/// are then dropped.
pub trait Compute {
    /// The flat parameter vector.
    fn layout(&self) -> &Layout;

    /// Numeric classes that take part, sorted; more classes may join later.
    fn classes(&self) -> Vec<String>;

    /// Announces parameters that [`Compute::set_parameters`] will set, in order, while the others are still being
    /// computed, so that a slow network transfer can begin early. Announced values have no effect before that call; the
    /// first stretch starts over. Changes are those of the parameters that were set last.
    fn parameters_ahead(&mut self, _step: u64, _stretch: Stretch) {}

    /// Sets the parameters after `step` steps for all later calls; moments for islands may follow them.
    fn set_parameters(&mut self, step: u64, flat: &[f32]) -> Result<Option<()>, TrainError>;

    /// Announces the microbatches of the step after the next call of [`Compute::gradients`]: they may be computed during
    /// that call with the parameters that were set last. Only where steps are delayed, and if no other call comes between
    /// both steps' gradients but that which sets parameters.
    fn ahead(&mut self, _work: Vec<Microbatch>) {}

    /// Replaces the contents of `sums` by gradient and loss of `work`, the microbatches of `step`: each microbatch is
    /// added exactly once. Where steps are delayed, the gradient of step s is that of the parameters after step s - 2, or of
    /// the initial ones.
    fn gradients(
        &mut self,
        step: u64,
        work: &[Microbatch],
        sums: &mut Sums,
        say: Say,
    ) -> Result<Option<Effort>, TrainError>;

    /// Replaces the contents of `sums` by the results of islands, each exactly once. The parameters were set with their
    /// moments, as [`super::island::vectors`]; `last` is the last step of the islands.
    fn islands(
        &mut self,
        last: u64,
        work: &[Island],
        sums: &mut Sums,
        say: Say,
    ) -> Result<Option<Effort>, TrainError>;

    /// Scores an evaluation after `step` steps.
    fn losses(&mut self, step: u64, scoring: Scoring, say: Say) -> Result<Option<()>, TrainError>;

    /// Continues a prompt after `step` steps.
    fn answer(
        &mut self,
        step: u64,
        prompt: &[u32],
        sampling: &Sampling,
        say: Say,
    ) -> Result<Option<Vec<u32>>, TrainError>;

    /// Notes about other machines after the last step.
    fn remarks(&self) -> Vec<Change> {
        Vec::new()
    }

    /// Measured costs of the devices so far, if any were measured.
    fn speeds(&self, _step: u64) -> Vec<Speed> {
        Vec::new()
    }
}

/// Costs of a step other than time.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Effort {
    /// Distribution over devices; None if one device did all the work.
    pub shared: Option<Shared>,
    /// Start and end of each microbatch on the only device, in seconds since the start of the step's work.
    pub spans: Vec<(f64, f64)>,
    /// Transfers between host and device; None for a backend that computes in host memory.
    pub traffic: Option<Traffic>,
}
