//! How a worker finds its coordinator and comes back to it: it looks for its coordinator, reconnects when the connection is lost, and
//! ends with the run. An error that a person has to fix ends it at once; other errors are retried at growing
//! intervals, up to a time limit.

use super::peers::PeerNet;
use super::{Outcome, Sight, Worker};
use crate::cluster::link::{WorkerLink, connected};
use crate::cluster::message::{Hello, PROTOCOL};
use crate::net::discovery::find_and_dial;
use crate::net::{Connection, DIAL_TIMEOUT, Endpoint, Listener, NetError, Security, dial};
use crate::numeric::REVISION;
use crate::support::stderr::say;
use crate::train::event::Share;
use crate::train::stop::{Stop, Urgency};
use ring::rand::{SecureRandom, SystemRandom};
use std::net::IpAddr;
use std::time::{Duration, Instant};
use tokio::runtime::{Handle, Runtime};

/// Shortest and longest pause between two attempts.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// Longest delay until a raised stop flag is noticed.
const GLANCE: Duration = Duration::from_millis(50);
/// Silence limit of an authenticated coordinator before it has welcomed this worker.
const SILENCE: Duration = Duration::from_secs(30);

/// How the run ended, for the summary of this worker's part.
const COMPLETE: &str = "run complete";
const HALTED: &str = "run halted";

/// How a worker connects to its coordinator.
pub enum Way {
    /// The worker dials.
    Dial(Endpoint),
    /// The worker looks in the local network for a coordinator with its token's fingerprint.
    Find,
    /// The worker listens and is dialled.
    Listen(Endpoint),
}

/// The settings of a worker's lifetime.
pub struct Reconnect<'a> {
    /// How it reaches the coordinator.
    pub way: Way,
    /// How both sides authenticate.
    pub security: Security,
    /// How long it looks for a coordinator.
    pub patience: Duration,
    /// Whether it waits for the next run after this one.
    pub stays: bool,
    /// Content hash of the model that its user named.
    pub model: Option<String>,
    /// Training options that its user typed.
    pub options: Vec<(String, String)>,
    /// The stop flag, raised by signals.
    pub stop: &'a Stop,
    /// Receives messages for the user, line by line.
    pub say: &'a dyn Fn(&str),
}

/// How a worker ended.
#[derive(Debug)]
pub enum Ending {
    /// The run is complete.
    Complete,
    /// A signal asked it to stop.
    Stopped,
    /// The run halted on a bad value.
    Halted(String),
    /// The worker may not take part, now or later.
    Refused(String),
    /// An error on this side.
    Failed(String),
    /// No coordinator was found.
    Alone(NetError),
}

impl Reconnect<'_> {
    /// Connects and serves conversations until the end.
    pub fn run(&self, worker: &mut Worker<'_>) -> Ending {
        let failed = |e: &dyn std::fmt::Display| Ending::Failed(format!("the network's threads: {e}"));
        let runtime = match runtime() {
            Ok(runtime) => runtime,
            Err(e) => return failed(&e),
        };
        let hello = match hello(self.model.clone(), self.options.clone()) {
            Ok(hello) => hello,
            Err(line) => return Ending::Failed(line),
        };
        let mut road = match Road::new(self, &runtime) {
            Ok(road) => road,
            Err(e) => return Ending::Alone(e),
        };
        let ending = self.conversations(worker, &hello, &mut road);
        let took_part = worker.share.get() != Share::default();
        let why = match &ending {
            Ending::Complete => Some(COMPLETE),
            Ending::Halted(_) => Some(HALTED),
            Ending::Stopped => took_part.then_some("stopped"),
            Ending::Refused(_) | Ending::Failed(_) | Ending::Alone(_) => took_part.then_some("left the run"),
        };
        why.into_iter().for_each(|why| (worker.see)(Sight::Over(why)));
        runtime.shutdown_background();
        ending
    }

    fn conversations(&self, worker: &mut Worker<'_>, hello: &Hello, road: &mut Road<'_>) -> Ending {
        // A worker that is asked to come back later has still not found its run.
        let (mut pauses, mut since) = (Pauses::default(), Instant::now());
        loop {
            let (link, coordinator) = match road.next(self, (&mut pauses, since)) {
                Ok(Some(found)) => found,
                Ok(None) => return Ending::Stopped,
                Err(e) => return Ending::Alone(e),
            };
            let (runtime, security) = (road.handle().clone(), self.security.clone());
            worker.peers = Some(PeerNet { runtime, security, coordinator });
            let outcome = worker.serve(link, hello.clone(), self.stop);
            if worker.welcomed {
                (pauses, since) = (Pauses::default(), Instant::now());
            }
            match outcome {
                Outcome::Left => return Ending::Stopped,
                Outcome::Done if self.stays => {
                    (worker.see)(Sight::Over(COMPLETE));
                    worker.share.set(Share::default());
                    (self.say)("waiting for the next run");
                }
                Outcome::Done => return Ending::Complete,
                Outcome::Halted { reason } if self.stays => {
                    (worker.see)(Sight::Over(HALTED));
                    worker.share.set(Share::default());
                    (self.say)(&reason);
                }
                Outcome::Halted { reason } => return Ending::Halted(reason),
                Outcome::Refused { reason } => return Ending::Refused(reason),
                Outcome::Out { reason } => {
                    return Ending::Failed(format!("removed by the coordinator: {reason}"));
                }
                Outcome::Failed { reason } => return Ending::Failed(reason),
                Outcome::Lost { reason } if !self.stays && since.elapsed() >= self.patience => {
                    return Ending::Failed(format!("no coordinator has taken this worker in: {reason}"));
                }
                Outcome::Lost { reason } => {
                    (self.say)(&format!("lost the coordinator: {reason}; looking for it"))
                }
            }
            // A closing coordinator must not be dialled in a tight loop.
            pauses.rest(self.stop);
        }
    }

    fn stopped(&self) -> bool {
        self.stop.urgency() != Urgency::Run
    }
}

/// The `Hello` of this process. `model` is the hash of a named model; the error is one line.
pub(super) fn hello(model: Option<String>, options: Vec<(String, String)>) -> Result<Hello, String> {
    Ok(Hello {
        protocol: PROTOCOL,
        version: env!("CARGO_PKG_VERSION").into(),
        numerics: REVISION,
        identity: identity()?,
        name: format!("{}-{}", host(), std::process::id()),
        model,
        options,
        before: None,
    })
}

/// A random identity for this process; the error is one line.
pub fn identity() -> Result<[u8; 16], String> {
    random("this worker's identity")
}

/// Random bytes for `what`; the error is one line.
pub fn random<const N: usize>(what: &str) -> Result<[u8; N], String> {
    let mut bytes = [0; N];
    let random = SystemRandom::new().fill(&mut bytes);
    random.map_err(|_| format!("the system gives no random numbers for {what}"))?;
    Ok(bytes)
}

/// A runtime for the network.
pub(super) fn runtime() -> std::io::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).thread_name("net").enable_all().build()
}

/// The machine's name, without its domain.
fn host() -> String {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let name = kernel.or_else(|| std::env::var("HOSTNAME").ok()).unwrap_or_default();
    let name = name.trim().split('.').next().unwrap_or_default().to_string();
    if name.is_empty() { "worker".into() } else { name }
}

/// The pause between attempts; it doubles up to a limit.
struct Pauses(Duration);

impl Default for Pauses {
    fn default() -> Self {
        Pauses(PAUSES.0)
    }
}

impl Pauses {
    fn rest(&mut self, stop: &Stop) {
        let until = Instant::now() + self.0;
        while Instant::now() < until && stop.urgency() == Urgency::Run {
            std::thread::sleep(GLANCE.min(until.saturating_duration_since(Instant::now())));
        }
        self.0 = (self.0 * 2).min(PAUSES.1);
    }
}

/// The source of connections.
enum Road<'a> {
    Dial(&'a Endpoint, Handle),
    Find(Handle),
    Listen(Listener, Handle),
}

impl<'a> Road<'a> {
    fn new(reconnect: &'a Reconnect<'_>, runtime: &Runtime) -> Result<Self, NetError> {
        let handle = runtime.handle().clone();
        match &reconnect.way {
            Way::Dial(target) => Ok(Road::Dial(target, handle)),
            Way::Find => Ok(Road::Find(handle)),
            Way::Listen(at) => {
                let refused = |refusal: crate::net::Refusal| say!("warning: {refusal}");
                let listener = runtime.block_on(Listener::bind(at, reconnect.security.clone(), refused))?;
                (reconnect.say)(&format!("listens on {} for its coordinator", listener.address()));
                Ok(Road::Listen(listener, handle))
            }
        }
    }

    /// The next connection and the address of its other side, or `None` if the stop flag was raised. The search started at `began`.
    fn next(
        &mut self,
        reconnect: &Reconnect<'_>,
        (pauses, began): (&mut Pauses, Instant),
    ) -> Result<Option<(WorkerLink, IpAddr)>, NetError> {
        let mut said = String::new();
        while !reconnect.stopped() {
            let e = match self.attempt(reconnect, began) {
                Ok(Some(connection)) => {
                    let at = connection.peer().ip();
                    return Ok(Some((connected(self.handle(), connection, SILENCE), at)));
                }
                Ok(None) => continue,
                Err(e) => e,
            };
            // With --stay there may be no run for days.
            if e.is_final() || (!reconnect.stays && began.elapsed() >= reconnect.patience) {
                return Err(e);
            }
            if said != e.to_string() {
                said = e.to_string();
                (reconnect.say)(&format!("{said} (trying again)"));
            }
            pauses.rest(reconnect.stop);
        }
        Ok(None)
    }

    /// One attempt, which checks the stop flag. `None`: no connection yet.
    fn attempt(&mut self, reconnect: &Reconnect<'_>, began: Instant) -> Result<Option<Connection>, NetError> {
        let stopped = async {
            while !reconnect.stopped() {
                tokio::time::sleep(GLANCE).await;
            }
        };
        match self {
            Road::Dial(target, handle) => handle.block_on(async {
                tokio::select! {
                    connection = dial(target, &reconnect.security, DIAL_TIMEOUT) => connection.map(Some),
                    () = stopped => Ok(None),
                }
            }),
            Road::Find(handle) => handle.block_on(async {
                tokio::select! {
                    found = find_and_dial(&reconnect.security, DIAL_TIMEOUT) => found.map(|(at, connection)| {
                        (reconnect.say)(&format!("found a coordinator at {at}"));
                        Some(connection)
                    }),
                    () = stopped => Ok(None),
                }
            }),
            Road::Listen(listener, handle) => {
                let left = reconnect.patience.saturating_sub(began.elapsed());
                let waited = handle.block_on(async {
                    tokio::select! {
                        connection = listener.accept() => Some(connection),
                        () = stopped => None,
                        () = tokio::time::sleep(left), if !reconnect.stays => {
                            let cause = "no coordinator has dialled this worker: start it with --nodes".into();
                            Some(Err(NetError::Local { what: "listening", cause }))
                        }
                    }
                });
                waited.transpose()
            }
        }
    }

    fn handle(&self) -> &Handle {
        match self {
            Road::Dial(_, handle) | Road::Find(handle) | Road::Listen(_, handle) => handle,
        }
    }
}
