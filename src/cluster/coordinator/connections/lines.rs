//! Which worker takes which seat of which line. Each worker that connects takes the first free seat of a line that is
//! being formed; if there is none, it is the first of another line.

use crate::cluster::coordinator::outbox::Outbox;
use crate::cluster::message::{SeatPlan, ToCoordinator};
use ring::rand::{SecureRandom, SystemRandom};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// How the layers of a model are divided among the seats of a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinePlan {
    /// Layers of each seat, in order.
    pub layers: Vec<Range<usize>>,
    /// Values of the flat layout that each seat trains.
    pub values: Vec<Range<usize>>,
}

impl LinePlan {
    /// Most microbatches of a seat that wait for their backward pass: one in each seat above it and itself, and one on
    /// each way between them, so that sending takes no time from computing.
    pub fn depth(&self, place: usize) -> usize {
        2 * (self.layers.len() - 1 - place) + 1
    }
}

/// What the tasks of its seats tell a line.
#[derive(Debug)]
pub(super) enum FromSeat {
    /// A worker has taken this seat.
    Sat { place: usize, name: String, host: String, outbox: Outbox },
    /// It sent a message; the permit bounds the number of its messages queued here.
    Said { place: usize, message: ToCoordinator, _room: OwnedSemaphorePermit },
    /// Its connection is lost.
    Gone { place: usize, reason: String },
}

/// The lines of a run that are being formed.
pub(super) struct Lines {
    pub plan: LinePlan,
    forming: Mutex<Forming>,
}

#[derive(Default)]
struct Forming {
    lines: Vec<Open>,
    /// The last seat of each worker: it may still hold the layers of that seat.
    last: BTreeMap<[u8; 16], usize>,
}

/// A line with free seats.
struct Open {
    key: [u8; 16],
    free: BTreeSet<usize>,
    events: UnboundedSender<FromSeat>,
}

/// A seat that a worker has taken.
pub(super) struct Taken {
    pub plan: SeatPlan,
    pub events: UnboundedSender<FromSeat>,
    /// What a new line hears; `None` if this is a seat of a line that there is already.
    pub opened: Option<UnboundedReceiver<FromSeat>>,
}

impl Lines {
    pub fn new(plan: LinePlan) -> Self {
        Lines { plan, forming: Mutex::default() }
    }

    fn forming(&self) -> MutexGuard<'_, Forming> {
        self.forming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a worker a seat. The error is one line.
    pub fn sit(&self, identity: [u8; 16]) -> Result<Taken, String> {
        let mut forming = self.forming();
        let mut opened = None;
        if forming.lines.iter().all(|line| line.free.is_empty()) {
            let mut key = [0; 16];
            let drawn = SystemRandom::new().fill(&mut key);
            drawn.map_err(|_| "the system gives no random numbers for a line".to_string())?;
            let (events, heard) = unbounded_channel();
            let free = (0..self.plan.layers.len()).collect();
            forming.lines.push(Open { key, free, events });
            opened = Some(heard);
        }
        let last = forming.last.get(&identity).copied();
        let free = |line: &&mut Open| !line.free.is_empty();
        let line = forming.lines.iter_mut().find(free).ok_or("there is no seat")?;
        let first = line.free.first().copied().unwrap_or(0);
        let place = last.filter(|place| line.free.contains(place)).unwrap_or(first);
        line.free.remove(&place);
        let (key, events) = (line.key, line.events.clone());
        forming.last.insert(identity, place);
        Ok(Taken { plan: self.seat(key, place), events, opened })
    }

    fn seat(&self, key: [u8; 16], place: usize) -> SeatPlan {
        let (layers, values) = (&self.plan.layers[place], &self.plan.values[place]);
        SeatPlan {
            key,
            place: place as u16,
            of: self.plan.layers.len() as u16,
            layers: (layers.start as u32, layers.end as u32),
            values: (values.start as u64, values.end as u64),
            depth: self.plan.depth(place) as u16,
        }
    }

    /// The worker of this seat has left before the line stood. Returns whether another line is being formed: its seats
    /// may be taken by the workers that this line lacks.
    pub fn leave(&self, key: [u8; 16], place: usize) -> bool {
        let mut forming = self.forming();
        if let Some(line) = forming.lines.iter_mut().find(|line| line.key == key) {
            line.free.insert(place);
        }
        forming.lines.len() > 1
    }

    /// The line stands or is over: no worker takes a seat of it any more.
    pub fn close(&self, key: [u8; 16]) {
        self.forming().lines.retain(|line| line.key != key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_take_free_seats_and_their_last_one_again() {
        let plan = LinePlan { layers: vec![0..3, 3..5, 5..6], values: vec![0..30, 30..50, 50..60] };
        let lines = Lines::new(plan);
        let sit = |worker: u8| {
            let Taken { plan, opened, .. } = lines.sit([worker; 16]).unwrap();
            (plan.key, usize::from(plan.place), opened.is_some())
        };
        let (first, place, opened) = sit(1);
        assert_eq!((place, opened), (0, true));
        assert_eq!([sit(2), sit(3)], [(first, 1, false), (first, 2, false)]);
        let (second, place, opened) = sit(4);
        assert_eq!((place, opened, second == first), (0, true, false));
        // A worker that leaves a line that is being formed makes room for the next one.
        assert!(lines.leave(first, 1), "the other line is being formed too");
        assert_eq!(sit(5), (first, 1, false));
        // After a fall its workers fill the other line, at their seats where these are free.
        lines.close(first);
        assert_eq!([sit(3), sit(1)], [(second, 2, false), (second, 1, false)]);
        lines.close(second);
        let (third, place, _) = sit(2);
        assert_eq!((place, third == second), (1, false));
    }

    #[test]
    fn seats_get_their_ranges_and_depths() {
        let plan = LinePlan { layers: vec![0..3, 3..5, 5..6], values: vec![0..30, 30..50, 50..60] };
        let lines = Lines::new(plan);
        let plans: Vec<SeatPlan> = (0..3).map(|worker| lines.sit([worker; 16]).unwrap().plan).collect();
        let got: Vec<_> = plans.iter().map(|p| (p.layers, p.values, p.depth, p.of)).collect();
        assert_eq!(got, [((0, 3), (0, 30), 5, 3), ((3, 5), (30, 50), 3, 3), ((5, 6), (50, 60), 1, 3)]);
    }
}
