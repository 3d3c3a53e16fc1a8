//! The coordinator's acting half: it has the clock, the threads, the sockets and the gradients that
//! [`super::machine`] has not, and decides nothing that can be decided there.
//!
//! Connections live in tasks ([`Reception`]), which shake hands, serve the model's files and keep watch over
//! silence whatever else happens. The driver is the thread that asks for gradients: it feeds what the tasks
//! report into the machine and carries out what comes out. Sums are added on threads of their own
//! ([`super::reduce`]) while they still arrive.

mod compute;
mod connections;
mod events;
mod files;
mod frame_limits;
mod gate;
mod outbox;
mod parameters;
mod port;
mod round;
pub mod run_lock;
mod scores;
mod waiting;

pub use connections::Reception;
use connections::{Absent, UNKNOWN};
pub use events::Hint;
pub use files::{FilesError, ModelFiles};
pub use frame_limits::{Longest, Misfit, prompt_fits};
pub use gate::Gate;
pub use port::{Port, call};
pub use run_lock::{Lock, RunLockError, RunRecord};

use super::machine::{Machine, MemberId};
use super::message::{Bye, ToCoordinator, ToWorker};
use super::reduce::{Reducer, Report};
use crate::model::layout::Layout;
use crate::model::stage::Traffic;
use crate::train::stop::Stop;
use events::Accounts;
use outbox::Outbox;
use parameters::{Broadcast, Coming};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};
use tokio::sync::OwnedSemaphorePermit;
use waiting::Waiting;

/// How long a connection that was made while the run ended may take to be told so: its handshake, and again its words.
const LATE: Duration = Duration::from_secs(1);

/// What the tasks and threads around the driver tell it.
#[derive(Debug)]
enum Incoming {
    /// A connection was welcomed.
    Joined { member: MemberId, name: String, peer: Option<String>, remark: Option<String>, outbox: Outbox },
    /// It said something; the permit bounds how much of it waits here.
    Said { member: MemberId, message: ToCoordinator, _room: OwnedSemaphorePermit },
    /// It is gone.
    Lost { member: MemberId, reason: String },
    /// It was rejected before it was a member.
    Refused { name: String, who: Rejected, reason: String },
    /// The reducer has added a sum, or refuses it.
    Added(Report),
}

/// What was rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rejected {
    /// A connection that did not prove the token; the port counts it.
    Stranger,
    /// A peer that did.
    Worker,
}

/// Who else may come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Company {
    /// Anybody with the token, at any time.
    Open,
    /// Nobody: when those who are here leave, the run is over.
    Closed,
}

/// What was not as it should be, counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Workers that were removed.
    pub expelled: u64,
    /// Workers that proved the token and may not take part.
    pub refused: u64,
    /// Late or duplicate messages, which changed nothing.
    pub ignored: u64,
    /// The last step that was worked on.
    pub step: u64,
}

/// What a coordinator is made of.
pub struct Setup<'a> {
    /// What is trained.
    pub layout: Layout,
    /// How many devices are waited for, and how long.
    pub machine: super::machine::Config,
    /// Who may take part in what.
    pub gate: Gate,
    /// The base model.
    pub files: ModelFiles,
    /// Where connections are served.
    pub runtime: tokio::runtime::Handle,
    /// Threads that add sums.
    pub threads: usize,
    /// For a line about steps with few microbatches.
    pub hint: Hint,
    /// Who else may come.
    pub company: Company,
    /// Raised by signals.
    pub stop: &'a Stop,
}

/// Hands out microbatches and adds up what comes back; see [`crate::train::Compute`].
pub struct Coordinator<'a> {
    layout: Layout,
    stop: &'a Stop,
    machine: Machine,
    reducer: Reducer,
    incoming: Receiver<Incoming>,
    reception: Arc<Reception>,
    members: BTreeMap<MemberId, Outbox>,
    /// Name and address of those that came over the network.
    peers: BTreeMap<MemberId, (String, String)>,
    counts: Counts,
    /// What everybody computes with.
    parameters: Option<Broadcast>,
    /// The next ones, of which some are there.
    coming: Option<Coming>,
    /// Members that were sent parameters, and so wait for the next ones.
    served: BTreeSet<MemberId>,
    /// Sums whose pieces are being added.
    pending: BTreeMap<(MemberId, u64), ToCoordinator>,
    /// Numeric classes of microbatches that count.
    classes: BTreeSet<String>,
    /// Numeric classes of devices that are or were here.
    present: BTreeSet<String>,
    accounts: Accounts,
    /// Of the sums of this step.
    traffic: Traffic,
    waiting: Waiting,
    company: Company,
    /// Somebody has been here.
    met: bool,
    /// There was something to do.
    worked: bool,
    patience: Duration,
    hint: Hint,
    began: Instant,
}

impl<'a> Coordinator<'a> {
    /// A coordinator that knows nobody. Members come through its [`Self::reception`].
    pub fn new(setup: Setup<'a>) -> std::io::Result<Self> {
        let (events, incoming) = mpsc::channel();
        let reports = events.clone();
        // The driver lives as long as the reducer; after it nobody listens.
        let report = move |report| drop(reports.send(Incoming::Added(report)));
        let reducer = Reducer::new(setup.layout.len(), setup.threads, report)?;
        let reception = Reception::new(setup.gate, setup.files, events, setup.runtime);
        Ok(Coordinator {
            layout: setup.layout,
            stop: setup.stop,
            patience: setup.machine.join_timeout,
            hint: setup.hint,
            machine: Machine::new(setup.machine),
            reducer,
            incoming,
            reception: Arc::new(reception),
            members: BTreeMap::new(),
            peers: BTreeMap::new(),
            counts: Counts::default(),
            parameters: None,
            coming: None,
            served: BTreeSet::new(),
            pending: BTreeMap::new(),
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

    /// Numeric classes of the steps before a resume: they are part of this run too.
    pub fn recall(&mut self, classes: &[String]) {
        self.present.extend(classes.iter().cloned());
    }

    /// Where connections are handed in.
    pub fn reception(&self) -> Arc<Reception> {
        self.reception.clone()
    }

    /// So many devices of this process will come as a member of that name: they count as here until they do.
    pub fn opens_here(&mut self, name: &str, devices: usize) {
        self.waiting.opens(name, devices);
    }

    /// What was not as it should be, so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Tells everybody how the run ended, and waits a little for them to hear it; then closes the port, and tells those
    /// that had connected by then. Who was with the run until an earlier coordinator of it died may be looking for this
    /// one: that takes a moment, and longer than this one may have had something to do.
    pub fn close(mut self, bye: &Bye, patience: Duration, mut port: Option<Port>) {
        let first = self.reception.manifest().epoch <= 1 || self.began.elapsed() >= UNKNOWN;
        let known = self.company == Company::Closed || (self.worked && first);
        self.reception.shut(bye, if known { Absent::Known } else { Absent::Anybody });
        let mut until = Instant::now() + patience;
        let mut outboxes: Vec<Outbox> = std::mem::take(&mut self.members).into_values().collect();
        loop {
            // Some were welcomed just before.
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
