//! What a coordinator and a worker say to each other. Every message is one frame, encoded with postcard; bulk
//! data travels in pieces of at most [`PIECE`] bytes, so that no frame needs more than [`FRAME_LIMIT`]. Devices
//! of the coordinator's own process hold the same conversation over channels, without the encoding.
//!
//! A connection is a member. What it was granted and has not delivered belongs to the connection: once it is
//! gone the coordinator gives that work out again, and the worker, however it comes back, begins with nothing.

use super::codec::in_place;
pub use super::trials::Trials;
use crate::model::lora::LoraSpec;
use crate::model::stage::{LossSums, Microbatch, Sampling, Traffic};
use crate::train::event::Link;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// The version that both ends must have; greetings and TLS have agreed on it before the first message.
pub use crate::net::PROTOCOL;

/// Most bytes of bulk data in one message.
pub const PIECE: usize = 1 << 20;

/// Most bytes of a frame after the handshake: a piece, or a microbatch of the manifest's size, and its header.
pub const FRAME_LIMIT: usize = PIECE + (64 << 10);

/// blake3 of something that both ends must have the same of.
pub type Hash = [u8; 32];

/// A lease's number, never used twice in a run's epoch.
pub type LeaseId = u64;

/// From a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ToCoordinator {
    /// Always first.
    Hello(Hello),
    /// Wants a part of a file of the model; answered by [`ToWorker::Piece`]s that cover it.
    Fetch {
        /// Index into [`Manifest::files`].
        file: u32,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// The model is loaded and every device that is named here has passed its self-test: leases may come.
    Ready {
        /// The devices that take part, in the order of their indices.
        devices: Vec<Device>,
        /// Devices that do not, each with one line that says why.
        refused: Vec<String>,
    },
    /// The device takes leases from now on; the newest of these counts.
    Ask {
        /// Its index in [`ToCoordinator::Ready`].
        device: u16,
        /// Leases that may wait behind the one that it works on.
        room: u16,
    },
    /// A training microbatch is finished, checked, and waits to be granted. Said again until it is answered.
    Announce {
        /// Its lease.
        lease: LeaseId,
        /// Hash of the parameters it was computed with.
        parameters: Hash,
        /// Time that it took to compute, in microseconds.
        micros: u64,
        /// The most bytes of the device that it had in use at once, frozen weights apart; 0 where nobody counts.
        memory: u64,
    },
    /// A part of the running sum; all parts of one sum come in order before their [`ToCoordinator::Sum`].
    SumPiece {
        /// Numbers the member's sums, from 1.
        sum: u64,
        /// First value in the flat layout.
        offset: u64,
        /// Values.
        len: u32,
        /// `numeric::pack` of them, or little-endian f32 where the sum is of a single microbatch.
        packed: Packed,
    },
    /// The running sum is complete; the worker's next one begins at zero. Kept until
    /// [`ToWorker::SumTaken`], and sent again when asked for.
    Sum {
        /// Its number.
        sum: u64,
        /// The step.
        step: u64,
        /// Leases whose gradients are in it: all that were granted and not in an earlier sum.
        leases: Vec<LeaseId>,
        /// Losses in fixed point, added up.
        loss: i128,
        /// Weights in fixed point, added up.
        weight: i128,
        /// Supervised targets (for a classifier: rows).
        targets: u64,
        /// Hash of the parameters they were computed with.
        parameters: Hash,
        /// What went to devices and back for them.
        traffic: Traffic,
    },
    /// An evaluation microbatch is finished.
    Score {
        /// Its lease.
        lease: LeaseId,
        /// Loss, weight, targets and predictions of this microbatch.
        sums: LossSums,
        /// Hash of the parameters it was computed with.
        parameters: Hash,
        /// Time that it took to compute, in microseconds.
        micros: u64,
    },
    /// A prompt is answered.
    Answer {
        /// Its lease.
        lease: LeaseId,
        /// The new tokens.
        ids: Vec<u32>,
        /// Hash of the parameters it was made with.
        parameters: Hash,
    },
    /// A lease was stopped by [`ToWorker::Cancel`], or is handed back.
    Stopped {
        /// It.
        lease: LeaseId,
        /// Time that was spent on it, in microseconds.
        micros: u64,
    },
    /// A lease gave no result.
    Fault {
        /// It.
        lease: LeaseId,
        /// What happened.
        fault: Trouble,
    },
    /// A device now computes on another backend; what it was working on is done again there.
    Fallback {
        /// Its index.
        device: u16,
        /// What it is now.
        now: Device,
        /// One line: what happened to the one before.
        reason: String,
    },
    /// Answers [`ToWorker::Ping`].
    Pong {
        /// The ping's number.
        number: u64,
    },
    /// Leaves of its own will; nothing that it held will come.
    Leave {
        /// One line.
        reason: String,
    },
    /// What the devices of [`ToCoordinator::Ready`] were measured to need; said once, right after it.
    Measured {
        /// What trial microbatches took, for every device in its order; a device that was not measured has none.
        devices: Vec<Trials>,
        /// The way here, where there is one.
        link: Option<Link>,
    },
}

/// From the coordinator.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ToWorker {
    /// Answers [`ToCoordinator::Hello`].
    Welcome(Box<Manifest>),
    /// A part of a file of the model.
    Piece {
        /// Index into [`Manifest::files`].
        file: u32,
        /// First byte.
        offset: u64,
        /// At most [`PIECE`].
        #[serde(with = "in_place")]
        bytes: Bytes,
    },
    /// A part of the parameters; parts come in order.
    ParametersPiece {
        /// The parameters after this many steps.
        step: u64,
        /// First value in the flat layout.
        offset: u64,
        /// Little-endian f32.
        #[serde(with = "in_place")]
        bytes: Bytes,
    },
    /// The parameters are complete; the running sum begins at zero.
    Parameters {
        /// After this many steps.
        step: u64,
        /// blake3 of all of them.
        hash: Hash,
    },
    /// Work for a device.
    Lease(Box<Lease>),
    /// The announced microbatch counts: add it to the running sum.
    Grant {
        /// Its lease.
        lease: LeaseId,
    },
    /// Somebody else was first (or the step is over): drop it.
    Deny {
        /// Its lease.
        lease: LeaseId,
    },
    /// Stop working on it.
    Cancel {
        /// Its lease.
        lease: LeaseId,
    },
    /// Send the running sum of this step once every announced microbatch of it has been answered.
    Flush {
        /// The step.
        step: u64,
    },
    /// The sum has arrived whole and counts.
    SumTaken {
        /// Its number.
        sum: u64,
    },
    /// Answered by [`ToCoordinator::Pong`].
    Ping {
        /// Counts up.
        number: u64,
    },
    /// The conversation is over.
    Bye(Bye),
}

/// Who a worker is, and what it brings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL`] of its build.
    pub protocol: u16,
    /// Its build's version, for messages.
    pub version: String,
    /// `numeric::REVISION` of its build.
    pub numerics: u32,
    /// Drawn once per worker process (or kept in its cache folder): a worker that comes back is the same one.
    pub identity: [u8; 16],
    /// For people: host name and process id.
    pub name: String,
    /// Content hash of the model that its user named, if any.
    pub model: Option<String>,
    /// Training options that its user typed, which must be those of the run: name and value as in run.yaml.
    pub options: Vec<(String, String)>,
    /// The run and epoch that it took part in before, if any.
    pub before: Option<(String, u64)>,
}

/// All that a worker needs to build what the run trains.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The run's id, drawn when its output folder was made.
    pub run: String,
    /// Raised at every start of the coordinator on that folder.
    pub epoch: u64,
    /// What the coordinator calls this worker.
    pub name: String,
    /// The model's name, for people.
    pub model: String,
    /// Content hash of the model's files.
    pub model_hash: String,
    /// Its files.
    pub files: Vec<ModelFile>,
    /// A classifier's labels.
    pub labels: Option<Vec<String>>,
    /// Class weights of its loss.
    pub class_weights: Option<Vec<f32>>,
    /// How every worker quantises the model once it has its files: `model::quantised::Recipe`.
    pub quantize: Option<String>,
    /// The adapter's shape.
    pub lora: LoraSpec,
    /// Values in the flat layout.
    pub parameters: u64,
    /// blake3 of the flat layout: names and shapes.
    pub layout: Hash,
    /// The longest microbatch that a lease can hold.
    pub tokens: u64,
    /// The numeric type that the run's user typed, which binds every device.
    pub dtype: Option<String>,
    /// `numeric::fixed::FRACTION_BITS`.
    pub fraction_bits: u32,
    /// Steps of the whole run.
    pub steps: u64,
    /// A worker that has heard nothing for this long may take the coordinator for gone, and the other way round.
    pub silence_millis: u64,
}

/// A file of the model, by its path within the model's folder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelFile {
    /// A plain file name.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// blake3 of its contents.
    pub hash: Hash,
}

/// A device that computes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Device {
    /// For people: `cpu 0`.
    pub name: String,
    /// Its numeric class.
    pub class: String,
}

/// A unit of work, given to one device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Lease {
    /// Its number.
    pub lease: LeaseId,
    /// The worker's device.
    pub device: u16,
    /// The parameters to use: those after this many steps, whose hash the worker has checked.
    pub after: u64,
    /// Microbatches of this round: none of them may exceed `fixed::cap` of it.
    pub of: u32,
    /// What to do.
    pub work: Work,
}

/// What is to be computed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Work {
    /// Forward and backward; announced, then granted or denied.
    Train(Microbatch),
    /// Once more what somebody found a bad value in: forward and backward, or, where its step is the parameters'
    /// own and so it is of an evaluation, forward; only whether it is bad here too is wanted: answered by [`ToCoordinator::Announce`] (it is fine) or [`ToCoordinator::Fault`].
    Recheck(Microbatch),
    /// Forward; scored.
    Eval(Microbatch),
    /// Continue a prompt; answered.
    Prompt {
        /// The prompt.
        ids: Vec<u32>,
        /// How tokens are chosen.
        sampling: Sampling,
    },
}

/// Values of a running sum.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Packed {
    /// Fixed point, `numeric::pack`.
    Fixed(#[serde(with = "in_place")] Bytes),
    /// Little-endian f32 of a single microbatch, to be converted by whoever adds it.
    Single(#[serde(with = "in_place")] Bytes),
}

/// Why a lease gave no result, and so what follows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Trouble {
    /// The device failed: the lease is free again; the device falls back or leaves.
    Device {
        /// One line.
        reason: String,
    },
    /// A value is not finite, or too large for exact sums: the run halts.
    Value {
        /// The tensor of the flat layout, or `the loss`.
        tensor: String,
        /// It.
        value: f64,
    },
}

/// How a conversation ends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Bye {
    /// The run is complete.
    Done,
    /// The coordinator stops and will be back: dial again.
    Later {
        /// One line.
        reason: String,
    },
    /// The run halted on a bad value; the worker ends with exit code 3.
    Halted {
        /// The line that the coordinator's user reads.
        reason: String,
    },
    /// This worker may not take part; it ends with exit code 78.
    Refused {
        /// One line: what, and what to do.
        reason: String,
    },
    /// This worker was taken out (silent, wrong result); dialling again is allowed where `again` is true.
    Out {
        /// One line.
        reason: String,
        /// Whether it may come back.
        again: bool,
    },
}
