//! The work of an idle device when no item is open: it takes over a late item. An item that waits in another
//! device's queue is moved. An item in work is repeated, by one device at a time and only within a numeric class, so
//! that either result has the same bits. Both happen only if the helper is expected to finish first.

use super::super::message::ToWorker;
use super::Machine;
use super::action::{Action, Note, Purpose};
use super::slot::{Queued, Slot};
use std::sync::Arc;

/// A lease that an idle device could take over.
struct Late {
    lease: u64,
    item: usize,
    tokens: f64,
    class: Arc<str>,
    /// When its holder is expected to finish it, in microseconds from now.
    finish: f64,
    /// Not started, and a cancel is expected to arrive before it starts. Of several that are computed together none
    /// waits: a cancel would end the work of the others.
    waits: bool,
}

impl Machine {
    /// Gives every idle device the item in work where it saves most time, if there is one.
    pub(super) fn repeat(&mut self, slots: &[Slot]) {
        self.look_again(slots);
        if self.round.as_ref().is_none_or(|r| r.ledger.open().next().is_some()) {
            return;
        }
        let mut idle: Vec<&Slot> = slots.iter().filter(|s| s.idle() && s.known).collect();
        if idle.is_empty() {
            return;
        }
        let mut late = self.late(slots);
        // A device that would finish even the smallest of them after the latest helps with none.
        let latest = late.iter().map(|l| l.finish).fold(f64::NEG_INFINITY, f64::max);
        let least = late.iter().map(|l| l.tokens).fold(f64::INFINITY, f64::min);
        idle.retain(|s| latest - (s.free + 1.1 * (least + s.lead) * s.each) > 0.0);
        idle.sort_by(|a, b| a.each.total_cmp(&b.each));
        for helper in idle {
            let gain = |l: &Late| {
                // A margin of a tenth of its own time, so that noise alone does not make two devices compute one
                // item.
                l.finish - (helper.free + 1.1 * (l.tokens + helper.lead) * helper.each)
            };
            let fits = |l: &Late| (l.waits || l.class == helper.class) && gain(l) > 0.0;
            let best = late.iter().enumerate().filter(|(_, l)| fits(l));
            let best = best.max_by(|a, b| gain(a.1).total_cmp(&gain(b.1))).map(|(i, _)| i);
            if let Some(best) = best {
                let late = late.swap_remove(best);
                self.help(&late, helper);
            }
        }
    }

    /// Revokes leases so late that their device may hang. Such a device gets no lease until it sends a message.
    pub(super) fn call_back_hopeless(&mut self, slots: &[Slot]) {
        for slot in slots {
            if let Some(&Queued { lease, .. }) = slot.queue.first().filter(|_| slot.hopeless <= 0.0) {
                let Some(round) = &mut self.round else { return };
                round.tally.reopened += u64::from(round.ledger.cancel(lease));
                self.call_back(lease);
                let stopping = self.fleet.device_mut(slot.id).and_then(|d| d.stopping.as_mut());
                stopping.into_iter().for_each(|s| s.until = self.now);
            }
        }
    }

    /// Repeats `Cancel` to devices that have not confirmed that they stopped.
    pub(super) fn call_back_again(&mut self) {
        let (now, reask) = (self.now, self.config.reask);
        for id in std::mem::take(&mut self.fleet.stopping) {
            let Some(stopping) = self.fleet.device_mut(id).and_then(|d| d.stopping.as_mut()) else {
                continue;
            };
            if now >= stopping.again {
                stopping.again = now + reask;
                let message = ToWorker::Cancel { lease: stopping.lease };
                self.out.push(Action::Say { member: id.member, message });
            }
            self.fleet.stopping.insert(id);
        }
    }

    /// All items with exactly one live lease.
    fn late(&self, slots: &[Slot]) -> Vec<Late> {
        let Some(round) = &self.round else { return Vec::new() };
        let mut late = Vec::new();
        for slot in slots {
            for (place, &Queued { lease, finish, .. }) in slot.queue.iter().enumerate() {
                let held = round.ledger.lease(lease);
                let item = &round.ledger.items()[held.item];
                if item.live != [lease] {
                    continue;
                }
                let tokens = item.tokens as f64;
                let starts = finish - (tokens + slot.lead) * slot.each;
                let waits = place >= slot.together && starts > slot.overhead;
                late.push(Late { lease, item: held.item, tokens, class: held.class.clone(), finish, waits });
            }
        }
        late
    }

    fn help(&mut self, late: &Late, helper: &Slot) {
        let Some(round) = &mut self.round else { return };
        let holder = round.ledger.lease(late.lease).device;
        if late.waits {
            round.ledger.cancel(late.lease);
            self.call_back(late.lease);
        } else {
            round.tally.repeats += 1;
            let (holder, repeater) = (self.fleet.place(holder), self.fleet.place(helper.id));
            self.note(Note::Repeated { item: late.item, holder, repeater });
        }
        self.lease(late.item, helper.id, Purpose::Round);
    }
}
