//! Signals, as a run sees them: a flag that it looks at between microbatches and between steps. Who sets it
//! (cli, from a signal handler's thread) and what a second SIGINT does are not its business.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// How urgently a run is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// Go on.
    Run = 0,
    /// End after this step, with a checkpoint (first SIGINT).
    AfterStep = 1,
    /// Checkpoint the last finished step, never wait for the current one (SIGTERM).
    Now = 2,
}

/// Shared between the run and whoever may stop it; urgency only rises.
#[derive(Debug, Default)]
pub struct Stop {
    urgency: AtomicU8,
    save: AtomicBool,
}

impl Stop {
    /// A flag that nobody raised.
    pub const fn new() -> Self {
        Stop { urgency: AtomicU8::new(0), save: AtomicBool::new(false) }
    }

    /// Asks the run to end; returns what was asked before, so that a second SIGINT can be told from a first.
    pub fn ask(&self, urgency: Urgency) -> Urgency {
        from(self.urgency.fetch_max(urgency as u8, Ordering::SeqCst))
    }

    /// Asks for a checkpoint at the end of this step; the run goes on (SIGUSR1).
    pub fn ask_checkpoint(&self) {
        self.save.store(true, Ordering::SeqCst);
    }

    /// What was asked.
    pub fn urgency(&self) -> Urgency {
        from(self.urgency.load(Ordering::SeqCst))
    }

    /// True once for every request of a checkpoint.
    pub fn take_checkpoint(&self) -> bool {
        self.save.swap(false, Ordering::SeqCst)
    }
}

fn from(level: u8) -> Urgency {
    match level {
        0 => Urgency::Run,
        1 => Urgency::AfterStep,
        _ => Urgency::Now,
    }
}
