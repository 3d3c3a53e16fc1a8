//! A value that is not finite, or too large for exact sums, ends the run. Before that, another device computes the
//! item again, so that the user learns whether the data or a device is at fault. All other work stops when the value
//! is reported.

use super::super::message::LeaseId;
use super::Machine;
use super::action::{Action, Again, Bad, Finding, Purpose};
use super::event::{DeviceId, Kind};
use super::ledger::{Held, State, Status};
use super::slot::Slot;
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Recheck {
    finding: Finding,
    device: DeviceId,
    /// The lease of the second check, if there is one.
    lease: Option<LeaseId>,
    tried: Vec<DeviceId>,
    since: Duration,
    /// Where results are checked: a device of the same class that finds no bad value.
    fine: Option<DeviceId>,
}

impl Machine {
    /// When to stop waiting for another device, or for a second finding.
    pub(super) fn recheck_wake(&self) -> Option<Duration> {
        let next = |at: Duration| if self.now < at { at } else { self.patience() };
        self.recheck.as_ref().map(|_| next(self.elsewhere()))
    }

    /// Keeps a bad value of the next step until that step is the round, and returns whether it did. Its item stays leased
    /// unless its holder is lost.
    pub(super) fn postpones(&mut self, lease: LeaseId, held: &Held, bad: &Bad) -> bool {
        let Some(round) = self.round.as_mut().filter(|r| r.ledger.is_ahead(held.item)) else { return false };
        if let Some(next) = &mut round.next {
            next.bad.get_or_insert_with(|| (lease, bad.clone()));
        }
        let now = self.now;
        self.fleet.device_mut(held.device).map(|d| d.leaves(lease, now));
        true
    }

    /// A device found a bad value in a lease. The ledger has ended that lease already.
    pub(super) fn bad_value(&mut self, lease: LeaseId, held: &Held, bad: Bad) {
        if let Some(recheck) = &self.recheck {
            if recheck.finding.item == held.item && recheck.device != held.device
                || recheck.lease == Some(lease)
            {
                self.halt(Some(Again::Also(bad)));
            }
            return;
        }
        let Some(round) = &self.round else { return };
        let finding = Finding { kind: round.kind, item: held.item, first: bad, again: None };
        let prompt = round.kind == Kind::Prompt;
        let elsewhere = match round.ledger.items()[held.item].state {
            State::Granted(other) => Some(round.ledger.lease(other).device),
            _ => None,
        };
        let (device, since) = (held.device, self.now);
        self.recheck = Some(Recheck { finding, device, lease: None, tried: Vec::new(), since, fine: None });
        if prompt || elsewhere.is_some_and(|other| !self.outvotes(other)) {
            let again = elsewhere.map(|other| Again::Not(self.fleet.place(other)));
            return self.halt(again);
        }
        if self.recheck.is_none() {
            return;
        }
        for (_, lease) in self.live_leases() {
            if let Some(round) = &mut self.round {
                round.ledger.cancel(lease);
                self.call_back(lease);
            }
        }
    }

    /// The second device found no bad value.
    pub(super) fn fine_here(&mut self, lease: LeaseId) {
        let Some(round) = &mut self.round else { return };
        round.ledger.end(lease, Status::Void);
        let id = round.ledger.lease(lease).device;
        let (place, now) = (self.fleet.place(id), self.now);
        self.fleet.device_mut(id).map(|d| d.leaves(lease, now));
        if self.recheck.as_ref().is_some_and(|r| r.lease == Some(lease)) && !self.outvotes(id) {
            self.halt(Some(Again::Not(place)));
        }
    }

    /// Where results are checked, the run does not halt because of one device: if two other members of its class find no
    /// bad value, or this process does, its member is taken out. If that member has already left, one other is enough.
    /// Returns false if no member can decide that.
    fn outvotes(&mut self, id: DeviceId) -> bool {
        let verifies = self.verifies();
        let Some(recheck) = self.recheck.as_mut().filter(|_| verifies) else { return false };
        let (first, fine, class) = (recheck.device, recheck.fine, recheck.finding.first.place.class.clone());
        let of_the_class = self.fleet.device(id).is_some_and(|d| *d.class == *class);
        if !of_the_class || first.member == id.member {
            return false;
        }
        let here = self.fleet.member(id.member).is_some_and(|m| m.here);
        let gone = self.fleet.member(first.member).is_none();
        recheck.lease = None;
        if here || gone || fine.is_some_and(|fine| fine.member != id.member) {
            let Bad { tensor, value, .. } = &recheck.finding.first;
            let found = format!("its {tensor} became {value} in microbatch {}", recheck.finding.item);
            let reason = format!("{found}, where others of its class found no bad value");
            self.recheck = None;
            self.expel(first.member, &reason);
            return true;
        }
        recheck.fine = Some(id);
        self.others(&class, &|member| member == first.member || member == id.member)
    }

    /// Whether a device can decide between the first two.
    fn may_recheck(&self, recheck: &Recheck, slot: &Slot) -> bool {
        let of_the_class = || self.fleet.device(recheck.device).is_some_and(|d| d.class == slot.class);
        let third = |fine: DeviceId| slot.id.member != fine.member && slot.id.member != recheck.device.member;
        !recheck.tried.contains(&slot.id) && recheck.fine.is_none_or(|fine| third(fine) && of_the_class())
    }

    /// Leases the item for a second check, within the time limit.
    pub(super) fn recheck_on(&mut self) {
        let (Some(recheck), Some(round)) = (&self.recheck, &self.round) else { return };
        if recheck.lease.is_some_and(|l| round.ledger.lease(l).status == Status::Live)
            && self.now < self.patience()
        {
            return;
        }
        let (item, first) = (recheck.finding.item, recheck.device);
        let free = |s: &Slot| self.may_recheck(recheck, s);
        let mut slots = self.all_slots();
        let others = slots.iter().any(|s| s.id != first && free(s));
        slots.retain(|s| s.idle() && free(s));
        // Prefer another worker, then another device of the same worker, then the same device; where results are
        // checked, one of the same class; among equals the fastest.
        let class = self.fleet.device(first).map(|d| d.class.clone()).filter(|_| self.verifies());
        slots.sort_by(|a, b| {
            let other = |s: &Slot| class.as_ref().is_some_and(|class| *class != s.class);
            let far = |s: &Slot| (s.id.member == first.member, s.id == first, other(s));
            far(a).cmp(&far(b)).then(a.each.total_cmp(&b.each))
        });
        let next = slots.first().map(|s| s.id).filter(|_| self.now < self.patience());
        // A busy device other than the first gives a stronger finding than the same device.
        if others && next.is_none_or(|next| next == first) && self.now < self.elsewhere() {
            return;
        }
        let Some(next) = next else {
            let fine = recheck.fine.map(|fine| Again::Not(self.fleet.place(fine)));
            return self.halt(fine);
        };
        let lease = self.lease(item, next, Purpose::Recheck);
        if let Some(recheck) = &mut self.recheck {
            recheck.lease = Some(lease);
            recheck.tried.push(next);
        }
    }

    fn patience(&self) -> Duration {
        self.recheck.as_ref().map_or(Duration::ZERO, |r| r.since + self.config.recheck)
    }

    /// The time until which the machine waits for a device other than the first.
    fn elsewhere(&self) -> Duration {
        self.recheck.as_ref().map_or(Duration::ZERO, |r| r.since + self.config.recheck / 2)
    }

    fn halt(&mut self, again: Option<Again>) {
        if let Some(recheck) = self.recheck.take() {
            self.over = true;
            self.out.push(Action::Halt(Finding { again, ..recheck.finding }));
        }
    }
}
