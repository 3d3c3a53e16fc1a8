//! Assignment of items to devices. The planner deals the open items in thought, largest first, each to the device
//! that would finish it first after all that it already has. A device with room gets the items that fall to it; a
//! slow device to which none falls waits, so that the step does not end with waiting for it. Items that fall to a
//! device with a full queue stay open and are dealt again at the next event, with the knowledge of that time.

use super::Machine;
use super::action::{Action, Purpose};
use super::event::{DeviceId, Kind, MemberId};
use super::fleet::{Device, Member, micros};
use super::ledger::{Alone, Held, Ledger, Status};
use super::round::Current;
use super::speed::{Speed, assumed};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Most items that are dealt. With more than these open, a device to which none falls is so slow that no time is
/// lost.
const DEALT: usize = 512;

/// A device as the planner sees it.
pub(super) struct Slot {
    pub id: DeviceId,
    pub class: Arc<str>,
    /// Microseconds per token.
    pub each: f64,
    /// Fixed cost of a lease, in tokens that take as long.
    pub lead: f64,
    /// Whether `each` was measured on this device.
    pub known: bool,
    /// Its leases, with their expected finish in microseconds from now.
    pub queue: Vec<(u64, f64)>,
    /// When its first lease is so late that it is revoked, in microseconds from now.
    pub hopeless: f64,
    /// When it is expected to have finished all of them, in microseconds from now.
    pub free: f64,
    /// Compute time of its leases, in microseconds.
    work: f64,
    /// Time between a lease and its announcement besides computing, in microseconds.
    pub overhead: f64,
    /// Most leases that it may hold.
    limit: usize,
    /// Leases that it computes at the same time; its queue holds at least one besides them.
    pub together: usize,
    held: usize,
}

/// The time of planning, and the grace period for late leases.
#[derive(Clone, Copy)]
struct At {
    now: Duration,
    patience: Duration,
}

impl Slot {
    fn of(seen: (DeviceId, &Member, &Device), each: f64, round: &Current, at: At) -> Self {
        let (id, member, device) = seen;
        let At { now, patience } = at;
        // Before the first measurement: the round trip of a message.
        let travels = member.link.map(|link| 1e6 * link.round_trip.min(60.0));
        let overhead = device.overhead.get().or(travels).unwrap_or(0.0);
        let lead = device.speed.size(0, round.microbatches);
        let from_now = |at: Duration| at.as_micros() as f64 - now.as_micros() as f64;
        let (mut queue, mut hopeless, mut work) = (Vec::new(), f64::INFINITY, 0.0);
        let known = device.speed.any();
        let mut free = from_now(member.available(now)).max(0.0);
        for (place, &lease) in device.queue.iter().enumerate() {
            let held = round.ledger.lease(lease);
            let mut cost = (round.ledger.items()[held.item].tokens as f64 + lead) * each;
            work += cost;
            if held.alone != Alone::Queued {
                cost += overhead;
            }
            if place == 0 {
                let left = cost + from_now(device.began.max(held.sent));
                let patience = patience.as_micros() as f64 * if known { 1.0 } else { 10.0 };
                hopeless = left + 9.0 * cost + patience;
                // A late lease is expected to need as long again as it is late already.
                cost = left.max(-left).max(0.1 * cost);
            }
            free += cost;
            queue.push((lease, free));
        }
        if queue.is_empty() {
            free += overhead;
        }
        let hangs = device.hangs(now);
        let limit = match device.room {
            Some(room) if device.up && !hangs => 1 + usize::from(room) * usize::from(known),
            _ => 0,
        };
        let held = queue.len();
        Slot {
            id,
            class: device.class.clone(),
            each,
            lead,
            known,
            queue,
            hopeless,
            free,
            work,
            overhead,
            limit,
            together: device.together,
            held,
        }
    }

    /// Whether it should get another lease now, so that it does not wait for one later.
    pub fn has_room(&self) -> bool {
        self.held < self.limit && (self.held <= self.together || self.work < 1.5 * self.overhead + 2000.0)
    }

    /// Whether it has no lease and may get one.
    pub fn idle(&self) -> bool {
        self.held == 0 && self.limit > 0
    }
}

impl Machine {
    /// The devices that are up, in their current state.
    pub(super) fn slots(&self) -> Vec<Slot> {
        let Some(round) = &self.round else { return Vec::new() };
        let seen: Vec<_> = self.fleet.devices().filter(|(_, _, d)| d.up).collect();
        let speeds: Vec<(&str, &Speed)> = seen.iter().map(|(_, _, d)| (&*d.class, &d.speed)).collect();
        let each = assumed(&speeds, round.kind);
        let at = At { now: self.now, patience: self.config.patience };
        let slot = |(seen, each): ((DeviceId, &Member, &Device), f64)| {
            let lone = self.is_lone(seen.0, seen.2);
            let slot = Slot::of(seen, each, round, at);
            Slot { limit: if lone { 0 } else { slot.limit }, ..slot }
        };
        seen.into_iter().zip(each).map(slot).collect()
    }

    /// Deals the open items, and gives idle devices items to repeat. Returns the members to which an item fell for
    /// which they have no room yet.
    pub(super) fn assign(&mut self) -> BTreeSet<MemberId> {
        let mut slots = self.slots();
        if slots.iter().any(|s| s.hopeless <= 0.0) {
            self.call_back_hopeless(&slots);
            slots = self.slots();
        }
        if self.lease_checks() {
            slots = self.slots();
        }
        let mut expecting = BTreeSet::new();
        let Some(round) = &self.round else { return expecting };
        for (item, slot) in deal(&round.ledger, &mut slots) {
            let slot = &mut slots[slot];
            expecting.insert(slot.id.member);
            if let Some(lease) = item {
                self.lease(lease, slot.id, Purpose::Round);
            }
        }
        if !expecting.is_empty() {
            slots = self.slots();
        }
        self.repeat(&slots);
        expecting
    }

    /// Leases an item to a device.
    pub(super) fn lease(&mut self, item: usize, id: DeviceId, purpose: Purpose) -> u64 {
        let (Some(round), Some(member)) = (&mut self.round, self.fleet.members.get(&id.member)) else {
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
        let tokens = round.ledger.items().iter().map(|i| i.tokens).max().unwrap_or(1);
        let soon = micros(each * tokens as f64 / 4.0);
        let soon = self.now + soon.clamp(Duration::from_millis(5), Duration::from_secs(1));
        self.look = Some(self.look.map_or(soon, |look| look.min(soon)));
    }
}

/// The open items in the order in which they are dealt: the slot to which each falls, and the item if that slot has
/// room for it.
fn deal(ledger: &Ledger, slots: &mut [Slot]) -> Vec<(Option<usize>, usize)> {
    let mut dealt = Vec::new();
    if !slots.iter().any(|s| s.limit > 0) {
        return dealt;
    }
    for item in ledger.open().take(DEALT.max(4 * slots.len())) {
        if !slots.iter().any(Slot::has_room) {
            break; // a device without room has work already
        }
        let tokens = ledger.items()[item].tokens as f64;
        let cost = |s: &Slot| (tokens + s.lead) * s.each;
        let finish = |s: &Slot| if s.limit > 0 { s.free + cost(s) } else { f64::INFINITY };
        let better = |a: &(usize, f64), b: &(usize, f64)| a.1.total_cmp(&b.1);
        let Some((best, at)) = slots.iter().map(finish).enumerate().min_by(better) else { break };
        let slot = &mut slots[best];
        let room = slot.has_room();
        slot.free = at;
        slot.held += usize::from(room);
        slot.work += cost(slot);
        dealt.push((room.then_some(item), best));
    }
    dealt
}
