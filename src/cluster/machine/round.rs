//! A round from start to end: when members are asked for their sums, and the statistics of the round.

use super::super::message::{Bye, Hash, LeaseId, ToWorker};
use super::Machine;
use super::action::{Action, Note, Tally};
use super::event::{Kind, MemberId, Round};
use super::ledger::Ledger;
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Current {
    pub kind: Kind,
    /// Most microbatches of an item.
    pub microbatches: u64,
    /// Number of steps that the parameters result from.
    pub after: u64,
    pub hash: Hash,
    pub ledger: Ledger,
    pub began: Duration,
    /// When the newest result was finished.
    pub last: Duration,
    /// When the first sum was requested.
    pub asked: Option<Duration>,
    pub done: bool,
    pub tally: Tally,
}

impl Current {
    /// The step that a training round computes.
    pub fn step(&self) -> u64 {
        self.after + 1
    }
}

impl Machine {
    pub(super) fn begin(&mut self, round: Round) {
        assert!(self.round.as_ref().is_none_or(|r| r.done), "one round at a time");
        let (after, hash) = self.parameters.unwrap_or_default();
        self.forget_leases();
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
        self.round = Some(Current {
            kind: round.kind,
            microbatches: round.microbatches,
            after,
            hash,
            ledger: Ledger::new(self.next_lease, &round.tokens),
            began: self.now,
            last: self.now,
            asked: None,
            done: false,
            tally: Tally::default(),
        });
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
        let step = round.step();
        let mut mute = Vec::new();
        let mut due = std::mem::take(&mut self.fleet.resting);
        if let Some(until) = self.now.checked_sub(self.config.reask) {
            due.extend(self.fleet.flushed_until(until));
        }
        for id in due {
            let Some(member) = self.fleet.member(id) else { continue };
            let again = member.flushed().map(|at| self.now.saturating_sub(at) >= self.config.reask);
            let rests = member.granted > 0 && (unasked || member.idle());
            if member.granted > 0
                && again.unwrap_or(unasked || rests && expecting.binary_search(&id).is_err())
            {
                self.fleet.flush(id, Some(self.now));
                let Some(member) = self.fleet.member_mut(id) else { continue };
                member.reasked += u32::from(again.is_some());
                if member.reasked > self.config.reasks {
                    mute.push(id);
                }
                round.asked.get_or_insert(self.now);
                if !unasked || again.is_some() {
                    self.out.push(Action::Say { member: id, message: ToWorker::Flush { step } });
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
