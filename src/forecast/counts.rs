//! Counts of a run's work, from the plan that the run follows.

use super::time::{Sent, Workload};
use crate::config::groups::{Every, Options, Relays};
use crate::data::Corpus;
use crate::data::plan::Plan;
use crate::devices::Sizes;

/// Maximum microbatches of a plan that are counted one by one; the rest is extrapolated from the counted steps.
pub const ALL: usize = 4_000_000;
/// The same limit where only the run time is needed.
pub const SOME: usize = 100_000;

/// Counts of a run's work.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Counts {
    /// Steps of the whole run.
    pub steps: u64,
    /// The first step of this run.
    pub first: u64,
    /// Steps of one pass over the rows.
    pub steps_per_epoch: u64,
    /// Microbatches in the steps of this run.
    pub microbatches: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Rows that they hold.
    pub rows: u64,
    /// Microbatches of the smallest and the largest step.
    pub microbatches_per_step: (usize, usize),
    /// Tokens of the longest microbatch that every device must have memory for.
    pub longest: usize,
    /// False where the last steps of a long run were extrapolated from its first ones.
    pub exact: bool,
    /// Number of evaluations.
    pub evals: u64,
    /// Tokens of each evaluation.
    pub eval_tokens: u64,
    /// Tokens of the answers that a reference scores before the first step; 0 for a loss without one.
    pub reference: u64,
    /// Number of checkpoints.
    pub saves: u64,
}

impl Counts {
    /// Sizes of the microbatches.
    pub fn sizes(&self) -> Sizes {
        Sizes { tokens: self.longest, microbatches: self.microbatches_per_step.1 }
    }
}

/// Input of the count: the plan, the rows, and the completed steps.
#[derive(Clone, Copy)]
pub struct Ahead<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// Rows to train on.
    pub train: &'a Corpus,
    /// Rows to evaluate on.
    pub eval: Option<&'a Corpus>,
    /// Completed steps.
    pub done: u64,
    /// Maximum microbatches counted one by one.
    pub most: usize,
}

/// How often the steps after `done` of `total`, taken `together` at a time, hold a multiple of `every`, or end; 0 has no
/// multiples.
fn times((done, total): (u64, u64), every: u64, together: u64) -> u64 {
    let all = total.saturating_sub(done).div_ceil(together);
    match every {
        _ if all == 0 => 0,
        0 => 1,
        _ if every <= together => all,
        // No two multiples are in the same steps.
        _ => {
            let last = done + (all - 1) * together;
            total / every - done / every + u64::from(total / every == last / every)
        }
    }
}

/// What travels between coordinator and workers in a run with these options.
fn sent(options: &Options) -> Sent {
    let (o, relays) = (&options.optim, options.cluster.relays_with(options.optim.delay) != Relays::Never);
    Sent { sum: o.sum_bits, update: o.update_bits, islands: o.islands, relays, delay: o.delay }
}

/// Counts the steps after `done` and their contents.
pub fn count(ahead: Ahead, options: &Options) -> (Counts, Workload) {
    let Ahead { plan, train, eval, done, most } = ahead;
    let total = plan.total_steps();
    let mut c = Counts {
        steps: total,
        first: done + 1,
        steps_per_epoch: plan.steps_per_epoch(),
        microbatches_per_step: (usize::MAX, 0),
        exact: true,
        ..Counts::default()
    };
    let mut load = Workload { sent: sent(options), ..Workload::default() };
    for step in done + 1..=total {
        let planned = plan.step(step).microbatches;
        let tokens = |rows: &Vec<usize>| rows.iter().map(|&i| train.samples.tokens(i) as u32).sum::<u32>();
        c.rows += planned.iter().map(|rows| rows.len() as u64).sum::<u64>();
        let sizes: Vec<u32> = planned.iter().map(tokens).collect();
        c.microbatches += sizes.len() as u64;
        c.tokens += sizes.iter().map(|n| u64::from(*n)).sum::<u64>();
        let (fewest, largest) = c.microbatches_per_step;
        c.microbatches_per_step = (fewest.min(sizes.len()), largest.max(sizes.len()));
        load.steps.push(sizes);
        if c.microbatches as usize > most && step < total {
            let by = (total - done) as f64 / (step - done) as f64;
            let grow = |n: u64| (n as f64 * by).round() as u64;
            (c.microbatches, c.tokens, c.rows) = (grow(c.microbatches), grow(c.tokens), grow(c.rows));
            (c.exact, load.times) = (false, Some(by));
            break;
        }
    }
    let lengths = |c: &Corpus| (0..c.samples.len()).map(|i| c.samples.tokens(i)).max().unwrap_or(0);
    c.longest = plan.micro_batch_tokens().max(lengths(train)).max(eval.map_or(0, lengths));
    let steps = |every: Every| every.steps(total, plan.steps_per_epoch());
    let (evals, saves) = (steps(options.output.eval_steps), steps(options.output.save_steps));
    // At intervals and at the end, which may also be one of the intervals.
    let times = |every: Option<u64>| times((done, total), every.unwrap_or(0), load.sent.steps());
    let looks = u64::from(done == 0) + times(evals);
    c.eval_tokens = eval.map_or(0, |e| e.counts.tokens);
    c.evals = if eval.is_some() { looks } else { 0 };
    c.saves = times(saves);
    load.eval = (c.eval_tokens, c.evals);
    // A resumed run has the scores in its folder.
    let compares = options.data.objective.is_some_and(|objective| objective.loss.has_reference());
    if compares && done == 0 {
        c.reference =
            plan.rows().iter().map(|&row| train.samples.tokens(row) as u64).sum::<u64>() + c.eval_tokens;
    }
    load.reference = c.reference;
    load.saves = c.saves;
    load.pauses = times(evals);
    let rows = options.output.sample_rows.min(eval.map_or(0, |e| e.samples.len()));
    let asked = options.output.sample_prompts.len() + rows;
    load.answers = if train.is_labelled() { 0 } else { looks * asked as u64 };
    if c.evals == 0 && load.answers == 0 {
        load.pauses = 1;
    }
    (c, load)
}

#[cfg(test)]
mod tests {
    use super::times;

    #[test]
    fn steps_taken_together_hold_few_multiples() {
        for (done, total, every, together, want) in [
            (0, 160, 1, 16, 10),
            (0, 160, 20, 16, 8),
            (0, 40, 32, 16, 2),
            (0, 160, 0, 16, 1),
            (32, 160, 7, 16, 8),
            (9, 9, 3, 1, 0),
        ] {
            assert_eq!(times((done, total), every, together), want, "{done} {total} {every} {together}");
        }
        for (total, every, together) in
            (1..40).flat_map(|t| (1..9).flat_map(move |e| (1..9).map(move |h| (t, e, h))))
        {
            let mut due = 0;
            let mut at = 0;
            while at < total {
                let end = (at + together).min(total);
                due += u64::from(end == total || (at + 1..=end).any(|step| step % every == 0));
                at = end;
            }
            assert_eq!(times((0, total), every, together), due, "{total} {every} {together}");
        }
    }
}
