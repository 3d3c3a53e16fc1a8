//! The output of the machine, carried out in the given order. Actions never fail for the machine: a message that can
//! no longer be sent is dropped, and the driver's `Lost` follows.

use super::super::message::{Device, LeaseId, ToWorker};
use super::event::{Counted, DeviceId, Kind, MemberId};
use crate::model::memory::Used;
use crate::numeric::line::Points;
use crate::train::event::Link;
use std::collections::BTreeMap;
use std::time::Duration;

/// An instruction to the driver.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Send the parameters: `ParametersPiece`s or `ParametersChange`s, then `Parameters`. Later messages to this member follow them.
    SendParameters {
        /// The receiver.
        member: MemberId,
    },
    /// Send `ToWorker::Lease` with the item's work: for [`Purpose::Round`] the work of the round's kind, for
    /// [`Purpose::Recheck`] `Work::Recheck`, for [`Purpose::Verify`] `Work::Verify`.
    Lease {
        /// The receiving device.
        device: DeviceId,
        /// Number of the lease.
        lease: LeaseId,
        /// Index of the item in the round; the items of the next step follow those of the round.
        item: usize,
        /// Why the item is leased.
        purpose: Purpose,
    },
    /// Compute the hash of this complete sum of one microbatch, and pass it as [`super::Event::Hashed`] after the actions
    /// of this tick.
    Hash {
        /// The sender of the sum.
        member: MemberId,
        /// Number of the sum.
        sum: u64,
    },
    /// Send this message unchanged.
    Say {
        /// The receiver.
        member: MemberId,
        /// `Grant`, `Deliver`, `Deny`, `Cancel`, `Flush`, `SumTaken` or `Bye`.
        message: ToWorker,
    },
    /// A sum counts: the driver adds its loss, weight and targets to the step's. Its pieces stay in the total, and their
    /// copies may be dropped. It is the sum of this tick; where results are checked it may be an earlier one.
    TakeSum {
        /// The sender of the sum.
        member: MemberId,
        /// Number of the sum.
        sum: u64,
    },
    /// The `Score` or `Answer` of this tick is the result of this item.
    TakeResult {
        /// Index of the item in the round.
        item: usize,
    },
    /// Subtract all added pieces of this member's sums that were not taken; no effect if there are none.
    TakeBack {
        /// The sender of the sums.
        member: MemberId,
    },
    /// Close the connection once all queued messages are sent. The machine has already removed the member; a later
    /// `Lost` for it is optional.
    Close {
        /// The member.
        member: MemberId,
    },
    /// Every item of the round has been counted exactly once: the total is complete.
    RoundDone(Tally),
    /// A bad value: the run ends with exit code 3 and every member gets `Bye::Halted`. The machine emits no further
    /// action.
    Halt(Finding),
    /// Devices of a class have different results of an item, and none can decide: the run ends. The machine emits no
    /// further action.
    Dispute {
        /// Index of the item in the round.
        item: usize,
        /// The devices and what they have.
        results: Vec<(Place, String)>,
    },
    /// Too few devices for too long: the driver saves, sends `Bye::Later` and exits with code 75. The machine emits
    /// no further action.
    GiveUp {
        /// Number present.
        have: usize,
        /// Number waited for.
        want: usize,
        /// What was counted.
        counts: Counted,
    },
    /// An event to be shown and kept in metrics.jsonl.
    Note(Note),
}

/// Why an item is leased.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// The round needs the item's result.
    Round,
    /// The machine needs to know whether a reported bad value occurs on this device too.
    Recheck,
    /// The result of another device is compared with this one's.
    Verify,
}

/// Statistics of a round.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tally {
    /// Items in work that were leased to a second device.
    pub repeats: u64,
    /// Leases that were cancelled.
    pub cancels: u64,
    /// Tokens that were computed, as far as known, and not counted: by devices that lost a repeat, and by members
    /// that were lost before their sum arrived.
    pub wasted_tokens: u64,
    /// Leases of lost or failing devices whose items were leased again.
    pub reopened: u64,
    /// Messages that were late, repeated or out of place, and changed nothing.
    pub ignored: u64,
    /// Items that were computed again and compared.
    pub checked: u64,
    /// Items that were to be computed again and count without: trusted devices of a class that no other member has.
    pub unchecked: u64,
    /// Counted items for each numeric class that computed them.
    pub classes: BTreeMap<String, u64>,
    /// From the start of the round to the last result (for training: the last grant).
    pub computing: Duration,
    /// From the last result to the end of the round: sums that arrived while no device computed.
    pub exposed: Duration,
    /// From the first request for a sum to the last grant: sums that travelled while devices computed.
    pub hidden: Duration,
    /// When items were computed, from the devices' own compute times; at most `SPANS` per round.
    pub spans: Vec<(Place, Span)>,
}

/// Spans kept for each round; they are drawn in charts.
pub const SPANS: usize = 4096;

/// A period of computing, relative to the start of the round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Start.
    pub from: Duration,
    /// End.
    pub to: Duration,
}

impl Tally {
    /// Records that a device computed from `from` to `to`.
    pub fn computed(&mut self, place: Place, from: Duration, to: Duration) {
        if self.spans.len() < SPANS {
            self.spans.push((place, Span { from, to }));
        }
    }
}

/// A bad value, and the finding of a second device.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    /// Kind of the round.
    pub kind: Kind,
    /// Index of the item in the round.
    pub item: usize,
    /// The first report.
    pub first: Bad,
    /// The result of the second check, if there was one.
    pub again: Option<Again>,
}

/// A value that is not finite or too large, and the device that computed it.
#[derive(Debug, Clone, PartialEq)]
pub struct Bad {
    /// The device that computed it.
    pub place: Place,
    /// Name of the tensor, or `the loss`.
    pub tensor: String,
    /// The value.
    pub value: f64,
}

/// The result of a second check.
#[derive(Debug, Clone, PartialEq)]
pub enum Again {
    /// The value is bad on this device too: the data is the cause.
    Also(Bad),
    /// The value is fine on this device: the first device is the cause.
    Not(Place),
}

/// A device by its display names.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The member's name.
    pub member: String,
    /// The device's name.
    pub device: String,
    /// Its numeric class.
    pub class: String,
}

/// An event for display.
#[derive(Debug, Clone, PartialEq)]
pub enum Note {
    /// Devices that joined were measured.
    Measured {
        /// The measured devices.
        devices: Vec<DeviceReport>,
    },
    /// The run waits for its first devices. Emitted at the first round and whenever the number changes.
    Waiting {
        /// Number present.
        have: usize,
        /// Number expected.
        want: usize,
        /// What is counted.
        counts: Counted,
    },
    /// Fewer devices than the minimum are left: no item is leased.
    Paused {
        /// Number of devices present.
        have: usize,
        /// The minimum.
        want: usize,
    },
    /// Enough devices are present again.
    Running {
        /// Number of devices present.
        have: usize,
    },
    /// A member's devices are ready.
    Joined {
        /// The member's name.
        member: String,
        /// Its devices.
        devices: Vec<Device>,
        /// Devices that it refused, with reasons.
        refused: Vec<String>,
    },
    /// A member left or was lost.
    Left {
        /// The member's name.
        member: String,
        /// The reason.
        reason: String,
        /// Number of items that are leased again.
        reopened: usize,
    },
    /// A device reported an error. It gets no lease until it has fallen back or asks again.
    Failed {
        /// The device.
        place: Place,
        /// The error.
        reason: String,
    },
    /// A device continues on another backend.
    Fallback {
        /// The device before.
        before: Place,
        /// The device now.
        now: Device,
        /// The error that caused it.
        reason: String,
    },
    /// An item in work was leased to a second device.
    Repeated {
        /// Index of the item.
        item: usize,
        /// The device that already computes it.
        holder: Place,
        /// The device that is expected to finish first.
        repeater: Place,
    },
    /// A device gets no work, because no other member has its class and so none can check it. Emitted once per class.
    Lone {
        /// The device.
        place: Place,
    },
    /// A step has fewer than 3 microbatches for each device. Emitted once.
    Few {
        /// Microbatches of the step.
        microbatches: usize,
        /// Number of devices.
        devices: usize,
    },
}

/// The work of a device so far. Departed devices are kept under their last name.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceReport {
    /// The device.
    pub place: Place,
    /// Its id while it is present.
    pub id: Option<DeviceId>,
    /// Training microbatches that it was granted.
    pub microbatches: u64,
    /// Tokens in those microbatches.
    pub tokens: u64,
    /// Compute time that it reported, over all kinds of rounds.
    pub busy: Duration,
    /// Measured training speed in microseconds per token.
    pub micros_per_token: Option<f64>,
    /// Tokens and seconds of its training microbatches, trials included.
    pub points: Points,
    /// Number of trials in `points`.
    pub trials: u64,
    /// Tokens and bytes in use of its training microbatches.
    pub memory: Used,
    /// Its network link, if the worker measured one.
    pub link: Option<Link>,
}

impl DeviceReport {
    /// Adds the work of `other` under the same name. Speed and link are taken from `other` only where they are unknown.
    pub(super) fn join(&mut self, other: &DeviceReport) {
        self.microbatches += other.microbatches;
        self.tokens += other.tokens;
        self.busy += other.busy;
        self.micros_per_token = self.micros_per_token.or(other.micros_per_token);
        self.points.join(&other.points);
        self.trials += other.trials;
        self.memory.join(&other.memory);
        self.link = self.link.or(other.link);
    }
}
