//! The answers to members' messages. A message that a correct worker may send late or twice gets the same answer as
//! before and changes nothing. A message that no correct worker sends removes the member.

use super::super::message::{Device as Named, Hash, LeaseId, ToCoordinator, ToWorker, Trouble};
use super::Machine;
use super::action::{Action, Bad, Note, Purpose};
use super::event::{DeviceId, Kind, MemberId};
use super::fleet::{self, Device, Stopping};
use super::ledger::{Alone, Found, Held, Status};
use std::collections::BTreeSet;
use std::time::Duration;

/// Most leases that a device is taken to compute at the same time, because the number comes from a worker.
const MOST_TOGETHER: usize = 64;

/// The lease that a message names.
enum Own {
    /// A lease of this round that the sender holds.
    Here(Held),
    /// A lease of an earlier round: the message is late.
    Old,
    /// A lease that was never given or belongs to another member: the sender has been removed for it.
    Wrong,
}

/// What a sum is to the machine.
pub(super) enum Verdict {
    /// It counts, or is to be checked.
    Counts,
    /// It was taken before.
    Taken,
    /// Its step is over.
    Late,
    /// No correct worker sends it; the reason in one line.
    Wrong(&'static str),
}

/// The claims of a finished lease.
struct Result {
    lease: LeaseId,
    kind: Kind,
    parameters: Hash,
    micros: Option<u64>,
    memory: u64,
}

impl Machine {
    pub(super) fn said(&mut self, member: MemberId, message: &ToCoordinator) {
        let Some(m) = self.fleet.member(member) else { return };
        match message {
            // The tasks of connections and lines take these.
            ToCoordinator::Hello(_)
            | ToCoordinator::Fetch { .. }
            | ToCoordinator::Pong { .. }
            | ToCoordinator::Seated { .. }
            | ToCoordinator::Linked
            | ToCoordinator::Passes { .. }
            | ToCoordinator::Capacity(_)
            // The driver's part about relays takes these.
            | ToCoordinator::TotalPiece { .. }
            | ToCoordinator::Unlinked { .. }
            | ToCoordinator::SumPiece { .. } => {}
            ToCoordinator::Ready { devices, refused } => self.ready(member, devices, refused),
            ToCoordinator::Leave { reason } => {
                self.lost(member, reason);
                self.out.push(Action::Close { member });
            }
            _ if m.devices.is_none() => self.expel(member, "it spoke of work before it was ready"),
            &ToCoordinator::Ask { device, room, together } => {
                self.asked(DeviceId { member, index: device }, (room, together));
            }
            &ToCoordinator::Announce { lease, parameters, micros, memory } => {
                let result = Result { lease, kind: Kind::Train, parameters, micros: Some(micros), memory };
                self.announced(member, result);
            }
            ToCoordinator::Measured { devices, link } => self.came_measured(member, devices, *link),
            ToCoordinator::Sum { .. } => self.summed(member, message),
            &ToCoordinator::Score { lease, parameters, micros, .. } => {
                let result = Result { lease, kind: Kind::Eval, parameters, micros: Some(micros), memory: 0 };
                self.scored(member, result);
            }
            &ToCoordinator::Verified { lease, digest, parameters, micros, memory } => {
                let result = Result { lease, kind: Kind::Train, parameters, micros: Some(micros), memory };
                self.verified(member, result, digest);
            }
            &ToCoordinator::Answer { lease, parameters, .. } => {
                let result = Result { lease, kind: Kind::Prompt, parameters, micros: None, memory: 0 };
                self.scored(member, result);
            }
            &ToCoordinator::Stopped { lease, micros } => self.stopped(member, lease, micros),
            ToCoordinator::Fault { lease, fault } => self.faulted(member, *lease, fault),
            ToCoordinator::Fallback { device, now, reason } => {
                self.fell_back(DeviceId { member, index: *device }, now, reason);
            }
        }
    }

    fn ready(&mut self, member: MemberId, devices: &[Named], refused: &[String]) {
        let Some(m) = self.fleet.member_mut(member) else { return };
        if m.devices.is_some() {
            return self.expel(member, "it was ready twice");
        }
        if devices.len() > fleet::MOST {
            return self.expel(member, "it named more devices than a worker can have");
        }
        let devices = fleet::distinct(devices);
        m.devices = Some(devices.iter().map(Device::new).collect());
        let name = m.name.clone();
        self.fleet.recount();
        self.note(Note::Joined { member: name, devices, refused: refused.to_vec() });
        self.send_parameters(member);
    }

    fn asked(&mut self, id: DeviceId, (room, together): (u16, u16)) {
        let now = self.now;
        let Some(device) = self.fleet.device_mut(id) else {
            return self.expel(id.member, "it spoke of a device that it does not have");
        };
        let was_up = std::mem::replace(&mut device.up, true);
        (device.room, device.stopping) = (Some(room), None);
        device.together = usize::from(together).clamp(1, MOST_TOGETHER);
        if !was_up {
            self.fleet.recount();
        }
        if let Some(m) = self.fleet.member_mut(id.member)
            && let Some(sent) = m.sent.take()
        {
            m.transfer.add(now.saturating_sub(sent).as_micros() as f64);
        }
    }

    fn own(&mut self, member: MemberId, lease: LeaseId) -> Own {
        // A device that lost a repeat in one round may stop in the next.
        let devices = self.fleet.member_mut(member).and_then(|m| m.devices.as_mut());
        devices.into_iter().flatten().for_each(|d| d.moves(lease));
        let found = match &self.round {
            Some(round) => round.ledger.find(lease),
            None if lease < self.next_lease => Found::Old,
            None => Found::Never,
        };
        match found {
            Found::Here(held) if held.device.member == member => return Own::Here(held),
            Found::Here(_) => self.expel(member, "it spoke of another worker's lease"),
            Found::Never => self.expel(member, "it spoke of a lease that was never given"),
            Found::Old => {
                self.ignored();
                return Own::Old;
            }
        }
        Own::Wrong
    }

    fn ignored(&mut self) {
        if let Some(round) = &mut self.round {
            round.tally.ignored += 1;
        }
    }

    /// Whether a result has the right kind and was computed with the right parameters; if not, its sender is
    /// removed.
    fn sound(&mut self, member: MemberId, held: &Held, result: &Result) -> bool {
        let Some(round) = &self.round else { return false };
        if result.parameters != round.hash_of(held.item) {
            self.expel(member, "it computed with other parameters");
            return false;
        }
        // A recheck is answered by an announcement in every kind of round.
        let kind = if held.purpose == Purpose::Recheck { Kind::Train } else { round.kind };
        if result.kind != kind {
            self.expel(member, "it answered a lease with another kind of result");
        }
        result.kind == kind
    }

    fn announced(&mut self, member: MemberId, result: Result) {
        let lease = result.lease;
        let held = match self.own(member, lease) {
            Own::Here(held) => held,
            Own::Old => return self.say(member, ToWorker::Deny { lease }),
            Own::Wrong => return,
        };
        if !self.sound(member, &held, &result) {
            return;
        }
        if held.purpose == Purpose::Verify {
            return self.expel(member, "it answered a lease with another kind of result");
        }
        let granted = match held.status {
            Status::Granted | Status::Delivered | Status::Counted => {
                self.ignored();
                true
            }
            Status::Denied | Status::Void => {
                self.ignored();
                false
            }
            Status::Live | Status::Cancelled if held.purpose == Purpose::Recheck => {
                self.say(member, ToWorker::Deny { lease });
                return self.fine_here(lease);
            }
            Status::Live | Status::Cancelled => self.finished(&held, &result),
        };
        let answer = match granted {
            true if self.verifies() => ToWorker::Deliver { lease },
            true => ToWorker::Grant { lease },
            false => ToWorker::Deny { lease },
        };
        self.say(member, answer);
    }

    /// A microbatch of another member was computed again.
    fn verified(&mut self, member: MemberId, result: Result, digest: Hash) {
        let lease = result.lease;
        let Own::Here(held) = self.own(member, lease) else { return };
        if !self.sound(member, &held, &result) {
            return;
        }
        if held.purpose != Purpose::Verify {
            return self.expel(member, "it answered a lease with another kind of result");
        }
        if !matches!(held.status, Status::Live | Status::Cancelled) {
            return self.ignored();
        }
        self.measure(&held, &result);
        if let Some(round) = &mut self.round {
            round.ledger.end(lease, Status::Void);
            // Until then a device computed.
            round.last = self.now;
        }
        self.computed_again(lease, &held, Some(digest));
    }

    /// The lease is finished. Returns true if it was first; then all other leases of the item are cancelled.
    fn finished(&mut self, held: &Held, result: &Result) -> bool {
        self.measure(held, result);
        let Some(round) = &mut self.round else { return false };
        let tokens = round.ledger.items()[held.item].tokens;
        if round.done || !round.ledger.grantable(held.item) {
            round.ledger.end(result.lease, Status::Denied);
            round.tally.wasted_tokens += tokens;
            return false;
        }
        round.last = self.now;
        let others = round.ledger.grant(result.lease);
        let ahead = round.ledger.is_ahead(held.item);
        if let Some(m) = self.fleet.member_mut(held.device.member) {
            *(if ahead { &mut m.granted_ahead } else { &mut m.granted }) += 1;
        }
        if let (Kind::Train, Some(d)) = (result.kind, self.fleet.device_mut(held.device)) {
            d.microbatches += 1;
            d.tokens += tokens;
        }
        others.into_iter().for_each(|lease| self.call_back(lease));
        true
    }

    /// Sends a cancel to the holder of a lease that the ledger has as cancelled.
    pub(super) fn call_back(&mut self, lease: LeaseId) {
        let now = self.now;
        let Some(round) = &mut self.round else { return };
        round.tally.cancels += 1;
        let id = round.ledger.lease(lease).device;
        if let Some(device) = self.fleet.device_mut(id) {
            if device.queue.front() == Some(&lease) {
                let overhead = fleet::micros(4.0 * device.overhead.get().unwrap_or(0.0));
                let until = now + Duration::from_secs(1) + overhead;
                device.stopping = Some(Stopping { lease, until, again: now + self.config.reask });
            }
            device.leaves(lease, now);
            self.fleet.stopping.insert(id);
            self.fleet.resting.insert(id.member);
        }
        self.say(id.member, ToWorker::Cancel { lease });
    }

    fn measure(&mut self, held: &Held, result: &Result) {
        let now = self.now;
        let Some(round) = &self.round else { return };
        let (kind, microbatches) = (round.kind, round.microbatches);
        let tokens = round.ledger.items()[held.item].tokens;
        let Some(device) = self.fleet.device_mut(held.device) else { return };
        let began = device.began.max(held.sent);
        device.leaves(result.lease, now);
        let elapsed = now.saturating_sub(began).as_micros() as u64;
        // A device cannot have computed for longer than it had the lease.
        let whole = now.saturating_sub(held.sent).as_micros() as u64;
        let micros = result.micros.map_or(elapsed, |m| m.min(whole));
        device.speed.measure(kind, (tokens, microbatches), micros);
        if microbatches == 1 {
            device.speed.takes(tokens, result.memory);
        }
        device.busy += Duration::from_micros(micros);
        self.note_span(held.device, micros);
        let Some(device) = self.fleet.device_mut(held.device) else { return };
        if held.alone == Alone::Waiting && result.micros.is_some() {
            device.overhead.add((whole - micros) as f64);
        }
    }

    fn scored(&mut self, member: MemberId, result: Result) {
        let Own::Here(held) = self.own(member, result.lease) else { return };
        if !self.sound(member, &held, &result) {
            return;
        }
        if !matches!(held.status, Status::Live | Status::Cancelled) {
            return self.ignored();
        }
        if self.finished(&held, &result) {
            self.count(result.lease);
            self.owes_less(member);
            self.out.push(Action::TakeResult { item: held.item });
        }
    }

    pub(super) fn count(&mut self, lease: LeaseId) {
        let Some(round) = &mut self.round else { return };
        round.ledger.count(lease);
        *round.tally.classes.entry(round.ledger.lease(lease).class.to_string()).or_default() += 1;
    }

    /// A granted lease of the member counts.
    fn owes_less(&mut self, member: MemberId) {
        if let Some(m) = self.fleet.member_mut(member) {
            m.granted -= 1;
        }
    }

    /// What the machine does with a sum; `None` if there is no such member or round.
    pub(super) fn verdict(&self, member: MemberId, message: &ToCoordinator) -> Option<Verdict> {
        let ToCoordinator::Sum { sum, step, leases, parameters, .. } = message else { return None };
        let (round, m) = (self.round.as_ref()?, self.fleet.member(member)?);
        if *sum <= m.last_sum {
            return Some(Verdict::Taken);
        }
        if *step != round.step && self.verifies() && !round.done {
            // Sums that count at the end of the round would be taken back with this one.
            return Some(Verdict::Wrong("its sum is of another step"));
        }
        if *step != round.step || round.done {
            return Some(Verdict::Late);
        }
        if *parameters != round.hash {
            return Some(Verdict::Wrong("its sum was computed with other parameters"));
        }
        let granted = |lease: &LeaseId| match round.ledger.find(*lease) {
            Found::Here(held) => {
                held.device.member == member && held.status == Status::Granted && round.owns(*lease)
            }
            Found::Old | Found::Never => false,
        };
        let distinct: BTreeSet<&LeaseId> = leases.iter().collect();
        match !leases.is_empty() && distinct.len() == leases.len() && leases.iter().all(granted) {
            true => Some(Verdict::Counts),
            false => Some(Verdict::Wrong("its sum holds what it was not granted")),
        }
    }

    pub(super) fn summed(&mut self, member: MemberId, message: &ToCoordinator) {
        let ToCoordinator::Sum { sum, leases, relays, .. } = message else { return };
        match self.verdict(member, message) {
            None => return,
            Some(Verdict::Taken) => {
                self.ignored();
                return self.say(member, ToWorker::SumTaken { sum: *sum });
            }
            Some(Verdict::Late) => {
                // The step is over; the worker drops this sum when the next parameters arrive.
                self.ignored();
                return self.out.push(Action::TakeBack { member });
            }
            Some(Verdict::Wrong(reason)) => return self.expel(member, reason),
            Some(Verdict::Counts) => {}
        }
        if self.verifies() {
            return match leases[..] {
                [lease] => self.delivered(member, *sum, lease),
                _ => self.expel(member, "its sum holds several microbatches, where each was asked for alone"),
            };
        }
        leases.iter().for_each(|&lease| {
            self.count(lease);
            self.owes_less(member);
        });
        if let Some(m) = self.fleet.member_mut(member) {
            (m.last_sum, m.reasked) = (*sum, 0);
            if relays.is_some() {
                m.relayed = m.relayed.saturating_sub(leases.len());
            }
        }
        self.fleet.flush(member, None);
        self.out.push(Action::TakeSum { member, sum: *sum });
        self.say(member, ToWorker::SumTaken { sum: *sum });
    }

    fn stopped(&mut self, member: MemberId, lease: LeaseId, micros: u64) {
        let Own::Here(held) = self.own(member, lease) else { return };
        match held.status {
            Status::Granted | Status::Delivered | Status::Counted => {
                self.expel(member, "it handed back what it was granted");
            }
            Status::Denied | Status::Void => self.ignored(),
            Status::Live | Status::Cancelled => {
                self.waste(&held, micros);
                self.drop_lease(lease, &held);
                let unasked = self.fleet.device_mut(held.device).filter(|_| held.status == Status::Live);
                // Handed back unasked: the device gets no lease before it asks.
                unasked.into_iter().for_each(|d| d.room = None);
            }
        }
    }

    /// Records for charts that the device computed for this long, until now.
    fn note_span(&mut self, device: DeviceId, micros: u64) {
        let place = self.fleet.place(device);
        let Some(round) = &mut self.round else { return };
        let to = self.now.saturating_sub(round.began);
        round.tally.computed(place, to.saturating_sub(Duration::from_micros(micros)), to);
    }

    /// Adds the computed part of a lease that will not count to the round's waste.
    fn waste(&mut self, held: &Held, micros: u64) {
        let Some(round) = &mut self.round else { return };
        let tokens = round.ledger.items()[held.item].tokens;
        let Some(device) = self.fleet.device_mut(held.device) else { return };
        let whole = self.now.saturating_sub(held.sent).as_micros() as u64;
        device.busy += Duration::from_micros(micros.min(whole));
        let place = self.fleet.place(held.device);
        let to = self.now.saturating_sub(round.began);
        round.tally.computed(place, to.saturating_sub(Duration::from_micros(micros.min(whole))), to);
        let Some(device) = self.fleet.device_mut(held.device) else { return };
        let confirmed = device.speed.confirm();
        let each = device.speed.known(round.kind);
        if !confirmed && micros > 0 && each.is_none_or(|each| micros as f64 > each * tokens as f64) {
            // A lower bound of its time: without it, a device that never finishes first would keep a fast estimate.
            device.speed.measure(round.kind, (tokens, round.microbatches), micros.min(whole));
        }
        round.tally.wasted_tokens += each.map_or(0, |each| (micros as f64 / each) as u64).min(tokens);
    }

    pub(super) fn drop_lease(&mut self, lease: LeaseId, held: &Held) {
        let now = self.now;
        if let Some(device) = self.fleet.device_mut(held.device) {
            device.leaves(lease, now);
        }
        if let Some(round) = &mut self.round {
            round.tally.reopened += u64::from(round.ledger.end(lease, Status::Void));
        }
    }

    fn faulted(&mut self, member: MemberId, lease: LeaseId, fault: &Trouble) {
        let Own::Here(held) = self.own(member, lease) else { return };
        if !matches!(held.status, Status::Live | Status::Cancelled) {
            return self.ignored();
        }
        match fault {
            Trouble::Device { reason } => {
                self.drop_lease(lease, &held);
                self.note(Note::Failed { place: self.fleet.place(held.device), reason: reason.clone() });
                self.stand_down(held.device);
            }
            Trouble::Value { tensor, value } => {
                let bad = Bad { place: self.fleet.place(held.device), tensor: tensor.clone(), value: *value };
                if self.postpones(lease, &held, &bad) {
                    return;
                }
                self.drop_lease(lease, &held);
                match held.purpose {
                    Purpose::Verify => self.computed_again(lease, &held, None),
                    _ => self.bad_value(lease, &held, bad),
                }
            }
        }
    }
}
