//! Connections, one task each: the handshake, the model's files, and the messages between the member and the driver.
//! A task waits for the driver only when too many messages of its own member are queued there, so only that member
//! is delayed.

mod cells;
mod division;
mod line;
mod lines;
mod translation;

#[cfg(test)]
pub(in crate::cluster) use translation::{Fall, Heard, Translation};

pub(super) use cells::{Cells, Wrong};
pub use division::{Between, Division, Formed, Place, Waits};
pub use lines::LinePlan;

use super::super::link::{End, FAREWELL, MemberLink};
use super::super::machine::MemberId;
use super::super::message::{Bye, Capacity, Hello, Manifest, ToCoordinator, ToWorker};
use super::super::plain::plain;
use super::gate::remark;
use super::outbox::{Delivered, Outbox, outbox};
use super::{Gate, Incoming, ModelFiles, Rejected};
use crate::net::Endpoint;
use line::Line;
use lines::{Destination, FromSeat, Lines, Seated, Waiter};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};

/// Time limit for the first message of an authenticated peer.
const HELLO: Duration = Duration::from_secs(5);
/// How long a finished run waits for workers that lost their connection: the longest pause between their dial
/// attempts.
const KNOWN: Duration = Duration::from_secs(2);
/// The same if such workers are not known: long enough for a worker whose attempt just failed to pause and dial
/// again.
pub(super) const UNKNOWN: Duration = Duration::from_millis(2500);
/// How long workers whose number is open wait for another one before they stream layers.
const OTHERS: Duration = Duration::from_secs(10);
/// Interval between checks for workers that have not heard the end of the run.
const GLANCE: Duration = Duration::from_millis(20);
/// Messages of one member that may queue for the driver: pieces of at most 1 MiB.
const ROOM: usize = 32;
/// Bytes of bulk data that may queue for a member, whatever the size of the layout.
const LEAST: u64 = 64 << 20;

/// Receives connections from any thread.
pub struct Reception {
    gate: Gate,
    files: ModelFiles,
    events: Sender<Incoming>,
    runtime: tokio::runtime::Handle,
    known: Mutex<Known>,
    /// Number of conversations that are not over.
    open: watch::Sender<usize>,
    /// Where workers hold the model together: their lines.
    lines: Option<Lines>,
    /// The answer to everybody once the run is over.
    over: watch::Sender<Option<Bye>>,
}

#[derive(Default)]
struct Known {
    next: u64,
    identities: BTreeMap<[u8; 16], (MemberId, End)>,
    names: BTreeSet<String>,
    /// Workers whose connection was lost and which may dial again soon.
    missing: BTreeSet<[u8; 16]>,
    /// Set once the run is over.
    closing: Option<Closing>,
}

/// The end of a run.
struct Closing {
    /// The answer to new connections.
    bye: Bye,
    absent: Absent,
    /// The time until which absent workers are waited for.
    until: Instant,
}

/// Workers besides the connected ones that should hear the end of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Absent {
    /// Workers whose connection was lost.
    Known,
    /// Any worker that connects.
    Anybody,
}

/// A member during the lifetime of its task.
struct Seat {
    member: MemberId,
    identity: [u8; 16],
    name: String,
    /// Its address, unless it is in this process.
    peer: Option<String>,
    /// The note that is shown when it joins.
    remark: Option<String>,
}

/// Where the messages of a member go.
enum Desk<'a> {
    /// To the driver.
    Driver(&'a Seat),
    /// Where the worker is sent once it has reported what it can hold.
    Lines(&'a Seat, &'a Lines, Arc<OnceLock<Destination>>),
}

/// How a conversation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parting {
    /// One side ended it.
    Proper,
    /// The connection was lost.
    Lost,
}

impl Reception {
    pub(super) fn new(
        gate: Gate,
        files: ModelFiles,
        events: Sender<Incoming>,
        (runtime, lines): (tokio::runtime::Handle, Option<LinePlan>),
    ) -> Self {
        let (known, open, over) = (Mutex::default(), watch::Sender::new(0), watch::Sender::new(None));
        let lines = lines.map(Lines::new);
        Reception { gate, files, events, runtime, known, open, lines, over }
    }

    /// The manifest that workers receive.
    pub fn manifest(&self) -> &Manifest {
        &self.gate.manifest
    }

    /// Serves a connection. `peer` is its address, shown until its name is known.
    pub fn receive(self: &Arc<Self>, link: MemberLink, peer: String) {
        let (this, end) = (self.clone(), link.end.clone());
        self.hold(async move {
            this.converse(link, Some(peer)).await;
            // A worker that hears the end closes its side; until then the last messages may still be in transit.
            let _ = tokio::time::timeout(FAREWELL, end.ended()).await;
        });
    }

    /// Serves one end of a pair of channels, which deliver every message that was sent.
    pub fn receive_here(self: &Arc<Self>, link: MemberLink) {
        let this = self.clone();
        self.hold(async move { this.converse(link, None).await });
    }

    fn hold(self: &Arc<Self>, conversation: impl Future<Output = ()> + Send + 'static) {
        let this = self.clone();
        this.open.send_modify(|open| *open += 1);
        self.runtime.spawn(async move {
            conversation.await;
            this.open.send_modify(|open| *open -= 1);
        });
    }

    /// Records a connection that was rejected before it proved the token.
    pub fn rejected_stranger(&self, peer: String, reason: String) {
        self.rejected(peer, Rejected::Stranger, reason);
    }

    fn rejected(&self, name: String, who: Rejected, reason: String) {
        // Without a driver there is no record.
        let _ = self.events.send(Incoming::Refused { name, who, reason });
    }

    /// From now on every new connection is answered with `bye`. Workers that get `Bye::Later` are not waited for.
    pub(super) fn shut(&self, bye: &Bye, absent: Absent) {
        let farewell = match (bye, absent) {
            (Bye::Later { .. }, _) => Duration::ZERO,
            (_, Absent::Known) => KNOWN,
            (_, Absent::Anybody) => UNKNOWN,
        };
        self.over.send_replace(Some(bye.clone()));
        self.lines.iter().for_each(|lines| lines.close(bye));
        self.known().closing = Some(Closing { bye: bye.clone(), absent, until: Instant::now() + farewell });
    }

    /// Waits a moment. Returns true once every connected or expected worker has heard the end of the run.
    pub(super) fn heard(&self) -> bool {
        let waited = {
            let known = self.known();
            let none_missing = |c: &Closing| c.absent == Absent::Known && known.missing.is_empty();
            known.closing.as_ref().is_none_or(|c| none_missing(c) || Instant::now() >= c.until)
        };
        let mut open = self.open.subscribe();
        let closed = async {
            let quiet = tokio::time::timeout(GLANCE, open.wait_for(|&open| open == 0)).await.is_ok();
            if quiet && !waited {
                tokio::time::sleep(GLANCE).await;
            }
            quiet
        };
        self.runtime.block_on(closed) && waited
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn converse(self: &Arc<Self>, mut link: MemberLink, peer: Option<String>) {
        let hello = match tokio::time::timeout(HELLO, link.from.recv()).await {
            Ok(Some(ToCoordinator::Hello(hello))) => hello,
            Ok(None) => return self.unidentified(&link.end, peer),
            Ok(Some(_)) => {
                link.end.cut("it did not say who it is");
                return self.unidentified(&link.end, peer);
            }
            Err(_) => {
                link.end.cut("it did not say who it is in time");
                return self.unidentified(&link.end, peer);
            }
        };
        if let Err(bye) = self.let_in(&hello) {
            if let Bye::Refused { reason } | Bye::Later { reason } = &bye {
                let at = peer.as_deref().unwrap_or("this process");
                let name = format!("{} at {at}", plain(&hello.name));
                self.rejected(name, Rejected::Worker, reason.clone());
            }
            let _ = link.to.send(ToWorker::Bye(bye)).await;
            return;
        }
        let seat =
            Seat { peer, remark: remark(&hello), ..self.seat((hello.identity, &hello.name), &link.end) };
        let lines = self.lines.as_ref().filter(|_| seat.peer.is_some());
        let seats = lines.map(|lines| lines.plan.seats());
        let manifest = Manifest { name: seat.name.clone(), seats, ..self.gate.manifest.clone() };
        link.end.set_silence(Duration::from_millis(manifest.silence_millis));
        let desk = lines.map_or(Desk::Driver(&seat), |lines| Desk::Lines(&seat, lines, Arc::default()));
        let parting = match link.to.send(ToWorker::Welcome(Box::new(manifest))).await {
            Ok(()) => self.serve(&mut link, &desk).await,
            Err(_) => {
                desk.lost(self, "it closed the connection".into());
                Parting::Lost
            }
        };
        drop(desk);
        // A member of this process does not dial again.
        let parting = if seat.peer.is_some() { parting } else { Parting::Proper };
        self.rise(seat, parting);
    }

    /// A worker has reported what it can hold: it, and workers that waited for it, may get their places. The error is why
    /// it breaks the protocol.
    fn place(self: &Arc<Self>, seat: &Seat, lines: &Lines, capacity: Capacity) -> Result<(), String> {
        let seated = lines.report(seat.member, capacity)?;
        if let (Seated::No, Some(reports)) = (&seated, lines.awaits_others()) {
            let this = self.clone();
            self.runtime.spawn(async move {
                tokio::time::sleep(OTHERS).await;
                let seated = this.lines.as_ref().and_then(|lines| lines.wait_no_longer(reports));
                seated.into_iter().for_each(|seated| this.send(seated));
            });
        }
        self.send(seated);
        Ok(())
    }

    /// Sends workers that have waited where they belong.
    fn send(self: &Arc<Self>, seated: Seated) {
        match seated {
            Seated::No => {}
            Seated::Line { seats, heard } => {
                self.runtime.spawn(Line::new(self.clone(), seats, heard).run());
            }
            Seated::Whole(waiter) => {
                let Waiter { member, name, peer, remark, outbox, .. } = *waiter;
                outbox.say(ToWorker::Sit(None));
                let _ = self.events.send(Incoming::Joined { member, name, peer: Some(peer), remark, outbox });
            }
            Seated::Refused(waiter, reason) => {
                self.rejected(plain(&waiter.name), Rejected::Worker, reason.clone());
                waiter.outbox.say(ToWorker::Bye(Bye::Refused { reason }));
            }
        }
    }

    /// A line as a member.
    fn line_member(&self, (name, peer): (String, String), end: &End, key: [u8; 16]) -> Seat {
        Seat { peer: Some(peer), ..self.seat((key, &name), end) }
    }

    /// Records a peer that proved the token and sent no `Hello`.
    fn unidentified(&self, end: &End, peer: Option<String>) {
        let reason = end.reason().unwrap_or_else(|| "it closed the connection".into());
        peer.into_iter().for_each(|peer| self.rejected(peer, Rejected::Worker, reason.clone()));
    }

    fn let_in(&self, hello: &Hello) -> Result<(), Bye> {
        let mut known = self.known();
        known.missing.remove(&hello.identity);
        if let Some(closing) = &known.closing {
            return Err(closing.bye.clone());
        }
        drop(known);
        self.gate.judge(hello)
    }

    /// Numbers and names a member. A worker that dials again has lost its old connection, so that one is closed.
    fn seat(&self, (identity, name): ([u8; 16], &str), end: &End) -> Seat {
        let mut known = self.known();
        known.next += 1;
        let member = MemberId(known.next);
        if let Some((_, old)) = known.identities.insert(identity, (member, end.clone())) {
            old.cut("it connected again");
        }
        let asked = Some(plain(name)).filter(|name| !name.trim().is_empty()).unwrap_or("worker".into());
        let others = (2..).map(|n| format!("{asked} ({n})"));
        let mut names = std::iter::once(asked.clone()).chain(others);
        let name = names.find(|name| !known.names.contains(name)).unwrap_or(asked);
        known.names.insert(name.clone());
        Seat { member, identity, name, peer: None, remark: None }
    }

    fn rise(&self, seat: Seat, parting: Parting) {
        let mut known = self.known();
        known.names.remove(&seat.name);
        if known.identities.get(&seat.identity).is_some_and(|(member, _)| *member == seat.member) {
            known.identities.remove(&seat.identity);
            if parting == Parting::Lost {
                known.missing.insert(seat.identity);
            }
        }
    }

    /// Serves the member until its desk closes the outbox or the connection is lost.
    async fn serve(self: &Arc<Self>, link: &mut MemberLink, desk: &Desk<'_>) -> Parting {
        let (outbox, postman) = outbox(
            LEAST.max((12 + 4 * self.gate.manifest.delay) * self.gate.manifest.values()),
            link.end.clone(),
        );
        desk.joined(self, outbox);
        let mut listening = std::pin::pin!(self.listen(desk, &mut link.from, (&link.to, &link.end)));
        let parting = tokio::select! {
            delivered = postman.deliver(&link.to, &link.first) => match delivered {
                Delivered::All => return desk.parting(self),
                // The peer receives no more; messages that it sent before still count.
                Delivered::Cut => listening.await,
            },
            parting = &mut listening => parting,
        };
        let reason = link.end.reason().unwrap_or_else(|| "it closed the connection".into());
        desk.lost(self, reason);
        parting
    }

    async fn listen(
        self: &Arc<Self>,
        desk: &Desk<'_>,
        from: &mut mpsc::Receiver<ToCoordinator>,
        (to, end): (&mpsc::Sender<ToWorker>, &End),
    ) -> Parting {
        let mut parting = Parting::Lost;
        let room = Arc::new(Semaphore::new(ROOM));
        while let Some(message) = from.recv().await {
            if let ToCoordinator::Fetch { file, offset, len } = message {
                let Some(pieces) = self.files.pieces(file, offset, len) else {
                    end.cut("it asked for a part of the model that there is not");
                    return parting;
                };
                for piece in pieces {
                    if to.send(piece).await.is_err() {
                        return parting;
                    }
                }
                continue;
            }
            if matches!(message, ToCoordinator::Leave { .. }) {
                parting = Parting::Proper;
            }
            let Ok(permit) = room.clone().acquire_owned().await else { return parting };
            match desk.said(self, message, permit) {
                Ok(true) => {}
                Ok(false) => return parting,
                Err(reason) => {
                    end.cut(reason);
                    return parting;
                }
            }
        }
        parting
    }
}

impl Desk<'_> {
    /// The member has joined. Without a driver or a line at the desk it cannot be served; the dropped outbox ends the conversation.
    fn joined(&self, reception: &Reception, outbox: Outbox) {
        match self {
            Desk::Driver(Seat { member, name, peer, remark, .. }) => {
                let (member, name, peer, remark) = (*member, name.clone(), peer.clone(), remark.clone());
                let _ = reception.events.send(Incoming::Joined { member, name, peer, remark, outbox });
            }
            Desk::Lines(Seat { member, identity, name, peer, remark }, lines, destination) => {
                lines.enter(Waiter {
                    member: *member,
                    identity: *identity,
                    name: name.clone(),
                    peer: peer.clone().unwrap_or_default(),
                    remark: remark.clone(),
                    outbox,
                    destination: destination.clone(),
                    capacity: None,
                })
            }
        }
    }

    /// Passes a message on. Returns false if the desk is empty. The error is why the message breaks the protocol.
    fn said(
        &self,
        reception: &Arc<Reception>,
        mut message: ToCoordinator,
        room: OwnedSemaphorePermit,
    ) -> Result<bool, String> {
        let (Desk::Driver(seat) | Desk::Lines(seat, ..)) = self;
        if let Desk::Lines(_, lines, destination) = self {
            match (destination.get(), message) {
                (None, ToCoordinator::Capacity(capacity)) => {
                    return reception.place(seat, lines, capacity).map(|()| true);
                }
                // The connection ends next.
                (None, ToCoordinator::Leave { reason }) => {
                    reception.rejected(plain(&seat.name), Rejected::Worker, plain(&reason));
                    return Ok(true);
                }
                (None, _) => return Err("it spoke of work before it had a seat".into()),
                (Some(Destination::Seat(place, events)), message) => {
                    return Ok(events
                        .send(FromSeat::Said { place: *place, message: Box::new(message), _room: room })
                        .is_ok());
                }
                (Some(Destination::Driver), said) => message = said,
            }
        }
        let member = seat.member;
        Ok(reception.events.send(Incoming::Said { member, message, _room: room }).is_ok())
    }

    fn lost(&self, reception: &Reception, reason: String) {
        let (Desk::Driver(seat) | Desk::Lines(seat, ..)) = self;
        let destination = match self {
            Desk::Driver(_) => Some(Destination::Driver),
            Desk::Lines(_, lines, destination) => lines.leave(seat.member, destination),
        };
        match destination {
            Some(Destination::Driver) => {
                let _ = reception.events.send(Incoming::Lost { member: seat.member, reason });
            }
            Some(Destination::Seat(place, events)) => drop(events.send(FromSeat::Gone { place, reason })),
            None => {}
        }
    }

    /// How a conversation ended that this side ended. A worker of a line that fell connects again.
    fn parting(&self, reception: &Reception) -> Parting {
        match self {
            Desk::Lines(_, _, destination)
                if matches!(destination.get(), Some(Destination::Seat(..)))
                    && reception.over.borrow().is_none() =>
            {
                Parting::Lost
            }
            _ => Parting::Proper,
        }
    }
}

/// The host of a peer's address, as other workers reach it; empty for a worker on this machine.
pub(super) fn host(peer: &str) -> String {
    let endpoint = peer.parse::<Endpoint>().ok().filter(|endpoint| !endpoint.is_loopback());
    endpoint.map_or_else(String::new, |endpoint| endpoint.host)
}
