//! Connections, each in a task of its own: the handshake, the model's files, and what passes between the member
//! and the driver. A task never waits for the driver but when too much of its member's waits there, and then only
//! that member is held up.

use super::super::link::{End, MemberLink};
use super::super::machine::MemberId;
use super::super::message::{Bye, Hello, Manifest, ToCoordinator, ToWorker};
use super::super::plain::plain;
use super::gate::remark;
use super::outbox::{Delivered, Outbox, outbox};
use super::{Gate, Incoming, ModelFiles, Rejected};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, mpsc, watch};

/// How long an authenticated peer may take to say who it is.
const HELLO: Duration = Duration::from_secs(5);
/// How long a conversation that is over may take to be heard.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// How long a run that is over waits for workers that lost their connection: their longest pause between two
/// attempts.
const FAREWELL: Duration = Duration::from_secs(2);
/// The same where nobody knows who they are: so that whoever has just failed to connect has paused, and said who it is.
pub(super) const UNKNOWN: Duration = Duration::from_millis(2500);
/// Between two looks at who has still to hear that the run is over.
const GLANCE: Duration = Duration::from_millis(20);
/// Messages of one member that may wait for the driver: pieces of 1 MiB at most.
const ROOM: usize = 32;
/// Bulk data that may wait for a member whatever the size of the layout.
const LEAST: u64 = 64 << 20;

/// Where connections are handed in, from any thread.
pub struct Reception {
    gate: Gate,
    files: ModelFiles,
    events: Sender<Incoming>,
    runtime: tokio::runtime::Handle,
    known: Mutex<Known>,
    /// Conversations that are not over.
    open: watch::Sender<usize>,
}

#[derive(Default)]
struct Known {
    next: u64,
    identities: BTreeMap<[u8; 16], (MemberId, End)>,
    names: BTreeSet<String>,
    /// Workers whose connection was lost, and who may be about to dial again.
    missing: BTreeSet<[u8; 16]>,
    /// Set once the run is over.
    closing: Option<Closing>,
}

/// The end of a run.
struct Closing {
    /// What newcomers hear.
    bye: Bye,
    absent: Absent,
    /// Until when they are waited for.
    until: Instant,
}

/// Who else should hear that a run is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Absent {
    /// Those whose connection was lost.
    Known,
    /// Whoever comes.
    Anybody,
}

/// A member for as long as its task lives.
struct Seat {
    member: MemberId,
    identity: [u8; 16],
    name: String,
    /// Where it is, unless in this process.
    peer: Option<String>,
    /// What is to be said of it when it joins.
    remark: Option<String>,
}

/// How a conversation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parting {
    /// One side said that it was over.
    Proper,
    /// The connection went.
    Lost,
}

impl Reception {
    pub(super) fn new(
        gate: Gate,
        files: ModelFiles,
        events: Sender<Incoming>,
        runtime: tokio::runtime::Handle,
    ) -> Self {
        let (known, open) = (Mutex::default(), watch::Sender::new(0));
        Reception { gate, files, events, runtime, known, open }
    }

    /// What workers are told of the run.
    pub fn manifest(&self) -> &Manifest {
        &self.gate.manifest
    }

    /// Takes over a connection, by `peer`, which is shown until it has a name.
    pub fn receive(self: &Arc<Self>, link: MemberLink, peer: String) {
        let (this, end) = (self.clone(), link.end.clone());
        self.hold(async move {
            this.converse(link, Some(peer)).await;
            // Whoever is told why it ends closes its side; until then our last words may be on their way.
            let _ = tokio::time::timeout(LAST_WORDS, end.ended()).await;
        });
    }

    /// Takes over one end of a pair of channels: what was said into it has arrived.
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

    /// A connection was rejected before it had proved the token: the run's record says so.
    pub fn turned_away(&self, peer: String, reason: String) {
        self.rejected(peer, Rejected::Stranger, reason);
    }

    fn rejected(&self, name: String, who: Rejected, reason: String) {
        // Without a driver there is no record.
        let _ = self.events.send(Incoming::Refused { name, who, reason });
    }

    /// From now on everybody who comes hears that the run is over. Who is to come again later need not hear it now.
    pub(super) fn shut(&self, bye: &Bye, absent: Absent) {
        let farewell = match (bye, absent) {
            (Bye::Later { .. }, _) => Duration::ZERO,
            (_, Absent::Known) => FAREWELL,
            (_, Absent::Anybody) => UNKNOWN,
        };
        self.known().closing = Some(Closing { bye: bye.clone(), absent, until: Instant::now() + farewell });
    }

    /// Waits a moment; true once everybody has heard it who is here or may still come.
    pub(super) fn heard(&self) -> bool {
        let waited = {
            let known = self.known();
            let nobody = |c: &Closing| c.absent == Absent::Known && known.missing.is_empty();
            known.closing.as_ref().is_none_or(|c| nobody(c) || Instant::now() >= c.until)
        };
        let mut open = self.open.subscribe();
        let nobody = async {
            let quiet = tokio::time::timeout(GLANCE, open.wait_for(|&open| open == 0)).await.is_ok();
            if quiet && !waited {
                tokio::time::sleep(GLANCE).await;
            }
            quiet
        };
        self.runtime.block_on(nobody) && waited
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn converse(&self, mut link: MemberLink, peer: Option<String>) {
        let hello = match tokio::time::timeout(HELLO, link.from.recv()).await {
            Ok(Some(ToCoordinator::Hello(hello))) => hello,
            Ok(None) => return self.nobody(&link.end, peer),
            Ok(Some(_)) => {
                link.end.cut("it did not say who it is");
                return self.nobody(&link.end, peer);
            }
            Err(_) => {
                link.end.cut("it did not say who it is in time");
                return self.nobody(&link.end, peer);
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
        let seat = Seat { peer, remark: remark(&hello), ..self.seat(&hello, &link.end) };
        let manifest = Manifest { name: seat.name.clone(), ..self.gate.manifest.clone() };
        link.end.set_silence(Duration::from_millis(manifest.silence_millis));
        let parting = match link.to.send(ToWorker::Welcome(Box::new(manifest))).await {
            Ok(()) => self.serve(&mut link, &seat).await,
            Err(_) => Parting::Lost,
        };
        // What is lost within a process does not dial again.
        let parting = if seat.peer.is_some() { parting } else { Parting::Proper };
        self.rise(seat, parting);
    }

    /// Somebody proved the token and did not say who he is.
    fn nobody(&self, end: &End, peer: Option<String>) {
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

    /// Numbers and names a member. A worker that dials again has lost its old connection, whatever that says.
    fn seat(&self, hello: &Hello, end: &End) -> Seat {
        let mut known = self.known();
        known.next += 1;
        let member = MemberId(known.next);
        if let Some((_, old)) = known.identities.insert(hello.identity, (member, end.clone())) {
            old.cut("it connected again");
        }
        let asked =
            Some(plain(&hello.name)).filter(|name| !name.trim().is_empty()).unwrap_or("worker".into());
        let others = (2..).map(|n| format!("{asked} ({n})"));
        let mut names = std::iter::once(asked.clone()).chain(others);
        let name = names.find(|name| !known.names.contains(name)).unwrap_or(asked);
        known.names.insert(name.clone());
        Seat { member, identity: hello.identity, name, peer: None, remark: None }
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

    /// Until the driver closes the outbox, or the member is gone.
    async fn serve(&self, link: &mut MemberLink, seat: &Seat) -> Parting {
        let (outbox, postman) = outbox(LEAST.max(12 * self.gate.manifest.parameters), link.end.clone());
        self.joined(seat, outbox);
        let member = seat.member;
        let mut listening = std::pin::pin!(self.listen(member, &mut link.from, (&link.to, &link.end)));
        let parting = tokio::select! {
            delivered = postman.deliver(&link.to) => match delivered {
                Delivered::All => return Parting::Proper,
                // Nobody hears us any more; what was said before that still counts.
                Delivered::Cut => listening.await,
            },
            parting = &mut listening => parting,
        };
        let reason = link.end.reason().unwrap_or_else(|| "it closed the connection".into());
        let _ = self.events.send(Incoming::Lost { member, reason });
        parting
    }

    fn joined(&self, seat: &Seat, outbox: Outbox) {
        let Seat { member, name, peer, remark, .. } = seat;
        let (member, name, peer, remark) = (*member, name.clone(), peer.clone(), remark.clone());
        // Without a driver there is nobody to serve; the dropped outbox ends the conversation.
        let _ = self.events.send(Incoming::Joined { member, name, peer, remark, outbox });
    }

    async fn listen(
        &self,
        member: MemberId,
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
            if self.events.send(Incoming::Said { member, message, _room: permit }).is_err() {
                return parting;
            }
        }
        parting
    }
}
