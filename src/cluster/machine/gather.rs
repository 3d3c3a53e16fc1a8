//! Whether enough devices are present to lease work: first the expected number, afterwards the minimum.

use super::Machine;
use super::action::{Action, Note};
use super::event::{Config, Counted};
use std::time::Duration;

#[derive(Debug, Default)]
pub(super) struct Gathering {
    phase: Phase,
    /// The number in the last `Note::Waiting`.
    said: Option<usize>,
    /// Microbatches of the longest training round so far, on which the hint below is based: an epoch's last may be
    /// short.
    pub most: usize,
    /// Whether the hint that a step has few microbatches was given.
    pub few: bool,
}

#[derive(Debug, Default, Clone, Copy)]
enum Phase {
    /// No round has begun.
    #[default]
    Before,
    /// Since when it has waited for the expected devices.
    Waiting(Duration),
    Running,
    /// Since when too few devices are left.
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
    /// Whether the expected number has been here, or is.
    pub(super) fn all_met(&self) -> bool {
        let have = match self.config.counts {
            Counted::Tasks => self.fleet.able(),
            Counted::Devices | Counted::Checkable => self.fleet.up(),
        };
        have >= self.config.expect || matches!(self.gathering.phase, Phase::Running | Phase::Paused(_))
    }

    /// Whether leases may be given. Emits notes on changes, and gives up after the time limit.
    pub(super) fn gathered(&mut self) -> bool {
        let (up, min) = (self.useful(), self.config.min.max(1));
        let (have, want, counts) = match (self.gathering.phase, self.config.counts) {
            (Phase::Running | Phase::Paused(_), _) => (up, min, Counted::Devices),
            (_, Counted::Devices | Counted::Checkable) => {
                (self.fleet.up(), self.config.expect.max(min), Counted::Devices)
            }
            (_, Counted::Tasks) => (self.fleet.able(), self.config.expect, Counted::Tasks),
        };
        let g = &mut self.gathering;
        if have >= want && up >= min {
            let waited = matches!(g.phase, Phase::Waiting(_) | Phase::Paused(_));
            g.phase = Phase::Running;
            if waited {
                self.note(Note::Running { have: up });
            }
            return true;
        }
        // Enough are here, and too few can be checked.
        let (have, want, counts) = match self.all_met() && up < min.min(self.fleet.up()) {
            true => (up, min, Counted::Checkable),
            false => (have, want, counts),
        };
        let g = &mut self.gathering;
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
            self.note(Note::Waiting { have, want, counts });
        }
        if self.gathering.deadline(&self.config).is_some_and(|at| self.now >= at) {
            self.over = true;
            self.out.push(Action::GiveUp { have, want, counts });
        }
        false
    }
}
