//! How much memory a stage takes, from shapes alone, so that what blocks keep can be chosen before anything is
//! loaded. Counts values that exist at the same time at the worst moment, and what the trainer holds of
//! each parameter. A backend keeps freed memory for the next microbatch, up to a quarter more than was ever in
//! use; its own packing may add a few per cent. Where a device has computed microbatches of this model before, the
//! line through what they had in use ([`Fit`]) takes the place of what is counted here.

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

/// Bytes, by what they are for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Frozen weights, as the backend packs them.
    pub weights: u64,
    /// Adapter: parameters and gradient, and what they travel through; where the device computes in the machine's own
    /// memory, also what the host holds of each: parameters, two moments, the exact sum.
    pub adapter: u64,
    /// What blocks keep between forward and backward.
    pub kept: u64,
    /// What one block, or the head, needs while it computes.
    pub scratch: u64,
    /// Of it all, what the device has in use at once besides the weights: what [`InUse`] measures.
    pub in_use: u64,
    /// What that rests on.
    pub basis: Basis,
}

/// What an estimate of memory rests on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Basis {
    /// Shapes alone.
    Counted,
    /// Shapes, and what they were off by where the device was measured: far from these tokens, or keeping something else.
    Scaled,
    /// The line through what was measured.
    Measured(Line),
}

impl Basis {
    /// One word.
    pub fn word(self) -> &'static str {
        match self {
            Basis::Counted => "estimated",
            Basis::Scaled => "scaled",
            Basis::Measured(_) => "measured",
        }
    }

    /// The line that it was measured by.
    pub fn line(self) -> Option<Line> {
        match self {
            Basis::Measured(line) => Some(line),
            Basis::Counted | Basis::Scaled => None,
        }
    }
}

impl Estimate {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.weights + self.adapter + self.kept + self.scratch
    }
}

/// What is to be fitted: the whole model, and microbatches of up to that many tokens.
#[derive(Debug, Clone, Copy)]
pub struct Load<'a> {
    /// The model.
    pub config: &'a Config,
    /// What is trained.
    pub lora: &'a LoraSpec,
    /// Longest microbatch.
    pub tokens: usize,
    /// Bytes of the frozen weights, as the backend packs them: [`super::weights::Weights::packed`].
    pub weights: u64,
    /// Whether any of them is in blocks.
    pub quantised: bool,
    /// Bytes that they would take in NF4; `None` where they cannot be quantised, or are.
    pub nf4: Option<u64>,
    /// What the backend takes of its own, beside the values of its verbs.
    pub beside: Beside,
    /// Whose memory it is.
    pub home: Home,
    /// Bytes of a number of what only products, swiglu and the gradient of attention read: [`Backend::short_bytes`](crate::backend::Backend).
    pub short: u64,
    /// What the device was measured to take, where somebody did.
    pub measured: Option<Fit>,
}

impl<'a> Load<'a> {
    /// In f32 on the host, with nothing beside it and nothing measured.
    pub fn of(config: &'a Config, lora: &'a LoraSpec, tokens: usize, weights: u64) -> Self {
        let (beside, home, short, measured) = (Beside::default(), Home::Host, 4, None);
        let (quantised, nf4) = (false, None);
        Load { config, lora, tokens, weights, quantised, nf4, beside, home, short, measured }
    }
}

/// Bytes of copies in a narrower type, which products read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Beside {
    /// For each token.
    pub token: u64,
    /// For each row of a vocabulary's logits: of their gradient.
    pub logits: u64,
}

/// Whose memory a device computes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Home {
    /// The machine's, directly: the CPU of a run alone.
    Host,
    /// The same in a process that coordinates, or works for a coordinator.
    HostInTeam,
    /// The machine's, through a driver: what is sent and read lies there a second time.
    Shared,
    /// Its own.
    Own,
}

/// Bytes that a device has of each trained parameter: its value and its gradient.
const ON_DEVICE: u64 = 4 * 2;
/// Bytes of the parameter, its two moments and its exact sum.
const ON_HOST: u64 = 4 * 3 + 8;
/// Bytes of what a coordinator and a worker hold beside those: parameters on their way, gradients that wait for their
/// grant, a second sum.
const IN_TEAM: u64 = 4 * 3 + 8;

impl Home {
    /// Bytes for each trained parameter.
    fn adapter(self) -> u64 {
        // Upload: one value on its way and one in a buffer of the device.
        let sent = 4 * 2;
        match self {
            Home::Host => ON_DEVICE + ON_HOST,
            Home::HostInTeam => ON_DEVICE + ON_HOST + IN_TEAM,
            Home::Own => ON_DEVICE + sent,
            // Two values more wait to be read; buffers are a quarter larger at most.
            Home::Shared => ON_DEVICE + ON_HOST + IN_TEAM + sent + 4 * 2 + 2,
        }
    }
}

/// What it takes.
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
        // What was off by its shapes where it was measured is off elsewhere; and where one way took more than its
        // shapes say, another does too.
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

/// Terms of a sum that a product of the CPU adds up at a time.
const SLICE: u64 = 768;

/// Bytes that are kept between forward and backward, and that are needed while something is computed.
fn counted(load: &Load, keep: Keep) -> (u64, u64) {
    let &Load { config, lora, tokens, beside, short, .. } = load;
    let (c, f, t) = (config.hidden as u64, config.feed_forward as u64, tokens as u64);
    let (q, kv) =
        ((config.heads.query * config.heads.size) as u64, (config.heads.kv * config.heads.size) as u64);
    // x, mid; q, attended; k, v; gate, up; q and k before their norms; logsumexp, roots and h are small.
    let norms = if config.family.head_norms { q + kv } else { 0 };
    // Outputs of the two halves, before a norm that follows them.
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
    // A block that is computed again takes what is missing of it, and where others above it kept more, what they have
    // given back.
    let topmost = counts.iter().position(|&count| count > 0).map_or(0, |which| held[which]);
    let one_block = if topmost == held[3] { everything } else { everything - topmost };
    // Backward: the residual, two normed streams, two of F, an input that is masked; or the head: rows, logits, their
    // gradients.
    let dropped = if lora.dropout > 0.0 { 4 * t * f } else { 0 };
    let (feed_forward, attention) = if short == 4 {
        (4 * t * (3 * c + 2 * f + q + 2 * kv) + dropped, 0)
    } else {
        // What is set in 16 bits has its whole sum before; with dropout something is added to it. In attention's gradient
        // what is short is widened.
        let sums = if c > SLICE { 4 * t * f } else { 0 };
        let inner = 4 * t * 2 * c + short * t * (c + 2 * f);
        (inner + sums.max(3 * dropped), 4 * t * (c + 6 * q + 4 * kv))
    };
    let in_block = one_block + feed_forward.max(attention);
    let outputs = config.labels.as_ref().map_or(config.vocab, Vec::len) as u64;
    let rows = t.min(chunk(outputs as usize) as u64);
    // Logits of a chunk; who computes in 16 bits has none, but the sums of two blocks of rows for eight parts of the
    // vocabulary.
    let block = (160_000 / c.max(1)).clamp(48, 264);
    let logits = match short < 4 && config.labels.is_none() {
        true => t.min(2 * block) * 8 * (c + 3),
        false => rows * outputs,
    };
    let copied = if config.labels.is_none() { rows * beside.logits } else { 0 };
    let in_head = 4 * (t * 5 * c + logits) + copied;
    (kept, in_block.max(in_head) + t * beside.token)
}

/// Bytes for people: `3.10 GB`, `15 MB`.
pub fn size(bytes: u64) -> String {
    match bytes as f64 {
        bytes if bytes < 1e9 => format!("{:.0} MB", (bytes / 1e6).ceil()),
        bytes => format!("{:.2} GB", bytes / 1e9),
    }
}

/// What blocks keep where nobody says how much memory they may take: below that much, memory is not worth time.
const COMFORT: u64 = 950_000_000;
/// The largest share of a step's arithmetic that is done again for it; attention never is.
const DEAR: f64 = 0.125;

/// How much memory there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// Somebody said so: all of it is taken where that is faster.
    Typed(u64),
    /// So much is free, which is no reason to fill it.
    Free(u64),
}

impl From<u64> for Limit {
    fn from(bytes: u64) -> Limit {
        Limit::Typed(bytes)
    }
}

impl Limit {
    /// What was typed, or what is free.
    pub fn of(typed: Option<u64>, free: impl FnOnce() -> u64) -> Limit {
        typed.map_or_else(|| Limit::Free(free()), Limit::Typed)
    }

    /// At most.
    pub fn bytes(self) -> u64 {
        match self {
            Limit::Typed(bytes) | Limit::Free(bytes) => bytes,
        }
    }

    /// The same for one of so many devices.
    pub fn among(self, devices: u64) -> Limit {
        match self {
            Limit::Typed(bytes) => Limit::Typed(bytes / devices),
            Limit::Free(bytes) => Limit::Free(bytes / devices),
        }
    }

    /// The fastest policy within what was typed, and what it takes. Within what is free the first one that keeps no
    /// more than is comfortable, unless it costs too much time.
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

/// What blocks may keep, fastest first: products are computed again before attention is.
fn policies(layers: usize) -> impl Iterator<Item = Keep> {
    let narrow = (1..=layers).map(move |n| Keep::Parts([layers - n, n, 0]));
    let attended = (1..=layers).map(move |n| Keep::Parts([0, layers - n, n]));
    let inputs = (1..layers).map(move |n| Keep::Parts([0, 0, layers - n]));
    [Keep::Everything].into_iter().chain(narrow).chain(attended).chain(inputs).chain([Keep::Inputs])
}

/// What is computed again, as a share of the step; rows are taken to be as long as the microbatch.
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

/// What blocks keep within that limit, and what it takes.
pub fn choose(load: Load, limit: impl Into<Limit>) -> Result<(Keep, Estimate), ModelError> {
    limit.into().choose(load)
}

/// Whether the way that a fit was measured with still is the one to take; false where blocks have to keep less, and the
/// error where nothing fits.
pub fn stands(load: Load, limit: impl Into<Limit>) -> Result<bool, ModelError> {
    let (keep, _) = limit.into().choose(load)?;
    Ok(load.measured.is_none_or(|fit| keep.blocks(load.config.layers) >= fit.blocks))
}
