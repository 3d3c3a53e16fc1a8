//! Trial microbatches that measure a device's time and memory before it takes part. Their tokens are synthetic, because
//! neither depends on the content of rows. Rows are short, so attention over long rows is not measured. Small trials
//! come first, and measuring stops after a time limit, so that a slow device loses little time.

use crate::model::config::Config;
use crate::model::head;
use crate::model::memory::{InUse, Used};
use crate::model::stage::{IGNORE, Microbatch, Model, Targets};
use crate::numeric::line::Points;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Tokens of the largest trial.
pub const LONGEST: usize = 1024;
/// Tokens of each row of a trial.
const ROW: usize = 128;
/// A first pass that takes longer counts: what it warms up, such as compiled kernels, is a small part of its time.
const PATIENCE: Duration = Duration::from_secs(10);

/// A pass that was made, with its peak of memory where the device measures it.
pub struct Passed(pub Option<InUse>);

/// Results of a device's trial microbatches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Trials {
    /// Tokens and seconds.
    pub time: Points,
    /// Tokens and bytes.
    pub memory: Used,
}

impl Trials {
    /// Runs every trial twice; only the second pass counts, because the first one warms up, unless that takes longer
    /// than `PATIENCE`. A pass computes `copies` equal microbatches, and its time is divided by them. No trial starts
    /// later than `enough` after the first. A `None` of `pass` ends the trials.
    pub fn run<E>(
        &mut self,
        trials: &[Microbatch],
        (enough, copies): (Duration, usize),
        pass: &mut dyn FnMut(&Microbatch) -> Result<Option<Passed>, E>,
    ) -> Result<(), E> {
        let began = Instant::now();
        let mut timed = |batch| -> Result<Option<(Duration, Option<InUse>)>, E> {
            let from = Instant::now();
            Ok(pass(batch)?.map(|Passed(in_use)| (from.elapsed() / copies as u32, in_use)))
        };
        for batch in trials {
            let Some(mut measured) = timed(batch)? else { return Ok(()) };
            if measured.0 < PATIENCE {
                let Some(again) = timed(batch)? else { return Ok(()) };
                measured = again;
            }
            let tokens = batch.ids.len() as f64;
            self.time.add(tokens, measured.0.as_secs_f64());
            measured.1.into_iter().for_each(|seen| self.memory.add(tokens, seen));
            if began.elapsed() > enough {
                return Ok(());
            }
        }
        Ok(())
    }
}

/// Memory in use by a model at rest: the first answer of a model includes the peak of its loading.
pub fn at_rest(model: &mut dyn Model) -> Option<InUse> {
    model.in_use().and_then(|_| model.in_use())
}

/// Trials of a few sizes, up to the longest microbatch of the run.
pub fn trials(config: &Config, longest: usize) -> Vec<Microbatch> {
    sizes(longest).into_iter().map(|tokens| batch(config, tokens)).collect()
}

fn sizes(longest: usize) -> Vec<usize> {
    let most = longest.clamp(1, LONGEST);
    let mut sizes: Vec<usize> = [8, 4, 2, 1].iter().map(|by| (most / by).max(1)).collect();
    sizes.dedup();
    sizes
}

fn batch(config: &Config, tokens: usize) -> Microbatch {
    let row = ROW.min(config.max_positions).max(1);
    let ids: Vec<u32> = (0..tokens).map(|i| ((i * 7919) % config.vocab) as u32).collect();
    let bounds: Vec<u32> = (0..tokens).step_by(row).chain([tokens]).map(|at| at as u32).collect();
    let rows = bounds.len() - 1;
    let next = |row: &[u32]| row[1..].iter().copied().chain([IGNORE]).collect::<Vec<_>>();
    let of_head = head::targets(config, (rows, tokens));
    let targets = of_head.unwrap_or_else(|| Targets::Tokens(ids.chunks(row).flat_map(next).collect()));
    Microbatch { step: 0, rows: (0..rows as u64).collect(), ids, bounds, targets }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_double_up_to_the_longest() {
        assert_eq!(sizes(256), [32, 64, 128, 256]);
        assert_eq!(sizes(100_000), [128, 256, 512, 1024]);
        assert_eq!(sizes(3), [1, 3]);
        assert_eq!(sizes(0), [1]);
    }
}
