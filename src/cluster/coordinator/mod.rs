//! The acting half of the coordinator: it has the clock, threads, sockets and gradients that [`super::machine`]
//! lacks, and leaves every decision to it.
//!
//! Connections live in tasks ([`Reception`]), which do the handshake, serve the model's files and notice silence at
//! any time. The driver is the thread that asks for gradients: it passes the reports of the tasks to the machine and
//! carries out the machine's actions. Sums are added on separate threads ([`super::reduce`]) while they still
//! arrive.

mod compute;
mod connections;
mod events;
mod files;
mod frame_limits;
mod gate;
mod outbox;
mod parameters;
mod port;
pub(super) mod relays;
mod round;
pub mod run_lock;
mod scores;
mod waiting;

use connections::{Absent, UNKNOWN};
pub use connections::{Between, Division, Formed, LinePlan, Place, Reception, Waits};
#[cfg(test)]
pub(super) use connections::{Fall, Heard, Translation};
pub use events::Hint;
pub use files::{FilesError, ModelFiles};
pub use frame_limits::{Longest, Misfit, prompt_fits};
pub use gate::Gate;
pub use port::{Counter, Port, call};
pub use relays::Use as UseOfRelays;
pub use run_lock::{Lock, RunLockError, RunRecord};

use super::machine::{Machine, MemberId};
use super::message::{Bye, Hash, ToCoordinator, ToWorker};
use super::reduce::{Holds, Reducer, Report};
use crate::model::layout::Layout;
use crate::model::stage::{Microbatch, Traffic};
use crate::train::event::LineFormed;
use crate::train::stop::Stop;
use events::Accounts;
use outbox::Outbox;
use parameters::{Broadcast, Coming};
use relays::Relays;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};
use tokio::sync::OwnedSemaphorePermit;
use waiting::Waiting;

/// Time limit for a connection made while the run ended: for its handshake, and again for its last messages.
const LATE: Duration = Duration::from_secs(1);

/// Reports to the driver from the tasks and threads around it.
#[derive(Debug)]
enum Incoming {
    /// A connection was welcomed.
    Joined { member: MemberId, name: String, peer: Option<String>, remark: Option<String>, outbox: Outbox },
    /// A member sent a message; the permit bounds the number of its messages queued here.
    Said { member: MemberId, message: ToCoordinator, _room: OwnedSemaphorePermit },
    /// A member is lost.
    Lost { member: MemberId, reason: String },
    /// Workers hold the model together, and join as one member.
    Line(LineFormed),
    /// One of them has computed its layers of a training microbatch.
    Passes(Passes),
    /// A peer was rejected before it became a member.
    Refused { name: String, who: Rejected, reason: String },
    /// The reducer has added a sum, or refuses it.
    Added(Report),
    /// The hash of a sum; `None` if the sum is gone.
    Hashed { member: MemberId, sum: u64, digest: Option<Hash> },
}

/// When a seat of a line computed its layers.
#[derive(Debug, Clone)]
struct Passes {
    /// The name of the line.
    line: String,
    /// Its place, worker and device.
    seat: (usize, String, String),
    /// Start and end of the forward and of the backward pass.
    spans: [(Instant, Instant); 2],
}

/// The kind of a rejected peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rejected {
    /// A connection that did not prove the token; the port counts it.
    Stranger,
    /// A peer that proved the token.
    Worker,
}

/// Whether further members may join.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Company {
    /// Any worker with the token, at any time.
    Open,
    /// None: the run is over when the present members have left.
    Closed,
}

/// Counts of irregular events.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Workers that were removed.
    pub expelled: u64,
    /// Workers that proved the token and were refused.
    pub refused: u64,
    /// Late or duplicate messages, which changed nothing.
    pub ignored: u64,
    /// Microbatches that were computed again and compared.
    pub checked: u64,
    /// Those that were drawn and count without.
    pub unchecked: u64,
    /// The last step that was worked on.
    pub step: u64,
}

/// The arguments of [`Coordinator::new`].
pub struct Setup<'a> {
    /// The parameters that are trained.
    pub layout: Layout,
    /// Limits of the state machine: expected devices, minimum, timeouts.
    pub machine: super::machine::Config,
    /// Admission of workers.
    pub gate: Gate,
    /// The base model.
    pub files: ModelFiles,
    /// Where connections are served.
    pub runtime: tokio::runtime::Handle,
    /// Number of threads that add sums.
    pub threads: usize,
    /// Option values for the hint about steps with few microbatches.
    pub hint: Hint,
    /// Whether further members may join.
    pub company: Company,
    /// How the layers are divided where workers hold the model together; `None` where each holds all of it.
    pub lines: Option<LinePlan>,
    /// Whether workers add parts of the sums for each other. Not with a delay, lines or checked work.
    pub relays: UseOfRelays,
    /// The stop flag, raised by signals.
    pub stop: &'a Stop,
}

/// Distributes microbatches and adds up the results; see [`crate::train::Compute`].
pub struct Coordinator<'a> {
    layout: Layout,
    stop: &'a Stop,
    machine: Machine,
    reducer: Reducer,
    incoming: Receiver<Incoming>,
    reception: Arc<Reception>,
    members: BTreeMap<MemberId, Outbox>,
    /// Name and address of the members that came over the network.
    peers: BTreeMap<MemberId, (String, String)>,
    counts: Counts,
    /// Connections that the port rejected.
    rejected: Option<Counter>,
    /// The current parameters.
    parameters: Option<Broadcast>,
    /// Where steps are delayed: the parameters before, with which a step that was begun ahead is computed.
    before: Option<Broadcast>,
    /// Microbatches of the next step, if it begins while the step is computed.
    ahead: Vec<Microbatch>,
    /// Number of steps by which gradients are delayed.
    delay: u64,
    /// The next parameters, partly computed.
    coming: Option<Coming>,
    /// Members that received the current parameters, and so wait for the next ones.
    served: BTreeSet<MemberId>,
    /// Sums whose pieces are being added.
    pending: BTreeMap<(MemberId, u64), ToCoordinator>,
    relays: Relays,
    /// To `incoming`.
    reports: Sender<Incoming>,
    /// Numeric classes of microbatches that count.
    classes: BTreeSet<String>,
    /// Numeric classes of devices that are or were present.
    present: BTreeSet<String>,
    accounts: Accounts,
    /// Device traffic of this step's sums.
    traffic: Traffic,
    waiting: Waiting,
    company: Company,
    /// Whether any member has joined.
    met: bool,
    /// Whether any round was started.
    worked: bool,
    patience: Duration,
    hint: Hint,
    began: Instant,
}

impl<'a> Coordinator<'a> {
    /// A coordinator without members. Members join through its [`Self::reception`].
    pub fn new(setup: Setup<'a>) -> std::io::Result<Self> {
        let (events, incoming) = mpsc::channel();
        let (reports, hashes) = (events.clone(), events.clone());
        // The driver lives as long as the reducer; reports after it are dropped.
        let report = move |report| drop(reports.send(Incoming::Added(report)));
        // Sums of relays may come all at once, when a set ends.
        let many = setup.machine.verify.is_some() || setup.relays != UseOfRelays::Never;
        let holds = if many { Holds::Round } else { Holds::Two };
        let values = usize::try_from(setup.gate.manifest.values()).unwrap_or(usize::MAX);
        let reducer = Reducer::new(values, (setup.threads, holds), report)?;
        let reception = Reception::new(setup.gate, setup.files, events, (setup.runtime, setup.lines));
        Ok(Coordinator {
            layout: setup.layout,
            stop: setup.stop,
            patience: setup.machine.join_timeout,
            hint: setup.hint,
            delay: setup.machine.delay,
            machine: Machine::new(setup.machine),
            reducer,
            incoming,
            reception: Arc::new(reception),
            members: BTreeMap::new(),
            peers: BTreeMap::new(),
            counts: Counts::default(),
            rejected: None,
            parameters: None,
            before: None,
            ahead: Vec::new(),
            coming: None,
            served: BTreeSet::new(),
            pending: BTreeMap::new(),
            relays: Relays::new(values, setup.relays),
            reports: hashes,
            classes: BTreeSet::new(),
            present: BTreeSet::new(),
            accounts: Accounts::default(),
            traffic: Traffic::default(),
            waiting: Waiting::default(),
            company: setup.company,
            met: false,
            worked: false,
            began: Instant::now(),
        })
    }

    /// Adds the numeric classes of the steps before a resume, which are part of this run.
    pub fn recall(&mut self, classes: &[String]) {
        self.present.extend(classes.iter().cloned());
    }

    /// The entry for connections.
    pub fn reception(&self) -> Arc<Reception> {
        self.reception.clone()
    }

    /// Announces devices of this process, which join as a member of this name: they count as present until they do.
    pub fn opens_here(&mut self, name: &str, devices: usize) {
        self.waiting.opens(name, devices);
    }

    /// Counts the connections that a port rejects among the irregular events.
    pub fn counts_rejected(&mut self, rejected: Counter) {
        self.rejected = Some(rejected);
    }

    /// The counts of irregular events so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Sends the end of the run to every member and waits up to `patience` for its delivery; then closes the port
    /// and sends it to workers that had connected by then. After a restart, workers of the earlier coordinator may
    /// still be dialling: they are waited for unless this coordinator has run longer than `UNKNOWN`.
    pub fn close(mut self, bye: &Bye, patience: Duration, mut port: Option<Port>) {
        let first = self.reception.manifest().epoch <= 1 || self.began.elapsed() >= UNKNOWN;
        let known = self.company == Company::Closed || (self.worked && first);
        self.reception.shut(bye, if known { Absent::Known } else { Absent::Anybody });
        let mut until = Instant::now() + patience;
        let mut outboxes: Vec<Outbox> = std::mem::take(&mut self.members).into_values().collect();
        loop {
            // Some members were welcomed just before.
            while let Ok(incoming) = self.incoming.try_recv() {
                if let Incoming::Joined { outbox, .. } = incoming {
                    outboxes.push(outbox);
                }
            }
            outboxes.drain(..).for_each(|outbox| outbox.say(ToWorker::Bye(bye.clone())));
            if !self.reception.heard() && Instant::now() < until {
                continue;
            }
            let Some(mut port) = port.take() else { return };
            port.close(LATE);
            until = Instant::now() + LATE;
        }
    }
}
