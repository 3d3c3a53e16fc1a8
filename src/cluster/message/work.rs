//! The work of a device, its result, and why it may fail.

use super::LeaseId;
use crate::cluster::codec::in_place;
use crate::model::stage::{Microbatch, Sampling};
use crate::numeric::{difference, pack};
use crate::train::island::Island;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A device of a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Device {
    /// Display name, such as `cpu 0`.
    pub name: String,
    /// Its numeric class.
    pub class: String,
}

/// A unit of work for one device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Lease {
    /// Number of the lease.
    pub lease: LeaseId,
    /// Index of the worker's device.
    pub device: u16,
    /// Steps behind the parameters to compute with. The worker has checked the hash of those parameters.
    pub after: u64,
    /// Number of microbatches in the round. No gradient value may exceed `fixed::cap` of it.
    pub of: u32,
    /// The work.
    pub work: Work,
}

/// The work of a lease.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Work {
    /// Forward and backward. The result is announced, then granted or denied.
    Train(Microbatch),
    /// Computes a microbatch again in which a device reported a bad value, to learn whether the value is bad here
    /// too. Forward only if the microbatch's step equals the step of the parameters (an evaluation), else forward
    /// and backward. The answer is `ToCoordinator::Announce` (no bad value) or `ToCoordinator::Fault`.
    Recheck(Microbatch),
    /// Forward only. The answer is `ToCoordinator::Score`.
    Eval(Microbatch),
    /// Continue a prompt. The answer is `ToCoordinator::Answer`.
    Prompt {
        /// Tokens of the prompt.
        ids: Vec<u32>,
        /// How the next token is chosen.
        sampling: Sampling,
    },
    /// Computes a training microbatch of another worker again. The answer is `ToCoordinator::Verified`, or
    /// `ToCoordinator::Fault` if a value is bad.
    Verify(Microbatch),
    /// As [`Work::Eval`], with the most probable token in the place of each supervised target.
    Predict(Microbatch),
    /// Several optimizer steps. The result is announced, then granted or denied, as a gradient is.
    Island(Island),
    /// Takes the steps of an island again, to learn whether a bad value is bad here too: as [`Work::Recheck`].
    RecheckIsland(Island),
    /// Takes the steps of an island of another worker again: as [`Work::Verify`].
    VerifyIsland(Island),
}

impl Work {
    /// The microbatch; a prompt is none.
    pub fn batch(&self) -> Option<&Microbatch> {
        match self {
            Work::Train(batch)
            | Work::Recheck(batch)
            | Work::Eval(batch)
            | Work::Verify(batch)
            | Work::Predict(batch) => Some(batch),
            Work::Prompt { .. } => None,
            Work::Island(_) | Work::RecheckIsland(_) | Work::VerifyIsland(_) => None,
        }
    }

    /// The island, where it is one.
    pub fn island(&self) -> Option<&Island> {
        match self {
            Work::Island(island) | Work::RecheckIsland(island) | Work::VerifyIsland(island) => Some(island),
            _ => None,
        }
    }

    /// The tokens of the microbatch, of the island or of the prompt.
    pub fn tokens(&self) -> u64 {
        match (self, self.island()) {
            (Work::Prompt { ids, .. }, _) => ids.len() as u64,
            (_, Some(island)) => island.tokens(),
            (_, None) => self.batch().map_or(0, |batch| batch.ids.len() as u64),
        }
    }

    /// The rows of the microbatch or of the island.
    pub fn rows(&self) -> Vec<u64> {
        match (self.batch(), self.island()) {
            (Some(batch), _) => batch.rows.clone(),
            (None, Some(island)) => island.rows(),
            (None, None) => Vec::new(),
        }
    }
}

/// Values of a running sum.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Packed {
    /// Fixed point, `numeric::pack`.
    Fixed(#[serde(with = "in_place")] Bytes),
    /// Little-endian f32 of a single microbatch. The coordinator converts them to fixed point.
    Single(#[serde(with = "in_place")] Bytes),
}

/// Values of new parameters, by those that the worker has.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Changed {
    /// What is added to each value in f32, in fixed point: `numeric::pack`.
    Added(#[serde(with = "in_place")] Bytes),
    /// Differences of their bits: `numeric::difference`.
    Bits(#[serde(with = "in_place")] Bytes),
}

impl Changed {
    /// The packed values.
    pub fn bytes(&self) -> &Bytes {
        let (Changed::Added(bytes) | Changed::Bits(bytes)) = self;
        bytes
    }

    /// Those of some of the `len` values; `None` if the bytes are not a packing of as many.
    pub fn part(&self, len: usize, range: Range<usize>) -> Option<Self> {
        let mut part = Vec::new();
        match self {
            _ if range == (0..len) => Some(self.clone()),
            Changed::Added(packed) => {
                let mut changes = vec![0; len];
                pack::set(packed, &mut changes, i64::MAX).ok()?;
                pack::pack(changes.get(range)?, &mut part);
                Some(Changed::Added(part.into()))
            }
            Changed::Bits(packed) => {
                // Differences from zeros are the values' own bits.
                let (zeros, mut bits) = (vec![0.0; len], Vec::new());
                difference::unpack(packed, &zeros, &mut bits).ok()?;
                let of = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
                difference::pack(&of(bits.get(range.clone())?), &of(&zeros[range]), &mut part);
                Some(Changed::Bits(part.into()))
            }
        }
    }
}

/// Why a lease failed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Trouble {
    /// The device failed. The lease is open again, and the device falls back or leaves.
    Device {
        /// The error, in one line.
        reason: String,
    },
    /// A value is not finite, or too large for exact sums: the run halts.
    Value {
        /// Name of the tensor in the flat layout, or another value by a name that begins with `the`: `the loss`, `the
        /// hidden states after layer 19`.
        tensor: String,
        /// The value.
        value: f64,
    },
}
