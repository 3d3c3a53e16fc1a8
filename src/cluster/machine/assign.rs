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
use super::slot::{Seen, Slot};
use super::speed::{Speed, assumed};
use std::collections::BTreeSet;
use std::time::Duration;

/// Most items that are dealt. With more than these open, a device to which none falls is so slow that no time is
/// lost.
const DEALT: usize = 512;

impl Machine {
    /// The devices that are up, in their current state. [`Self::saw`] takes them back, unless they were altered.
    pub(super) fn slots(&mut self) -> Vec<Slot> {
        let changed = self.fleet.changed();
        let is_changed = !changed.is_empty();
        let Seen { mut slots, at, of } = std::mem::take(&mut self.seen);
        let Some(round) = &self.round else { return Vec::new() };
        // The speed of one device may be assumed from those of others.
        let same =
            of == Some((round.kind, round.microbatches)) && (!is_changed || slots.iter().all(|s| s.own));
        if same && changed.into_iter().all(|member| self.see_again(member, &mut slots)) {
            if at != self.now || (is_changed && self.verifies()) {
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

    /// The slots after something has changed.
    pub(super) fn slots_again(&mut self, slots: Vec<Slot>) -> Vec<Slot> {
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

    /// Deals the open items, and gives idle devices items to repeat. Returns the members to which an
    /// item of the round fell, in order.
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
        let most = DEALT.max(4 * slots.len());
        let own = round.ledger.open().take(most).take_while(|&item| !round.ledger.is_ahead(item)).count();
        let dealt = deal(items.take(most), &slots);
        // A sum does not wait for items of the next step.
        let of_round = dealt.iter().take(own);
        let mut expecting: Vec<MemberId> = of_round.map(|(_, slot)| slots[*slot].id.member).collect();
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
