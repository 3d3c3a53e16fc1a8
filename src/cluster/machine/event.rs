//! The input of the machine. The driver turns everything that happens into events, in the order in which it
//! happened. Messages of a connection keep the order in which they arrived.

use super::super::message::{Hash, ToCoordinator};
use super::draw::Verify;
use std::time::Duration;

/// A connection. The driver chooses the numbers; a number is never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub u64);

/// A device of a member, by its index in the member's `Ready`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId {
    /// The member that owns the device.
    pub member: MemberId,
    /// Its index in that member's `Ready`.
    pub index: u16,
}

/// What is counted before the first round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counted {
    /// Devices that can compute.
    Devices,
    /// Members with at least one such device.
    Tasks,
    /// Devices whose results another member can check.
    Checkable,
}

impl Counted {
    /// The word for one.
    pub fn word(self) -> &'static str {
        match self {
            Counted::Devices => "device",
            Counted::Tasks => "task",
            Counted::Checkable => "checkable device",
        }
    }
}

/// The user's requirements on members, and the machine's time limits.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// No lease is given before this many have been present at the same time once.
    pub expect: usize,
    /// What `expect` counts.
    pub counts: Counted,
    /// The machine gives no new lease while fewer devices than this are present. At least 1.
    pub min: usize,
    /// Time limit for waiting for either number, after which the machine emits [`super::Action::GiveUp`].
    pub join_timeout: Duration,
    /// A requested sum of which nothing arrived for this long is requested again.
    pub reask: Duration,
    /// After this many repeated requests without an answer the member is removed. It may reconnect.
    pub reasks: u32,
    /// A lease is revoked once it runs longer than 10 times its estimate plus this grace period. The grace period is
    /// 10 times as long on a device that was never measured.
    pub patience: Duration,
    /// A bad value is reported without a second finding if none arrives within this time. For the first half of it
    /// the machine waits for a device other than the first.
    pub recheck: Duration,
    /// Which training microbatches are computed again; `None`: none. Where no device can compute one again, the machine
    /// waits as long as for a second finding.
    pub verify: Option<Verify>,
    /// Number of steps by which gradients are delayed, 0 or 1. Not with `verify`.
    pub delay: u64,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            expect: 1,
            counts: Counted::Devices,
            min: 1,
            join_timeout: Duration::from_secs(600),
            reask: Duration::from_secs(30),
            reasks: 4,
            patience: Duration::from_secs(60),
            recheck: Duration::from_secs(60),
            verify: None,
            delay: 0,
        }
    }
}

/// The kind of a round's items.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Microbatches of an optimizer step: announced, granted, summed.
    Train,
    /// Microbatches of an evaluation: scored.
    Eval,
    /// Prompts: answered.
    Prompt,
}

/// Work under one set of parameters. A round is over when each of its items has been counted once.
#[derive(Debug, Clone, PartialEq)]
pub struct Round {
    /// The kind of its items.
    pub kind: Kind,
    /// Size of each item in tokens; for a prompt, its own tokens plus the new tokens that it may get. The driver
    /// keeps the contents; the machine names an item by its position in this list.
    pub tokens: Vec<u64>,
    /// Most microbatches of an item: an island has several. Each has the fixed cost of one.
    pub microbatches: u64,
    /// Size of each item of the next step, if that is to begin meanwhile, with the newest parameters. They follow the
    /// items of the round, and the next round is of them. Empty but in training rounds of delayed steps.
    pub ahead: Vec<u64>,
}

impl Round {
    /// A round of one microbatch for each item.
    pub fn of(kind: Kind, tokens: Vec<u64>) -> Self {
        Round { kind, tokens, microbatches: 1, ahead: Vec::new() }
    }
}

/// Something that happened. Each variant says what the driver has to do besides sending the event.
#[derive(Debug, Clone, PartialEq)]
pub enum Event<'a> {
    /// Time passed. The driver sends this when [`super::Machine::wake`] asks for it, after all queued events.
    Time,
    /// These are the parameters from now on. Only between rounds.
    Parameters {
        /// Number of steps that they result from.
        after: u64,
        /// blake3 of the parameters.
        hash: Hash,
    },
    /// A round starts under the newest parameters; a training round under those before, if steps are delayed and there
    /// are any. Only after [`super::Action::RoundDone`] or [`Event::Abandon`] of
    /// the previous round.
    Begin(Round),
    /// The round is abandoned because of a signal: none of its results counts. The driver clears its total.
    Abandon,
    /// A connection has been welcomed. Precedes every message of that connection.
    Joined {
        /// Its number.
        member: MemberId,
        /// Its display name.
        name: String,
        /// Whether it is the coordinator's own process.
        here: bool,
    },
    /// A message of a member. The driver may pass every message from `Ready` on; the machine ignores messages that
    /// do not concern it. Two need care:
    ///
    /// - `SumPiece`: passed *before* its values are added, and only if [`super::Machine::wants_sum`] is true for its
    ///   sum; the driver drops other pieces unread.
    /// - `Sum`: passed once all of its pieces have been added to the total and cover the layout. If they do not, or
    ///   hold invalid values, the driver sends [`Event::Misbehaved`] instead. A sum that `wants_sum` rejects is passed
    ///   too, so that a lost `SumTaken` is sent again.
    Said {
        /// The sender.
        member: MemberId,
        /// The message. The machine does not read its bulk data: see [`super::Action::TakeSum`] and
        /// [`super::Action::TakeResult`].
        message: &'a ToCoordinator,
    },
    /// Relays hold the parts of a sum of this member, which [`super::Machine::takes`]. The driver passes the sum in
    /// [`Event::Totalled`] once it is in the total, or [`Event::Released`] if it will not be.
    Relayed {
        /// The member.
        member: MemberId,
        /// Number of leases in the sum.
        leases: usize,
    },
    /// These sums, each of which [`super::Machine::takes`], are in the total together.
    Totalled {
        /// The sender and last message of each.
        sums: &'a [(MemberId, ToCoordinator)],
    },
    /// Relays hold no sums of these members any more: they are requested again.
    Released {
        /// The members.
        members: Vec<MemberId>,
    },
    /// Answers [`super::Action::Hash`].
    Hashed {
        /// The sender of the sum.
        member: MemberId,
        /// Number of the sum.
        sum: u64,
        /// `cluster::digest` of the sum.
        digest: Hash,
    },
    /// The connection is closed, was silent for too long, or was replaced by a newer one of the same worker. The
    /// driver sends this at most once per member, and no other event of that member after it.
    Lost {
        /// The member.
        member: MemberId,
        /// The reason, in one line for display.
        reason: String,
    },
    /// A member sent bytes that no correct worker sends (an undecodable frame, a sum beyond its range): the machine
    /// removes it.
    Misbehaved {
        /// The member.
        member: MemberId,
        /// The reason, in one line for display.
        reason: String,
    },
}
