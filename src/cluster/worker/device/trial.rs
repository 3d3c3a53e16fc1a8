//! Microbatches that a device is measured with before it takes part. What is in them is made up: time does not depend
//! on what rows say. The small ones come first, and nothing more is measured once it has taken long enough, so that
//! a slow device is not kept from its work by being asked how slow it is.

use super::{Failed, Worker};
use crate::model::config::Config;
use crate::model::stage::{IGNORE, Microbatch, Targets};
use crate::numeric::line::Points;
use std::time::{Duration, Instant};

/// Tokens of the longest trial.
const LONGEST: usize = 1024;
/// Tokens of its rows.
const ROW: usize = 128;
/// Time after which no larger one is begun.
const ENOUGH: Duration = Duration::from_millis(300);

impl Worker {
    /// How long trial microbatches of a few sizes take, the small ones first.
    pub fn measure(&mut self) -> Points {
        let trials = sizes(self.shared.blueprint.shape.tokens);
        let (config, mut points) = (self.shared.blueprint.config.clone(), Points::default());
        let mut gradient = self.shared.buffers.take(self.layout.len());
        gradient.fill(0.0);
        let mut pass = |worker: &mut Self, batch: &Microbatch| -> Result<Duration, Failed> {
            let began = Instant::now();
            worker.model()?.gradient(batch, &mut gradient)?;
            worker.throttle(began)?;
            Ok(began.elapsed())
        };
        // The adapter is whatever it was made with: time does not depend on values.
        measure(&mut points, &config, trials, &mut |batch| pass(self, batch).ok());
        self.shared.buffers.give_back(gradient);
        points
    }
}

/// Sizes below the longest microbatch of a run.
fn sizes(longest: usize) -> Vec<usize> {
    let most = longest.clamp(1, LONGEST);
    let mut sizes: Vec<usize> = [8, 4, 2, 1].iter().map(|by| (most / by).max(1)).collect();
    sizes.dedup();
    sizes
}

/// Every size twice, of which the second pass counts: the first one warms up. `pass` says how long one took.
fn measure(
    points: &mut Points,
    config: &Config,
    sizes: Vec<usize>,
    pass: &mut dyn FnMut(&Microbatch) -> Option<Duration>,
) {
    let began = Instant::now();
    for tokens in sizes {
        let batch = batch(config, tokens);
        let (Some(_), Some(took)) = (pass(&batch), pass(&batch)) else { return };
        points.add(tokens as f64, took.as_secs_f64());
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
