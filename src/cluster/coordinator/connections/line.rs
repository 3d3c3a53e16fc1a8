//! A line of workers that hold the layers of one model together. It waits for its seats, connects them, and then stands
//! between them and the driver, for which it is a member with one device. It never outlives the loss of a seat: the
//! driver then hears that the member is lost, and the workers are asked to connect again.

use super::lines::{FromSeat, Waiter};
use super::translation::{Fall, Heard, Translation};
use super::{Desk, Reception, host};
use crate::cluster::coordinator::outbox::Outbox;
use crate::cluster::coordinator::{Incoming, Passes, Rejected};
use crate::cluster::link::{ROOM, WorkerLink, pair};
use crate::cluster::message::{Bye, Device, LeaseId, SeatPlan, ToCoordinator, ToWorker, Trials, Trouble};
use crate::cluster::plain::plain;
use crate::model::line;
use crate::model::memory::Limit;
use crate::train::event::{LineFormed, Seat};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::Instant;

/// Time limit for seats that know each other to connect.
const MEETING: Duration = Duration::from_secs(30);

/// A worker on its seat.
struct Chair {
    name: String,
    host: String,
    outbox: Outbox,
    plan: SeatPlan,
    /// Bytes that it needs, and that it may use.
    memory: (u64, u64),
    device: Option<Device>,
    /// The port on which the seat above reaches it, once it listens.
    port: Option<u16>,
    linked: bool,
}

/// A line that is being formed.
pub(super) struct Line {
    reception: Arc<Reception>,
    events: UnboundedReceiver<FromSeat>,
    chairs: Vec<Chair>,
    /// When its seats must be connected, once they know each other.
    introduced: Option<Instant>,
}

/// Why a line ends before it stands.
enum Ended {
    /// A seat is lost, or broke the protocol.
    Fell(String),
    /// The run is over.
    Over(Bye),
}

impl Line {
    pub fn new(
        reception: Arc<Reception>,
        seats: Vec<(Waiter, SeatPlan, u64)>,
        events: UnboundedReceiver<FromSeat>,
    ) -> Self {
        let chair = |(waiter, plan, needs): (Waiter, SeatPlan, u64)| {
            let Waiter { name, peer, outbox, capacity, .. } = waiter;
            let memory = (needs, capacity.map_or(0, |capacity| capacity.limit));
            outbox.say(ToWorker::Sit(Some(plan.clone())));
            Chair { name, host: host(&peer), outbox, plan, memory, device: None, port: None, linked: false }
        };
        Line { reception, events, chairs: seats.into_iter().map(chair).collect(), introduced: None }
    }

    /// Forms the line and serves it to its end.
    pub async fn run(mut self) {
        match self.form().await {
            Ok(()) => Standing::new(self).serve().await,
            Err(ended) => {
                if let Ended::Fell(reason) = &ended {
                    let names: Vec<String> = self.chairs.iter().map(|chair| plain(&chair.name)).collect();
                    self.reception.rejected(names.join(" + "), Rejected::Worker, reason.clone());
                }
                let bye = ended.bye();
                self.chairs.iter().for_each(|chair| chair.outbox.say(ToWorker::Bye(bye.clone())));
            }
        }
    }

    /// Waits until all seats are taken, ready and connected.
    async fn form(&mut self) -> Result<(), Ended> {
        let mut closing = self.reception.over.subscribe();
        while !self.chairs.iter().all(|chair| chair.linked) {
            let until = self.introduced;
            let late = async {
                match until {
                    Some(until) => tokio::time::sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            let event = tokio::select! {
                event = self.events.recv() => event,
                () = late => return Err(Ended::Fell("the line fell: its workers do not reach each other".into())),
                _ = closing.wait_for(Option::is_some) => None,
            };
            match event {
                Some(event) => self.heard(event).map_err(Ended::Fell)?,
                None => {
                    let over = self.reception.over.borrow().clone();
                    return Err(over.map_or(Ended::Fell("its connections are lost".into()), Ended::Over));
                }
            }
            self.introduce();
        }
        Ok(())
    }

    fn heard(&mut self, event: FromSeat) -> Result<(), String> {
        match event {
            FromSeat::Gone { place, reason } => Err(fall(&self.chairs[place].name, &reason)),
            FromSeat::Said { place, message, .. } => {
                let chair = &mut self.chairs[place];
                match *message {
                    ToCoordinator::Ready { devices, .. } => chair.device = devices.into_iter().next(),
                    ToCoordinator::Seated { port } => chair.port = Some(port),
                    ToCoordinator::Linked => chair.linked = true,
                    // The connection ends next.
                    ToCoordinator::Leave { reason } => {
                        self.reception.rejected(plain(&chair.name), Rejected::Worker, plain(&reason));
                    }
                    ToCoordinator::Measured { .. } => {}
                    _ => return Err(fall(&chair.name, "it spoke of work before the line stood")),
                }
                Ok(())
            }
        }
    }

    /// Tells each seat where the one below it is, once all listen.
    fn introduce(&mut self) {
        let ready = |chair: &Chair| chair.device.is_some() && chair.port.is_some();
        if self.introduced.is_some() || !self.chairs.iter().all(ready) {
            return;
        }
        self.introduced = Some(Instant::now() + MEETING);
        for pair in self.chairs.windows(2) {
            if let [below, above] = pair {
                let (host, port) = (below.host.clone(), below.port.unwrap_or(0));
                above.outbox.say(ToWorker::Below { host, port });
            }
        }
    }
}

fn fall(name: &str, reason: &str) -> String {
    format!("the line fell: {}: {}", plain(name), plain(reason))
}

impl Ended {
    fn bye(self) -> Bye {
        match self {
            Ended::Fell(reason) => Bye::Out { reason, again: true },
            Ended::Over(bye) => bye,
        }
    }
}

/// A line whose seats compute.
struct Standing {
    reception: Arc<Reception>,
    /// Its name as a member.
    name: String,
    events: UnboundedReceiver<FromSeat>,
    chairs: Vec<Chair>,
    translation: Translation,
}

impl Standing {
    fn new(line: Line) -> Self {
        let Line { reception, events, chairs, .. } = line;
        let at = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
        let values = chairs.iter().map(|Chair { plan, .. }| at(plan.values.0)..at(plan.values.1));
        let translation = Translation::new(&values.collect::<Vec<_>>());
        Standing { reception, name: String::new(), events, chairs, translation }
    }

    /// The line as a device.
    fn device(&self) -> Device {
        let devices = || self.chairs.iter().filter_map(|chair| Some((&chair.plan, chair.device.as_ref()?)));
        let classes = devices()
            .map(|(plan, device)| (plain(&device.class), plan.layers.0 as usize..plan.layers.1 as usize));
        let names: Vec<String> = devices().map(|(_, device)| plain(&device.name)).collect();
        let class = line::class(&classes.collect::<Vec<_>>());
        let cuts: Vec<usize> = devices().skip(1).map(|(plan, _)| plan.layers.0 as usize).collect();
        Device { name: names.join(" + "), class: self.chairs[0].plan.wire.class(class, &cuts) }
    }

    /// The line as an event, for the line of this name.
    fn formed(&self, worker: String) -> LineFormed {
        let seat = |chair: &Chair| Seat {
            worker: plain(&chair.name),
            device: chair.device.as_ref().map_or_else(String::new, |device| plain(&device.name)),
            first_layer: u64::from(chair.plan.layers.0),
            layers: u64::from(chair.plan.layers.1 - chair.plan.layers.0),
            streamed: u64::from(chair.plan.streamed),
            memory: chair.memory.0,
            limit: Limit::Free(chair.memory.1).known(),
        };
        let token_bytes = self.reception.lines.as_ref().map_or(0, |lines| lines.plan.token_bytes());
        LineFormed { step: 0, worker, seats: self.chairs.iter().map(seat).collect(), token_bytes }
    }

    /// Joins as a member of the driver, and passes messages until the line is over.
    async fn serve(mut self) {
        let names: Vec<&str> = self.chairs.iter().map(|chair| chair.name.as_str()).collect();
        let hosts: Vec<&str> = self.chairs.iter().map(|chair| chair.host.as_str()).collect();
        let (mut ours, mut theirs) = pair(ROOM);
        let seat = self.reception.line_member(
            (names.join(" + "), hosts.join(" + ")),
            &ours.end,
            self.chairs[0].plan.key,
        );
        self.name = seat.name.clone();
        let formed = self.formed(seat.name.clone());
        let _ = self.reception.events.send(Incoming::Line(formed));
        let reception = self.reception.clone();
        self.reception.hold(async move {
            reception.serve(&mut ours, &Desk::Driver(&seat)).await;
            reception.rise(seat, super::Parting::Proper);
        });
        let (guilty, bye) = match self.pass(&mut theirs).await {
            Ok(bye) => (None, bye),
            Err((guilty, reason)) => (guilty, Bye::Out { reason, again: true }),
        };
        if let Bye::Out { reason, .. } = &bye {
            theirs.end.cut(reason.clone());
        }
        for (place, chair) in self.chairs.iter().enumerate() {
            let bye = match bye.clone() {
                Bye::Out { reason, .. } if guilty == Some(place) => Bye::Out { reason, again: false },
                bye => bye,
            };
            chair.outbox.say(ToWorker::Bye(bye));
        }
    }

    /// Passes messages until the driver ends the conversation. The error is why the line falls, with the seat that must not
    /// come again.
    async fn pass(&mut self, driver: &mut WorkerLink) -> Result<Bye, (Option<usize>, String)> {
        let ready = ToCoordinator::Ready { devices: vec![self.device()], refused: vec![] };
        let measured = ToCoordinator::Measured { devices: vec![Trials::default()], link: None };
        for message in [ready, measured] {
            let _ = driver.to.send(message).await;
        }
        loop {
            tokio::select! {
                message = driver.from.recv() => match message {
                    Some(ToWorker::Bye(bye)) => return Ok(bye),
                    Some(message) => {
                        for (place, message) in self.translation.down(message) {
                            self.chairs[place].outbox.say(message);
                        }
                    }
                    None => {
                        let reason = driver.end.reason();
                        return Err((None, reason.unwrap_or_else(|| "the line is over".into())));
                    }
                },
                event = self.events.recv() => match event {
                    Some(FromSeat::Said { place, mut message, .. }) => {
                        match &mut *message {
                            ToCoordinator::Passes { lease, forward, between, backward } => {
                                self.passed(place, *lease, [*forward, *between, *backward]);
                                continue;
                            }
                            ToCoordinator::Fault { fault: Trouble::Value { tensor, .. }, .. } => {
                                *tensor += &format!(" on {}", self.chairs[place].name);
                            }
                            _ => {}
                        }
                        let heard = self.translation.up(place, *message);
                        let Heard { driver: up, seats } = heard.map_err(|fall| match fall {
                            Fall::Lost(reason) => (None, self.fall(place, &reason)),
                            Fall::Broke(reason) => (Some(place), self.fall(place, &reason)),
                        })?;
                        for (place, message) in seats {
                            self.chairs[place].outbox.say(message);
                        }
                        for message in up {
                            let _ = driver.to.send(message).await;
                        }
                    }
                    Some(FromSeat::Gone { place, reason }) => return Err((None, self.fall(place, &reason))),
                    None => return Err((None, "its connections are lost".into())),
                },
            }
        }
    }

    /// Tells the driver when a seat computed a microbatch, if its times are possible.
    fn passed(&mut self, place: usize, lease: LeaseId, [forward, between, backward]: [u64; 3]) {
        let now = std::time::Instant::now();
        let before = |at: std::time::Instant, micros| at.checked_sub(Duration::from_micros(micros));
        let Some(again) = before(now, backward) else { return };
        let Some(end) = before(again, between) else { return };
        let Some(from) = before(end, forward) else { return };
        if self.translation.times_once(place, lease) {
            let chair = &self.chairs[place];
            let device = chair.device.as_ref().map_or_else(String::new, |device| plain(&device.name));
            let (line, seat) = (self.name.clone(), (place, plain(&chair.name), device));
            let spans = [(from, end), (again, now)];
            let _ = self.reception.events.send(Incoming::Passes(Passes { line, seat, spans }));
        }
    }

    fn fall(&self, place: usize, reason: &str) -> String {
        fall(&self.chairs[place].name, reason)
    }
}
