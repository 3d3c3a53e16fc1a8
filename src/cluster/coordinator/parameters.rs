//! The parameters on their way to the members. They are converted to bytes, hashed and cut into pieces once for all
//! members, while the later ones are still being computed. All messages share the same memory. Pieces have no effect
//! before the message that completes them, so they can be sent ahead without commitment.

use super::super::machine::MemberId;
use super::super::message::{Changed, Hash, PIECE, ToWorker};
use super::super::sum_chunk::little_endian;
use super::outbox::Outbox;
use crate::numeric::fixed::CELL;
use crate::numeric::{difference, fixed, pack};
use crate::train::optimizer_step::{STRETCH, Stretch};
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

    /// Adds a stretch of values and sends it to the waiting members, found by `outbox`, which hold the parameters `before`.
    /// Returns the number of bytes sent; a line of workers is counted as one worker.
    pub fn add<'o>(
        &mut self,
        stretch: Stretch,
        before: Option<&Broadcast>,
        outbox: impl Fn(MemberId) -> Option<&'o Outbox>,
    ) -> u64 {
        let mut said = 0;
        for values in stretch.values.chunks(PIECE / 4) {
            let (first, bytes) = (self.values, little_endian(values));
            // Hashed here while the bytes are in the cache; other threads compute the next values.
            self.hasher.update(&bytes);
            self.values += values.len();
            for from in (first..self.values).step_by(CELL) {
                let to = self.values.min(from + CELL);
                let values = bytes.slice(4 * (from - first)..4 * (to - first));
                let added = stretch.changes.get(from - stretch.from..to - stretch.from);
                said += before.map_or(0, |before| self.send((from, values), before, added, &outbox));
            }
            self.pieces.push((first as u64, bytes));
        }
        said
    }

    /// Sends a cell of values from index `from` on: the changes `added` if they are rounded, otherwise differences of bits.
    fn send<'o>(
        &self,
        (from, values): (usize, Bytes),
        before: &Broadcast,
        added: Option<&[f32]>,
        outbox: impl Fn(MemberId) -> Option<&'o Outbox>,
    ) -> u64 {
        let relay = self.relays.iter().find(|(_, range)| range.contains(&from));
        let relay = relay.and_then(|(member, _)| outbox(*member));
        let to: Vec<&Outbox> = self.to.iter().filter_map(|member| outbox(*member)).collect();
        if relay.is_none() && to.is_empty() {
            return 0;
        }
        let changed = match added.and_then(packed) {
            Some(packed) => Changed::Added(packed),
            None => Changed::Bits(before.differences(from, &values)),
        };
        let (step, offset, len) = (self.step, from as u64, (values.len() / 4) as u32);
        for outbox in &to {
            let (values, changed) = (values.clone(), changed.clone());
            outbox.say(ToWorker::ParametersChange { step, offset, len, values, changed });
        }
        let size = changed.bytes().len() * (to.len() + usize::from(relay.is_some()));
        // Relays get differences of bits alone.
        if let (Some(relay), Changed::Bits(packed)) = (relay, changed) {
            relay.say(ToWorker::Spread { step, offset, len, packed });
        }
        size as u64
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
    /// The packed differences of new values from those from index `from` on, all of one cell.
    fn differences(&self, from: usize, new: &[u8]) -> Bytes {
        const { assert!((PIECE / 4).is_multiple_of(CELL) && STRETCH.is_multiple_of(PIECE / 4)) };
        let (first, piece) = &self.pieces[from / (PIECE / 4)];
        let (at, mut packed) = (4 * (from - *first as usize), Vec::new());
        difference::pack(new, &piece[at..at + new.len()], &mut packed);
        packed.into()
    }

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
