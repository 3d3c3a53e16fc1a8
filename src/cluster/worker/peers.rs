//! The neighbours of a seat: the seat above connects to the one below. Both prove the token, and with the first message
//! that they belong to the same line.

use super::device_queue::DeviceQueue;
use super::inbox::{Back, Heard, Neighbours};
use crate::cluster::carry::{Assembly, Carry, CarryLink};
use crate::cluster::link::{End, connected};
use crate::cluster::message::SeatPlan;
use crate::model::wire::Wire;
use crate::net::{Connection, DIAL_TIMEOUT, Endpoint, Listener, Security, dial};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};

/// Time limit for a neighbour's first message.
const HELLO: Duration = Duration::from_secs(5);
/// Most microbatches whose values may wait, besides [`FOR_EACH_SEAT`]: leases that a seat may hold, and those that were
/// called back.
const WAITING: usize = 64;
/// A line of S seats computes at most 2 S - 1 microbatches at the same time.
const FOR_EACH_SEAT: usize = 8;

/// What a worker needs to connect with other workers.
#[derive(Clone)]
pub(super) struct PeerNet {
    /// Where connections are served.
    pub runtime: Handle,
    /// Security of the connection to the coordinator.
    pub security: Security,
    /// The address of the coordinator as this worker sees it.
    pub coordinator: IpAddr,
}

/// Connections to the neighbours.
pub(super) struct Met {
    above: Option<CarryLink>,
    below: Option<CarryLink>,
}

/// The neighbours of a conversation. Dropping it ends the connections to them.
pub(super) struct Attached {
    ends: Vec<End>,
    lost: mpsc::UnboundedReceiver<String>,
}

impl Attached {
    /// Why a neighbour is lost, once one is. Cancel safe.
    pub async fn lost(&mut self) -> String {
        self.lost.recv().await.unwrap_or_else(|| "its neighbours are gone".into())
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.ends.iter().for_each(|end| end.cut("the line is over"));
    }
}

impl PeerNet {
    /// Opens a port for the seat above, if there is one.
    pub async fn listen(&self, plan: &SeatPlan) -> Result<Option<Listener>, String> {
        if plan.place + 1 >= plan.of {
            return Ok(None);
        }
        self.port().await.map(Some)
    }

    /// Opens a port for other workers.
    pub async fn port(&self) -> Result<Listener, String> {
        let security = self.security.of_a_seat();
        let at = if security.is_plain() { Endpoint::loopback(0) } else { Endpoint::everywhere(0) };
        let bound = self.runtime.spawn(async move { Listener::bind(&at, security, |_| ()).await });
        let bound = bound.await.map_err(|e| e.to_string())?;
        bound.map_err(|e| format!("a port for other workers: {e}"))
    }

    /// The address of a neighbour: an empty host is the coordinator's.
    pub fn endpoint(&self, host: String, port: u16) -> Endpoint {
        Endpoint { host: if host.is_empty() { self.coordinator.to_string() } else { host }, port }
    }

    /// Connects with both neighbours, however long the line takes to form. `below` gives the address of the seat below
    /// once it is known.
    pub fn meet(
        &self,
        plan: SeatPlan,
        silence: Duration,
        listener: Option<Listener>,
        below: oneshot::Receiver<Endpoint>,
    ) -> oneshot::Receiver<Result<Met, String>> {
        let (said, met) = oneshot::channel();
        let (runtime, security) = (self.runtime.clone(), self.security.of_a_seat());
        self.runtime.spawn(async move {
            let meeting = Meeting { plan, silence, runtime, security };
            let mut said = said;
            let met = tokio::select! {
                both = async { tokio::try_join!(meeting.above(listener), meeting.below(below)) } => both,
                // The conversation has ended.
                () = said.closed() => return,
            };
            let _ = said.send(met.map(|(above, below)| Met { above, below }));
        });
        met
    }

    /// Starts the exchange of values in a line: what comes goes to `queue`. `most` bounds the values of a microbatch.
    pub fn attach(&self, met: Met, queue: &Arc<DeviceQueue>, (most, plan): (usize, &SeatPlan)) -> Attached {
        let (wire, waiting) = (plan.wire, WAITING + FOR_EACH_SEAT * usize::from(plan.of));
        let most = (most.saturating_mul(wire.size()), waiting);
        let (loses, lost) = mpsc::unbounded_channel();
        let mut ends = Vec::new();
        let neighbours = Neighbours {
            above: met.above.as_ref().map(|link| link.to.clone()),
            below: met.below.as_ref().map(|link| link.to.clone()),
            wire,
        };
        let round = queue.join(neighbours);
        for (link, below) in [(met.above, false), (met.below, true)] {
            let Some(CarryLink { from, end, .. }) = link else { continue };
            ends.push(end.clone());
            let (queue, loses) = (queue.clone(), loses.clone());
            self.runtime.spawn(async move {
                let reason = read(from, wire, (&queue, round), (below, most)).await;
                let reason =
                    reason.or_else(|| end.reason()).unwrap_or_else(|| "it closed the connection".into());
                end.cut(reason.clone());
                let whose = if below { "below" } else { "above" };
                let _ = loses.send(format!("the seat {whose}: {reason}"));
            });
        }
        Attached { ends, lost }
    }
}

/// A seat that looks for its neighbours.
struct Meeting {
    plan: SeatPlan,
    silence: Duration,
    runtime: Handle,
    security: Security,
}

impl Meeting {
    async fn above(&self, listener: Option<Listener>) -> Result<Option<CarryLink>, String> {
        let Some(mut listener) = listener else { return Ok(None) };
        loop {
            let connection = listener.accept().await.map_err(|e| e.to_string())?;
            // A peer of another line is disconnected.
            if let Ok(link) = self.greet(connection, self.plan.place + 1).await {
                return Ok(Some(link));
            }
        }
    }

    async fn below(&self, below: oneshot::Receiver<Endpoint>) -> Result<Option<CarryLink>, String> {
        if self.plan.place == 0 {
            return Ok(None);
        }
        let at = below.await.map_err(|_| "the conversation is over".to_string())?;
        let dialled = dial(&at, &self.security, DIAL_TIMEOUT).await.map_err(|e| e.to_string())?;
        let greeted = self.greet(dialled, self.plan.place - 1).await;
        greeted.map(Some).map_err(|reason| format!("the seat below at {at}: {reason}"))
    }

    /// Exchanges the first messages with the seat of that place.
    async fn greet(&self, connection: Connection, place: u16) -> Result<CarryLink, String> {
        let link: CarryLink = connected(&self.runtime, connection, self.silence);
        greeted(link, (self.plan.key, self.plan.place), |theirs| theirs == place).await.map(|(_, link)| link)
    }
}

/// Exchanges the first messages with another worker, which must have the same key and a place that is `due`. Returns that
/// place.
pub(super) async fn greeted(
    mut link: CarryLink,
    (key, own): ([u8; 16], u16),
    due: impl Fn(u16) -> bool,
) -> Result<(u16, CarryLink), String> {
    let _ = link.to.send(Carry::Hello { key, place: own }).await;
    match tokio::time::timeout(HELLO, link.from.recv()).await {
        Ok(Some(Carry::Hello { key: theirs, place })) if theirs == key && due(place) => Ok((place, link)),
        Ok(None) => Err(link.end.reason().unwrap_or_else(|| "it closed the connection".into())),
        _ => {
            link.end.cut("it is not of this line");
            Err("it is not of this line".into())
        }
    }
}

/// Passes on what a neighbour sends until its end. Returns the reason, if it is not that of the connection.
async fn read(
    mut from: mpsc::Receiver<Carry>,
    wire: Wire,
    (queue, round): (&DeviceQueue, u64),
    (below, (bytes, waiting)): (bool, (usize, usize)),
) -> Option<String> {
    let mut assembly = Assembly::new(wire);
    while let Some(message) = from.recv().await {
        let heard = match message {
            Carry::Values { lease, rest, bytes: part } => match assembly.add(lease, (rest, &part), bytes) {
                Ok(Some(values)) if below => Heard::Hidden(lease, values),
                Ok(Some(values)) => Heard::Back(lease, Back::Gradient(values)),
                Ok(None) => continue,
                Err(reason) => return Some(reason),
            },
            Carry::Drop { lease } if !below => Heard::Back(lease, Back::Nothing),
            Carry::Token { lease, id } if !below => Heard::Back(lease, Back::Token(id)),
            _ => return Some("it sent a message that does not belong there".into()),
        };
        if queue.hears(round, heard) > waiting {
            return Some("it sent more values than there are leases".into());
        }
    }
    None
}
