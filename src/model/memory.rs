//! Estimates of the memory of a stage before anything is loaded, so that the policy for kept values is chosen first. A
//! dry run of the longest microbatch gives the bytes that the device has in use at once; the trainer's values for each
//! parameter are added. A backend keeps freed memory for the next microbatch, up to a quarter above its peak; its own
//! packing may add a few per cent. Where a device has computed microbatches of this model before, the line fitted to
//! its measured memory ([`Fit`]) replaces the figures, but no decision depends on it.

mod advice;
mod rehearsals;
mod streaming;

use super::config::Config;
use super::decoder::Keep;
use super::lora::LoraSpec;
pub use super::memory_fit::{Fit, InUse, Used};
use super::weights::{ModelError, Packed};
use crate::backend::Target;
use crate::numeric::line::Line;
pub use advice::{largest, least};
use rehearsals::{Again, Counts, FRUGAL, Rehearsals};
pub use streaming::{freed, needed};

/// Bytes by purpose.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Frozen weights, as the backend packs them.
    pub weights: u64,
    /// Adapter: parameters and gradient, and their transfer buffers; where the device computes in host memory, also the
    /// host's copies: parameters, two moments, the exact sum.
    pub adapter: u64,
    /// Values that blocks keep between forward and backward, and what further microbatches of a group hold.
    pub kept: u64,
    /// Working memory of one block or of the head.
    pub scratch: u64,
    /// Part of the total that the device has in use at once besides the weights; [`InUse`] measures the same.
    pub in_use: u64,
    /// Number of streamed layers, whose weights are not among `weights`, except for one layer at a time.
    pub streamed: usize,
    /// Most microbatches that go through streamed layers together.
    pub group: usize,
    /// Basis of the estimate.
    pub basis: Basis,
}

/// Basis of an estimate of memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Basis {
    /// A dry run.
    Counted,
    /// The line fitted to measurements.
    Measured(Line),
}

impl Basis {
    /// One-word name of the basis.
    pub fn word(self) -> &'static str {
        match self {
            Basis::Counted => "estimated",
            Basis::Measured(_) => "measured",
        }
    }

    /// The fitted line of a measured estimate.
    pub fn line(self) -> Option<Line> {
        match self {
            Basis::Measured(line) => Some(line),
            Basis::Counted => None,
        }
    }
}

impl Estimate {
    /// Total bytes.
    pub fn total(&self) -> u64 {
        self.weights + self.adapter + self.kept + self.scratch
    }
}

/// Input of an estimate: a model, and microbatches of up to `tokens` tokens.
#[derive(Debug, Clone, Copy)]
pub struct Load<'a> {
    /// The model.
    pub config: &'a Config,
    /// The trained adapter.
    pub lora: &'a LoraSpec,
    /// Tokens of the longest microbatch.
    pub tokens: usize,
    /// Bytes of the frozen weights, as the backend packs them: [`super::weights::Weights::packed`].
    pub weights: u64,
    /// Whether any weight is in blocks.
    pub quantised: bool,
    /// Bytes of the weights in NF4; `None` where they cannot be quantised or already are.
    pub nf4: Option<Packed>,
    /// The device.
    pub device: Target,
    /// Location of the device's memory.
    pub home: Home,
    /// Measured memory of the device, where available.
    pub measured: Option<Fit>,
    /// Which layers may be streamed.
    pub offload: Offload,
    /// Bytes of the weights of the smallest and of the largest layer, as the backend packs them.
    pub layer: (u64, u64),
    /// The layers of the device.
    pub part: Part,
    /// Most microbatches that may go through streamed layers together: those of a step, or 1. A team divides work by the
    /// time of each microbatch; in a group a microbatch has no time of its own.
    pub microbatches: usize,
}

/// The part of a model that a device holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Its first layer.
    pub from: usize,
    /// The layer after its last one.
    pub to: usize,
    /// Most passes that wait for their backward pass at the same time.
    pub depth: usize,
    /// Most microbatches that go through streamed layers together; at least 1.
    pub group: usize,
    /// Gradients that wait in host memory at the same time for those of other devices. They count where the device
    /// uses host memory.
    pub waiting: usize,
}

impl Part {
    /// The whole model on one device.
    fn whole(config: &Config) -> Self {
        Part { from: 0, to: config.layers, depth: 1, group: 1, waiting: 0 }
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.to - self.from
    }
}

/// Layers whose weights are read again in each pass instead of being kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offload {
    /// As few as make the model fit, and more where that makes room for a group of microbatches that saves time.
    Auto,
    /// None.
    Never,
    /// That many, the lowest ones.
    Layers(usize),
}

impl Offload {
    /// Fewest and most layers that are streamed on a device that has `layers`.
    pub fn of(self, layers: usize) -> (usize, usize) {
        match self {
            Offload::Auto => (0, layers),
            Offload::Never => (0, 0),
            Offload::Layers(count) => (count.min(layers), count.min(layers)),
        }
    }
}

impl<'a> Load<'a> {
    /// A load in f32 on the CPU, without measurements.
    pub fn of(config: &'a Config, lora: &'a LoraSpec, tokens: usize, weights: u64) -> Self {
        let device = Target::default();
        let (quantised, nf4, home, measured) = (false, None, Home::Host, None);
        let (offload, layer, part, microbatches) = (Offload::Never, (0, 0), Part::whole(config), 1);
        Load {
            config,
            lora,
            tokens,
            weights,
            quantised,
            nf4,
            device,
            home,
            measured,
            offload,
            layer,
            part,
            microbatches,
        }
    }

    /// The load of a device that holds `part` alone, whose weights take `weights` bytes, those of its smallest and of its
    /// largest layer `layer`.
    pub fn of_part(self, part: Part, (weights, layer): (u64, (u64, u64))) -> Self {
        Load { part, weights, layer, nf4: None, measured: None, ..self }
    }

    /// The same load with as many streamed layers as may be.
    pub fn most_streamed(self) -> Self {
        match self.offload {
            Offload::Auto => Load { offload: Offload::Layers(self.part.layers()), ..self },
            Offload::Never | Offload::Layers(_) => self,
        }
    }

    /// Number of streamed layers where their number does not depend on memory.
    pub fn streamed(&self) -> usize {
        self.offload.of(self.part.layers()).0
    }

    /// Bytes of the weights with that many streamed layers, one of which is on the device at a time.
    pub(super) fn resident(&self, streamed: usize) -> u64 {
        self.weights.saturating_sub(freed(self.layer, streamed))
    }

    /// The same load with that many streamed layers, and groups of that many microbatches.
    fn grouped(self, streamed: usize, group: usize) -> Self {
        Load { offload: Offload::Layers(streamed), part: Part { group, ..self.part }, ..self }
    }
}

/// Location of the memory in which a device computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Home {
    /// Host memory, directly: the CPU of a run without a team.
    Host,
    /// Any memory, in a process that evaluates or generates only.
    Untrained,
    /// Host memory, directly, in a process that coordinates or works for a coordinator.
    HostInTeam,
    /// Host memory through a driver: transferred data exists there a second time.
    Shared,
    /// The device's own memory.
    Own,
}

/// Bytes on the device per trained parameter: value and gradient.
const ON_DEVICE: u64 = 4 * 2;
/// Bytes on the host per trained parameter: value, two moments and exact sum.
const ON_HOST: u64 = 4 * 3 + 8;
/// Additional bytes of a coordinator and a worker per trained parameter: parameters in transfer, gradients that wait
/// for their grant, a second sum.
const IN_TEAM: u64 = 4 * 3 + 8;

impl Home {
    /// Bytes for each trained parameter.
    fn adapter(self) -> u64 {
        // Upload: one value in transfer and one in a buffer of the device.
        let sent = 4 * 2;
        match self {
            Home::Host => ON_DEVICE + ON_HOST,
            Home::Untrained => ON_DEVICE + sent,
            Home::HostInTeam => ON_DEVICE + ON_HOST + IN_TEAM,
            Home::Own => ON_DEVICE + sent,
            // Two more values wait to be read; buffers are at most a quarter larger.
            Home::Shared => ON_DEVICE + ON_HOST + IN_TEAM + sent + 4 * 2 + 2,
        }
    }
}

/// Estimates the memory of `load` with the policy `keep`.
pub fn estimate(load: Load, keep: Keep) -> Result<Estimate, ModelError> {
    Rehearsals::new(load, Counts::Memory)?.estimate(load.tokens, keep)
}

/// Arithmetic of a microbatch of `load`.
pub fn flops(load: Load, keep: Keep) -> Result<f64, ModelError> {
    Ok(Rehearsals::new(load, Counts::Arithmetic)?.cost(load.tokens, keep)?.flops)
}

/// Bytes in readable form: `3.10 GB`, `15 MB`.
pub fn size(bytes: u64) -> String {
    match bytes as f64 {
        bytes if bytes < 1e9 => format!("{:.0} MB", (bytes / 1e6).ceil()),
        bytes => format!("{:.2} GB", bytes / 1e9),
    }
}

/// Target for kept bytes without a typed memory limit: below this, saving memory is not worth time.
const COMFORT: u64 = 950_000_000;
/// Largest share of a step's arithmetic that is recomputed to reach [`COMFORT`]; attention is never recomputed for it.
const DEAR: f64 = 0.125;

/// Available memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// Limit given by the user: all of it is used where that is faster.
    Typed(u64),
    /// Free memory, which is not filled without need.
    Free(u64),
}

impl From<u64> for Limit {
    fn from(bytes: u64) -> Limit {
        Limit::Typed(bytes)
    }
}

impl Limit {
    /// The typed limit, else the free memory.
    pub fn of(typed: Option<u64>, free: impl FnOnce() -> u64) -> Limit {
        typed.map_or_else(|| Limit::Free(free()), Limit::Typed)
    }

    /// The limit in bytes.
    pub fn bytes(self) -> u64 {
        match self {
            Limit::Typed(bytes) | Limit::Free(bytes) => bytes,
        }
    }

    /// The limit for each of `devices` devices.
    pub fn among(self, devices: u64) -> Limit {
        match self {
            Limit::Typed(bytes) => Limit::Typed(bytes / devices),
            Limit::Free(bytes) => Limit::Free(bytes / devices),
        }
    }

    /// The limit in bytes; `None` where it is unknown.
    pub fn known(self) -> Option<u64> {
        Some(self.bytes()).filter(|bytes| *bytes < u64::MAX / 2)
    }

    /// That many times the limit.
    pub fn times(self, count: u64) -> Limit {
        match self {
            Limit::Typed(bytes) => Limit::Typed(bytes.saturating_mul(count)),
            Limit::Free(bytes) => Limit::Free(bytes.saturating_mul(count)),
        }
    }

    /// Returns the fastest policy within a typed limit, and its estimate. Within free memory returns the first policy
    /// that keeps at most `COMFORT` bytes, unless it costs too much time. A dry run decides: what was measured of a
    /// device neither refuses a run nor changes it.
    pub fn choose(self, load: Load) -> Result<(Keep, Estimate), ModelError> {
        let mut runs = Rehearsals::new(Load { measured: None, ..load }, Counts::Memory)?;
        let resident = if load.streamed() == 0 { self.policy(&mut runs)? } else { None };
        let (keep, how) = match resident {
            Some(keep) => (keep, runs.load),
            None => self.streaming(&mut runs)?,
        };
        Ok((keep, estimate(Load { measured: load.measured, ..how }, keep)?))
    }

    /// The policy for `runs`, where one fits.
    fn policy(self, runs: &mut Rehearsals) -> Result<Option<Keep>, ModelError> {
        let all: Vec<Keep> = policies(runs.load.part.layers()).collect();
        // Each policy takes less memory than those before it.
        let first = all.partition_point(|keep| !runs.fits(*keep, self.bytes()));
        Ok(match (all.get(first), self) {
            (Some(&fastest), Limit::Typed(_)) => Some(fastest),
            (Some(&fastest), Limit::Free(_)) => {
                let keep = comfortable(runs, &all[first..])?;
                Some(if runs.fits(keep, self.bytes()) { keep } else { fastest })
            }
            // Keeping the values of one block may take less than keeping only inputs.
            (None, _) => FRUGAL.into_iter().find(|keep| runs.fits(*keep, self.bytes())),
        })
    }
}

/// The first of `policies` that keeps at most [`COMFORT`] bytes, or the last one before they cost too much time; the
/// first one whatever it costs.
fn comfortable(runs: &mut Rehearsals, policies: &[Keep]) -> Result<Keep, ModelError> {
    let mut much = |keep: &Keep| runs.kept(*keep).is_ok_and(|kept| kept > COMFORT);
    if !much(&policies[0]) {
        return Ok(policies[0]);
    }
    let first = policies.partition_point(much);
    let (layers, mut again) = (runs.load.part.layers(), Again::of(runs.load)?);
    let cheap =
        |keep: &Keep| keep.counts(layers)[3] == 0 && again.share(*keep).is_ok_and(|share| share <= DEAR);
    let last = policies.partition_point(cheap).saturating_sub(1);
    Ok(policies[first.min(last)])
}

/// Policies for kept values, fastest first: products are recomputed before attention is.
fn policies(layers: usize) -> impl Iterator<Item = Keep> {
    let narrow = (1..=layers).map(move |n| Keep::Parts([layers - n, n, 0]));
    let attended = (1..=layers).map(move |n| Keep::Parts([0, layers - n, n]));
    let inputs = (1..layers).map(move |n| Keep::Parts([0, 0, layers - n]));
    [Keep::Everything].into_iter().chain(narrow).chain(attended).chain(inputs).chain([Keep::Inputs])
}

/// Returns the policy within `limit`, and its estimate.
pub fn choose(load: Load, limit: impl Into<Limit>) -> Result<(Keep, Estimate), ModelError> {
    limit.into().choose(load)
}
