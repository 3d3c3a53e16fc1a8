//! A worker: it computes what it is given and keeps nothing that could not be lost. Whatever ends a conversation, the
//! next one begins with nothing but loaded models; what was granted and not delivered is the coordinator's to give
//! out again.

mod blueprint;
mod cache;
mod device;
mod device_queue;
mod devices;
mod join;
mod limits;
mod outbox;
mod parameters;
mod reconnect;
mod selftest;
mod session;
mod sum;
mod visit;

pub use blueprint::{Begin, Blueprint, Candidate, Opener, Shape, Unfit};
pub use cache::Cache;
pub use devices::Equipment;
pub use parameters::{Parameters, hash};
pub use reconnect::{Ending, Reconnect, Way, identity};
pub use selftest::{Deviation, Reference};
pub use visit::{Visit, visit};

use super::link::WorkerLink;
use super::message::Hello;
use crate::train::event::Share;
use crate::train::stop::Stop;
use devices::DeviceThreads;
use outbox::Outbox;
use std::cell::Cell;
use std::path::PathBuf;

/// How a conversation ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The run is complete.
    Done,
    /// This side was told to stop, and has handed back what it held.
    Left,
    /// The connection, or the coordinator, is gone for now: dial again.
    Lost {
        /// One line.
        reason: String,
    },
    /// The run halted on a bad value.
    Halted {
        /// The line that the coordinator's user reads.
        reason: String,
    },
    /// This worker may not take part, now or later.
    Refused {
        /// One line.
        reason: String,
    },
    /// It was taken out.
    Out {
        /// One line.
        reason: String,
    },
    /// Something here does not work.
    Failed {
        /// One line.
        reason: String,
    },
}

/// Where a worker's model comes from.
#[expect(clippy::large_enum_variant, reason = "a process has one of it")]
pub enum ModelSource {
    /// From the same process, which is the coordinator's.
    Here(Blueprint),
    /// From this machine's disk, or from the coordinator.
    Files {
        /// The model that the user named, and its content hash.
        named: Option<(PathBuf, String)>,
        /// Where models that came from coordinators are kept.
        cache: Cache,
    },
}

/// What a worker shows of its part in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sight<'a> {
    /// What it has done so far.
    Share(Share),
    /// Its part is over; in two words, why.
    Over(&'a str),
}

/// A process' devices, which take part in one conversation after the other.
pub struct Worker<'a> {
    equipment: Equipment,
    source: ModelSource,
    /// Told what happens, line by line.
    say: &'a dyn Fn(&str),
    /// Shown what it has done.
    see: &'a dyn Fn(Sight<'_>),
    share: Cell<Share>,
    threads: Option<DeviceThreads>,
    before: Option<(String, u64)>,
    /// Whether the last conversation got as far as the welcome of a coordinator that it follows.
    welcomed: bool,
}

impl<'a> Worker<'a> {
    /// Nothing is opened yet; `say` is told what happens, line by line.
    pub fn new(equipment: Equipment, source: ModelSource, say: &'a dyn Fn(&str)) -> Self {
        let (see, share) = (&|_: Sight<'_>| (), Cell::default());
        Worker { equipment, source, say, see, share, threads: None, before: None, welcomed: false }
    }

    /// The same worker; `see` is shown what it has done whenever that grows.
    #[must_use]
    pub fn shown_to(self, see: &'a dyn Fn(Sight<'_>)) -> Self {
        Worker { see, ..self }
    }

    /// One conversation, to its end. `hello` is sent with what this worker knows of the run from before.
    pub fn serve(&mut self, link: WorkerLink, hello: Hello, stop: &Stop) -> Outcome {
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_time().build() {
            Ok(runtime) => runtime,
            Err(e) => return Outcome::Failed { reason: format!("no event loop: {e}") },
        };
        self.welcomed = false;
        // What went down while nobody listened ends the worker as it would have ended it before.
        if let Some(reason) = self.threads.as_ref().and_then(DeviceThreads::spent) {
            return Outcome::Failed { reason };
        }
        runtime.block_on(async {
            let mut outbox = Outbox::new(link, stop);
            let hello = Hello { before: self.before.clone(), ..hello };
            let outcome = self.converse(&mut outbox, hello).await;
            match &outcome {
                Outcome::Left => outbox.leave("it was told to stop"),
                Outcome::Refused { reason } | Outcome::Failed { reason } => outbox.leave(reason),
                _ => {}
            }
            outbox.finish().await;
            outcome
        })
    }
}
