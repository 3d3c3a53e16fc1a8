//! Trial microbatches that measure a device's time and memory before it takes part. Their tokens are synthetic,
//! because neither depends on the content of rows. Small trials come first, and measuring stops after a time limit,
//! so that a slow device loses little time.

use super::{DeviceWorker, Failed};
use crate::cluster::message::Trials;
use crate::model::config::Config;
use crate::model::stage::{IGNORE, InUse, Microbatch, Targets};
use std::time::{Duration, Instant};

/// Tokens of the largest trial.
const LONGEST: usize = 1024;
/// Tokens of each of its rows.
const ROW: usize = 128;
/// Time after which no larger trial starts.
const ENOUGH: Duration = Duration::from_millis(300);

impl DeviceWorker {
    /// Measures trial microbatches of a few sizes, the small ones first.
    pub fn measure(&mut self) -> Trials {
        let trials = sizes(self.shared.blueprint.shape.tokens);
        let (config, mut taken) = (self.shared.blueprint.config.clone(), Trials::default());
        let mut gradient = self.shared.buffers.take(self.layout.len());
        gradient.fill(0.0);
        let mut pass = |worker: &mut Self, batch: &Microbatch| -> Result<Pass, Failed> {
            let began = Instant::now();
            worker.model()?.gradient(batch, &mut gradient)?;
            worker.throttle(began)?;
            Ok(Pass { took: began.elapsed(), in_use: worker.model()?.in_use() })
        };
        let at_rest = |worker: &mut Self| {
            // The first answer includes the peak of loading; the second is the memory at rest.
            let model = worker.model().ok()?;
            model.in_use().and_then(|_| model.in_use())
        };
        if let Some(seen) = at_rest(self) {
            taken.memory.rest(seen);
        }
        // The adapter keeps its initial values: time does not depend on them.
        measure(&mut taken, &config, trials, &mut |batch| pass(self, batch).ok());
        self.shared.buffers.give_back(gradient);
        taken
    }
}

/// Trial sizes up to the longest microbatch of the run.
fn sizes(longest: usize) -> Vec<usize> {
    let most = longest.clamp(1, LONGEST);
    let mut sizes: Vec<usize> = [8, 4, 2, 1].iter().map(|by| (most / by).max(1)).collect();
    sizes.dedup();
    sizes
}

/// Time and memory of one pass.
struct Pass {
    took: Duration,
    in_use: Option<InUse>,
}

/// Runs every size twice; only the second pass counts, because the first one warms up.
fn measure(
    taken: &mut Trials,
    config: &Config,
    sizes: Vec<usize>,
    pass: &mut dyn FnMut(&Microbatch) -> Option<Pass>,
) {
    let began = Instant::now();
    for tokens in sizes {
        let batch = batch(config, tokens);
        let (Some(_), Some(Pass { took, in_use })) = (pass(&batch), pass(&batch)) else { return };
        taken.time.add(tokens as f64, took.as_secs_f64());
        in_use.into_iter().for_each(|seen| taken.memory.add(tokens as f64, seen));
        if began.elapsed() > ENOUGH {
            return;
        }
    }
}

fn batch(config: &Config, tokens: usize) -> Microbatch {
    let row = ROW.min(config.longest_row()).max(1);
    let ids: Vec<u32> = (0..tokens).map(|i| ((i * 7919) % config.vocab) as u32).collect();
    let bounds: Vec<u32> = (0..tokens).step_by(row).chain([tokens]).map(|at| at as u32).collect();
    let rows = bounds.len() - 1;
    let next = |row: &[u32]| row[1..].iter().copied().chain([IGNORE]).collect::<Vec<_>>();
    let targets = match &config.labels {
        Some(_) => Targets::Labels(vec![0; rows]),
        None => Targets::Tokens(ids.chunks(row).flat_map(next).collect()),
    };
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
