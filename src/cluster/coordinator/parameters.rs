//! The parameters on their way to everybody: turned into bytes, hashed and cut into pieces once, however many
//! members there are, and while the later ones are still being made. Every message holds a part of the same memory.
//! Pieces count for nothing before the message that closes them, so what is sent ahead needs no promise.

use super::super::machine::MemberId;
use super::super::message::{Hash, PIECE, ToWorker};
use super::super::sum_chunk::little_endian;
use super::outbox::Outbox;
use bytes::Bytes;
use std::collections::BTreeSet;

/// Parameters of which some are there.
pub(super) struct Coming {
    step: u64,
    pieces: Vec<(u64, Bytes)>,
    values: usize,
    hasher: blake3::Hasher,
    /// Members that get the pieces as they come.
    to: BTreeSet<MemberId>,
}

impl Coming {
    pub fn new(step: u64, to: BTreeSet<MemberId>) -> Self {
        Coming { step, pieces: Vec::new(), values: 0, hasher: blake3::Hasher::new(), to }
    }

    /// Whether `stretch`, from value `from` on, is what comes next.
    pub fn follows(&self, step: u64, from: usize) -> bool {
        self.step == step && self.values == from
    }

    /// Adds a stretch, and gives it to those that wait for it, found by `outbox`; returns the bytes.
    pub fn add<'o>(&mut self, stretch: &[f32], outbox: impl Fn(MemberId) -> Option<&'o Outbox>) -> u64 {
        let mut said = 0;
        for values in stretch.chunks(PIECE / 4) {
            let (offset, bytes) = (self.values as u64, little_endian(values));
            // While it is in the cache, and on this thread: the others make what comes next.
            self.hasher.update(&bytes);
            self.values += values.len();
            for outbox in self.to.iter().filter_map(|member| outbox(*member)) {
                outbox.say(ToWorker::ParametersPiece { step: self.step, offset, bytes: bytes.clone() });
                said += bytes.len() as u64;
            }
            self.pieces.push((offset, bytes));
        }
        said
    }

    /// All of them are there.
    pub fn whole(self) -> Broadcast {
        let hash = *self.hasher.finalize().as_bytes();
        Broadcast { step: self.step, hash, pieces: self.pieces, begun: self.to }
    }
}

/// The parameters after a step.
#[derive(Debug)]
pub(super) struct Broadcast {
    /// Steps that were taken.
    pub step: u64,
    /// blake3 of the bytes.
    pub hash: Hash,
    pieces: Vec<(u64, Bytes)>,
    /// Members that have got the pieces, and not yet the message that closes them.
    begun: BTreeSet<MemberId>,
}

impl Broadcast {
    /// Queues all of them for a member, or what it has not got yet; returns the bytes.
    pub fn send(&mut self, member: MemberId, outbox: &Outbox) -> u64 {
        let mut said = 0;
        if !self.begun.remove(&member) {
            for (offset, bytes) in &self.pieces {
                let (step, offset, bytes) = (self.step, *offset, bytes.clone());
                said += bytes.len() as u64;
                outbox.say(ToWorker::ParametersPiece { step, offset, bytes });
            }
        }
        outbox.say(ToWorker::Parameters { step: self.step, hash: self.hash });
        said
    }
}
