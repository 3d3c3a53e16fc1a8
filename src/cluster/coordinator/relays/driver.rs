//! Relays as a part of the driver: their messages, and what follows for sums and parameters.

use super::super::connections::host;
use super::super::round::Task;
use super::super::{Coordinator, Incoming};
use super::{Candidate, Cause, Messages, Offer, TOTALS};
use crate::cluster::machine::{Event, MemberId};
use crate::cluster::message::{ToCoordinator, ToWorker};
use crate::cluster::reduce::Refusal;
use crate::cluster::worker::random;
use crate::train::event::Link;
use crate::train::event::{Change, Shared, What};
use std::collections::BTreeMap;

impl Coordinator<'_> {
    fn say_all(&self, messages: Messages) {
        messages.into_iter().for_each(|(member, message)| self.say(member, message));
    }

    /// After a training round: forms a set of relays, or ends one, by what the round took.
    pub(in super::super) fn consider_relays(&mut self, shared: &Shared, whole: f64, task: &mut Task) {
        if !self.relays.possible() {
            return;
        }
        self.relays.took(shared.sync_seconds - shared.hidden_seconds, whole);
        if self.relays.is_useless() {
            return self.part_relays("steps wait as long as without them", Cause::Other, task);
        }
        let devices = self.machine.devices();
        let links: BTreeMap<MemberId, Option<Link>> =
            devices.iter().filter_map(|device| Some((device.id?.member, device.link))).collect();
        // Workers with devices that have got the parameters.
        let candidates = self.peers.iter().filter_map(|(&member, (_, peer))| {
            let link = *links.get(&member).filter(|_| self.served.contains(&member))?;
            Some(Candidate { member, host: host(peer), link })
        });
        let candidates: Vec<Candidate> = candidates.collect();
        if self.relays.is_outgrown(&candidates, self.began.elapsed()) {
            self.part_relays("until all workers are relays", Cause::Other, task);
        }
        let messages = self.relays.consider(candidates, self.began.elapsed());
        self.say_all(messages);
    }

    /// Takes the messages about relays. Returns any other.
    pub(in super::super) fn hear_of_relays(
        &mut self,
        member: MemberId,
        message: ToCoordinator,
        task: &mut Task,
    ) -> Option<ToCoordinator> {
        match message {
            ToCoordinator::Seated { port } => {
                let Ok(key) = random("relays") else { return None };
                let messages = self.relays.listens(member, port, key);
                self.say_all(messages);
            }
            ToCoordinator::Linked => {
                if self.relays.linked(member) {
                    self.note_relays("workers add parts of the sums for each other (--relays)", task);
                }
            }
            ToCoordinator::Unlinked { set, reason } => {
                if self.relays.is_current(member, set) {
                    let name = self.peers.get(&member).map_or("a worker", |(name, _)| name);
                    let reason = format!("{name}: {}", crate::cluster::plain::plain(&reason));
                    self.part_relays(&reason, Cause::Failure, task);
                }
            }
            message @ ToCoordinator::TotalPiece { .. } => self.total_comes(member, message, task),
            ToCoordinator::Sum { relays: Some(set), ref leases, .. } => {
                // Of a set that was parted: all of the sum is asked for again.
                if self.relays.set_of(member) != Some(set) {
                    return None;
                }
                if !self.machine.takes(member, &message) {
                    return Some(message);
                }
                let leases = leases.len();
                if !self.relays.offer(Offer { member, message }) {
                    self.misbehaved(member, "its sums hold a microbatch twice".into(), task);
                } else {
                    self.tick(Event::Relayed { member, leases }, task);
                }
            }
            ToCoordinator::Ask { .. } => {
                self.relays.asks(member);
                return Some(message);
            }
            ToCoordinator::Announce { parameters, .. } | ToCoordinator::Score { parameters, .. } => {
                if self.parameters.as_ref().is_some_and(|newest| newest.hash == parameters) {
                    self.relays.has_parameters(member);
                }
                return Some(message);
            }
            message => return Some(message),
        }
        None
    }

    fn total_comes(&mut self, member: MemberId, message: ToCoordinator, task: &mut Task) {
        if let ToCoordinator::TotalPiece { packed, .. } = &message {
            self.accounts.received(packed);
        }
        let now = self.began.elapsed();
        let mut taken = self.relays.piece(member, message, now);
        for piece in taken.iter_mut().flat_map(std::mem::take) {
            let ToCoordinator::SumPiece { sum, offset, len, packed } = piece else { continue };
            if let Err(refusal) = self.reducer.piece(TOTALS, sum, (offset, len), packed) {
                taken = Err(refusal.to_string());
                break;
            }
        }
        match taken {
            Err(reason) => self.misbehaved(member, reason, task),
            Ok(_) => {
                if let Some(claim) = self.relays.claim() {
                    self.reducer.finish(TOTALS, claim);
                }
            }
        }
    }

    /// The reducer has added a total, or refuses it.
    pub(in super::super) fn total_added(&mut self, total: u64, result: Result<(), Refusal>, task: &mut Task) {
        let Some(offers) = self.relays.counts(total, self.began.elapsed()) else { return };
        if let Err(refusal) = result {
            return self.part_relays(&refusal.to_string(), Cause::Failure, task);
        }
        let takes = |offer: &Offer| self.machine.takes(offer.member, &offer.message);
        if !offers.iter().all(takes) || !self.reducer.take(TOTALS, total) {
            return self.part_relays("a total does not count", Cause::Failure, task);
        }
        for Offer { member, message } in &offers {
            if let ToCoordinator::Sum { sum, .. } = message {
                self.pending.insert((*member, *sum), message.clone());
            }
        }
        let sums: Vec<_> = offers.into_iter().map(|Offer { member, message }| (member, message)).collect();
        self.tick(Event::Totalled { sums: &sums }, task);
    }

    /// What is due among relays after an event: the next total, or the end of a set.
    pub(in super::super) fn relays_go_on(&mut self, task: &mut Task) {
        if self.relays.is_broken() {
            return self.part_relays("one of them is gone", Cause::Other, task);
        }
        if self.relays.has_offers() {
            let (machine, of) = (&self.machine, task.count as u32);
            let now = self.began.elapsed();
            let messages = self.relays.combine(|member| machine.has_handed_over(member), of, now);
            self.say_all(messages);
        }
    }

    /// After all events that wait: the end of a set from which nothing has come for too long.
    pub(in super::super) fn relays_in_time(&mut self, task: &mut Task) {
        if self.relays.is_late(self.began.elapsed()) {
            self.part_relays("nothing came from them for too long", Cause::Failure, task);
        }
    }

    /// Ends a set of relays: sums and parameters that were on their way go by the coordinator.
    pub(in super::super) fn part_relays(&mut self, reason: &str, cause: Cause, task: &mut Task) {
        let Some(parted) = self.relays.part(cause, self.began.elapsed()) else { return };
        self.reducer.take_back(TOTALS);
        for &member in &parted.members {
            self.say(member, ToWorker::Relay(None));
        }
        for member in parted.lacking {
            self.send_parameters(member);
        }
        self.note_relays(&format!("all sums go to the coordinator: {reason}"), task);
        self.tick(Event::Released { members: parted.members }, task);
    }

    fn note_relays(&self, reason: &str, task: &mut Task) {
        let (step, worker, devices) = (task.after, String::new(), vec![]);
        task.change(Change { step, what: What::Note, worker, devices, reason: reason.into() });
    }

    /// A member is lost: its set is parted before the machine hears of it.
    pub(in super::super) fn lost_relay(&mut self, incoming: &Incoming, task: &mut Task) {
        if let Incoming::Lost { member, reason } = incoming
            && self.relays.has(*member)
        {
            let name = self.peers.get(member).map_or("a worker", |(name, _)| name);
            let reason = format!("{name} is lost: {reason}");
            self.part_relays(&reason, Cause::Other, task);
        }
    }
}
