//! A device as the planner sees it. What depends on the time is apart from what changes with the device, its leases or
//! the round, so that a slot is kept from one event to the next.

use super::event::{DeviceId, Kind};
use super::fleet::{Device, Member};
use super::ledger::Alone;
use super::round::Current;
use std::sync::Arc;
use std::time::Duration;

/// A device as the planner sees it.
#[derive(Debug, PartialEq)]
pub(super) struct Slot {
    pub id: DeviceId,
    pub class: Arc<str>,
    /// Microseconds per token.
    pub each: f64,
    /// Fixed cost of a lease, in tokens that take as long.
    pub lead: f64,
    /// Whether `each` was measured on this device.
    pub known: bool,
    /// Whether `each` follows from this device alone.
    pub own: bool,
    /// Its leases, in order of work.
    pub queue: Vec<Queued>,
    /// When its first lease is so late that it is revoked, in microseconds from now.
    pub hopeless: f64,
    /// When it is expected to have finished all of them, in microseconds from now.
    pub free: f64,
    /// Compute time of its leases, in microseconds.
    pub work: f64,
    /// Time between a lease and its announcement besides computing, in microseconds.
    pub overhead: f64,
    /// Most leases that it may hold.
    pub limit: usize,
    /// Leases that it computes at the same time; its queue holds at least one besides them.
    pub together: usize,
    pub held: usize,
    times: Times,
}

/// A lease of a device.
#[derive(Debug, PartialEq)]
pub(super) struct Queued {
    pub lease: u64,
    /// Its expected duration, in microseconds.
    cost: f64,
    /// Whether it is computed with the newest parameters.
    newest: bool,
    /// Its expected finish, in microseconds from now.
    pub finish: f64,
}

/// Fixed times from which those of a slot follow. Numbers are microseconds.
#[derive(Debug, PartialEq)]
struct Times {
    /// When its parameters are expected to arrive; 0 if it has them.
    arrives: f64,
    /// When its first lease can have started.
    began: f64,
    /// The grace period of its first lease.
    patience: f64,
    /// From when it may hang.
    hangs: Duration,
    /// Most leases that it may hold if it does not hang.
    most: usize,
}

/// All slots at a time. Those of members that have not changed since are not made again.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub slots: Vec<Slot>,
    pub at: Duration,
    /// What the speeds are of. `None`: nothing was seen.
    pub of: Option<(Kind, u64)>,
}

fn micros_of(time: Duration) -> f64 {
    time.as_micros() as f64
}

impl Slot {
    /// A device in a round, with this speed and grace period, not yet [`Self::at`] any time.
    pub fn of(seen: (DeviceId, &Member, &Device), each: f64, round: &Current, patience: Duration) -> Self {
        let (id, member, device) = seen;
        // Before the first measurement: the round trip of a message.
        let travels = member.link.map(|link| 1e6 * link.round_trip.min(60.0));
        let overhead = device.overhead.get().or(travels).unwrap_or(0.0);
        let lead = device.speed.size(0, round.microbatches);
        let known = device.speed.any();
        let (mut queue, mut work, mut began) = (Vec::with_capacity(device.queue.len()), 0.0, 0.0);
        for &lease in &device.queue {
            let held = round.ledger.lease(lease);
            let mut cost = (round.ledger.items()[held.item].tokens as f64 + lead) * each;
            work += cost;
            if held.alone != Alone::Queued {
                cost += overhead;
            }
            if queue.is_empty() {
                began = micros_of(device.began.max(held.sent));
            }
            let newest = round.newest || round.ledger.is_ahead(held.item);
            queue.push(Queued { lease, cost, newest, finish: 0.0 });
        }
        let most = match device.room {
            Some(room) if device.up => 1 + usize::from(room) * usize::from(known),
            _ => 0,
        };
        let times = Times {
            arrives: member.arrives().map_or(0.0, micros_of),
            began,
            patience: micros_of(patience) * if known { 1.0 } else { 10.0 },
            hangs: device.hangs_from(),
            most,
        };
        Slot {
            id,
            class: device.class.clone(),
            each,
            lead,
            known,
            own: device.speed.likely(round.kind).is_some(),
            held: queue.len(),
            queue,
            hopeless: f64::INFINITY,
            free: 0.0,
            work,
            overhead,
            limit: 0,
            together: device.together,
            times,
        }
    }

    /// Sets what depends on the time.
    pub fn at(&mut self, now: Duration) {
        self.limit = if now >= self.times.hangs { 0 } else { self.times.most };
        let now = micros_of(now);
        let arrives = (self.times.arrives - now).max(0.0);
        self.free = 0.0;
        for (place, Queued { cost, newest, finish, .. }) in self.queue.iter_mut().enumerate() {
            let mut cost = *cost;
            if *newest {
                self.free = self.free.max(arrives);
            }
            if place == 0 {
                let left = cost + (self.times.began - now);
                self.hopeless = left + 9.0 * cost + self.times.patience;
                // A late lease is expected to need as long again as it is late already.
                cost = left.max(-left).max(0.1 * cost);
            }
            self.free += cost;
            *finish = self.free;
        }
        self.free = self.free.max(arrives);
        if self.queue.is_empty() {
            self.free += self.overhead;
        }
    }

    /// Whether it should get another lease now, so that it does not wait for one later.
    pub fn has_room(&self) -> bool {
        self.has_room_with(self.held, self.work)
    }

    /// The same, if it held this many leases with this compute time.
    pub fn has_room_with(&self, held: usize, work: f64) -> bool {
        held < self.limit && (held <= self.together || work < 1.5 * self.overhead + 2000.0)
    }

    /// Whether it has no lease and may get one.
    pub fn idle(&self) -> bool {
        self.held == 0 && self.limit > 0
    }
}

#[cfg(test)]
impl Slot {
    /// A device without a history that may hold `limit` leases and holds `held`.
    pub fn made_up([each, lead, free, work]: [f64; 4], (limit, held): (usize, usize)) -> Self {
        let times = Times { arrives: 0.0, began: 0.0, patience: 0.0, hangs: Duration::MAX, most: limit };
        Slot {
            id: DeviceId { member: super::event::MemberId(0), index: 0 },
            class: "".into(),
            each,
            lead,
            known: true,
            own: true,
            queue: Vec::new(),
            hopeless: f64::INFINITY,
            free,
            work,
            overhead: 1000.0,
            limit,
            together: 1,
            held,
            times,
        }
    }
}
