//! What comes out of the machine, to be carried out in the order given. Actions never fail for the machine: what
//! cannot be sent any more is dropped, and the driver's `Lost` follows.

use super::super::message::{Device, LeaseId, ToWorker};
use super::event::{DeviceId, Kind, MemberId};
use crate::model::memory::Used;
use crate::numeric::line::Points;
use crate::train::event::Link;
use std::collections::BTreeMap;
use std::time::Duration;

/// Something that the driver has to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Send the parameters: `ParametersPiece`s, then `Parameters`. Later actions for this member are sent
    /// behind them.
    SendParameters {
        /// To whom.
        member: MemberId,
    },
    /// Send `ToWorker::Lease` with the item's work: for [`Purpose::Round`] what the round's kind says, for
    /// [`Purpose::Recheck`] `Work::Recheck`.
    Lease {
        /// To which device.
        device: DeviceId,
        /// The lease's number.
        lease: LeaseId,
        /// The item of the round.
        item: usize,
        /// What is wanted of it.
        purpose: Purpose,
    },
    /// Send this message as it is.
    Say {
        /// To whom.
        member: MemberId,
        /// `Grant`, `Deny`, `Cancel`, `Flush`, `SumTaken` or `Bye`.
        message: ToWorker,
    },
    /// The `Sum` that this tick was given counts: its loss, weight and targets are added to the step's, and the
    /// pieces that were added for it need not be kept any longer.
    TakeSum {
        /// Whose.
        member: MemberId,
        /// Its number.
        sum: u64,
    },
    /// The `Score` or `Answer` that this tick was given is the result of this item.
    TakeResult {
        /// The item of the round.
        item: usize,
    },
    /// Whatever has been added of a sum of this member that was not taken is subtracted again; nothing, if
    /// there is none.
    TakeBack {
        /// Whose.
        member: MemberId,
    },
    /// Close the connection as soon as what was said is sent. The machine has forgotten the member already; a
    /// `Lost` for it may come or not.
    Close {
        /// It.
        member: MemberId,
    },
    /// Every item of the round has been counted exactly once: the total is whole.
    RoundDone(Tally),
    /// A bad value: the run ends with exit code 3, everybody is told `Bye::Halted`. The machine does nothing
    /// more.
    Halt(Finding),
    /// Too few devices for too long: the driver saves, says `Bye::Later` and exits with 75. Nothing more is to
    /// be expected of this machine.
    GiveUp {
        /// Devices that are here.
        have: usize,
        /// Devices that were waited for.
        want: usize,
    },
    /// Something to be shown, and kept in metrics.jsonl.
    Note(Note),
}

/// Why an item is leased.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// For its result.
    Round,
    /// Only to learn whether its values are bad here too.
    Recheck,
}

/// What happened in a round.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tally {
    /// Outstanding items that were given to a second device.
    pub repeats: u64,
    /// Leases that were called back.
    pub cancels: u64,
    /// Tokens that were computed, so far as is known, and not counted: by losers of a repeat, and by members
    /// that were lost before their sum arrived.
    pub wasted_tokens: u64,
    /// Leases of lost or failing devices that were given out again.
    pub reopened: u64,
    /// Messages that were late, repeated or out of place, and changed nothing.
    pub ignored: u64,
    /// Items that count, by the numeric class that computed them.
    pub classes: BTreeMap<String, u64>,
    /// From the round's begin to the last result (for training: the last grant).
    pub computing: Duration,
    /// From there to the end: sums that arrived while nobody computed.
    pub exposed: Duration,
    /// From the first request for a sum to the last grant: sums that travelled while others computed.
    pub hidden: Duration,
    /// When items were computed, by what devices say of how long; the first few thousand of a round.
    pub spans: Vec<(Place, Span)>,
}

/// So many are kept of a round: they are for pictures.
pub const SPANS: usize = 4096;

/// Computing, since the round began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Its beginning.
    pub from: Duration,
    /// Its end.
    pub to: Duration,
}

impl Tally {
    /// Notes that a device computed from `from` to `to`.
    pub fn computed(&mut self, place: Place, from: Duration, to: Duration) {
        if self.spans.len() < SPANS {
            self.spans.push((place, Span { from, to }));
        }
    }
}

/// A bad value, and what a second device found.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    /// The round's kind.
    pub kind: Kind,
    /// The item.
    pub item: usize,
    /// Where it was found first.
    pub first: Bad,
    /// Where it was looked for again, if it could be.
    pub again: Option<Again>,
}

/// A value that is not finite or too large, and who computed it.
#[derive(Debug, Clone, PartialEq)]
pub struct Bad {
    /// The device.
    pub place: Place,
    /// The tensor, or `the loss`.
    pub tensor: String,
    /// The value.
    pub value: f64,
}

/// The second look.
#[derive(Debug, Clone, PartialEq)]
pub enum Again {
    /// It is bad there too: data.
    Also(Bad),
    /// It is not: the first device.
    Not(Place),
}

/// A device, for people.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The member's name.
    pub member: String,
    /// The device's name.
    pub device: String,
    /// Its numeric class.
    pub class: String,
}

/// Something to be shown.
#[derive(Debug, Clone, PartialEq)]
pub enum Note {
    /// Devices that came were measured.
    Measured {
        /// What they do.
        devices: Vec<DeviceReport>,
    },
    /// The run waits for its first devices; said at the first round, and whenever the number changes.
    Waiting {
        /// Devices that are here.
        have: usize,
        /// Devices that are expected.
        want: usize,
    },
    /// Fewer than the minimum are left: nothing is given out.
    Paused {
        /// Devices that are here.
        have: usize,
        /// The minimum.
        want: usize,
    },
    /// Enough are here (again).
    Running {
        /// Devices that are here.
        have: usize,
    },
    /// A member's devices are ready.
    Joined {
        /// The member's name.
        member: String,
        /// Its devices.
        devices: Vec<Device>,
        /// Devices that it turned away, with reasons.
        refused: Vec<String>,
    },
    /// A member is gone.
    Left {
        /// The member's name.
        member: String,
        /// Why.
        reason: String,
        /// Items that are given out again.
        reopened: usize,
    },
    /// A device gave an error; it takes nothing until it has fallen back or asks again.
    Failed {
        /// The device.
        place: Place,
        /// What happened.
        reason: String,
    },
    /// A device is another one now.
    Fallback {
        /// What it was.
        before: Place,
        /// What it is.
        now: Device,
        /// Why.
        reason: String,
    },
    /// An outstanding item was given to a second device.
    Repeated {
        /// The item.
        item: usize,
        /// Who has it.
        holder: Place,
        /// Who should finish first.
        repeater: Place,
    },
    /// A step has fewer than 3 microbatches for each device. Said once.
    Few {
        /// Microbatches of the step.
        microbatches: usize,
        /// Devices.
        devices: usize,
    },
}

/// What a device has done so far; devices that are gone are kept, under the names that they had.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceReport {
    /// Which.
    pub place: Place,
    /// Its number, while it is here.
    pub id: Option<DeviceId>,
    /// Training microbatches that it was granted.
    pub microbatches: u64,
    /// Tokens in them.
    pub tokens: u64,
    /// Time that it says it computed, in every kind of round.
    pub busy: Duration,
    /// Measured speed in training, microseconds per token.
    pub micros_per_token: Option<f64>,
    /// Tokens and seconds of its training microbatches, trials included.
    pub points: Points,
    /// Trials among them.
    pub trials: u64,
    /// Tokens and bytes of them.
    pub memory: Used,
    /// How it is reached, where it said so.
    pub link: Option<Link>,
}
