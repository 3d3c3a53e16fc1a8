//! The parameters on their way to the members. They are converted to bytes, hashed and cut into pieces once for all
//! members, while the later ones are still being computed. All messages share the same memory. Pieces have no effect
//! before the message that completes them, so they can be sent ahead without commitment.

use super::super::machine::MemberId;
use super::super::message::{Hash, PIECE, ToWorker};
use super::super::sum_chunk::little_endian;
use super::outbox::Outbox;
use crate::numeric::fixed::CELL;
use crate::numeric::{fixed, pack};
use crate::train::optimizer_step::Stretch;
use bytes::Bytes;
use std::collections::BTreeSet;
use std::ops::Range;

/// Parameters that are partly computed.
pub(super) struct Coming {
    step: u64,
    pieces: Vec<(u64, Bytes)>,
    values: usize,
    hasher: blake3::Hasher,
    /// Members that get the pieces as they are made.
    to: BTreeSet<MemberId>,
    /// Members that get the values of these ranges, and pass them on to each other.
    relays: Vec<(MemberId, Range<usize>)>,
}

impl Coming {
    pub fn new(step: u64, mut to: BTreeSet<MemberId>, relays: Vec<(MemberId, Range<usize>)>) -> Self {
        to.retain(|member| relays.iter().all(|(relay, _)| relay != member));
        Coming { step, pieces: Vec::new(), values: 0, hasher: blake3::Hasher::new(), to, relays }
    }

    /// Whether values from index `from` on come next.
    pub fn follows(&self, step: u64, from: usize) -> bool {
        self.step == step && self.values == from
    }

    /// Adds a stretch of values and sends it to the waiting members, found by `outbox`. Returns the number of bytes
    /// sent; a line of workers is counted as one worker.
    pub fn add<'o>(&mut self, stretch: Stretch, outbox: impl Fn(MemberId) -> Option<&'o Outbox>) -> u64 {
        let (mut said, step) = (0, self.step);
        let mut changes = stretch.changes.chunks(PIECE / 4);
        for values in stretch.values.chunks(PIECE / 4) {
            let (offset, bytes) = (self.values as u64, little_endian(values));
            // Hashed here while the bytes are in the cache; other threads compute the next values.
            self.hasher.update(&bytes);
            self.values += values.len();
            let changes = changes.next().filter(|_| !self.to.is_empty());
            let (message, size) = match changes.and_then(packed) {
                Some(packed) => {
                    let (len, size, values) = (values.len() as u32, packed.len(), bytes.clone());
                    (ToWorker::ParametersChange { step, offset, len, values, packed }, size)
                }
                None => {
                    let bytes = bytes.clone();
                    let size = bytes.len();
                    (ToWorker::ParametersPiece { step, offset, bytes }, size)
                }
            };
            for outbox in self.to.iter().filter_map(|member| outbox(*member)) {
                outbox.say(message.clone());
                said += size as u64;
            }
            for (member, range) in &self.relays {
                let (from, to) = (range.start.max(offset as usize), range.end.min(self.values));
                let Some(outbox) = outbox(*member).filter(|_| from < to) else { continue };
                for from in (from..to).step_by(CELL) {
                    let at = 4 * (from - offset as usize)..4 * (to.min(from + CELL) - offset as usize);
                    said += at.len() as u64;
                    outbox.say(ToWorker::Spread { step, offset: from as u64, bytes: bytes.slice(at) });
                }
            }
            self.pieces.push((offset, bytes));
        }
        said
    }

    /// Completes the parameters.
    pub fn whole(self) -> Broadcast {
        let hash = *self.hasher.finalize().as_bytes();
        let relays = self.relays.into_iter().map(|(member, _)| member);
        Broadcast {
            step: self.step,
            hash,
            pieces: self.pieces,
            begun: self.to.into_iter().chain(relays).collect(),
        }
    }
}

/// Rounded changes, which are numbers of fixed point; `None` if one is outside its range.
fn packed(changes: &[f32]) -> Option<Bytes> {
    let (mut fixed, mut bytes) = (vec![0; changes.len()], Vec::new());
    fixed::add(&mut fixed, changes, i64::MAX).ok()?;
    pack::pack(&fixed, &mut bytes);
    Some(bytes.into())
}

/// The complete parameters after a step.
#[derive(Debug)]
pub(super) struct Broadcast {
    /// Number of optimizer steps they result from.
    pub step: u64,
    /// blake3 of the bytes.
    pub hash: Hash,
    pieces: Vec<(u64, Bytes)>,
    /// Members that have the pieces but not the message that completes them.
    begun: BTreeSet<MemberId>,
}

impl Broadcast {
    /// Queues the pieces that a member lacks, and the completing message. Returns the number of bytes.
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
