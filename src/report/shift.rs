//! Shows a worker's share of a run on stderr: a bar on a terminal, occasional lines in a file or a pipe, and one line
//! with the totals at the end.

use super::console::{Look, style};
use super::words::duration;
use crate::support::plural::count;
use crate::train::event::Share;
use indicatif::{ProgressBar, ProgressDrawTarget};
use std::io::Write;
use std::time::Instant;

/// Approximate number of step lines, for a run of any length.
const LINES: u64 = 50;

/// Shows a worker's share as it grows.
pub struct Shift {
    look: Look,
    bar: Option<ProgressBar>,
    /// The last known share, and the time of the first one.
    share: Option<(Share, Instant)>,
}

impl Shift {
    /// Shows nothing before the first share.
    pub fn new(look: Look) -> Self {
        Shift { look, bar: None, share: None }
    }

    /// Shows the share so far.
    pub fn see(&mut self, share: Share) {
        let (before, began) = self.share.unwrap_or_else(|| (Share::default(), Instant::now()));
        self.share = Some((share, began));
        match self.look {
            Look::Quiet => {}
            Look::Bar => {
                let bar = self.bar.get_or_insert_with(|| bar(share.steps));
                bar.set_length(share.steps);
                bar.set_position(share.step);
                bar.set_message(pace(&share, began.elapsed().as_secs_f64()));
            }
            Look::Lines => {
                let every = share.steps.div_ceil(LINES).max(1);
                if share.step > before.step && (share.step.is_multiple_of(every) || share.step == share.steps)
                {
                    let width = share.steps.to_string().len();
                    let pace = pace(&share, began.elapsed().as_secs_f64());
                    self.line(&format!("step {:>width$}/{}  {pace}", share.step, share.steps));
                }
            }
        }
    }

    /// Prints a line that stays, above the bar.
    pub fn line(&self, line: &str) {
        let write = || drop(writeln!(std::io::stderr(), "{line}"));
        match (self.look, &self.bar) {
            (Look::Quiet, _) => {}
            (_, Some(bar)) => bar.suspend(write),
            // A closed stderr must not end a run.
            (_, None) => write(),
        }
    }

    /// Prints the totals and the reason for the end, and resets the share.
    pub fn over(&mut self, why: &str) {
        if let Some(bar) = self.bar.take() {
            bar.abandon();
        }
        match self.share.take() {
            Some((share, began)) => {
                self.line(&format!("{why}: {}", sum(&share, began.elapsed().as_secs_f64())));
            }
            None => self.line(why),
        }
    }
}

fn bar(steps: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
    bar.set_style(style("{bar:16} {pos}/{len}  {wide_msg}").progress_chars("=> "));
    bar
}

/// `25 %  72 microbatches  341 tokens/s`
fn pace(share: &Share, seconds: f64) -> String {
    let percent = 100 * share.step.min(share.steps) / share.steps.max(1);
    let speed = share.tokens as f64 / seconds.max(1e-3);
    format!("{percent} %  {} here  {speed:.0} tokens/s", count(share.microbatches, "microbatch"))
}

/// `72 microbatches, 13843 tokens, 0:43`
fn sum(share: &Share, seconds: f64) -> String {
    let microbatches = count(share.microbatches, "microbatch");
    format!("{microbatches}, {}, {}", count(share.tokens, "token"), duration(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_of_a_worker_is_shown_as_lines() {
        let share = Share { step: 12, steps: 48, microbatches: 72, tokens: 13_843 };
        assert_eq!(pace(&share, 43.0), "25 %  72 microbatches here  322 tokens/s");
        assert_eq!(sum(&share, 43.0), "72 microbatches, 13843 tokens, 0:43");
        assert_eq!(sum(&Share { microbatches: 1, tokens: 1, ..share }, 1.0), "1 microbatch, 1 token, 0:01");
        assert_eq!(pace(&Share::default(), 0.0), "0 %  0 microbatches here  0 tokens/s");
    }
}
