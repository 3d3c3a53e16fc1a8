//! Estimates of the memory of a stage, from shapes alone, so that the policy for kept values is chosen before anything
//! is loaded. The estimate counts values that exist at the same time at the peak, and the trainer's values for each
//! parameter. A backend keeps freed memory for the next microbatch, up to a quarter above its peak; its own packing may
//! add a few per cent. Where a device has computed microbatches of this model before, the line fitted to its measured
//! memory ([`Fit`]) replaces these counts.

mod advice;

use super::config::Config;
pub use super::memory_fit::{Fit, InUse, Used};

use super::decoder::Keep;
use super::flops;
use super::head::chunk;
use super::layout;
use super::lora::LoraSpec;
use super::weights::ModelError;
use crate::numeric::line::Line;
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
    /// Shapes alone.
    Counted,
    /// Shapes, scaled by the ratio of measured to counted bytes where the device was measured: the token count is far
    /// from the measured ones, or blocks keep something else.
    Scaled,
    /// The line fitted to measurements.
    Measured(Line),
}

impl Basis {
    /// One-word name of the basis.
    pub fn word(self) -> &'static str {
        match self {
            Basis::Counted => "estimated",
            Basis::Scaled => "scaled",
            Basis::Measured(_) => "measured",
        }
    }

    /// The fitted line of a measured estimate.
    pub fn line(self) -> Option<Line> {
        match self {
            Basis::Measured(line) => Some(line),
            Basis::Counted | Basis::Scaled => None,
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
    /// Bytes that the backend allocates besides the values of its verbs.
    pub beside: Beside,
    /// Location of the device's memory.
    pub home: Home,
    /// Bytes per number of values that only products, swiglu and the gradient of attention read:
    /// [`Backend::short_bytes`](crate::backend::Backend).
    pub short: u64,
    /// Measured memory of the device, where available.
    pub measured: Option<Fit>,
}

impl<'a> Load<'a> {
    /// A load in f32 on the host, without other allocations and measurements.
    pub fn of(config: &'a Config, lora: &'a LoraSpec, tokens: usize, weights: u64) -> Self {
        let (beside, home, short, measured) = (Beside::default(), Home::Host, 4, None);
        let (quantised, nf4) = (false, None);
        Load { config, lora, tokens, weights, quantised, nf4, beside, home, short, measured }
    }
}

/// Bytes of copies in a narrower type, which products read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Beside {
    /// Bytes for each token.
    pub token: u64,
    /// Bytes for each row of the gradient of a vocabulary's logits.
    pub logits: u64,
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
pub fn estimate(load: Load, keep: Keep) -> Estimate {
    let Load { config, lora, tokens, weights, home, measured, .. } = load;
    let trained = layout::of(config, lora, 0..config.layers).len() as u64;
    let (adapter, resident) = (trained * home.adapter(), trained * ON_DEVICE);
    let recycled = |bytes: u64| bytes + bytes / 4;
    let of = |(kept, scratch): (u64, u64), basis: Basis| Estimate {
        weights,
        adapter,
        kept: recycled(kept),
        scratch: recycled(scratch),
        in_use: resident + kept + scratch,
        basis,
    };
    let blocks = keep.blocks(config.layers);
    let seen = |line: Line, tokens: usize| {
        let besides = (line.fixed as u64).saturating_sub(resident);
        ((line.each * tokens as f64) as u64, besides)
    };
    match measured {
        Some(fit) if fit.blocks == blocks && fit.reaches(tokens) => {
            of(seen(fit.line, tokens), Basis::Measured(fit.line))
        }
        // The measured ratio applies to other token counts too; for another policy the ratio applies only where it is
        // above 1.
        Some(fit) => {
            let there = Load { tokens: fit.tokens as usize, ..load };
            let ((a, b), (c, d)) = (seen(fit.line, there.tokens), counted(&there, fit.keep(config.layers)));
            let off = (a + b) as f64 / (c + d).max(1) as f64;
            let off = if fit.blocks == blocks { off } else { off.max(1.0) };
            let more = |bytes: u64| (bytes as f64 * off) as u64;
            let (kept, scratch) = counted(&load, keep);
            of((more(kept), more(scratch)), Basis::Scaled)
        }
        None => of(counted(&load, keep), Basis::Counted),
    }
}

/// Terms that a product of the CPU sums at a time.
const SLICE: u64 = 768;

/// Returns the bytes kept between forward and backward, and the bytes of working memory.
fn counted(load: &Load, keep: Keep) -> (u64, u64) {
    let &Load { config, lora, tokens, beside, short, .. } = load;
    let (c, f, t) = (config.hidden as u64, config.feed_forward as u64, tokens as u64);
    let (q, kv) =
        ((config.heads.query * config.heads.size) as u64, (config.heads.kv * config.heads.size) as u64);
    // x, mid; q, attended; k, v; gate, up; q and k before their norms; logsumexp, inverse roots and h are small.
    let norms = if config.family.head_norms { q + kv } else { 0 };
    // Outputs of the two halves before a norm that follows them.
    let outputs = [config.family.attention_norms, config.family.mlp_norms];
    let outputs = outputs.map(|norms| norms.after.map_or(0, |_| c));
    let after = outputs.iter().sum::<u64>();
    let small = config.heads.query as u64 + 4 + (lora.targets.len() * lora.rank) as u64;
    let inner = short * 2 * t * f;
    let everything = 4 * t * (2 * c + norms + after + small) + short * t * (2 * q + 2 * kv) + inner;
    let attended = 4 * t * (c + outputs[1] + small) + short * t * q;
    let held = [everything, everything - inner, attended, 4 * t * c];
    let counts = keep.counts(config.layers).map(|count| count as u64);
    let kept: u64 = held.iter().zip(counts).map(|(held, count)| held * count).sum();
    // A recomputed block needs its missing values; where blocks above it kept more, it reuses the memory that those
    // have freed.
    let topmost = counts.iter().position(|&count| count > 0).map_or(0, |which| held[which]);
    let one_block = if topmost == held[3] { everything } else { everything - topmost };
    // Backward: the residual, two normed streams, two values of F, a masked input; or the head: rows, logits, their
    // gradients.
    let dropped = if lora.dropout > 0.0 { 4 * t * f } else { 0 };
    let (feed_forward, attention) = if short == 4 {
        (4 * t * (3 * c + 2 * f + q + 2 * kv) + dropped, 0)
    } else {
        // A product that is stored in 16 bits needs its whole f32 sum first; with dropout another value is added to it.
        // The gradient of attention widens 16-bit values.
        let sums = if c > SLICE { 4 * t * f } else { 0 };
        let inner = 4 * t * 2 * c + short * t * (c + 2 * f);
        (inner + sums.max(3 * dropped), 4 * t * (c + 6 * q + 4 * kv))
    };
    let in_block = one_block + feed_forward.max(attention);
    let outputs = config.labels.as_ref().map_or(config.vocab, Vec::len) as u64;
    let rows = t.min(chunk(outputs as usize) as u64);
    // Logits of a chunk; a backend that computes in 16 bits has no logits, only the sums of two blocks of rows for
    // eight parts of the vocabulary.
    let block = (160_000 / c.max(1)).clamp(48, 264);
    let logits = match short < 4 && config.labels.is_none() {
        true => t.min(2 * block) * 8 * (c + 3),
        false => rows * outputs,
    };
    let copied = if config.labels.is_none() { rows * beside.logits } else { 0 };
    let in_head = 4 * (t * 5 * c + logits) + copied;
    (kept, in_block.max(in_head) + t * beside.token)
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
    /// that keeps at most `COMFORT` bytes, unless it costs too much time.
    pub fn choose(self, load: Load) -> Result<(Keep, Estimate), ModelError> {
        self.found(load).ok_or_else(|| advice::too_little(load, self.bytes()))
    }

    fn found(self, load: Load) -> Option<(Keep, Estimate)> {
        let mut found = None;
        for keep in policies(load.config.layers) {
            let estimate = estimate(load, keep);
            if estimate.total() > self.bytes() {
                continue;
            }
            if found.is_some() && (again(load, keep) > DEAR || keep.counts(load.config.layers)[3] > 0) {
                break;
            }
            found = Some((keep, estimate));
            if matches!(self, Limit::Typed(_)) || counted(&load, keep).0 <= COMFORT {
                break;
            }
        }
        found
    }
}

/// Policies for kept values, fastest first: products are recomputed before attention is.
fn policies(layers: usize) -> impl Iterator<Item = Keep> {
    let narrow = (1..=layers).map(move |n| Keep::Parts([layers - n, n, 0]));
    let attended = (1..=layers).map(move |n| Keep::Parts([0, layers - n, n]));
    let inputs = (1..layers).map(move |n| Keep::Parts([0, 0, layers - n]));
    [Keep::Everything].into_iter().chain(narrow).chain(attended).chain(inputs).chain([Keep::Inputs])
}

/// Recomputed arithmetic as a share of the step; rows are assumed to be as long as the microbatch.
fn again(load: Load, keep: Keep) -> f64 {
    let Load { config, lora, tokens, .. } = load;
    let (c, q) = (config.hidden as f64, (config.heads.query * config.heads.size) as f64);
    let kv = (config.heads.kv * config.heads.size) as f64;
    let inner = 2.0 * 2.0 * c * config.feed_forward as f64;
    let outer = 2.0 * (2.0 * c * q + 2.0 * c * kv);
    let attention = 2.0 * q * tokens as f64;
    let [_, narrow, attended, input] = keep.counts(config.layers).map(|count| count as f64);
    let flops = (narrow + attended + input) * inner + (attended + input) * outer + input * attention;
    flops / flops::training(config, lora, tokens as f64)
}

/// Returns the policy within `limit`, and its estimate.
pub fn choose(load: Load, limit: impl Into<Limit>) -> Result<(Keep, Estimate), ModelError> {
    limit.into().choose(load)
}

/// Whether the policy of the measured fit is still valid: false where blocks have to keep less, an error where nothing
/// fits.
pub fn stands(load: Load, limit: impl Into<Limit>) -> Result<bool, ModelError> {
    let (keep, _) = limit.into().choose(load)?;
    Ok(load.measured.is_none_or(|fit| keep.blocks(load.config.layers) >= fit.blocks))
}
