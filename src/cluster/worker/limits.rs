//! Size limits of a lease. The devices were opened for the manifest's longest microbatch and the model's positions;
//! a larger lease is refused before memory is allocated for it.

use crate::cluster::message::Work;
use crate::model::stage::Microbatch;
use crate::train::island::Island;
use crate::train::optim::Options;

/// Most tokens of the leases of one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Limits {
    /// Limit of a microbatch, from the manifest.
    pub tokens: usize,
    /// Limit of a row and of a prompt: the model's positions.
    pub positions: usize,
    /// Whether the run has islands.
    pub moments: bool,
}

impl Limits {
    /// Checks a lease. The error is one line: the excess and the agreed limit.
    pub fn check(&self, work: &Work) -> Result<(), String> {
        match work {
            Work::Prompt { ids, .. } => {
                self.within("a prompt", ids.len(), (self.positions, "the model's positions are"))
            }
            _ => {
                work.island().map_or(Ok(()), |island| self.island(island))?;
                let island = work.island().into_iter().flat_map(Island::batches);
                work.batch().into_iter().chain(island).try_for_each(|batch| self.microbatch(batch))
            }
        }
    }

    fn island(&self, island: &Island) -> Result<(), String> {
        if !self.moments {
            return Err(
                "the coordinator leased an island in a run without islands: use one release on both sides"
                    .into(),
            );
        }
        let Options { beta1, beta2, eps, weight_decay, max_grad_norm, ratio_of_b, update_bits } =
            island.options;
        let numbers = [beta1, beta2, eps, weight_decay, max_grad_norm, ratio_of_b];
        let mut numbers = numbers.into_iter().chain(island.steps.iter().map(|step| step.rate));
        match numbers.all(f64::is_finite) && update_bits == 0 && island.after < u64::from(u32::MAX) {
            true => Ok(()),
            false => {
                Err("the coordinator leased an island whose optimizer has numbers that no run has".into())
            }
        }
    }

    fn microbatch(&self, batch: &Microbatch) -> Result<(), String> {
        let row = batch.bounds.windows(2).map(|b| b[1].saturating_sub(b[0]) as usize).max().unwrap_or(0);
        self.within("a microbatch", batch.ids.len(), (self.tokens, "the run's longest has"))?;
        self.within("a row", row, (self.positions, "the model's positions are"))
    }

    fn within(&self, what: &str, long: usize, (limit, whose): (usize, &str)) -> Result<(), String> {
        match long <= limit {
            true => Ok(()),
            false => Err(format!(
                "the coordinator leased {what} of {long} tokens, {whose} {limit}: it does not keep to its own manifest; \
                 use one release on both sides"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::stage::{Sampling, Targets};
    use crate::train::island::InnerStep;

    fn check(work: Work, part: &str) {
        let got = Limits { tokens: 64, positions: 32, moments: true }.check(&work).err().unwrap_or_default();
        assert!(got.contains(part) && got.is_empty() == part.is_empty(), "{got:?}, not {part:?}");
    }

    #[test]
    fn leases_beyond_manifest_or_model_are_refused() {
        let batch = |bounds: &[u32]| {
            let n = bounds.last().map_or(0, |n| *n as usize);
            let (ids, targets) = (vec![1; n], Targets::Tokens(vec![1; n]));
            Microbatch { step: 1, rows: vec![], ids, bounds: bounds.to_vec(), targets }
        };
        let prompt = |n: usize| Work::Prompt { ids: vec![1; n], sampling: Sampling::default() };
        check(Work::Train(batch(&[0, 32, 64])), "");
        check(Work::Eval(batch(&[0, 30, 65])), "a microbatch of 65 tokens, the run's longest has 64");
        check(Work::Recheck(batch(&[0, 33, 64])), "a row of 33 tokens, the model's positions are 32");
        check(Work::Verify(batch(&[0, 30, 65])), "a microbatch of 65 tokens, the run's longest has 64");
        check(Work::Train(batch(&[])), "");
        let island = |batches, rate| {
            let steps = vec![InnerStep { rate, batches }];
            Work::Island(Island { options: Options::default(), after: 0, steps })
        };
        check(island(vec![batch(&[0, 32, 64]); 9], 0.1), "");
        check(island(vec![batch(&[0, 32, 64]), batch(&[0, 30, 65])], 0.1), "a microbatch of 65 tokens");
        check(island(vec![], f64::NAN), "numbers that no run has");
        check(prompt(32), "");
        check(prompt(33), "a prompt of 33 tokens, the model's positions are 32");
    }
}
