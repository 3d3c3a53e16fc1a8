//! Choice of streamed layers: how many, the policy for kept values beside them, and how many microbatches go through
//! them together. More microbatches read a layer less often, but each holds memory that could keep values instead.

use super::rehearsals::{Again, Rehearsals};
use super::{COMFORT, Limit, Load, Offload, advice};
use crate::model::decoder::Keep;
use crate::model::weights::ModelError;

/// Sizes of groups.
const GROUPS: [usize; 4] = [1, 2, 4, 8];
/// Tokens of a group. With more, reading a layer takes little time beside its arithmetic.
const GROUPED: usize = 1024;
/// Tokens whose arithmetic in a layer takes as long as reading it for both passes: SmolLM2-135M with 20 of 30 layers
/// streamed took 1.55 times its time with microbatches of about 130 tokens (docs/journal).
const READING: f64 = 110.0;

/// A way to train with streamed layers.
type Way<'a> = (Keep, Load<'a>);

impl Limit {
    /// The fastest way that fits. `runs` must have no measurements.
    pub(super) fn streaming<'a>(self, runs: &mut Rehearsals<'a>) -> Result<Way<'a>, ModelError> {
        let load = runs.load;
        let most = load.microbatches.min(GROUPED / load.tokens.max(1)).max(1);
        let mut ways = Vec::new();
        for group in GROUPS.into_iter().filter(|group| *group <= most) {
            let Some(streamed) = self.fewest(runs, load, group)? else { break };
            runs.load = load.grouped(streamed, group);
            let Some(keep) = self.policy(runs)? else { break };
            // Free memory is not filled for a group.
            let comfortable = group == 1 || matches!(self, Limit::Typed(_)) || runs.kept(keep)? <= COMFORT;
            if !comfortable || !runs.fits(keep, self.bytes()) {
                break;
            }
            ways.push((keep, runs.load));
        }
        match ways[..] {
            [] => Err(advice::too_little(load.most_streamed(), self.bytes())?),
            [only] => Ok(only),
            _ => fastest(load, ways),
        }
    }

    /// The number of layers that are streamed for groups of that size: the given one, else the least that fits.
    fn fewest<'a>(
        self,
        runs: &mut Rehearsals<'a>,
        load: Load<'a>,
        group: usize,
    ) -> Result<Option<usize>, ModelError> {
        let all = match load.offload {
            Offload::Never => return Ok(None),
            Offload::Layers(_) => return Ok(Some(load.streamed())),
            Offload::Auto => load.part.layers(),
        };
        runs.load = load.grouped(0, 1);
        let missing = runs.least()?.1.total().saturating_sub(self.bytes());
        let fewest = enough(load.layer, missing);
        if fewest > all || group == 1 {
            return Ok(Some(fewest).filter(|fewest| *fewest <= all));
        }
        // The members of a group keep values of each streamed layer, so a search follows.
        let (mut few, mut enough) = (fewest - 1, all + 1);
        while enough - few > 1 {
            let middle = few.midpoint(enough);
            runs.load = load.grouped(middle, group);
            *(if runs.fits_frugally(self.bytes()) { &mut enough } else { &mut few }) = middle;
        }
        Ok(Some(enough).filter(|enough| *enough <= all))
    }
}

/// Bytes that leave a device with that many streamed layers, of which the smallest and the largest have these bytes. One
/// of them is on the device at a time.
pub fn freed((smallest, largest): (u64, u64), streamed: usize) -> u64 {
    let away = (streamed as u64).saturating_mul(smallest);
    away.saturating_sub(if streamed > 0 { largest } else { 0 })
}

/// The least number of streamed layers that frees `missing` bytes, from `fewest` to `most`; `None` if none does.
pub fn needed(layer: (u64, u64), missing: u64, (fewest, most): (usize, usize)) -> Option<usize> {
    let enough = if missing > 0 { enough(layer, missing) } else { 0 };
    Some(enough.max(fewest)).filter(|streamed| *streamed <= most)
}

/// The least number of streamed layers that frees `missing` bytes; more than there are if none does.
fn enough((smallest, largest): (u64, u64), missing: u64) -> usize {
    if smallest > 0 { missing.saturating_add(largest).div_ceil(smallest) as usize } else { usize::MAX }
}

/// The way that takes the least time, by its arithmetic and its reads.
fn fastest<'a>(load: Load<'a>, ways: Vec<Way<'a>>) -> Result<Way<'a>, ModelError> {
    let mut again = Again::of(load)?;
    let mut best: Option<(f64, Way)> = None;
    for (keep, way) in ways {
        let read = READING * way.streamed() as f64 / load.config.layers as f64;
        let time = again.share(keep)? + read / (way.part.group * load.tokens.max(1)) as f64;
        if best.is_none_or(|(least, _)| time < least) {
            best = Some((time, (keep, way)));
        }
    }
    Ok(best.map_or((Keep::Inputs, load), |(_, way)| way))
}
