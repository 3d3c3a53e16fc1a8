//! The work and the memory of a run, known before it begins.

use super::Job;
use crate::config::groups::Options;
use crate::data::plan::Plan;
use crate::devices::Need;
use crate::forecast::counts::{Ahead, Counts, SOME, count};
use crate::forecast::profile::ModelShape;
use crate::forecast::time::Workload;
use crate::model::weights::ModelError;
use crate::run::prepare::Prepared;

impl Job {
    /// The model's properties that determine its speed.
    pub fn shape(&self, options: &Options) -> Result<ModelShape, ModelError> {
        self.prepared.shape(options)
    }

    /// The remaining work.
    pub fn counts(&self, options: &Options) -> &(Counts, Workload) {
        self.ahead.get_or_init(|| {
            let p = &self.prepared;
            let (train, eval, done) = (&p.train, p.eval.as_ref(), self.state.step);
            count(Ahead { plan: &self.plan, train, eval, done, most: SOME }, options)
        })
    }

    /// Tokens of the run's longest microbatch.
    pub fn longest(&self, options: &Options) -> usize {
        let (counts, load) = self.counts(options);
        load.steps.iter().flatten().max().map_or(counts.longest, |tokens| *tokens as usize)
    }

    /// Memory that every device needs.
    pub fn need(&self) -> Need {
        need(&self.prepared, &self.plan)
    }
}

/// Memory that every device needs for the plan.
pub fn need(p: &Prepared, plan: &Plan) -> Need {
    let longest = [Some(&p.train), p.eval.as_ref()].into_iter().flatten();
    let longest = longest.flat_map(|c| (0..c.samples.len()).map(|i| c.samples.tokens(i))).max();
    let tokens = plan.micro_batch_tokens().max(longest.unwrap_or(0));
    Need { tokens, microbatches: plan.step(1).microbatches.len().max(1), measured: None, how: None }
}
