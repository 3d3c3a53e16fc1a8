//! A worker: it computes leases and keeps no state that could not be lost. A new conversation starts with loaded
//! models only, however the last one ended; the coordinator leases again what was granted and not delivered.

mod blueprint;
mod cache;
mod device;
mod device_queue;
mod devices;
mod inbox;
mod join;
mod limits;
mod mesh;
mod outbox;
mod parameters;
mod parts;
mod peers;
mod progress;
mod reconnect;
pub(super) mod relay;
mod selftest;
mod session;
mod sum;
mod visit;

pub use blueprint::{Begin, Blueprint, Candidate, Opener, Portion, Shape, Unfit};
pub use cache::Cache;
pub use devices::Equipment;
pub use parameters::{Parameters, hash};
pub use reconnect::{Ending, Reconnect, Way, identity, random};
pub use selftest::{Deviation, Reference};
pub use visit::{Visit, visit};

use super::link::WorkerLink;
use super::message::{Capacity, Hello, SeatPlan};
use crate::train::event::Share;
use crate::train::stop::Stop;
use devices::DeviceThreads;
use outbox::Outbox;
use peers::PeerNet;
use std::cell::Cell;
use std::path::PathBuf;

/// How a conversation ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The run is complete.
    Done,
    /// This side was asked to stop, and has handed back its leases.
    Left,
    /// The connection or the coordinator is lost for now: dial again.
    Lost {
        /// The reason, in one line.
        reason: String,
    },
    /// The run halted on a bad value.
    Halted {
        /// The line that is shown to the coordinator's user.
        reason: String,
    },
    /// This worker may not take part, now or later.
    Refused {
        /// The reason, in one line.
        reason: String,
    },
    /// The coordinator removed this worker.
    Out {
        /// The reason, in one line.
        reason: String,
    },
    /// An error on this side.
    Failed {
        /// The error, in one line.
        reason: String,
    },
}

/// Where a worker's model comes from.
#[expect(clippy::large_enum_variant, reason = "a process has one of it")]
pub enum ModelSource {
    /// From the coordinator, which is in the same process.
    Here(Blueprint),
    /// From this machine's disk, or from the coordinator.
    Files {
        /// The model that the user named, and its content hash.
        named: Option<(PathBuf, String)>,
        /// Cache of models that were fetched from coordinators.
        cache: Cache,
    },
}

/// A worker's part in a run, for display.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sight<'a> {
    /// Its work so far.
    Share(Share),
    /// Its part is over; the reason in a few words.
    Over(&'a str),
}

/// The devices of a process, which take part in one conversation after the other.
pub struct Worker<'a> {
    equipment: Equipment,
    source: ModelSource,
    /// Receives messages for the user, line by line.
    say: &'a dyn Fn(&str),
    /// Receives the work so far.
    see: &'a dyn Fn(Sight<'_>),
    share: Cell<Share>,
    threads: Option<DeviceThreads>,
    /// What its device can hold of the model of this hash and shape, in lines of that many seats.
    capacity: Option<((String, Shape, u16), Capacity)>,
    /// Its last seat in a line.
    seat: Option<SeatPlan>,
    before: Option<(String, u64)>,
    /// Whether the last conversation was welcomed by a coordinator that this worker follows.
    welcomed: bool,
    /// How it connects with other workers; `None` in the coordinator's own process.
    peers: Option<PeerNet>,
}

impl<'a> Worker<'a> {
    /// A worker without opened devices. `say` receives messages for the user, line by line.
    pub fn new(equipment: Equipment, source: ModelSource, say: &'a dyn Fn(&str)) -> Self {
        let (see, share) = (&|_: Sight<'_>| (), Cell::default());
        Worker {
            equipment,
            source,
            say,
            see,
            share,
            threads: None,
            capacity: None,
            seat: None,
            before: None,
            welcomed: false,
            peers: None,
        }
    }

    /// The same worker; `see` receives its work so far whenever it grows.
    #[must_use]
    pub fn shown_to(self, see: &'a dyn Fn(Sight<'_>)) -> Self {
        Worker { see, ..self }
    }

    /// Serves one conversation to its end. `hello` is sent with the run and epoch that this worker knows.
    pub fn serve(&mut self, link: WorkerLink, hello: Hello, stop: &Stop) -> Outcome {
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_time().build() {
            Ok(runtime) => runtime,
            Err(e) => return Outcome::Failed { reason: format!("no event loop: {e}") },
        };
        self.welcomed = false;
        // Devices that went down between conversations end the worker as they would have within one.
        if let Some(reason) = self.threads.as_ref().and_then(DeviceThreads::spent) {
            return Outcome::Failed { reason };
        }
        runtime.block_on(async {
            let mut outbox = Outbox::new(link, stop);
            let hello = Hello { before: self.before.clone(), ..hello };
            let outcome = self.converse(&mut outbox, hello).await;
            match &outcome {
                Outcome::Left => outbox.leave("it was asked to stop"),
                Outcome::Refused { reason } | Outcome::Failed { reason } => outbox.leave(reason),
                _ => {}
            }
            outbox.finish().await;
            outcome
        })
    }
}
