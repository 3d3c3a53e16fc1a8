//! Workers that wait for a seat in a line. Each reports what its device can hold; once there are enough of them, they get
//! their seats together.

use super::division::{Between, Division, Formed, Place, Waits};
use super::host;
use crate::cluster::coordinator::outbox::Outbox;
use crate::cluster::machine::MemberId;
use crate::cluster::message::{Bye, Capacity, SeatPlan, ToCoordinator, ToWorker};
use crate::cluster::worker::random;
use crate::model::memory::size;
use crate::model::split::depth;
use crate::model::wire::Wire;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// How workers hold a model together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinePlan {
    /// How its layers are divided.
    pub division: Division,
    /// Values of the flat layout below each layer; the last is the number of all.
    pub values: Vec<usize>,
    /// Values of the hidden state of a token.
    pub hidden: usize,
    /// The type in which they go from seat to seat.
    pub wire: Wire,
    /// Tokens of the longest microbatch.
    pub tokens: usize,
    /// Microbatches of a step.
    pub microbatches: usize,
}

impl LinePlan {
    fn layers(&self) -> usize {
        self.values.len() - 1
    }

    /// Most seats of a line.
    pub fn seats(&self) -> u16 {
        self.division.most() as u16
    }

    /// Bytes that go from seat to seat for a token, in each direction.
    pub fn token_bytes(&self) -> u64 {
        (self.wire.size() * self.hidden) as u64
    }

    /// What workers on these hosts send each other.
    pub fn between(&self, hosts: Vec<String>) -> Between {
        let bytes = self.token_bytes() * self.tokens as u64;
        Between { bytes, microbatches: self.microbatches, hosts }
    }

    fn seats_of(&self, key: [u8; 16], places: &[Place]) -> Vec<SeatPlan> {
        let seat = |(at, Place { layers, streamed, .. }): (usize, &Place)| SeatPlan {
            key,
            place: at as u16,
            of: places.len() as u16,
            layers: (layers.start as u32, layers.end as u32),
            streamed: *streamed as u32,
            values: (self.values[layers.start] as u64, self.values[layers.end] as u64),
            depth: depth(places.len() - 1 - at) as u16,
            wire: self.wire,
        };
        places.iter().enumerate().map(seat).collect()
    }
}

/// What the tasks of its seats tell a line.
#[derive(Debug)]
pub(super) enum FromSeat {
    /// It sent a message; the permit bounds the number of its messages queued here.
    Said { place: usize, message: Box<ToCoordinator>, _room: OwnedSemaphorePermit },
    /// Its connection is lost.
    Gone { place: usize, reason: String },
}

/// Where a worker was sent that had waited.
#[derive(Debug, Clone)]
pub(super) enum Destination {
    /// To this seat of a line.
    Seat(usize, UnboundedSender<FromSeat>),
    /// To the driver: it holds the whole model.
    Driver,
}

/// A worker that waits for a seat.
pub(super) struct Waiter {
    pub member: MemberId,
    pub identity: [u8; 16],
    pub name: String,
    /// Its address.
    pub peer: String,
    pub remark: Option<String>,
    pub outbox: Outbox,
    pub destination: Arc<OnceLock<Destination>>,
    pub capacity: Option<Capacity>,
}

/// What came of a worker's report.
pub(super) enum Seated {
    /// It waits.
    No,
    /// A line of these workers, in order, with the bytes that each needs, and what the line hears.
    Line { seats: Vec<(Waiter, SeatPlan, u64)>, heard: UnboundedReceiver<FromSeat> },
    /// This worker holds the whole model.
    Whole(Box<Waiter>),
    /// This worker cannot take part; the reason in one line.
    Refused(Box<Waiter>, String),
}

/// The workers that wait.
pub(super) struct Lines {
    pub plan: LinePlan,
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    workers: Vec<Waiter>,
    /// The last place of each worker: it may still hold the layers of that seat.
    last: BTreeMap<[u8; 16], usize>,
    /// Number of reports so far.
    reports: u64,
    /// The answer to everybody once the run is over.
    over: Option<Bye>,
}

impl Lines {
    pub fn new(plan: LinePlan) -> Self {
        Lines { plan, waiting: Mutex::default() }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A worker was welcomed.
    pub fn enter(&self, waiter: Waiter) {
        let mut waiting = self.waiting();
        match &waiting.over {
            Some(bye) => waiter.outbox.say(ToWorker::Bye(bye.clone())),
            None => waiting.workers.push(waiter),
        }
    }

    /// A worker has left. Returns where it was sent before.
    pub fn leave(&self, member: MemberId, destination: &OnceLock<Destination>) -> Option<Destination> {
        let mut waiting = self.waiting();
        waiting.workers.retain(|waiter| waiter.member != member);
        destination.get().cloned()
    }

    /// The run is over.
    pub fn close(&self, bye: &Bye) {
        let mut waiting = self.waiting();
        waiting.over = Some(bye.clone());
        waiting.workers.drain(..).for_each(|waiter| waiter.outbox.say(ToWorker::Bye(bye.clone())));
    }

    /// A worker reports what its device can hold. The error is why it breaks the protocol.
    pub fn report(&self, member: MemberId, capacity: Capacity) -> Result<Seated, String> {
        if !capacity.is_possible(self.plan.layers(), self.plan.division.most()) {
            return Err("it reported what no device can hold".into());
        }
        let mut waiting = self.waiting();
        let Some(waiter) = waiting.workers.iter_mut().find(|waiter| waiter.member == member) else {
            return Ok(Seated::No);
        };
        // Reports put off the others, who wait for more workers.
        if waiter.capacity.replace(capacity).is_some() {
            return Err("it reported twice what its device can hold".into());
        }
        waiting.reports += 1;
        self.form(&mut waiting, Waits::ForMore)
    }

    /// The number of reports, if those who wait should stream layers unless another worker comes soon.
    pub fn awaits_others(&self) -> Option<u64> {
        matches!(self.plan.division, Division::Auto(_)).then(|| self.waiting().reports)
    }

    /// What those who wait form if no worker has reported since. Where it fails, they go on waiting.
    pub fn wait_no_longer(&self, reports: u64) -> Option<Seated> {
        let mut waiting = self.waiting();
        if waiting.reports == reports { self.form(&mut waiting, Waits::NoLonger).ok() } else { None }
    }

    /// What those who have reported form. The error is that no random numbers can be had.
    fn form(&self, waiting: &mut Waiting, waits: Waits) -> Result<Seated, String> {
        let Waiting { workers, last, .. } = waiting;
        let ready: Vec<usize> = (0..workers.len()).filter(|at| workers[*at].capacity.is_some()).collect();
        let ready = in_places(ready, |at| last.get(&workers[*at].identity).copied());
        let capacities: Vec<&Capacity> =
            ready.iter().filter_map(|at| workers[*at].capacity.as_ref()).collect();
        let between = self.plan.between(ready.iter().map(|at| host(&workers[*at].peer)).collect());
        match self.plan.division.form(&capacities, &between, waits).within(&capacities) {
            Formed::No => Ok(Seated::No),
            Formed::Whole(one) => {
                let waiter = workers.remove(ready[one]);
                let _ = waiter.destination.set(Destination::Driver);
                Ok(Seated::Whole(Box::new(waiter)))
            }
            Formed::TooSmall(one) => {
                let reason = self.too_small(&capacities, one);
                Ok(Seated::Refused(Box::new(workers.remove(ready[one])), reason))
            }
            Formed::Line(places) => {
                let plans = self.plan.seats_of(random("a line")?, &places);
                let (events, heard) = unbounded_channel();
                let mut chosen: BTreeMap<usize, Waiter> = BTreeMap::new();
                let needs = places.iter().map(|place| place.needs);
                let at: Vec<usize> = places.iter().map(|place| ready[place.worker]).collect();
                for i in (0..workers.len()).rev().filter(|i| at.contains(i)) {
                    chosen.insert(i, workers.remove(i));
                }
                let mut seats = Vec::new();
                for (place, ((at, plan), needs)) in at.iter().zip(plans).zip(needs).enumerate() {
                    let Some(waiter) = chosen.remove(at) else { continue };
                    last.insert(waiter.identity, place);
                    let _ = waiter.destination.set(Destination::Seat(place, events.clone()));
                    seats.push((waiter, plan, needs));
                }
                Ok(Seated::Line { seats, heard })
            }
        }
    }

    /// Why these workers are too small together, for the one of this index.
    fn too_small(&self, capacities: &[&Capacity], one: usize) -> String {
        let mut ways = vec!["a larger --memory-limit"];
        if capacities.iter().any(|capacity| capacity.streams.1 == 0) {
            ways.push("--offload auto");
        }
        if let Division::Layers(counts) = &self.plan.division {
            let start = counts[..one].iter().sum::<usize>();
            let place =
                Place::new((one, capacities[one]), counts.len() - 1 - one, start..start + counts[one]);
            return format!(
                "layers {} to {} need {}, its device has {}: use {}, give it fewer layers (--stages), or smaller \
                 --micro-batch-tokens",
                place.layers.start,
                place.layers.end - 1,
                size(place.needs),
                size(capacities[one].limit),
                ways.join(", ")
            );
        }
        let has: Vec<String> = capacities.iter().map(|capacity| size(capacity.limit)).collect();
        let all = self.plan.layers();
        let whole = capacities.iter().map(|capacity| capacity.needs(0, &(0..all), 0)).min().unwrap_or(0);
        format!(
            "no split of the model, which takes {} whole, fits {} workers with {}: use {}, more workers (--stages), \
             smaller --micro-batch-tokens, or --quantize nf4",
            size(whole),
            capacities.len(),
            has.join(" and "),
            ways.join(", ")
        )
    }
}

/// Workers in the order of places: each at its last place (it may still hold the layers of that seat), the others, in the
/// order of their connection, at the free ones.
fn in_places(workers: Vec<usize>, last: impl Fn(&usize) -> Option<usize>) -> Vec<usize> {
    let held: BTreeSet<usize> = workers.iter().filter_map(&last).collect();
    let mut free = (0..).filter(|place| !held.contains(place));
    let mut placed: Vec<(usize, usize)> =
        workers.into_iter().map(|at| (last(&at).or_else(|| free.next()).unwrap_or(usize::MAX), at)).collect();
    placed.sort_by_key(|(place, _)| *place);
    placed.into_iter().map(|(_, at)| at).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn survivors_of_a_line_keep_their_places() {
        let places = |last: &[Option<usize>]| in_places((0..last.len()).collect(), |at| last[*at]);
        assert_eq!(places(&[None, None, None]), [0, 1, 2]);
        assert_eq!(places(&[Some(1), Some(2), None]), [2, 0, 1], "a new first seat");
        assert_eq!(places(&[Some(2), None, Some(0)]), [2, 1, 0]);
        assert_eq!(places(&[None, Some(0), None]), [1, 0, 2]);
        assert_eq!(places(&[Some(1), Some(1)]), [0, 1], "of two lines");
    }
}
