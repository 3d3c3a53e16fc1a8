//! Whether enough devices are here to give out work: first those that are expected, from then on the minimum.

use super::Machine;
use super::action::{Action, Note};
use super::event::Config;
use std::time::Duration;

#[derive(Debug, Default)]
pub(super) struct Gathering {
    phase: Phase,
    /// What was said last while waiting.
    said: Option<usize>,
    /// The longest training round so far, by which the hint below judges: an epoch's last may be short.
    pub most: usize,
    /// The hint that a step has few microbatches was given.
    pub few: bool,
}

#[derive(Debug, Default, Clone, Copy)]
enum Phase {
    /// No round has begun.
    #[default]
    Before,
    /// The expected devices are not all here yet.
    Waiting(Duration),
    Running,
    /// Too few are left.
    Paused(Duration),
}

impl Gathering {
    pub fn deadline(&self, config: &Config) -> Option<Duration> {
        match self.phase {
            Phase::Waiting(since) | Phase::Paused(since) => Some(since + config.join_timeout),
            Phase::Before | Phase::Running => None,
        }
    }
}

impl Machine {
    /// Whether leases may be given; says so when that changes, and gives up in time.
    pub(super) fn gathered(&mut self) -> bool {
        let have = self.fleet.up();
        let min = self.config.min.max(1);
        let want = match self.gathering.phase {
            Phase::Before | Phase::Waiting(_) => self.config.expect.max(min),
            Phase::Running | Phase::Paused(_) => min,
        };
        let g = &mut self.gathering;
        if have >= want {
            let waited = matches!(g.phase, Phase::Waiting(_) | Phase::Paused(_));
            g.phase = Phase::Running;
            if waited {
                self.note(Note::Running { have });
            }
            return true;
        }
        match g.phase {
            Phase::Before => g.phase = Phase::Waiting(self.now),
            Phase::Running => {
                g.phase = Phase::Paused(self.now);
                self.note(Note::Paused { have, want });
            }
            Phase::Waiting(_) | Phase::Paused(_) => {}
        }
        if matches!(self.gathering.phase, Phase::Waiting(_))
            && self.gathering.said.replace(have) != Some(have)
        {
            self.note(Note::Waiting { have, want });
        }
        if self.gathering.deadline(&self.config).is_some_and(|at| self.now >= at) {
            self.over = true;
            self.out.push(Action::GiveUp { have, want });
        }
        false
    }
}
