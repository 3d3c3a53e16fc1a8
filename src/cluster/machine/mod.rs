//! The coordinator's decisions as a pure state machine: events and the time go in, actions come out. The machine has
//! no clock, socket, thread or gradient, so a simulator can show it a thousand runs per second. The driver around it
//! has all of these and decides nothing.
//!
//! The driver's loop, in full:
//!
//! 1. Wait for an event, at most until [`Machine::wake`]. Pass every queued event to [`Machine::tick`] before
//!    [`Event::Time`], so that finished work is not treated as late.
//! 2. Carry out the actions of each tick in order, before the next tick.
//! 3. A step is [`Event::Parameters`], then [`Event::Begin`], then ticks until [`Action::RoundDone`]. Evaluations
//!    and prompts are rounds under the same parameters.
//!
//! `now` is the time since any fixed moment and never goes back. The machine is deterministic: the same events at
//! the same times give the same actions.

mod action;
mod answer;
mod assign;
#[cfg(test)]
mod check;
mod deal;
mod device;
mod draw;
mod event;
mod fleet;
mod gather;
mod ledger;
mod record;
mod relayed;
mod repeat;
mod round;
mod slot;
mod speed;
#[cfg(test)]
mod tests;
mod value;
mod verify;

pub use action::{Action, Again, Bad, DeviceReport, Finding, Note, Place, Purpose, Tally};
pub use draw::Verify;
pub use event::{Config, Counted, DeviceId, Event, Kind, MemberId, Round};

use super::message::{Bye, Hash, LeaseId, ToCoordinator, ToWorker};
use fleet::{Fleet, Member};
use gather::Gathering;
use ledger::Status;
use round::Current;
use slot::Seen;
use std::time::Duration;
use value::Recheck;
use verify::Checking;

/// The coordinator's decisions.
#[derive(Debug)]
pub struct Machine {
    config: Config,
    fleet: Fleet,
    /// Number of steps that the parameters result from, and their hash.
    parameters: Option<(u64, Hash)>,
    /// Where steps are delayed: those before.
    before: Option<(u64, Hash)>,
    /// The current round, or the last one if none runs, so that its late messages can still be answered.
    round: Option<Current>,
    next_lease: LeaseId,
    gathering: Gathering,
    /// A reported bad value that another device checks. The run halts whatever that check finds.
    recheck: Option<Recheck>,
    checking: Checking,
    /// The run has halted, or the machine gave up waiting for devices.
    over: bool,
    now: Duration,
    /// When idle devices look again for an item to repeat.
    look: Option<Duration>,
    /// The devices as the planner last saw them.
    seen: Seen,
    out: Vec<Action>,
}

impl Machine {
    /// A machine without members.
    pub fn new(config: Config) -> Self {
        Machine {
            config,
            fleet: Fleet::default(),
            parameters: None,
            before: None,
            round: None,
            next_lease: 1,
            gathering: Gathering::default(),
            recheck: None,
            checking: Checking::default(),
            over: false,
            now: Duration::ZERO,
            look: None,
            seen: Seen::default(),
            out: Vec::new(),
        }
    }

    /// Applies an event and returns the actions that follow from it.
    pub fn tick(&mut self, event: Event<'_>, now: Duration) -> Vec<Action> {
        self.now = self.now.max(now);
        if self.over {
            return Vec::new();
        }
        match event {
            Event::Time => {}
            Event::Parameters { after, hash } => self.take_parameters(after, hash),
            Event::Begin(round) => self.begin(round),
            Event::Abandon => self.abandon(),
            Event::Joined { member, name, here } => {
                let mut joined = Member::new(name);
                joined.here = here;
                self.fleet.insert(member, joined);
            }
            Event::Said { member, message: &ToCoordinator::SumPiece { sum, offset, .. } } => {
                // Only the wait for the sum changes: no decision follows before the time that `wake` says.
                self.fleet.comes(member, (sum, offset), self.now);
                return Vec::new();
            }
            Event::Said { member, message } => {
                self.said(member, message);
                self.fleet.resting.insert(member);
            }
            Event::Relayed { member, leases } => self.relayed(member, leases),
            Event::Totalled { sums } => self.totalled(sums),
            Event::Released { members } => self.released(&members),
            Event::Hashed { member, sum, digest } => self.hashed(member, sum, digest),
            Event::Lost { member, reason } => self.lost(member, &reason),
            Event::Misbehaved { member, reason } => self.expel(member, &reason),
        }
        self.advance();
        std::mem::take(&mut self.out)
    }

    /// When [`Event::Time`] is due if no other event comes first. `None`: the machine waits for an event.
    pub fn wake(&self) -> Option<Duration> {
        if self.over {
            return None;
        }
        let working = self.round.as_ref().is_some_and(|r| !r.done);
        let stopping = self.fleet.stopping.iter().filter_map(|&id| self.fleet.device(id)?.stopping);
        let stopping = stopping.map(|s| s.again);
        let soonest = stopping.filter(|_| working).min();
        if self.recheck.is_some() {
            return self.recheck_wake().into_iter().chain(soonest).min();
        }
        let sums = self.fleet.first_flushed().map(|at| at + self.config.reask).filter(|_| working);
        let others = [soonest, self.look, self.verify_wake(), self.gathering.deadline(&self.config)];
        others.into_iter().chain([sums]).flatten().min()
    }

    /// Whether pieces of this sum are to be added: the sum has not been taken yet, and the member holds granted
    /// leases that it can contain.
    pub fn wants_sum(&self, member: MemberId, sum: u64) -> bool {
        self.fleet.member(member).is_some_and(|m| sum > m.last_sum && m.granted > 0)
    }

    /// Whether a device computes with parameters before the newest.
    pub fn works_with_older(&self) -> bool {
        let older = |r: &&Current| !r.newest && !r.done;
        let Some(round) = self.round.as_ref().filter(older) else { return false };
        self.fleet.devices().any(|(_, _, d)| d.queue.front().is_some_and(|&lease| round.owns(lease)))
    }

    /// The work of every device so far. Present devices come first.
    pub fn devices(&self) -> Vec<DeviceReport> {
        self.fleet.reports()
    }

    /// The statistics of the current round so far.
    pub fn tally(&self) -> Option<&Tally> {
        self.round.as_ref().map(|r| &r.tally)
    }

    fn say(&mut self, member: MemberId, message: ToWorker) {
        self.out.push(Action::Say { member, message });
    }

    fn note(&mut self, note: Note) {
        self.out.push(Action::Note(note));
    }

    fn take_parameters(&mut self, after: u64, hash: Hash) {
        assert!(self.round.as_ref().is_none_or(|r| r.done), "parameters change between rounds only");
        let precedes = |(before, _): &(u64, Hash)| self.config.delay > 0 && before + 1 == after;
        self.before = self.parameters.filter(precedes);
        self.parameters = Some((after, hash));
        let ready = self.fleet.members().iter().filter(|(_, m)| m.devices.is_some());
        let ready: Vec<MemberId> = ready.map(|(&id, _)| id).collect();
        ready.into_iter().for_each(|member| self.send_parameters(member));
    }

    fn send_parameters(&mut self, member: MemberId) {
        if let (Some(_), Some(m)) = (self.parameters, self.fleet.member_mut(member)) {
            m.sent = Some(self.now);
            self.out.push(Action::SendParameters { member });
        }
    }

    /// Removes a member that did what no correct worker does.
    fn expel(&mut self, member: MemberId, reason: &str) {
        self.take_out(member, reason, Bye::Out { reason: reason.to_string(), again: false });
    }

    fn take_out(&mut self, member: MemberId, reason: &str, bye: Bye) {
        let Some(m) = self.fleet.member(member) else { return };
        let (unknown, name, reason) = (m.is_unknown(), m.name.clone(), format!("removed: {reason}"));
        self.lost(member, &reason);
        if unknown {
            // Its arrival was never reported; the reason for its removal must be.
            self.note(Note::Left { member: name, reason, reopened: 0 });
        }
        self.say(member, ToWorker::Bye(bye));
        self.out.push(Action::Close { member });
    }

    /// A member is lost: every item that it held is open again.
    fn lost(&mut self, id: MemberId, reason: &str) {
        let Some(member) = self.fleet.remove(id) else { return };
        let mut reopened = 0;
        if let Some(round) = self.round.as_mut().filter(|r| !r.done || r.next.is_some()) {
            for lease in round.ledger.standing(id) {
                let held = round.ledger.lease(lease);
                if matches!(held.status, Status::Granted | Status::Delivered) {
                    round.tally.wasted_tokens += round.ledger.items()[held.item].tokens;
                }
                reopened += usize::from(round.ledger.end(lease, Status::Void));
            }
            round.tally.reopened += reopened as u64;
        }
        self.forget_results(id);
        self.out.push(Action::TakeBack { member: id });
        if !member.is_unknown() {
            self.note(Note::Left { member: member.name, reason: reason.to_string(), reopened });
        }
    }

    /// Decides the next actions after every event.
    fn advance(&mut self) {
        self.look = None;
        if self.over || self.round.as_ref().is_none_or(|r| r.done) {
            return;
        }
        self.call_back_again();
        if self.recheck.is_some() {
            return self.recheck_on();
        }
        if self.verifies() {
            self.settle();
            self.note_lone();
        }
        loop {
            if self.over {
                return;
            }
            let expecting = if self.gathered() { self.assign() } else { Vec::new() };
            if self.over {
                return;
            }
            if !self.flush(&expecting) {
                break;
            }
        }
        if self.verifies() {
            self.count_delivered();
        }
        self.finish();
    }
}
