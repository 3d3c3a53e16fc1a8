//! Work that is checked: a share of the training microbatches is computed again on a device of another member, of the
//! same numeric class, and the hashes of both results are compared before the first one counts. Which ones is a draw
//! with a key that no member knows, made when the result has arrived, so that no member can be honest where it is
//! checked only. Two equal results decide: a member with another one is taken out, and its work of the step is done again.
//!
//! A sum counts at the end of the round, so that all sums of a member can be taken back until then. Devices of the
//! coordinator's own process are trusted where no other member has their class; other such devices get no work.

use super::super::message::{Bye, Hash, LeaseId, ToWorker};
use super::Machine;
use super::action::{Action, Note, Place, Purpose};
use super::event::{DeviceId, Kind, MemberId};
use super::fleet::Device;
use super::ledger::{Held, Status};
use super::slot::Slot;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

#[cfg(test)]
mod tests;

/// A device's result of a microbatch.
#[derive(Debug, Clone)]
struct Opinion {
    device: DeviceId,
    place: Place,
    /// `None`: a value that no sum can hold.
    digest: Option<Hash>,
}

/// A microbatch that is computed again.
#[derive(Debug)]
struct Check {
    /// The lease that was granted.
    lease: LeaseId,
    class: Arc<str>,
    /// That of the granted lease first.
    opinions: Vec<Opinion>,
    /// The lease under which a device computes it again.
    asked: Option<LeaseId>,
    /// Since when no device is left that could.
    stuck: Option<Duration>,
}

impl Check {
    /// The result that two computations have.
    fn verdict(&self) -> Option<Option<Hash>> {
        let mut digests = self.opinions.iter().map(|o| o.digest).enumerate();
        digests.find(|(at, d)| self.opinions[..*at].iter().any(|o| o.digest == *d)).map(|(_, d)| d)
    }

    fn asked_by(&self, member: MemberId) -> usize {
        self.opinions.iter().filter(|o| o.device.member == member).count()
    }
}

/// The sums and checks of a round.
#[derive(Debug, Default)]
pub(super) struct Checking {
    /// Sums that have arrived, by item: they count at the end of the round.
    delivered: BTreeMap<usize, (LeaseId, MemberId, u64)>,
    checks: BTreeMap<usize, Check>,
    /// Classes that only one member has, as far as they were reported.
    lone: BTreeSet<Arc<str>>,
}

impl Checking {
    /// The round is over.
    pub fn forget(&mut self) {
        self.delivered.clear();
        self.checks.clear();
    }
}

impl Machine {
    /// Whether results of this round are checked.
    pub(super) fn verifies(&self) -> bool {
        self.config.verify.is_some() && self.round.as_ref().is_some_and(|r| r.kind == Kind::Train)
    }

    /// Whether a member besides these has a device of this class that works.
    pub(super) fn others(&self, class: &str, besides: &dyn Fn(MemberId) -> bool) -> bool {
        !self.of_class(class, besides).is_empty()
    }

    /// The devices of this class that work, of members besides these.
    fn of_class(&self, class: &str, besides: &dyn Fn(MemberId) -> bool) -> Vec<(MemberId, &Device)> {
        let devices =
            self.fleet.devices().filter(|(id, _, d)| d.up && *d.class == *class && !besides(id.member));
        devices.map(|(id, _, d)| (id.member, d)).collect()
    }

    /// The devices whose results cannot be checked, nor trusted: a single member has their class.
    pub(super) fn lone(&self) -> impl Iterator<Item = (DeviceId, &Device)> {
        let devices = || self.verifies().then(|| self.fleet.devices()).into_iter().flatten();
        let up = move || devices().filter(|(_, _, d)| d.up);
        // The only member of each class, if it has only one.
        let mut only: BTreeMap<&str, Option<MemberId>> = BTreeMap::new();
        for (id, _, device) in up() {
            let of = only.entry(&*device.class).or_insert(Some(id.member));
            *of = of.filter(|member| *member == id.member);
        }
        let alone = move |d: &Device| only.get(&*d.class).is_some_and(|of| of.is_some());
        up().filter(move |(_, m, d)| !m.here && alone(d)).map(|(id, _, d)| (id, d))
    }

    /// Number of devices that can be given work.
    pub(super) fn useful(&self) -> usize {
        self.fleet.up() - self.lone().count()
    }

    /// Reports classes whose devices wait because a single member has them.
    pub(super) fn note_lone(&mut self) {
        if !self.all_met() {
            return;
        }
        let lone: BTreeMap<Arc<str>, DeviceId> = self.lone().map(|(id, d)| (d.class.clone(), id)).collect();
        self.checking.lone.retain(|class| lone.contains_key(class));
        for (class, id) in lone {
            if self.checking.lone.insert(class) {
                self.note(Note::Lone { place: self.fleet.place(id) });
            }
        }
    }

    /// A member is lost, and with it everything that it delivered or said in this round: if it comes back as another
    /// member, it must not have two results.
    pub(super) fn forget_results(&mut self, member: MemberId) {
        let Checking { delivered, checks, .. } = &mut self.checking;
        delivered.retain(|_, (_, of, _)| *of != member);
        let gone: Vec<Check> =
            checks.extract_if(.., |item, _| !delivered.contains_key(item)).map(|c| c.1).collect();
        for check in checks.values_mut() {
            check.opinions.retain(|o| o.device.member != member);
        }
        gone.iter().for_each(|check| self.call_off(check));
    }

    /// A check is over: its microbatch is not computed again.
    fn call_off(&mut self, check: &Check) {
        let Some(round) = &mut self.round else { return };
        if let Some(lease) = check.asked.filter(|&lease| round.ledger.lease(lease).status == Status::Live) {
            round.ledger.cancel(lease);
            self.call_back(lease);
        }
    }

    /// The sum of a granted lease has arrived.
    pub(super) fn delivered(&mut self, member: MemberId, sum: u64, lease: LeaseId) {
        let (Some(round), Some(verify)) = (&mut self.round, &self.config.verify) else { return };
        round.ledger.deliver(lease);
        let (item, class) = (round.ledger.lease(lease).item, round.ledger.lease(lease).class.clone());
        self.checking.delivered.insert(item, (lease, member, sum));
        if verify.takes(lease) {
            let check = Check { lease, class, opinions: vec![], asked: None, stuck: None };
            self.checking.checks.insert(item, check);
            self.out.push(Action::Hash { member, sum });
        }
        if let Some(m) = self.fleet.member_mut(member) {
            m.granted -= 1;
            (m.last_sum, m.reasked) = (sum, 0);
            let at = (m.granted > 0).then_some(self.now);
            self.fleet.flush(member, at);
        }
        self.say(member, ToWorker::SumTaken { sum });
    }

    /// The hash of a sum that was asked for.
    pub(super) fn hashed(&mut self, member: MemberId, sum: u64, digest: Hash) {
        let mut of = self.checking.delivered.iter().filter(|(_, d)| (d.1, d.2) == (member, sum));
        let (Some((&item, &(lease, ..))), Some(round)) = (of.next(), &self.round) else { return };
        let device = round.ledger.lease(lease).device;
        let place = self.fleet.place(device);
        if let Some(check) = self.checking.checks.get_mut(&item).filter(|c| c.opinions.is_empty()) {
            check.opinions.push(Opinion { device, place, digest: Some(digest) });
        }
    }

    /// A device has computed a microbatch again. `None`: it has a value that no sum can hold.
    pub(super) fn computed_again(&mut self, lease: LeaseId, held: &Held, digest: Option<Hash>) {
        let place = self.fleet.place(held.device);
        // A member that was asked twice, because it was late, has one say.
        // The lease may be of an earlier check of the item, of another class.
        let counts = |check: &Check| {
            held.class == check.class
                && !check.opinions.is_empty()
                && self.may_check(check, held.device.member)
        };
        let counts = self.checking.checks.get(&held.item).is_some_and(counts);
        let Some(check) = self.checking.checks.get_mut(&held.item) else { return };
        check.asked.take_if(|asked| *asked == lease);
        if !counts {
            return;
        }
        check.opinions.push(Opinion { device: held.device, place, digest });
    }

    /// Whether a device may compute it again: one of a member that has not yet, of the same class; if there is none and
    /// two members differ, one of this process once more.
    fn may_check(&self, check: &Check, member: MemberId) -> bool {
        let had = check.asked_by(member);
        let here = self.fleet.member(member).is_some_and(|m| m.here);
        had == 0
            || (here
                && had == 1
                && check.opinions.len() > 1
                && !self.others(&check.class, &|member| check.asked_by(member) > 0))
    }

    /// Decides every check that two equal results decide, and those that no device can decide.
    pub(super) fn settle(&mut self) {
        let decided = |(item, check): (&usize, &Check)| check.verdict().map(|verdict| (*item, verdict));
        while let Some((item, verdict)) = self.checking.checks.iter().find_map(decided) {
            let Some(check) = self.checking.checks.remove(&item) else { return };
            self.call_off(&check);
            self.decide(item, &check, verdict);
        }
        let now = self.now;
        let checks: Vec<usize> = self.checking.checks.keys().copied().collect();
        for item in checks {
            let Some(check) = self.checking.checks.get(&item).filter(|c| !c.opinions.is_empty()) else {
                continue;
            };
            let able = self.of_class(&check.class, &|member| !self.may_check(check, member));
            let silent = able.first().map(|(member, _)| *member);
            let stuck = able.iter().all(|(_, device)| device.hangs(now));
            let since = stuck.then(|| check.stuck.unwrap_or(now));
            let waited = since.is_some_and(|since| now >= since + self.config.recheck);
            let member = check.opinions[0].device.member;
            let trusted = self.fleet.member(member).is_some_and(|m| m.here);
            if stuck && trusted && check.opinions.len() == 1 {
                self.checking.checks.remove(&item);
                self.round.iter_mut().for_each(|round| round.tally.unchecked += 1);
            } else if let (true, Some(member)) = (waited, silent) {
                let reason = "its device does not answer, and no other can check the work of its class";
                self.expel(member, reason);
                // Another worker has as much time to come.
                self.checking.checks.get_mut(&item).into_iter().for_each(|check| check.stuck = None);
            } else if waited {
                self.undecided(item);
            } else if let Some(check) = self.checking.checks.get_mut(&item) {
                check.stuck = since;
            }
            if self.over {
                return;
            }
        }
    }

    fn decide(&mut self, item: usize, check: &Check, verdict: Option<Hash>) {
        let Some(round) = &mut self.round else { return };
        round.tally.checked += 1;
        let step = round.step;
        let (right, wrong): (Vec<&Opinion>, Vec<&Opinion>) =
            check.opinions.iter().partition(|o| o.digest == verdict);
        for opinion in &right {
            let member = self.fleet.member_mut(opinion.device.member);
            member.into_iter().for_each(|m| m.record.checked += 1);
        }
        let others: Vec<String> =
            right.iter().map(|o| format!("{}, {}", o.place.member, o.place.device)).collect();
        for opinion in wrong {
            let member = opinion.device.member;
            let Some(record) = self.fleet.member(member).map(|m| m.record) else { continue };
            let reason = format!(
                "in step {step}, microbatch {item}, {} has {}, {} have {}; {}",
                opinion.place.device,
                shown(opinion.digest),
                others.join(" and "),
                shown(verdict),
                record.shown(),
            );
            self.expel(member, &reason);
        }
    }

    /// No device can decide this check: who cannot be checked is asked to join again and waits for another worker of its
    /// class; where two differ, the run halts.
    fn undecided(&mut self, item: usize) {
        let Some(check) = self.checking.checks.get(&item) else { return };
        if let [first] = &check.opinions[..] {
            let (member, class) = (first.device.member, first.place.class.clone());
            let reason = format!("no other worker has a device of class {class}, so it cannot be checked");
            return self.take_out(member, &reason.clone(), Bye::Out { reason, again: true });
        }
        let results = check.opinions.iter().map(|o| (o.place.clone(), shown(o.digest))).collect();
        self.over = true;
        self.out.push(Action::Dispute { item, results });
    }

    /// When the machine stops waiting for a device that can decide a check.
    pub(super) fn verify_wake(&self) -> Option<Duration> {
        self.checking.checks.values().filter_map(|c| c.stuck).map(|at| at + self.config.recheck).min()
    }

    /// Whether microbatches are to be computed again.
    pub(super) fn is_checking(&self) -> bool {
        !self.checking.checks.is_empty()
    }

    /// Leases the microbatches that are to be computed again. A device that is late with one loses it to a faster one.
    pub(super) fn lease_checks(&mut self) {
        let items: Vec<usize> = self.checking.checks.keys().copied().collect();
        let mut slots = self.slots();
        for item in items {
            let Some((late, id)) = self.checker(item, &slots) else { continue };
            if let (Some(late), Some(round)) = (late, &mut self.round) {
                round.ledger.cancel(late);
                self.call_back(late);
            }
            let lease = self.lease(item, id, Purpose::Verify);
            self.checking.checks.get_mut(&item).into_iter().for_each(|check| check.asked = Some(lease));
            slots = self.slots_again(slots);
        }
        self.saw(slots);
    }

    /// The device that computes a microbatch again, and the lease that it replaces.
    fn checker(&self, item: usize, slots: &[Slot]) -> Option<(Option<LeaseId>, DeviceId)> {
        let (check, round) = (self.checking.checks.get(&item)?, self.round.as_ref()?);
        if check.opinions.is_empty() {
            return None;
        }
        let tokens = round.ledger.items()[item].tokens as f64;
        let live = check.asked.filter(|&lease| round.ledger.lease(lease).status == Status::Live);
        let fits = |s: &&Slot| s.class == check.class && s.has_room() && self.may_check(check, s.id.member);
        let finish = |s: &Slot| s.free + (tokens + s.lead) * s.each;
        let mut able: Vec<&Slot> = slots.iter().filter(fits).collect();
        if let Some(lease) = live {
            let due = slots.iter().flat_map(|s| &s.queue).find(|q| q.lease == lease)?.finish;
            able.retain(|s| s.idle() && s.known && due > s.free + 1.1 * (tokens + s.lead) * s.each);
        }
        // This process decides where two differ, if it can.
        let here = |s: &Slot| self.fleet.member(s.id.member).is_some_and(|m| m.here);
        if check.opinions.len() > 1 && able.iter().any(|s| here(s)) {
            able.retain(|s| here(s));
        }
        // Any device that is not much later than the first: no worker can choose whom it checks by being fast.
        let first = able.iter().map(|s| finish(s)).min_by(f64::total_cmp)?;
        able.retain(|s| finish(s) <= 2.0 * first);
        let draw = self.config.verify.as_ref()?.draw(check.lease, 1);
        let chosen = able.get((draw * able.len() as f64) as usize)?;
        Some((live, chosen.id))
    }

    /// Counts everything at the end of a round in which all items were delivered and no check is open.
    pub(super) fn count_delivered(&mut self) {
        let Some(round) = &self.round else { return };
        let (step, items) = (round.step, round.ledger.items().len());
        if self.checking.delivered.len() < items || !self.checking.checks.is_empty() {
            return;
        }
        for (lease, member, sum) in std::mem::take(&mut self.checking.delivered).into_values() {
            self.out.push(Action::TakeSum { member, sum });
            self.count(lease);
            let record = self.fleet.member_mut(member).map(|m| &mut m.record);
            record.into_iter().for_each(|r| r.counts(step));
        }
    }
}

fn shown(digest: Option<Hash>) -> String {
    match digest {
        Some(hash) => hash.iter().take(4).map(|byte| format!("{byte:02x}")).collect(),
        None => "a value that is not finite".into(),
    }
}
