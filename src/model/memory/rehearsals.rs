//! Dry runs of the longest microbatch of a load. A search asks for many: the model is built once for all of them.

use super::{Basis, Estimate, Home, Load, ON_DEVICE};
use crate::model::decoder::{Build, Cost, DryRuns, Keep};
use crate::model::head;
use crate::model::stage::{Microbatch, Targets};
use crate::model::weights::ModelError;
use crate::numeric::block::{Block, Encoding};
use crate::numeric::dtype::Dtype;
use crate::numeric::tensor::{About, Tensor, Tensors};

/// Most tokens of a dry run; more take proportionally more.
const MOST: usize = 1 << 18;

/// Candidates for the policy with the smallest estimate. Where the head takes less than a block, the values of one
/// block cost nothing: the first recomputed block needs that memory anyway.
pub const FRUGAL: [Keep; 2] = [Keep::Inputs, Keep::Parts([0, 0, 1])];

/// Whether arithmetic is counted too, which takes longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counts {
    /// Memory alone.
    Memory,
    /// Memory and arithmetic.
    Arithmetic,
}

/// Dry runs of one load on its device.
pub struct Rehearsals<'a> {
    /// The load. Its number of streamed layers and its group may change.
    pub load: Load<'a>,
    runs: DryRuns,
}

impl<'a> Rehearsals<'a> {
    /// Builds the model without its weights.
    pub fn new(load: Load<'a>, counts: Counts) -> Result<Self, ModelError> {
        let config = load.config;
        let [q, widest] = [config.heads.query * config.heads.size, config.feed_forward.max(config.hidden)];
        let target = load.device.of_model(config.heads, widest.max(q));
        let encoding = match load.quantised {
            true => Encoding::Blocks(Block::Q8_0),
            false => Encoding::Plain(Dtype::Bf16),
        };
        let model = (config, &Unread(encoding) as &dyn Tensors, load.lora);
        let build = Build { layers: load.part.from..load.part.to, ..Build::whole(config) };
        let runs = match counts {
            Counts::Memory => DryRuns::of_memory(target, model, build)?,
            Counts::Arithmetic => DryRuns::new(target, model, build)?,
        };
        Ok(Rehearsals { load, runs })
    }

    /// Cost of a microbatch of that many tokens.
    pub fn cost(&mut self, tokens: usize, keep: Keep) -> Result<Cost, ModelError> {
        let batch = self.batch(tokens.clamp(1, MOST));
        let cost = self.runs.run(keep, &batch)?;
        let more = tokens as f64 / batch.ids.len() as f64;
        if more <= 1.0 {
            return Ok(cost);
        }
        // Below the memory of any device, so that sums do not overflow.
        let grown = |bytes: u64| ((bytes as f64 * more) as u64).min(1 << 60);
        let (kept, peak) = (grown(cost.kept), cost.at_rest + grown(cost.peak - cost.at_rest));
        Ok(Cost { kept, peak, ..cost })
    }

    /// One row, in which each token is a target. Weighted rows take as much but for a few values of each target.
    fn batch(&self, tokens: usize) -> Microbatch {
        let of_head = head::targets(self.load.config, (1, tokens));
        let targets = of_head.unwrap_or_else(|| Targets::Tokens(vec![0; tokens]));
        Microbatch { step: 1, rows: vec![0], ids: vec![0; tokens], bounds: vec![0, tokens as u32], targets }
    }

    /// Estimate for a microbatch of that many tokens.
    pub fn estimate(&mut self, tokens: usize, keep: Keep) -> Result<Estimate, ModelError> {
        let Load { part, home, measured, .. } = self.load;
        let streamed = self.load.streamed();
        let weights = self.load.resident(streamed);
        let (trained, placed) = (self.runs.trained() as u64, self.runs.placed() as u64);
        let cost = self.cost(tokens, keep)?;
        let others = self.others((tokens, cost.peak), keep)?;
        let kept = cost.kept * part.depth as u64 + others;
        let counted =
            (kept, cost.peak - cost.at_rest - cost.kept, cost.peak + kept - cost.kept, Basis::Counted);
        let blocks = keep.blocks(part.layers());
        let line = measured.filter(|fit| fit.blocks == blocks && fit.reaches(tokens)).map(|fit| fit.line);
        let (kept, scratch, in_use, basis) = line.map_or(counted, |line| {
            let (grows, fixed) = ((line.each * tokens as f64) as u64, line.fixed as u64);
            let resident = placed * ON_DEVICE;
            let in_use = grows + fixed.max(resident) + others;
            (grows + others, fixed.saturating_sub(resident), in_use, Basis::Measured(line))
        });
        let recycled = |bytes: u64| bytes + bytes / 4;
        let waiting = if home == Home::Own { 0 } else { part.waiting as u64 };
        // Where projections share an A, values are copied to their places on the host.
        let copied = if placed == trained { 0 } else { (placed - trained) * ON_DEVICE + placed * 4 };
        let adapter = trained * (home.adapter() + 4 * waiting) + copied;
        let (kept, scratch) = (recycled(kept), recycled(scratch));
        Ok(Estimate { weights, adapter, kept, scratch, in_use, streamed, group: part.group, basis })
    }

    /// Bytes that a group has in use at once beyond the peak `one` of a single microbatch of that many tokens.
    fn others(&mut self, (tokens, one): (usize, u64), keep: Keep) -> Result<u64, ModelError> {
        let Load { part, .. } = self.load;
        if part.group <= 1 {
            return Ok(0);
        }
        let batches = vec![self.batch(tokens.clamp(1, MOST)); part.group];
        Ok(self.runs.group(keep, &batches, self.load.streamed())?.saturating_sub(one))
    }

    /// Bytes of the estimate.
    pub fn total(&mut self, tokens: usize, keep: Keep) -> Result<u64, ModelError> {
        Ok(self.estimate(tokens, keep)?.total())
    }

    /// Whether the longest microbatch takes at most `limit` bytes.
    pub fn fits(&mut self, keep: Keep, limit: u64) -> bool {
        self.total(self.load.tokens, keep).is_ok_and(|total| total <= limit)
    }

    /// Whether it does with any of the most frugal policies.
    pub fn fits_frugally(&mut self, limit: u64) -> bool {
        FRUGAL.into_iter().any(|keep| self.fits(keep, limit))
    }

    /// Bytes that the longest microbatches keep between forward and backward.
    pub fn kept(&mut self, keep: Keep) -> Result<u64, ModelError> {
        let (tokens, cost) = (self.load.tokens, self.cost(self.load.tokens, keep)?);
        Ok(cost.kept + self.others((tokens, cost.peak), keep)?)
    }

    /// The policy with the smallest estimate, and that estimate.
    pub fn least(&mut self) -> Result<(Keep, Estimate), ModelError> {
        let [inputs, one] = FRUGAL;
        let tokens = self.load.tokens;
        let (frugal, other) = (self.estimate(tokens, inputs)?, self.estimate(tokens, one)?);
        Ok(if other.total() < frugal.total() { (one, other) } else { (inputs, frugal) })
    }
}

/// Arithmetic that policies add to a load.
pub struct Again<'a> {
    runs: Rehearsals<'a>,
    usual: f64,
}

impl<'a> Again<'a> {
    /// Counts the arithmetic of the policy that computes nothing twice.
    pub fn of(load: Load<'a>) -> Result<Self, ModelError> {
        let mut runs = Rehearsals::new(load, Counts::Arithmetic)?;
        let usual = runs.cost(load.tokens, Keep::Everything)?.flops;
        Ok(Again { runs, usual })
    }

    /// Arithmetic that this policy computes a second time, as a share of all.
    pub fn share(&mut self, keep: Keep) -> Result<f64, ModelError> {
        Ok(self.runs.cost(self.runs.load.tokens, keep)?.flops / self.usual - 1.0)
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
