//! What a run needs and how much of it there is, known before any of it is done.

use super::Job;
use crate::config::groups::Options;
use crate::data::plan::Plan;
use crate::data::samples::Samples;
use crate::devices::Need;
use crate::forecast::counts::{Ahead, Counts, SOME, count};
use crate::forecast::profile::ModelShape;
use crate::forecast::time::Load;
use crate::model::stage::Microbatch;
use crate::run::prepare::Prepared;
use crate::train;

impl Job {
    /// The model as far as its speed goes.
    pub fn shape(&self, options: &Options) -> ModelShape {
        self.prepared.shape(options)
    }

    /// What is left to be done.
    pub(super) fn counts(&self, options: &Options) -> &(Counts, Load) {
        self.ahead.get_or_init(|| {
            let p = &self.prepared;
            let (train, eval, done) = (&p.train, p.eval.as_ref(), self.state.step);
            count(Ahead { plan: &self.plan, train, eval, done, most: SOME }, options)
        })
    }

    /// Tokens of the longest microbatch that it has.
    pub fn longest(&self, options: &Options) -> usize {
        let (counts, load) = self.counts(options);
        load.steps.iter().flatten().max().map_or(counts.longest, |tokens| *tokens as usize)
    }

    /// Microbatches of a few sizes, the small ones first, that a device can be measured with.
    pub fn trials(&self) -> Vec<Microbatch> {
        trials(&self.prepared.train.samples, self.plan.micro_batch_tokens())
    }

    /// What every device must have room for.
    pub fn need(&self) -> Need {
        need(&self.prepared, &self.plan)
    }
}

/// What every device must have room for.
pub fn need(p: &Prepared, plan: &Plan) -> Need {
    let longest = [Some(&p.train), p.eval.as_ref()].into_iter().flatten();
    let longest = longest.flat_map(|c| (0..c.samples.len()).map(|i| c.samples.tokens(i))).max();
    Need { tokens: plan.micro_batch_tokens().max(longest.unwrap_or(0)), measured: None, keep: None }
}

/// Microbatches of the first rows, of an eighth of `most` tokens and more, none longer than that but one of a row.
pub fn trials(rows: &Samples, most: usize) -> Vec<Microbatch> {
    let (mut taken, mut tokens, mut trials) = (Vec::new(), 0, Vec::new());
    let mut next = most / 8;
    for row in 0..rows.len() {
        tokens += rows.tokens(row);
        if tokens > most && !taken.is_empty() {
            break;
        }
        taken.push(row);
        if tokens >= next {
            trials.push(train::microbatch(rows, &taken, 0));
            next = 2 * tokens;
        }
    }
    trials
}
