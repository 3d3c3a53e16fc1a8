//! What goes into the machine. The driver turns everything that happens into one of these, in the order in which
//! it happened; a connection's messages come in the order in which they arrived on it.

use super::super::message::{Hash, ToCoordinator};
use std::time::Duration;

/// A connection. The driver numbers them from whatever it likes; a number is never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub u64);

/// A device of a member, by its index in the member's `Ready`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId {
    /// Whose.
    pub member: MemberId,
    /// Its index there.
    pub index: u16,
}

/// What a run's user decided about its members, and how patient the machine is.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// No lease is given before that many devices have been here at the same time (once).
    pub expect: usize,
    /// With fewer devices the machine gives no new leases. At least 1.
    pub min: usize,
    /// How long it waits for either before [`super::Action::GiveUp`].
    pub join_timeout: Duration,
    /// A sum that was asked for, and of which nothing has arrived for this long, is asked for again.
    pub reask: Duration,
    /// So often it is asked for again in vain; then the member is taken out, and may come back.
    pub reasks: u32,
    /// A lease that is late by this and by nine times what it should have taken is called back; ten times this
    /// on a device that was never measured.
    pub patience: Duration,
    /// A bad value is reported without a second finding if none has come for this long; for half of it another
    /// device than the first is waited for.
    pub recheck: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            expect: 1,
            min: 1,
            join_timeout: Duration::from_secs(600),
            reask: Duration::from_secs(30),
            reasks: 4,
            patience: Duration::from_secs(60),
            recheck: Duration::from_secs(60),
        }
    }
}

/// What the items of a round are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Microbatches of an optimizer step: announced, granted, summed.
    Train,
    /// Microbatches that are scored.
    Eval,
    /// Prompts that are answered.
    Prompt,
}

/// Work that is done under one set of parameters, and is over when every item of it has been counted once.
#[derive(Debug, Clone, PartialEq)]
pub struct Round {
    /// What its items are.
    pub kind: Kind,
    /// The size of each: tokens of a microbatch; of a prompt, its own and those that it may get. The driver
    /// keeps what they hold; the machine names an item by its position here.
    pub tokens: Vec<u64>,
}

/// Something happened. What the driver has to do besides is said at each.
#[derive(Debug, Clone, PartialEq)]
pub enum Event<'a> {
    /// Time passed: to be sent when [`super::Machine::wake`] says so, after all that has been queued meanwhile.
    Time,
    /// These are the parameters from now on. Between rounds only.
    Parameters {
        /// After this many steps.
        after: u64,
        /// blake3 of them.
        hash: Hash,
    },
    /// A round begins, under the parameters that were named last. Not before [`super::Action::RoundDone`] (or
    /// [`Event::Abandon`]) of the one before.
    Begin(Round),
    /// The round is given up (a signal): nothing of it counts. The driver clears its total.
    Abandon,
    /// A connection has been welcomed. Comes before any message of it.
    Joined {
        /// Its number.
        member: MemberId,
        /// What people call it.
        name: String,
    },
    /// A message of a member. Everything from `Ready` on may be given here; what is none of the machine's
    /// business it ignores. Two need care:
    ///
    /// - `SumPiece`: given *before* its values are added, and only where [`super::Machine::wants_sum`] is true
    ///   for it; others are dropped unread.
    /// - `Sum`: given once all of its pieces have been added to the total and cover the layout. If they do not,
    ///   or hold what they may not, the driver sends [`Event::Misbehaved`] in its place. A sum that
    ///   `wants_sum` does not want is given too (so that a lost `SumTaken` is said again).
    Said {
        /// Whose.
        member: MemberId,
        /// The message. Its bulk is looked at by nobody here: see [`super::Action::TakeSum`] and
        /// [`super::Action::TakeResult`].
        message: &'a ToCoordinator,
    },
    /// The connection is closed, silent for too long, or replaced by a newer one of the same worker. The driver
    /// sends it at most once, and nothing of that member after it.
    Lost {
        /// It.
        member: MemberId,
        /// One line for people.
        reason: String,
    },
    /// The driver found something in a member's bytes that no honest worker sends (a frame that does not
    /// decode, a sum beyond its range): it will be taken out.
    Misbehaved {
        /// It.
        member: MemberId,
        /// One line for people.
        reason: String,
    },
}
