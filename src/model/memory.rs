//! Estimates of the memory of a stage before anything is loaded, so that the policy for kept values is chosen first. A
//! dry run of the longest microbatch gives the bytes that the device has in use at once; the trainer's values for each
//! parameter are added. A backend keeps freed memory for the next microbatch, up to a quarter above its peak; its own
//! packing may add a few per cent. Where a device has computed microbatches of this model before, the line fitted to
//! its measured memory ([`Fit`]) replaces the figures, but no decision depends on it.

mod advice;

use super::config::Config;
use super::decoder::{Build, Cost, Keep, dry_memory, dry_run};
use super::layout;
use super::lora::LoraSpec;
pub use super::memory_fit::{Fit, InUse, Used};
use super::stage::{Microbatch, Targets};
use super::weights::ModelError;
use crate::backend::Target;
use crate::numeric::block::{Block, Encoding};
use crate::numeric::dtype::Dtype;
use crate::numeric::line::Line;
use crate::numeric::tensor::{About, Tensor, Tensors};
pub use advice::{largest, least};

/// Bytes by purpose.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Frozen weights, as the backend packs them.
    pub weights: u64,
    /// Adapter: parameters and gradient, and their transfer buffers; where the device computes in host memory, also the
    /// host's copies: parameters, two moments, the exact sum.
    pub adapter: u64,
    /// Values that blocks keep between forward and backward.
    pub kept: u64,
    /// Working memory of one block or of the head.
    pub scratch: u64,
    /// Part of the total that the device has in use at once besides the weights; [`InUse`] measures the same.
    pub in_use: u64,
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

/// Input of an estimate: the whole model, and microbatches of up to `tokens` tokens.
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
    pub nf4: Option<u64>,
    /// The device.
    pub device: Target,
    /// Location of the device's memory.
    pub home: Home,
    /// Measured memory of the device, where available.
    pub measured: Option<Fit>,
}

impl<'a> Load<'a> {
    /// A load in f32 on the CPU, without measurements.
    pub fn of(config: &'a Config, lora: &'a LoraSpec, tokens: usize, weights: u64) -> Self {
        let device = Target::default();
        let (quantised, nf4, home, measured) = (false, None, Home::Host, None);
        Load { config, lora, tokens, weights, quantised, nf4, device, home, measured }
    }
}

/// Location of the memory in which a device computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Home {
    /// Host memory, directly: the CPU of a run without a team.
    Host,
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
            Home::HostInTeam => ON_DEVICE + ON_HOST + IN_TEAM,
            Home::Own => ON_DEVICE + sent,
            // Two more values wait to be read; buffers are at most a quarter larger.
            Home::Shared => ON_DEVICE + ON_HOST + IN_TEAM + sent + 4 * 2 + 2,
        }
    }
}

/// Estimates the memory of `load` with the policy `keep`.
pub fn estimate(load: Load, keep: Keep) -> Result<Estimate, ModelError> {
    let Load { config, lora, tokens, weights, home, measured, .. } = load;
    let trained = layout::of(config, lora, 0..config.layers).len() as u64;
    let cost = counted(load, keep)?;
    let counted = (cost.kept, cost.peak - cost.at_rest - cost.kept, cost.peak, Basis::Counted);
    let blocks = keep.blocks(config.layers);
    let line = measured.filter(|fit| fit.blocks == blocks && fit.reaches(tokens)).map(|fit| fit.line);
    let (kept, scratch, in_use, basis) = line.map_or(counted, |line| {
        let (grows, fixed) = ((line.each * tokens as f64) as u64, line.fixed as u64);
        let resident = trained * ON_DEVICE;
        (grows, fixed.saturating_sub(resident), grows + fixed.max(resident), Basis::Measured(line))
    });
    let recycled = |bytes: u64| bytes + bytes / 4;
    let (adapter, kept, scratch) = (trained * home.adapter(), recycled(kept), recycled(scratch));
    Ok(Estimate { weights, adapter, kept, scratch, in_use, basis })
}

/// Most tokens of a dry run; more take proportionally more.
const DRY: usize = 1 << 18;

/// The device's memory for the longest microbatch, by a dry run.
fn counted(load: Load, keep: Keep) -> Result<Cost, ModelError> {
    let (target, batch) = load.rehearsal();
    let build = Build { keep, ..Build::whole(load.config) };
    let cost = dry_memory(target, (load.config, &load.unread(), load.lora), build, &batch)?;
    let more = load.tokens as f64 / batch.ids.len() as f64;
    if more <= 1.0 {
        return Ok(cost);
    }
    // Below the memory of any device, so that sums do not overflow.
    let grown = |bytes: u64| ((bytes as f64 * more) as u64).min(1 << 60);
    let (kept, peak) = (grown(cost.kept), cost.at_rest + grown(cost.peak - cost.at_rest));
    Ok(Cost { kept, peak, ..cost })
}

impl Load<'_> {
    /// The device, and the longest microbatch: each token is a target, and rows are as long as they may be.
    fn rehearsal(&self) -> (Target, Microbatch) {
        let Load { config, .. } = self;
        let [q, widest] = [config.heads.query * config.heads.size, config.feed_forward.max(config.hidden)];
        let tokens = self.tokens.clamp(1, DRY);
        let bounds: Vec<u32> = (0..tokens).step_by(config.longest_row().max(1)).map(|at| at as u32).collect();
        let rows = bounds.len();
        let targets = match config.labels {
            Some(_) => Targets::Labels(vec![0; rows]),
            None => Targets::Tokens(vec![0; tokens]),
        };
        let bounds = bounds.into_iter().chain([tokens as u32]).collect();
        let (ids, rows) = (vec![0; tokens], vec![0; rows]);
        let batch = Microbatch { step: 1, rows, ids, bounds, targets };
        (self.device.of_model(config.heads, widest.max(q)), batch)
    }

    fn unread(&self) -> Unread {
        Unread(if self.quantised { Encoding::Blocks(Block::Q8_0) } else { Encoding::Plain(Dtype::Bf16) })
    }
}

/// Weights of which only the encoding is known.
struct Unread(Encoding);

impl Tensors for Unread {
    fn tensor(&self, _: &str) -> Result<Option<Tensor<'_>>, String> {
        Ok(None)
    }

    fn about(&self, _: &str) -> Result<Option<About>, String> {
        Ok(Some(About { shape: Vec::new(), encoding: self.0 }))
    }

    fn names(&self) -> Vec<String> {
        Vec::new()
    }
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

    /// Returns the fastest policy within a typed limit, and its estimate. Within free memory returns the first policy
    /// that keeps at most `COMFORT` bytes, unless it costs too much time. A dry run decides: what was measured of a
    /// device neither refuses a run nor changes it.
    pub fn choose(self, load: Load) -> Result<(Keep, Estimate), ModelError> {
        let shapes = Load { measured: None, ..load };
        let total = |keep| estimate(shapes, keep).map(|estimate| estimate.total());
        total(Keep::Inputs)?;
        let fits = |keep: &Keep| total(*keep).is_ok_and(|total| total <= self.bytes());
        let all: Vec<Keep> = policies(load.config.layers).collect();
        // Each policy takes less memory than those before it.
        let first = all.partition_point(|keep| !fits(keep));
        let Some(&fastest) = all.get(first) else {
            // Keeping the values of one block may take less than keeping only inputs.
            let (keep, least) = advice::least(shapes)?;
            let fits = least.total() <= self.bytes();
            return if fits {
                Ok((keep, estimate(load, keep)?))
            } else {
                Err(advice::too_little(shapes, self.bytes())?)
            };
        };
        let keep = match self {
            Limit::Typed(_) => fastest,
            Limit::Free(_) => comfortable(shapes, &all[first..]).filter(fits).unwrap_or(fastest),
        };
        Ok((keep, estimate(load, keep)?))
    }
}

/// The first of `policies` that keeps at most [`COMFORT`] bytes, or the last one before they cost too much time.
fn comfortable(load: Load, policies: &[Keep]) -> Option<Keep> {
    let much = |keep: &Keep| counted(load, *keep).is_ok_and(|cost| cost.kept > COMFORT);
    let first = policies.partition_point(much);
    let usual = arithmetic(load, Keep::Everything).ok()?;
    let cheap = |keep: &Keep| {
        let again = arithmetic(load, *keep).map(|flops| flops / usual - 1.0);
        keep.counts(load.config.layers)[3] == 0 && again.is_ok_and(|again| again <= DEAR)
    };
    // The first one is the fastest, whatever it costs.
    let last = if first == 0 { 0 } else { policies.partition_point(cheap).saturating_sub(1) };
    policies.get(first.min(last)).copied()
}

/// Policies for kept values, fastest first: products are recomputed before attention is.
fn policies(layers: usize) -> impl Iterator<Item = Keep> {
    let narrow = (1..=layers).map(move |n| Keep::Parts([layers - n, n, 0]));
    let attended = (1..=layers).map(move |n| Keep::Parts([0, layers - n, n]));
    let inputs = (1..layers).map(move |n| Keep::Parts([0, 0, layers - n]));
    [Keep::Everything].into_iter().chain(narrow).chain(attended).chain(inputs).chain([Keep::Inputs])
}

/// Operations of one microbatch, with what is computed again.
fn arithmetic(load: Load, keep: Keep) -> Result<f64, ModelError> {
    let (target, batch) = load.rehearsal();
    let build = Build { keep, ..Build::whole(load.config) };
    Ok(dry_run(target, (load.config, &load.unread(), load.lora), build, &batch)?.flops)
}

/// Returns the policy within `limit`, and its estimate.
pub fn choose(load: Load, limit: impl Into<Limit>) -> Result<(Keep, Estimate), ModelError> {
    limit.into().choose(load)
}
