//! The driver: the loop that [`crate::cluster::machine`] prescribes. All queued events go to the machine before the
//! time does, and the actions of an event are carried out before the next event.

use super::super::machine::{Action, Event, Kind, MemberId, Note, Purpose, Round, Tally};
use super::super::message::{Lease, LeaseId, ToCoordinator, ToWorker, Work};
use super::super::reduce::{Claim, Report};
use super::parameters::Broadcast;
use super::relays::TOTALS;
use super::{Company, Coordinator, Incoming, Rejected, events, scores};
use crate::model::stage::Fault;
use crate::train::event::{Change, LineFormed, What};
use crate::train::stop::Urgency;
use crate::train::sum::Scalars;
use crate::train::{Say, TrainError};
use std::collections::BTreeMap;
use std::time::Duration;

/// Longest delay until a raised stop flag is noticed.
const GLANCE: Duration = Duration::from_millis(50);

/// Most queued messages that are handled before the clock and the stop flag are checked.
const TURN: usize = 4096;

/// The work of a round, and its results so far.
pub(super) struct Task<'t> {
    pub kind: Kind,
    pub count: usize,
    /// Number of optimizer steps before it.
    pub after: u64,
    /// Number of optimizer steps that its items' parameters result from.
    pub with: u64,
    /// Number of items of the next step, which follow the others and have the newest parameters.
    pub ahead: usize,
    /// Creates the work of an item.
    pub work: &'t dyn Fn(usize) -> Work,
    /// Receives the result of an item.
    pub result: &'t mut dyn FnMut(usize, ToCoordinator) -> Result<(), TrainError>,
    pub say: Say<'t>,
    pub leases: BTreeMap<LeaseId, usize>,
    pub done: Option<Tally>,
    pub failed: Option<TrainError>,
}

impl Task<'_> {
    fn over(&self) -> bool {
        self.done.is_some() || self.failed.is_some()
    }

    pub fn change(&mut self, change: Change) {
        (self.say)(crate::train::event::Event::Device(change));
    }
}

impl Coordinator<'_> {
    /// Runs a round until every item is counted exactly once. `None`: a signal ended the round, and no result
    /// counts.
    pub(super) fn round(&mut self, round: Round, task: &mut Task) -> Result<Option<Tally>, TrainError> {
        self.pending.clear();
        self.worked = true;
        self.counts.step = task.after;
        if task.kind == Kind::Train {
            self.reducer.begin(task.count);
        }
        self.tick(Event::Begin(round), task);
        loop {
            if let Some(error) = task.failed.take() {
                return Err(error);
            }
            if let Some(tally) = task.done.take() {
                self.counts.ignored += tally.ignored;
                self.counts.checked += tally.checked;
                self.counts.unchecked += tally.unchecked;
                self.classes.extend(tally.classes.keys().cloned());
                return Ok(Some(tally));
            }
            if self.company == Company::Closed && self.met && self.members.is_empty() {
                return Err(TrainError::Alone {
                    have: 0,
                    want: 1,
                    of: "device",
                    seconds: 0,
                    step: task.after,
                });
            }
            if self.stopped() {
                self.tick(Event::Abandon, task);
                return Ok(None);
            }
            let left = self.machine.wake().map_or(GLANCE, |at| at.saturating_sub(self.began.elapsed()));
            let mut next = self.incoming.recv_timeout(left.min(GLANCE)).ok();
            let mut taken = 0;
            while let Some(incoming) = next.take() {
                self.take(incoming, task);
                self.relays_go_on(task);
                taken += 1;
                // A message that was taken out of the queue is handled; the rest stays queued.
                let enough = task.over() || taken >= TURN || self.stopped();
                next = if enough { None } else { self.incoming.try_recv().ok() };
            }
            if !task.over() && self.machine.wake().is_some_and(|at| self.began.elapsed() >= at) {
                self.tick(Event::Time, task);
            }
            if !task.over() && taken < TURN {
                self.relays_in_time(task);
            }
        }
    }

    /// SIGTERM ends a round at once. A first SIGINT lets it finish, unless too few devices are present.
    fn stopped(&self) -> bool {
        let urgency = self.stop.urgency();
        urgency == Urgency::Now || (self.waiting.on && urgency != Urgency::Run)
    }

    pub(super) fn tick(&mut self, event: Event<'_>, task: &mut Task) {
        let gone = departure(&event);
        let actions = self.machine.tick(event, self.began.elapsed());
        self.act(actions, (None, gone), task);
    }

    pub(super) fn said(&mut self, member: MemberId, message: ToCoordinator, task: &mut Task) {
        let event = Event::Said { member, message: &message };
        let gone = departure(&event);
        let actions = self.machine.tick(event, self.began.elapsed());
        self.act(actions, (Some(message), gone), task);
    }

    fn take(&mut self, incoming: Incoming, task: &mut Task) {
        self.lost_relay(&incoming, task);
        match incoming {
            Incoming::Joined { member, name, peer, remark, outbox } => {
                self.members.insert(member, outbox);
                // Only devices of this process have no address.
                let here = peer.is_none();
                self.peers.extend(peer.map(|peer| (member, (name.clone(), peer))));
                self.met = true;
                self.waiting.met(&name, member);
                if let Some(reason) = remark {
                    let (step, worker) = (task.after, name.clone());
                    task.change(Change { step, what: What::Note, worker, devices: vec![], reason });
                }
                self.tick(Event::Joined { member, name, here }, task);
            }
            Incoming::Lost { member, reason } => {
                self.members.remove(&member);
                self.served.remove(&member);
                let waits = self.waiting.gone(member);
                self.tick(Event::Lost { member, reason }, task);
                self.peers.remove(&member);
                self.tell(waits, What::Note, task);
            }
            Incoming::Line(formed) => {
                (task.say)(crate::train::event::Event::Line(LineFormed { step: task.after, ..formed }));
            }
            Incoming::Passes(passes) => self.accounts.passed(passes),
            Incoming::Refused { name, who, reason } => {
                self.counts.refused += u64::from(who == Rejected::Worker);
                let (step, what, devices) = (task.after, What::Refused, vec![]);
                task.change(Change { step, what, worker: name, devices, reason });
            }
            Incoming::Said { member, message, _room } => self.hear(member, message, task),
            Incoming::Hashed { member, sum, digest: Some(digest) } => {
                self.tick(Event::Hashed { member, sum, digest }, task);
            }
            // Taken back in the meantime.
            Incoming::Hashed { digest: None, .. } => {}
            Incoming::Added(Report { member: TOTALS, sum, result }) => self.total_added(sum, result, task),
            Incoming::Added(Report { member, sum, result }) => {
                let member = MemberId(member);
                match (self.pending.get(&(member, sum)).cloned(), result) {
                    (Some(message), Ok(())) => self.said(member, message, task),
                    (_, Err(refusal)) => self.misbehaved(member, refusal.to_string(), task),
                    // Taken back in the meantime.
                    (None, Ok(())) => {}
                }
            }
        }
    }

    pub(super) fn misbehaved(&mut self, member: MemberId, reason: String, task: &mut Task) {
        self.tick(Event::Misbehaved { member, reason }, task);
    }

    /// Bulk data goes to the reducer before or after the machine sees its message. All other messages go to the
    /// machine.
    fn hear(&mut self, member: MemberId, message: ToCoordinator, task: &mut Task) {
        let Some(message) = self.hear_of_relays(member, message, task) else { return };
        match message {
            ToCoordinator::SumPiece { sum, .. } => {
                if self.machine.wants_sum(member, sum) {
                    self.tick(Event::Said { member, message: &message }, task);
                    self.add(member, message, task);
                }
            }
            ToCoordinator::Sum { sum, ref leases, loss, weight, targets, rewards, relays: None, .. }
                if self.machine.wants_sum(member, sum) =>
            {
                let claim =
                    Claim { sum, leases: leases.len(), scalars: Scalars { loss, weight, targets, rewards } };
                self.pending.insert((member, sum), message);
                self.reducer.finish(member.0, claim);
            }
            ToCoordinator::Score { lease, .. } | ToCoordinator::Answer { lease, .. } => {
                let classes = self.reception.manifest().labels.as_ref().map_or(0, Vec::len);
                let work = task.leases.get(&lease).map(|&item| (task.work)(item));
                match work.map_or(Ok(()), |work| scores::check(&message, &work, classes)) {
                    Ok(()) => self.said(member, message, task),
                    Err(reason) => self.misbehaved(member, reason, task),
                }
            }
            message => {
                if matches!(message, ToCoordinator::Ask { .. }) {
                    let machine = &self.machine;
                    self.accounts.asked(|| machine.works_with_older());
                }
                self.said(member, scores::readable(message), task);
            }
        }
    }

    fn add(&mut self, member: MemberId, message: ToCoordinator, task: &mut Task) {
        let ToCoordinator::SumPiece { sum, offset, len, packed } = message else { return };
        if !self.members.contains_key(&member) {
            return;
        }
        self.accounts.received(&packed);
        if let Err(refusal) = self.reducer.piece(member.0, sum, (offset, len), packed) {
            self.misbehaved(member, refusal.to_string(), task);
        }
    }

    fn act(
        &mut self,
        actions: Vec<Action>,
        (mut said, gone): (Option<ToCoordinator>, What),
        task: &mut Task,
    ) {
        for action in actions {
            match action {
                Action::SendParameters { member } => self.send_parameters(member),
                Action::Lease { device, lease, item, purpose } => {
                    task.leases.insert(lease, item);
                    let work = work(task, item, purpose);
                    let (after, of) = match item < task.count {
                        true => (task.with, task.count as u32),
                        false => (task.after, task.ahead as u32),
                    };
                    let lease = Lease { lease, device: device.index, after, of, work };
                    self.say(device.member, ToWorker::Lease(Box::new(lease)));
                }
                Action::Hash { member, sum } => {
                    let reports = self.reports.clone();
                    let tell = move |digest| drop(reports.send(Incoming::Hashed { member, sum, digest }));
                    self.reducer.digest(member.0, sum, tell);
                }
                Action::Say { member, message } => self.say(member, message),
                Action::TakeSum { member, sum } => self.take_sum(member, sum, task),
                Action::TakeBack { member } => {
                    self.pending.retain(|(of, _), _| *of != member);
                    self.reducer.take_back(member.0);
                }
                Action::TakeResult { item } => {
                    if let Some(Err(error)) = said.take().map(|message| (task.result)(item, message)) {
                        task.failed.get_or_insert(error);
                    }
                }
                Action::Close { member } => {
                    self.members.remove(&member);
                    self.served.remove(&member);
                    self.peers.remove(&member);
                    self.relays.breaks(member);
                    let waits = self.waiting.gone(member);
                    self.tell(waits, What::Note, task);
                }
                Action::RoundDone(tally) => task.done = Some(tally),
                Action::Halt(finding) => task.failed = Some(events::halt(&finding, task)),
                Action::Dispute { item, results } => {
                    task.failed = Some(events::dispute(item, results, task));
                }
                Action::GiveUp { have, want, counts } => {
                    let seconds = self.patience.as_secs();
                    task.failed =
                        Some(TrainError::Alone { have, want, of: counts.word(), seconds, step: task.after });
                }
                Action::Note(note) => self.note(note, gone, task),
            }
        }
    }

    /// The newest parameters, to a new member those before them first.
    pub(super) fn send_parameters(&mut self, member: MemberId) {
        let Some(outbox) = self.members.get(&member) else { return };
        let lacks = |_: &&mut Broadcast| !self.served.contains(&member);
        for parameters in self.before.as_mut().filter(lacks).into_iter().chain(&mut self.parameters) {
            self.accounts.sent(parameters.send(member, outbox));
        }
        self.served.insert(member);
    }

    fn take_sum(&mut self, member: MemberId, sum: u64, task: &mut Task) {
        let message = self.pending.remove(&(member, sum));
        let mut in_total = false;
        if let Some(ToCoordinator::Sum { traffic, relays, .. }) = message {
            self.traffic.add(&traffic);
            // The values are in a total, which was taken before.
            in_total = relays.is_some();
        }
        if !in_total && !self.reducer.take(member.0, sum) {
            let reason =
                format!("sum {sum} of member {} counts and is not in the total; report this", member.0);
            let fault = Fault::Device { device: "coordinator".into(), reason };
            task.failed.get_or_insert(TrainError::Device { step: task.after, fault });
        }
    }

    fn note(&mut self, note: Note, gone: What, task: &mut Task) {
        if let Note::Measured { devices } = note {
            let speeds = devices.into_iter().filter_map(|device| events::speed(device, task.after));
            return speeds.for_each(|speed| (task.say)(crate::train::event::Event::Speed(speed)));
        }
        let rejected = matches!(&note, Note::Joined { devices, .. } if devices.is_empty());
        let heard = self.waiting.hear(note);
        self.tell(heard, gone, task);
        if rejected {
            let waits = self.waiting.wait();
            self.tell(waits, What::Note, task);
        }
    }

    fn tell(&mut self, note: Option<Note>, gone: What, task: &mut Task) {
        let Some(mut note) = note else { return };
        if let Note::Left { member, reason, .. } = &mut note {
            self.counts.expelled += u64::from(gone == What::Expelled);
            // The name is the worker's own claim; the address is known.
            let at = self.peers.values().find(|(name, _)| name == member);
            at.into_iter().for_each(|(_, peer)| *reason = format!("{reason} (it was at {peer})"));
        }
        // If no further member may join, waiting has no purpose.
        if self.company == Company::Closed && matches!(note, Note::Waiting { .. }) {
            return;
        }
        let classes = events::classes(&note);
        if let Some(change) = events::change(note, gone, (task.after, self.hint)) {
            task.change(change);
        }
        let before = self.present.len();
        self.present.extend(classes);
        if self.present.len() > before.max(1) {
            task.change(events::mixed(&self.present, task.after));
        }
    }

    pub(super) fn say(&self, member: MemberId, message: ToWorker) {
        let Some(outbox) = self.members.get(&member) else { return };
        let newest = self.parameters.as_ref().map_or(0, |newest| newest.step);
        let message = match message {
            ToWorker::Flush { step, .. } => ToWorker::Flush { step, relays: self.relays.set_of(member) },
            message => message,
        };
        match self.delay > 0 && overtakes(&message, newest) {
            true => outbox.say_first(message),
            false => outbox.say(message),
        }
    }
}

/// Whether a message may overtake the newest parameters on their way, because it needs none of them.
fn overtakes(message: &ToWorker, newest: u64) -> bool {
    match message {
        ToWorker::Lease(lease) => lease.after < newest,
        ToWorker::Grant { .. }
        | ToWorker::Deny { .. }
        | ToWorker::Flush { .. }
        | ToWorker::SumTaken { .. } => true,
        _ => false,
    }
}

fn work(task: &Task, item: usize, purpose: Purpose) -> Work {
    match ((task.work)(item), purpose) {
        (Work::Train(batch) | Work::Eval(batch) | Work::Predict(batch), Purpose::Recheck) => {
            Work::Recheck(batch)
        }
        (Work::Train(batch), Purpose::Verify) => Work::Verify(batch),
        (Work::Island(island), Purpose::Recheck) => Work::RecheckIsland(island),
        (Work::Island(island), Purpose::Verify) => Work::VerifyIsland(island),
        (work, _) => work,
    }
}

/// The kind of departure if the member leaves by this event.
fn departure(event: &Event<'_>) -> What {
    match event {
        Event::Lost { .. } => What::Lost,
        Event::Said { message: ToCoordinator::Leave { .. }, .. } => What::Left,
        _ => What::Expelled,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::message::Bye;

    #[test]
    fn messages_without_newest_parameters_overtake_them() {
        let lease = |after| {
            let work = Work::Prompt { ids: vec![1], sampling: Default::default() };
            ToWorker::Lease(Box::new(Lease { lease: 1, device: 0, after, of: 1, work }))
        };
        for (message, expected) in [
            (lease(4), true),
            (lease(5), false),
            (ToWorker::Grant { lease: 1 }, true),
            (ToWorker::Deny { lease: 1 }, true),
            // It may not overtake its lease.
            (ToWorker::Cancel { lease: 1 }, false),
            (ToWorker::Flush { step: 5, relays: None }, true),
            (ToWorker::SumTaken { sum: 1 }, true),
            (ToWorker::Parameters { step: 5, hash: [0; 32] }, false),
            (ToWorker::Bye(Bye::Done), false),
        ] {
            assert_eq!(overtakes(&message, 5), expected, "{message:?}");
        }
    }
}
