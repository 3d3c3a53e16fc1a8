//! The connections of a relay: every worker of a set is connected with all others. The one with the higher place dials.

use super::peers::{PeerNet, greeted};
use crate::cluster::carry::{Carry, CarryLink};
use crate::cluster::link::connected;
use crate::cluster::message::RelayPlan;
use crate::net::{Connection, DIAL_TIMEOUT, Listener, dial};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinHandle, JoinSet};

/// Messages of all other relays that may wait: cells of a sum.
const ROOM: usize = 64;

/// How long a worker that listens may wait for its place, and the pause between attempts to reach it.
const OTHERS: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(200);

/// What happens on the way to a set of relays, and in it.
#[derive(Debug)]
pub(super) enum Event {
    /// Others reach this worker at this port.
    Listens(u16),
    /// It is connected with all others.
    Linked,
    /// The relay of this place has sent a message.
    Said(u16, Carry),
    /// It is no relay of its set any more; the reason in one line.
    Lost(String),
}

/// The connections with the other relays of a set, or what is to become them.
pub(super) struct Mesh {
    net: PeerNet,
    silence: Duration,
    /// The place that is waited for.
    place: Option<oneshot::Sender<Placed>>,
    /// To the other relays, by place; messages wait here, because the thread of the devices' reports must not.
    peers: Vec<Option<mpsc::UnboundedSender<Carry>>>,
    events: Option<mpsc::Receiver<Event>>,
    task: Option<Task>,
}

/// A place, and the messages to each other relay.
type Placed = (RelayPlan, Vec<Option<mpsc::UnboundedReceiver<Carry>>>);

/// Ends with its connections when it is dropped.
struct Task(JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Mesh {
    pub fn new(net: PeerNet, silence: Duration) -> Self {
        Mesh { net, silence, place: None, peers: Vec::new(), events: None, task: None }
    }

    /// Opens a port for another set, and leaves the one before.
    pub fn listen(&mut self) {
        self.part();
        let (tell, events) = mpsc::channel(ROOM);
        let (place, placed) = oneshot::channel();
        let (net, silence) = (self.net.clone(), self.silence);
        let relay = async move {
            if let Err(reason) = stay(net, silence, placed, &tell).await {
                let _ = tell.send(Event::Lost(reason)).await;
            }
        };
        self.task = Some(Task(self.net.runtime.spawn(relay)));
        (self.place, self.events) = (Some(place), Some(events));
    }

    /// Connects with the other relays. The error is that this worker does not listen.
    pub fn connect(&mut self, plan: RelayPlan) -> Result<(), String> {
        let of = plan.addresses.len();
        let (peers, waiting) = (0..of)
            .map(|place| match place == usize::from(plan.place) {
                true => (None, None),
                false => {
                    let (to, from) = mpsc::unbounded_channel();
                    (Some(to), Some(from))
                }
            })
            .unzip();
        self.peers = peers;
        let sent = self.place.take().map(|place| place.send((plan, waiting)).is_ok());
        if sent == Some(true) { Ok(()) } else { Err("it listens for no other workers".into()) }
    }

    /// Leaves the set.
    pub fn part(&mut self) {
        self.peers.clear();
        (self.place, self.events, self.task) = (None, None, None);
    }

    /// Queues a message to the relay of this place.
    pub fn send(&self, place: usize, message: Carry) {
        if let Some(Some(peer)) = self.peers.get(place) {
            // A lost relay is reported as an event.
            let _ = peer.send(message);
        }
    }

    /// Queues a message to all other relays.
    pub fn spread(&self, message: &Carry) {
        (0..self.peers.len()).for_each(|place| self.send(place, message.clone()));
    }

    /// The next event. Cancel safe.
    pub async fn event(&mut self) -> Event {
        match &mut self.events {
            Some(events) => events.recv().await.unwrap_or_else(|| {
                self.events = None;
                Event::Lost("its connections have ended".into())
            }),
            None => std::future::pending().await,
        }
    }
}

/// A worker of a set, from its port to the end of its connections. The error is why they end.
async fn stay(
    net: PeerNet,
    silence: Duration,
    placed: oneshot::Receiver<Placed>,
    tell: &mpsc::Sender<Event>,
) -> Result<(), String> {
    let listener = net.port().await?;
    let _ = tell.send(Event::Listens(listener.address().port())).await;
    let Ok((plan, mut waiting)) = placed.await else { return Ok(()) };
    let joining = Joining { net, silence, plan };
    let (above, below) = tokio::try_join!(joining.above(listener), joining.below())?;
    let _ = tell.send(Event::Linked).await;
    let mut both = JoinSet::new();
    for (place, link) in above.into_iter().chain(below) {
        let CarryLink { to, mut from, end, .. } = link;
        let mut messages = waiting.get_mut(usize::from(place)).and_then(Option::take);
        let of = tell.clone();
        both.spawn(async move {
            while let Some(message) = from.recv().await {
                if of.send(Event::Said(place, message)).await.is_err() {
                    break;
                }
            }
            let reason = end.reason().unwrap_or_else(|| "it closed the connection".into());
            Some(format!("the relay {place}: {reason}"))
        });
        both.spawn(async move {
            while let Some(message) = messages.as_mut()?.recv().await {
                if to.send(message).await.is_err() {
                    break;
                }
            }
            None
        });
    }
    while let Some(ended) = both.join_next().await {
        if let Ok(Some(reason)) = ended {
            return Err(reason);
        }
    }
    Ok(())
}

/// A worker that connects with the others of its set.
struct Joining {
    net: PeerNet,
    silence: Duration,
    plan: RelayPlan,
}

impl Joining {
    /// Waits for the workers with higher places.
    async fn above(&self, mut listener: Listener) -> Result<Vec<(u16, CarryLink)>, String> {
        let of = self.plan.addresses.len();
        let mut links: Vec<(u16, CarryLink)> = Vec::new();
        while links.len() + 1 + usize::from(self.plan.place) < of {
            let connection = listener.accept().await.map_err(|e| e.to_string())?;
            let due = |place: u16| {
                place > self.plan.place
                    && usize::from(place) < of
                    && links.iter().all(|(other, _)| *other != place)
            };
            // A peer of another set is disconnected.
            if let Ok(link) = self.greet(connection, due).await {
                links.push(link);
            }
        }
        Ok(links)
    }

    /// Dials the workers with lower places.
    async fn below(&self) -> Result<Vec<(u16, CarryLink)>, String> {
        let security = self.net.security.of_a_seat();
        let mut links = Vec::new();
        for ((host, port), place) in self.plan.addresses.iter().zip(0..self.plan.place) {
            let at = self.net.endpoint(host.clone(), *port);
            let failed = |reason: String| format!("the relay {place} at {at}: {reason}");
            let began = Instant::now();
            // The other worker may still wait for its place, behind parameters on a slow network.
            let link = loop {
                let dialled = dial(&at, &security, DIAL_TIMEOUT).await.map_err(|e| failed(e.to_string()))?;
                match self.greet(dialled, |theirs| theirs == place).await {
                    Ok(link) => break link,
                    Err(reason) if began.elapsed() > OTHERS => return Err(failed(reason)),
                    Err(_) => tokio::time::sleep(PAUSE).await,
                }
            };
            links.push(link);
        }
        Ok(links)
    }

    async fn greet(
        &self,
        connection: Connection,
        due: impl Fn(u16) -> bool,
    ) -> Result<(u16, CarryLink), String> {
        let link: CarryLink = connected(&self.net.runtime, connection, self.silence);
        greeted(link, (self.plan.key, self.plan.place), due).await
    }
}
