//! Signals, as a run sees them: a flag that the run checks between microbatches and between steps. `cli` sets the flag,
//! from a signal handler's thread, and decides the meaning of a second SIGINT.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// How soon a run must end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// Continue.
    Run = 0,
    /// End after this step, with a checkpoint (first SIGINT).
    AfterStep = 1,
    /// Save the last finished step without waiting for the current one (SIGTERM).
    Now = 2,
}

/// The stop flag, shared between the run and the signal handler; urgency only increases.
#[derive(Debug, Default)]
pub struct Stop {
    urgency: AtomicU8,
    save: AtomicBool,
}

impl Stop {
    /// A flag that is not raised.
    pub const fn new() -> Self {
        Stop { urgency: AtomicU8::new(0), save: AtomicBool::new(false) }
    }

    /// Asks the run to end; returns the previous urgency, so that the caller can distinguish a second SIGINT from the
    /// first.
    pub fn ask(&self, urgency: Urgency) -> Urgency {
        from(self.urgency.fetch_max(urgency as u8, Ordering::SeqCst))
    }

    /// Asks for a checkpoint at the end of this step; the run continues (SIGUSR1).
    pub fn ask_checkpoint(&self) {
        self.save.store(true, Ordering::SeqCst);
    }

    /// The current urgency.
    pub fn urgency(&self) -> Urgency {
        from(self.urgency.load(Ordering::SeqCst))
    }

    /// True once for each request of a checkpoint.
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
