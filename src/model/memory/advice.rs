//! Advice for a run that does not fit. Every suggestion is checked with the estimate that refused the run, so that a
//! run that follows it is not refused.

use super::rehearsals::{Counts, FRUGAL, Rehearsals};
use super::{Estimate, Load, size};
use crate::model::decoder::Keep;
use crate::model::lora::LoraSpec;
use crate::model::weights::ModelError;

/// The modules of the first LoRA paper, and the smallest common set.
const FEWEST: [&str; 2] = ["q_proj", "v_proj"];

/// Returns the policy with the smallest estimate, and that estimate.
pub fn least(load: Load) -> Result<(Keep, Estimate), ModelError> {
    Rehearsals::new(load, Counts::Memory)?.least()
}

/// Whether the most frugal policy stays within `limit` bytes.
fn fits(load: Load, limit: u64) -> bool {
    Rehearsals::new(load, Counts::Memory).is_ok_and(|mut runs| fit(&mut runs, load.tokens, limit))
}

fn fit(runs: &mut Rehearsals, tokens: usize, limit: u64) -> bool {
    FRUGAL.into_iter().any(|keep| runs.total(tokens, keep).is_ok_and(|total| total <= limit))
}

/// The longest microbatch that stays within `limit` bytes with the most frugal policy; 0 where none does.
pub fn largest(load: Load, limit: u64) -> usize {
    let runs = Rehearsals::new(load, Counts::Memory);
    runs.map_or(0, |mut runs| most(load.tokens.max(1), |tokens| fit(&mut runs, tokens, limit)))
}

/// The largest number up to `top` for which `fits` holds, else 0. `fits` is monotonic: if it holds for a number, it
/// holds for all smaller ones.
fn most(top: usize, mut fits: impl FnMut(usize) -> bool) -> usize {
    if fits(top) {
        return top;
    }
    let (mut low, mut high) = (0, top);
    while high - low > 1 {
        let middle = low.midpoint(high);
        if fits(middle) { low = middle } else { high = middle }
    }
    low
}

/// Returns the error with the required memory and the settings that fit.
pub(super) fn too_little(load: Load, limit: u64) -> Result<ModelError, ModelError> {
    let needed = least(load)?.1.total();
    let more = format!("--memory-limit {} where there is as much", typed(needed));
    let mut ways = ways(load, limit);
    let way_out = if ways.is_empty() {
        let what = if load.resident(load.streamed()) > limit {
            "the weights alone do not fit"
        } else {
            "no adapter fits beside the weights"
        };
        // Where the size in NF4 is known, NF4 does not fit either.
        let known = load.quantised || load.nf4.is_some();
        let smaller = if known { "a smaller base" } else { "a smaller or a quantised base" };
        format!("{what}: choose {smaller}, or use {more}")
    } else {
        ways.push(more);
        format!("use {}", ways.join(", or "))
    };
    Ok(ModelError::Memory { needed, limit, way_out })
}

/// Options that make the run fit, each by itself; where none does, all savings of the adapter together.
fn ways(load: Load, limit: u64) -> Vec<String> {
    let mut ways = Vec::new();
    let with = |rank: usize| load.lora.with_rank(rank);
    let fits = |load: Load| fits(load, limit);
    match largest(load, limit) {
        0 => {}
        // A power of two like the default, for comparable runs.
        most => ways.push(tokens(1 << most.ilog2())),
    }
    match most(load.lora.rank, |rank| fits(Load { lora: &with(rank), ..load })) {
        0 => {}
        rank if rank < load.lora.rank => ways.push(format!("--rank {rank}")),
        _ => {}
    }
    let fewest = fewest(load.lora);
    if let Some(lora) = fewest.as_ref().filter(|lora| fits(Load { lora, ..load })) {
        ways.push(format!("--target-modules {}", lora.targets.join(",")));
    }
    let in_nf4 =
        load.nf4.map(|nf4| Load { weights: nf4.total, layer: nf4.layer, nf4: None, quantised: true, ..load });
    if in_nf4.is_some_and(fits) {
        ways.push("--quantize nf4".into());
    }
    if ways.is_empty() {
        let lora = fewest.as_ref().unwrap_or(load.lora).with_rank(1);
        let modules = fewest.map(|lora| format!(" --target-modules {}", lora.targets.join(",")));
        match largest(Load { lora: &lora, ..load }, limit) {
            0 => {}
            most => {
                ways.push(format!("--rank 1{} {}", modules.unwrap_or_default(), tokens(1 << most.ilog2())))
            }
        }
    }
    if ways.is_empty()
        && let Some(in_nf4) = in_nf4
    {
        let smaller = self::ways(in_nf4, limit);
        ways.extend(smaller.into_iter().map(|way| format!("--quantize nf4 {way}")));
    }
    ways
}

/// The same adapter on the smallest set of modules; `None` where it already has that set or less, and where projections
/// are chosen one by one, which names of modules would undo.
fn fewest(lora: &LoraSpec) -> Option<LoraSpec> {
    let has = FEWEST.iter().all(|name| lora.targets.iter().any(|target| target == name));
    let targets = FEWEST.map(str::to_owned).to_vec();
    let fewer = has && lora.targets.len() > FEWEST.len() && lora.exceptions.is_empty();
    fewer.then(|| LoraSpec { targets, ..lora.clone() })
}

fn tokens(most: usize) -> String {
    format!("--micro-batch-tokens {most} (and --max-seq-len no longer)")
}

/// Bytes in the format of --memory-limit, rounded up: `7.01GB`.
fn typed(bytes: u64) -> String {
    match bytes {
        0..1_000_000_000 => size(bytes).replace(' ', ""),
        _ => format!("{:.2}GB", bytes.div_ceil(10_000_000) as f64 / 100.0),
    }
}
