//! A round from start to end: when members are asked for their sums, and the statistics of the round.

use super::super::message::{Bye, Hash, LeaseId, ToWorker};
use super::Machine;
use super::action::{Action, Bad, Note, Tally};
use super::event::{Kind, MemberId, Round};
use super::fleet::Member;
use super::ledger::{Found, Ledger};
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Current {
    pub kind: Kind,
    /// Most microbatches of an item.
    pub microbatches: u64,
    /// The step that a training round computes.
    pub step: u64,
    pub hash: Hash,
    /// Whether the parameters are those that were sent last: a device may have to wait for them.
    pub newest: bool,
    pub ledger: Ledger,
    /// Where steps are delayed: the next one, whose items follow those of the round.
    pub next: Option<Next>,
    pub began: Duration,
    /// When the newest result was finished, also one of the next step.
    pub last: Duration,
    /// When the first sum was requested.
    pub asked: Option<Duration>,
    pub done: bool,
    pub tally: Tally,
}

/// A step that is computed before the one before it is complete.
#[derive(Debug)]
pub(super) struct Next {
    pub hash: Hash,
    /// The first of its leases with a bad value. The report waits for its step: a run that ends earlier, or with
    /// another fault, is the same wherever it is computed.
    pub bad: Option<(LeaseId, Bad)>,
}

impl Current {
    /// The parameters that the item is computed with.
    pub fn hash_of(&self, item: usize) -> Hash {
        self.next.as_ref().filter(|_| self.ledger.is_ahead(item)).map_or(self.hash, |next| next.hash)
    }

    /// Whether the lease is one of the round and not of the next step.
    pub fn owns(&self, lease: LeaseId) -> bool {
        self.ledger.is_own(lease)
    }

    /// Whether no device of the member has work of this round, that of the next step aside.
    pub fn rests(&self, member: &Member) -> bool {
        let mut queued = member.devices.iter().flatten().flat_map(|d| &d.queue);
        match self.next {
            None => queued.next().is_none(),
            Some(_) => !queued.any(|&lease| self.owns(lease)),
        }
    }
}

impl Machine {
    pub(super) fn begin(&mut self, round: Round) {
        assert!(self.round.as_ref().is_none_or(|r| r.done), "one round at a time");
        let goes_on = self.round.as_ref().is_some_and(|r| r.next.is_some());
        if !goes_on {
            self.forget_leases();
        }
        self.looks_at_speeds(&round);
        match goes_on {
            true => self.goes_on(&round),
            false => self.starts(&round),
        }
        let newest = self.parameters.unwrap_or_default().1;
        if let Some(current) = self.round.as_mut().filter(|_| !round.ahead.is_empty()) {
            current.next = Some(Next { hash: newest, bad: None });
            current.ledger.append(&round.ahead);
        }
    }

    fn starts(&mut self, round: &Round) {
        let (after, newest) = self.parameters.unwrap_or_default();
        // A step is delayed by one: its gradient is that of the parameters before the newest, where there are any.
        let before = self.before.filter(|_| round.kind == Kind::Train);
        self.round = Some(Current {
            kind: round.kind,
            microbatches: round.microbatches,
            step: after + 1,
            hash: before.map_or(newest, |(_, hash)| hash),
            newest: before.is_none(),
            ledger: Ledger::new(self.next_lease, &round.tokens),
            next: None,
            began: self.now,
            last: self.now,
            asked: None,
            done: false,
            tally: Tally::default(),
        });
    }

    /// The round is complete, and its next step is the round.
    fn goes_on(&mut self, round: &Round) {
        let Some(current) = &mut self.round else { return };
        let Some(next) = current.next.take() else { return };
        current.ledger.advance();
        let same = round.kind == Kind::Train && current.ledger.items().len() == round.tokens.len();
        assert!(same, "a step that was begun ahead is the next round");
        (current.hash, current.newest, current.step) = (next.hash, false, current.step + 1);
        (current.began, current.last, current.asked) = (self.now, self.now, None);
        (current.done, current.tally) = (false, Tally::default());
        self.fleet.owes_ahead();
        if let Some((lease, bad)) = next.bad
            && let Found::Here(held) = current.ledger.find(lease)
        {
            self.drop_lease(lease, &held);
            self.bad_value(lease, &held, bad);
        }
    }

    /// Gives the hint that there are few microbatches, and doubts speeds that were not used for long.
    fn looks_at_speeds(&mut self, round: &Round) {
        let (have, most) = (self.fleet.up(), self.gathering.most);
        if round.kind == Kind::Train && round.tokens.len() >= most && have > 1 {
            self.gathering.most = round.tokens.len();
            if round.tokens.len() < 3 * have && !self.gathering.few {
                self.gathering.few = true;
                self.note(Note::Few { microbatches: round.tokens.len(), devices: have });
            }
        }
        let devices = self.fleet.members_mut().flat_map(|(_, m)| m.devices.iter_mut().flatten());
        for device in devices.filter(|d| round.kind == Kind::Train && d.up && d.room.is_some()) {
            if device.idleness.doubts() {
                device.speed.doubt();
            }
        }
    }

    pub(super) fn abandon(&mut self) {
        let ids: Vec<MemberId> = self.fleet.members().keys().copied().collect();
        for (member, lease) in self.live_leases() {
            self.say(member, ToWorker::Cancel { lease });
        }
        ids.into_iter().for_each(|member| self.out.push(Action::TakeBack { member }));
        self.forget_leases();
        self.recheck = None;
    }

    /// Leases that devices hold and have not finished.
    pub(super) fn live_leases(&self) -> Vec<(MemberId, LeaseId)> {
        self.fleet.devices().flat_map(|(id, _, d)| d.queue.iter().map(move |&l| (id.member, l))).collect()
    }

    fn forget_leases(&mut self) {
        self.checking.forget();
        if let Some(round) = self.round.take() {
            self.next_lease = round.ledger.next();
        }
        self.fleet.forget_sums();
        for (_, member) in self.fleet.members_mut() {
            for device in member.devices.iter_mut().flatten() {
                device.queue.clear();
                if device.stopping.is_some() {
                    // The lease was cancelled, and its answer arrives too late for this round.
                    device.speed.confirm();
                }
            }
        }
    }

    /// Requests the sum of every member that was granted leases and expects no more; members in `expecting` do. They are
    /// in order.
    /// Returns true if a member was removed, so that its items are open again.
    pub(super) fn flush(&mut self, expecting: &[MemberId]) -> bool {
        // A sum of one microbatch comes unasked, and is requested only if it does not come.
        let unasked = self.verifies();
        let Some(round) = &mut self.round else { return false };
        let step = round.step;
        let mut mute = Vec::new();
        let mut due = std::mem::take(&mut self.fleet.resting);
        if let Some(until) = self.now.checked_sub(self.config.reask) {
            due.extend(self.fleet.flushed_until(until));
        }
        for id in due {
            let Some(member) = self.fleet.member(id) else { continue };
            let again = member.flushed().map(|at| self.now.saturating_sub(at) >= self.config.reask);
            let rests = member.owes() > 0 && (unasked || round.rests(member));
            if member.owes() > 0 && again.unwrap_or(unasked || rests && expecting.binary_search(&id).is_err())
            {
                self.fleet.flush(id, Some(self.now));
                let Some(member) = self.fleet.member_mut(id) else { continue };
                member.reasked += u32::from(again.is_some());
                if member.reasked > self.config.reasks {
                    mute.push(id);
                }
                round.asked.get_or_insert(self.now);
                if !unasked || again.is_some() {
                    self.out
                        .push(Action::Say { member: id, message: ToWorker::Flush { step, relays: None } });
                }
            } else if rests && again.is_none() {
                self.fleet.resting.insert(id);
            }
        }
        let reopened = !mute.is_empty();
        for id in mute {
            let reason = "its sum did not come".to_string();
            self.take_out(id, "its sum did not come", Bye::Out { reason, again: true });
        }
        reopened
    }

    pub(super) fn finish(&mut self) {
        let Some(round) = &mut self.round else { return };
        if !round.ledger.complete() {
            return;
        }
        round.done = true;
        // Devices that compute the next step wait for no sum.
        if round.next.is_some() && self.fleet.devices().any(|(_, _, d)| !d.queue.is_empty()) {
            round.last = self.now;
        }
        round.tally.computing = round.last.saturating_sub(round.began);
        round.tally.exposed = self.now.saturating_sub(round.last);
        round.tally.hidden = round.asked.map_or(Duration::ZERO, |asked| round.last.saturating_sub(asked));
        self.out.push(Action::RoundDone(round.tally.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::super::event::DeviceId;
    use super::super::fleet::Stopping;
    use super::super::tests::Bed;
    use super::*;

    /// The device's answer arrives after the round, when it is ignored.
    #[test]
    fn recalled_device_regains_its_doubted_speed() {
        let mut bed = Bed::train(1, 1);
        let id = DeviceId { member: MemberId(0), index: 0 };
        let device = bed.machine.fleet.device_mut(id).unwrap();
        device.speed.measure(Kind::Train, (100, 1), 4200);
        let believed = device.speed.known(Kind::Train);
        // Doubted twice without a lease in between.
        (0..2).for_each(|_| device.speed.doubt());
        assert!(believed.is_some() && device.speed.known(Kind::Train).is_none());
        device.stopping = Some(Stopping { lease: 0, until: Duration::ZERO, again: Duration::ZERO });
        bed.machine.forget_leases();
        assert_eq!(bed.machine.fleet.device_mut(id).unwrap().speed.known(Kind::Train), believed);
    }
}
