//! The messages between a coordinator and a worker. Every message is one frame, encoded with postcard. Bulk data
//! travels in pieces of at most [`PIECE`] bytes, so that no frame exceeds [`FRAME_LIMIT`]. Devices of the
//! coordinator's own process use the same messages over channels, without the encoding.
//!
//! A connection is a member. Work that was granted and not delivered belongs to the connection: when the connection
//! is lost, the coordinator leases that work again, and a worker that reconnects starts with no work.

mod places;
mod work;

pub use places::{Capacity, Needs, RelayPlan, SeatPlan};
pub use work::{Changed, Device, Lease, Packed, Trouble, Work};

use super::codec::in_place;
use crate::model::lora::LoraSpec;
use crate::model::stage::{LossSums, Traffic};
use crate::train::event::Link;
use crate::train::island::VECTORS;
use crate::train::sum::RewardSums;
pub use crate::train::trial::Trials;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// The version that both ends must have. The greetings and TLS agree on it before the first message.
pub use crate::net::PROTOCOL;

/// Most bytes of bulk data in one message.
pub const PIECE: usize = 1 << 20;

/// Bytes of a part of a model file that has a hash of its own.
pub const PART: usize = 256 << 10;

/// Most bytes of a frame after the handshake: a piece, or a microbatch of the manifest's size, with its header.
pub const FRAME_LIMIT: usize = PIECE + (64 << 10);

/// A blake3 hash, by which both ends check that they hold the same bytes.
pub type Hash = [u8; 32];

/// The number of a lease, never used twice in an epoch of a run.
pub type LeaseId = u64;

/// Messages from a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ToCoordinator {
    /// The first message of every connection.
    Hello(Hello),
    /// Requests a part of a model file. The answer is the [`ToWorker::Piece`]s that cover that part.
    Fetch {
        /// Index into [`Manifest::files`].
        file: u32,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// The model is loaded and every listed device has passed its self-test: the coordinator may send leases.
    Ready {
        /// The devices that take part. The position in this list is the device's index.
        devices: Vec<Device>,
        /// The devices that do not take part: one line each, with the reason.
        refused: Vec<String>,
    },
    /// The device accepts leases from now on. The newest `Ask` of a device replaces earlier ones.
    Ask {
        /// Its index in [`ToCoordinator::Ready`].
        device: u16,
        /// Number of leases that may queue behind the lease in work.
        room: u16,
        /// Number of leases that it computes at the same time, in order: more than one where several devices hold the
        /// model together.
        together: u16,
    },
    /// A training microbatch is computed and checked, and waits to be granted. Repeated until it is answered.
    Announce {
        /// The lease of this microbatch.
        lease: LeaseId,
        /// Hash of the parameters that it was computed with.
        parameters: Hash,
        /// Compute time in microseconds.
        micros: u64,
        /// Peak device memory in bytes, without the frozen weights; 0 if the device does not count memory.
        memory: u64,
    },
    /// A part of the running sum. All parts of a sum arrive in order, before its [`ToCoordinator::Sum`].
    SumPiece {
        /// The number of the sum, counted from 1 in each connection.
        sum: u64,
        /// Index of the first value in the flat layout.
        offset: u64,
        /// Number of values.
        len: u32,
        /// The values: `numeric::pack` of them, or little-endian f32 if the sum holds a single microbatch.
        packed: Packed,
    },
    /// The running sum is complete; the worker's next sum starts at zero. The worker keeps this sum until
    /// [`ToWorker::SumTaken`] and sends it again on request.
    Sum {
        /// The number of the sum.
        sum: u64,
        /// The training step.
        step: u64,
        /// The leases whose gradients are in the sum: all that were granted and are in no earlier sum, or the one of
        /// [`ToWorker::Deliver`].
        leases: Vec<LeaseId>,
        /// Total loss in fixed point.
        loss: i128,
        /// Total weight in fixed point.
        weight: i128,
        /// Number of supervised targets (for a classifier: rows).
        targets: u64,
        /// Sums of rewards, where a loss compares answers.
        rewards: RewardSums,
        /// Hash of the parameters that the gradients were computed with.
        parameters: Hash,
        /// Data that was copied to and from devices for these microbatches.
        traffic: Traffic,
        /// The set of relays that gets its parts; `None` if they were sent with [`ToCoordinator::SumPiece`].
        relays: Option<u64>,
    },
    /// An evaluation microbatch is computed.
    Score {
        /// The lease of this microbatch.
        lease: LeaseId,
        /// Loss, weight, targets and predictions of this microbatch.
        sums: LossSums,
        /// Hash of the parameters that it was computed with.
        parameters: Hash,
        /// Compute time in microseconds.
        micros: u64,
    },
    /// A prompt is answered.
    Answer {
        /// The lease of this prompt.
        lease: LeaseId,
        /// The new tokens.
        ids: Vec<u32>,
        /// Hash of the parameters that they were generated with.
        parameters: Hash,
    },
    /// A lease ended without a result: stopped by [`ToWorker::Cancel`], or handed back.
    Stopped {
        /// The lease.
        lease: LeaseId,
        /// Compute time spent on the lease, in microseconds.
        micros: u64,
    },
    /// A lease failed.
    Fault {
        /// The lease.
        lease: LeaseId,
        /// The cause.
        fault: Trouble,
    },
    /// A device continues on another backend and computes its unfinished work again there.
    Fallback {
        /// Index of the device.
        device: u16,
        /// The device as it is from now on.
        now: Device,
        /// The error of the previous backend, in one line.
        reason: String,
    },
    /// Answers [`ToWorker::Ping`].
    Pong {
        /// Number of the ping.
        number: u64,
    },
    /// The worker leaves by its own decision. Work that it held will not be delivered.
    Leave {
        /// The reason, in one line.
        reason: String,
    },
    /// Measurements of the devices of [`ToCoordinator::Ready`]. Sent once, directly after `Ready`.
    Measured {
        /// Trial microbatches of every device, in the order of `Ready`; empty for a device that was not measured.
        devices: Vec<Trials>,
        /// Measured bandwidth and round trip of the network link, if there is one.
        link: Option<Link>,
    },
    /// A seat of a line has sent `Ready` and listens for the seat above it; or a worker answers [`ToWorker::Listen`].
    Seated {
        /// Its port for other workers; 0 for the last seat of a line, which has none.
        port: u16,
    },
    /// A seat of a line is connected with its neighbours, or a relay with the others.
    Linked,
    /// What the worker's device can hold, where the manifest asks for it.
    Capacity(Capacity),
    /// The result of [`Work::Verify`].
    Verified {
        /// The lease of this microbatch.
        lease: LeaseId,
        /// Hash of its gradient in fixed point, loss, weight, targets and rewards: `cluster::digest`.
        digest: Hash,
        /// Hash of the parameters that it was computed with.
        parameters: Hash,
        /// Compute time in microseconds.
        micros: u64,
        /// Peak device memory in bytes, without the frozen weights; 0 if the device does not count memory.
        memory: u64,
    },
    /// The passes of a seat of a line for a training microbatch, in microseconds. The backward pass ends when this message
    /// is sent, before [`ToCoordinator::Announce`].
    Passes {
        /// The lease of this microbatch.
        lease: LeaseId,
        /// Time of the forward pass.
        forward: u64,
        /// Time between the passes.
        between: u64,
        /// Time of the backward pass.
        backward: u64,
    },
    /// A part of a total, from a relay. Its parts arrive in order.
    TotalPiece {
        /// Number of the total: [`ToWorker::Combine`].
        total: u64,
        /// Index of the first value in the relay's range.
        offset: u64,
        /// Number of values.
        len: u32,
        /// The values.
        packed: Packed,
    },
    /// A worker cannot be a relay of this set, or no longer.
    Unlinked {
        /// Number of the set: [`RelayPlan::set`]; 0 if the worker cannot listen.
        set: u64,
        /// The reason, in one line.
        reason: String,
    },
}

/// Messages from the coordinator.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ToWorker {
    /// Answers [`ToCoordinator::Hello`].
    Welcome(Box<Manifest>),
    /// A part of a model file.
    Piece {
        /// Index into [`Manifest::files`].
        file: u32,
        /// First byte.
        offset: u64,
        /// At most [`PIECE`] bytes.
        #[serde(with = "in_place")]
        bytes: Bytes,
    },
    /// A part of the parameters. Parts arrive in order.
    ParametersPiece {
        /// Number of optimizer steps that these parameters result from.
        step: u64,
        /// Index of the first value in the flat layout.
        offset: u64,
        /// Little-endian f32 values.
        #[serde(with = "in_place")]
        bytes: Bytes,
    },
    /// The parameters are complete; the running sum starts at zero.
    Parameters {
        /// Number of optimizer steps that these parameters result from.
        step: u64,
        /// blake3 of all values.
        hash: Hash,
    },
    /// Work for one device.
    Lease(Box<Lease>),
    /// The announced microbatch counts: the worker adds it to its running sum.
    Grant {
        /// The lease that was announced.
        lease: LeaseId,
    },
    /// Another lease of this microbatch was announced first, or the step is over: the worker drops the gradient.
    Deny {
        /// The lease that was announced.
        lease: LeaseId,
    },
    /// Stop working on this lease.
    Cancel {
        /// The lease.
        lease: LeaseId,
    },
    /// Send the running sum of this step once every announced microbatch of it has been answered.
    Flush {
        /// The step.
        step: u64,
        /// The set of relays to which its parts go; `None`: all of it goes to the coordinator.
        relays: Option<u64>,
    },
    /// The sum has arrived complete; it counts, with `--verify` at the end of the round.
    SumTaken {
        /// The number of the sum.
        sum: u64,
    },
    /// Answered by [`ToCoordinator::Pong`].
    Ping {
        /// Counts up.
        number: u64,
    },
    /// The conversation is over.
    Bye(Bye),
    /// To a seat of a line: the address of the seat below it, to which it connects.
    Below {
        /// Its host; empty for the coordinator's.
        host: String,
        /// Its port.
        port: u16,
    },
    /// Answers [`ToCoordinator::Capacity`]: the worker's place in a line; `None` if it holds the whole model.
    Sit(Option<SeatPlan>),
    /// The announced microbatch counts, and its gradient is wanted in a sum of its own, which the worker sends at once.
    Deliver {
        /// The lease that was announced.
        lease: LeaseId,
    },
    /// A part of the parameters, by those that the worker has. Parts arrive in order.
    ParametersChange {
        /// Number of optimizer steps that the new parameters result from.
        step: u64,
        /// Index of the first value in the flat layout.
        offset: u64,
        /// Number of values.
        len: u32,
        /// The new values, little-endian f32: only within the coordinator's process.
        #[serde(skip)]
        values: Bytes,
        /// How to compute them from those of the step before.
        changed: Changed,
    },
    /// Open a port for other workers. The answer is [`ToCoordinator::Seated`] or [`ToCoordinator::Unlinked`].
    Listen,
    /// The worker's place among relays, which connect with each other; `None`: it is a relay no longer. The answer to a place
    /// is [`ToCoordinator::Linked`] or [`ToCoordinator::Unlinked`].
    Relay(Option<Box<RelayPlan>>),
    /// To each relay: add these sums, and send the total of your range as [`ToCoordinator::TotalPiece`]s.
    Combine {
        /// Number of the total, counted from 1 in each set of relays.
        total: u64,
        /// Number of microbatches in the round.
        of: u32,
        /// The sums: place of the worker, and number of its sum.
        sums: Vec<(u16, u64)>,
    },
    /// A part of a relay's range of the parameters, which it passes on to all other relays. Parts arrive in order.
    Spread {
        /// Number of optimizer steps that these parameters result from.
        step: u64,
        /// Index of the first value in the flat layout.
        offset: u64,
        /// Number of values.
        len: u32,
        /// Differences from the parameters before: `numeric::difference`.
        #[serde(with = "in_place")]
        packed: Bytes,
    },
}

/// A worker's identity, build and requirements.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL`] of its build.
    pub protocol: u16,
    /// Version of its build, for messages.
    pub version: String,
    /// `numeric::REVISION` of its build.
    pub numerics: u32,
    /// Random, drawn once per worker process or kept in its cache folder: identifies a worker that reconnects.
    pub identity: [u8; 16],
    /// Host name and process id, for display.
    pub name: String,
    /// Content hash of the model that the worker's user named, if any.
    pub model: Option<String>,
    /// Training options that the worker's user typed, as name and value of run.yaml. They must equal the run's.
    pub options: Vec<(String, String)>,
    /// The run and epoch in which this worker took part before, if any.
    pub before: Option<(String, u64)>,
}

/// Everything that a worker needs to build the model and adapter of the run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The run's id, drawn when its output folder was created.
    pub run: String,
    /// Raised at every start of the coordinator on that folder.
    pub epoch: u64,
    /// The name that the coordinator gives this worker.
    pub name: String,
    /// The model's name, for display.
    pub model: String,
    /// Content hash of the model's files.
    pub model_hash: String,
    /// The model's files.
    pub files: Vec<ModelFile>,
    /// Where workers fetch parts of files: lists of the hashes of each [`PART`] of a file, named `FILE.parts`. They are
    /// fetched like files, numbered after these.
    pub parts: Vec<ModelFile>,
    /// A classifier's labels.
    pub labels: Option<Vec<String>>,
    /// Whether they are those of tokens.
    pub tags: bool,
    /// Class weights of a classifier's loss.
    pub class_weights: Option<Vec<f32>>,
    /// How every worker quantizes the loaded model: text of `model::quantised::Recipe`.
    pub quantize: Option<String>,
    /// Number of rows of the embedding, with those of added tokens.
    pub vocabulary: u64,
    /// Configuration of the adapter.
    pub lora: LoraSpec,
    /// Number of values in the flat layout.
    pub parameters: u64,
    /// blake3 of the flat layout: names and shapes.
    pub layout: Hash,
    /// Tokens of the longest microbatch that a lease can hold.
    pub tokens: u64,
    /// The numeric type that the run's user typed. Every device must compute in it.
    pub dtype: Option<String>,
    /// `numeric::fixed::FRACTION_BITS`.
    pub fraction_bits: u32,
    /// Bits to which gradients are rounded before they are added; 0: none are.
    pub sum_bits: u32,
    /// Whether the moments travel with the parameters, for islands: three vectors of that layout, `train::island`.
    pub moments: bool,
    /// Number of steps by which gradients are delayed: the worker keeps the parameters of as many steps before the newest.
    pub delay: u64,
    /// Number of steps of the whole run.
    pub steps: u64,
    /// Either side treats the other as lost after this many milliseconds without a byte.
    pub silence_millis: u64,
    /// Most seats of a line, where workers hold the model together: the worker reports its [`Capacity`] for them.
    pub seats: Option<u16>,
}

impl Manifest {
    /// Number of values of parameters and of sums.
    pub fn values(&self) -> u64 {
        self.parameters.saturating_mul(if self.moments { VECTORS as u64 } else { 1 })
    }
}

/// A file of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelFile {
    /// A plain file name, without folders.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// blake3 of its contents.
    pub hash: Hash,
}

/// Why a conversation ends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Bye {
    /// The run is complete.
    Done,
    /// The coordinator stops and will start again: the worker dials again.
    Later {
        /// The reason, in one line.
        reason: String,
    },
    /// The run halted on a bad value. The worker exits with code 3.
    Halted {
        /// The line that is shown to the coordinator's user.
        reason: String,
    },
    /// This worker may not take part. It exits with code 78.
    Refused {
        /// One line: the cause and the remedy.
        reason: String,
    },
    /// This worker was removed: its sum did not arrive, or it broke the protocol.
    Out {
        /// The reason, in one line.
        reason: String,
        /// Whether the worker may dial again.
        again: bool,
    },
}
