//! Assignment of items to devices. The planner deals the open items in thought, largest first, each to the device
//! that would finish it first after all that it already has. A device with room gets the items that fall to it; a
//! slow device to which none falls waits, so that the step does not end with waiting for it. Items that fall to a
//! device with a full queue stay open and are dealt again at the next event, with the knowledge of that time.

use super::Machine;
use super::action::{Action, Purpose};
use super::deal::deal;
use super::event::{DeviceId, Kind, MemberId};
use super::fleet::{Device, Member, micros};
use super::ledger::{Alone, Held, Status};
use super::round::Current;
use super::speed::{Speed, assumed};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Most items that are dealt. With more than these open, a device to which none falls is so slow that no time is
/// lost.
const DEALT: usize = 512;

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
    own: bool,
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
    slots: Vec<Slot>,
    at: Duration,
    /// What the speeds are of. `None`: nothing was seen.
    of: Option<(Kind, u64)>,
}

fn micros_of(time: Duration) -> f64 {
    time.as_micros() as f64
}

impl Slot {
    /// A device in a round, with this speed and grace period, not yet [`Self::at`] any time.
    fn of(seen: (DeviceId, &Member, &Device), each: f64, round: &Current, patience: Duration) -> Self {
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
            queue.push(Queued { lease, cost, finish: 0.0 });
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
    fn at(&mut self, now: Duration) {
        self.limit = if now >= self.times.hangs { 0 } else { self.times.most };
        let now = micros_of(now);
        self.free = (self.times.arrives - now).max(0.0);
        for (place, Queued { cost, finish, .. }) in self.queue.iter_mut().enumerate() {
            let mut cost = *cost;
            if place == 0 {
                let left = cost + (self.times.began - now);
                self.hopeless = left + 9.0 * cost + self.times.patience;
                // A late lease is expected to need as long again as it is late already.
                cost = left.max(-left).max(0.1 * cost);
            }
            self.free += cost;
            *finish = self.free;
        }
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

impl Machine {
    /// The devices that are up, in their current state. [`Self::saw`] takes them back, unless they were altered.
    pub(super) fn slots(&mut self) -> Vec<Slot> {
        let changed = self.fleet.changed();
        let Seen { mut slots, at, of } = std::mem::take(&mut self.seen);
        let Some(round) = &self.round else { return Vec::new() };
        let same = of == Some((round.kind, round.microbatches)) && slots.iter().all(|s| s.own);
        if same && changed.into_iter().all(|member| self.see_again(member, &mut slots)) {
            if at != self.now || self.verifies() {
                slots.iter_mut().for_each(|slot| slot.at(self.now));
                self.leave_out_lone(&mut slots);
            }
        } else {
            slots = self.all_slots();
        }
        #[cfg(test)]
        assert_eq!(slots, self.all_slots(), "what is kept is what would be made again");
        slots
    }

    fn leave_out_lone(&self, slots: &mut [Slot]) {
        let lone: BTreeSet<DeviceId> = self.lone().map(|(id, _)| id).collect();
        slots.iter_mut().filter(|s| lone.contains(&s.id)).for_each(|s| s.limit = 0);
    }

    fn slots_again(&mut self, slots: Vec<Slot>) -> Vec<Slot> {
        self.saw(slots);
        self.slots()
    }

    /// Keeps what [`Self::slots`] returned at this time.
    pub(super) fn saw(&mut self, slots: Vec<Slot>) {
        let of = self.round.as_ref().map(|round| (round.kind, round.microbatches));
        self.seen = Seen { slots, at: self.now, of };
    }

    /// The same as [`Self::slots`], from nothing that was kept.
    pub(super) fn all_slots(&self) -> Vec<Slot> {
        let Some(round) = &self.round else { return Vec::new() };
        let seen: Vec<_> = self.fleet.devices().filter(|(_, _, d)| d.up).collect();
        let speeds: Vec<(&str, &Speed)> = seen.iter().map(|(_, _, d)| (&*d.class, &d.speed)).collect();
        let each = assumed(&speeds, round.kind);
        let slot = |(seen, each): ((DeviceId, &Member, &Device), f64)| {
            let mut slot = Slot::of(seen, each, round, self.config.patience);
            slot.at(self.now);
            slot
        };
        let mut slots: Vec<Slot> = seen.into_iter().zip(each).map(slot).collect();
        self.leave_out_lone(&mut slots);
        slots
    }

    /// Makes the slots of a member again. Returns false if it has others now, or its speed is not known.
    fn see_again(&self, member: MemberId, slots: &mut [Slot]) -> bool {
        let Some(round) = &self.round else { return false };
        let from = slots.partition_point(|s| s.id.member < member);
        let to = slots.partition_point(|s| s.id.member <= member);
        let mut now = slots[from..to].iter_mut();
        let up = self.fleet.devices_of(member).filter(|(_, _, d)| d.up);
        for seen in up {
            let (Some(slot), Some(each)) = (now.next(), seen.2.speed.likely(round.kind)) else {
                return false;
            };
            if slot.id != seen.0 {
                return false;
            }
            *slot = Slot::of(seen, each, round, self.config.patience);
            slot.at(self.now);
        }
        now.next().is_none()
    }

    /// Deals the open items, and gives idle devices items to repeat. Returns the members to which an item fell, in order.
    pub(super) fn assign(&mut self) -> Vec<MemberId> {
        let mut slots = self.slots();
        if slots.iter().any(|s| s.hopeless <= 0.0) {
            self.call_back_hopeless(&slots);
            slots = self.slots_again(slots);
        }
        if self.is_checking() {
            self.saw(slots);
            self.lease_checks();
            slots = self.slots();
        }
        let Some(round) = &self.round else { return Vec::new() };
        let items = round.ledger.open().map(|item| (item, round.ledger.items()[item].tokens));
        let dealt = deal(items.take(DEALT.max(4 * slots.len())), &slots);
        let mut expecting: Vec<MemberId> = dealt.iter().map(|(_, slot)| slots[*slot].id.member).collect();
        expecting.sort_unstable();
        expecting.dedup();
        for (item, slot) in dealt {
            if let Some(item) = item {
                self.lease(item, slots[slot].id, Purpose::Round);
            }
        }
        slots = self.slots_again(slots);
        self.repeat(&slots);
        self.saw(slots);
        expecting
    }

    /// Leases an item to a device.
    pub(super) fn lease(&mut self, item: usize, id: DeviceId, purpose: Purpose) -> u64 {
        let (Some(round), Some(member)) = (&mut self.round, self.fleet.member(id.member)) else {
            return 0;
        };
        let starting = member.sent.is_some();
        let Some(device) = self.fleet.device_mut(id) else { return 0 };
        let alone = match (device.queue.is_empty(), starting) {
            (true, false) => Alone::Waiting,
            (true, true) => Alone::Starting,
            (false, _) => Alone::Queued,
        };
        let class = device.class.clone();
        let held = Held { item, device: id, class, sent: self.now, alone, status: Status::Live, purpose };
        let lease = round.ledger.give(held);
        if device.queue.is_empty() {
            device.began = self.now;
        }
        device.idleness.used |= round.kind == Kind::Train;
        device.queue.push_back(lease);
        self.out.push(Action::Lease { device: id, lease, item, purpose });
        lease
    }

    /// Schedules the next look: when a lease is to be revoked, or an idle device may take over a late item.
    pub(super) fn look_again(&mut self, slots: &[Slot]) {
        let Some(round) = &self.round else { return };
        let hopeless = slots.iter().map(|s| s.hopeless).filter(|h| h.is_finite());
        self.look =
            hopeless.min_by(f64::total_cmp).map(|h| self.now + micros(h.max(0.0)) + Duration::from_micros(1));
        let pending = slots.iter().any(|s| s.held > 0) || round.ledger.open().next().is_some();
        if !pending || !slots.iter().any(Slot::idle) {
            return;
        }
        let each = slots.iter().map(|s| s.each).fold(f64::INFINITY, f64::min);
        let tokens = round.ledger.most();
        let soon = micros(each * tokens as f64 / 4.0);
        let soon = self.now + soon.clamp(Duration::from_millis(5), Duration::from_secs(1));
        self.look = Some(self.look.map_or(soon, |look| look.min(soon)));
    }
}
