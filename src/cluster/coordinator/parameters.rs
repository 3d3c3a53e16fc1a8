//! The parameters on their way to everybody: turned into bytes, hashed and cut into pieces once, however many
//! members there are. Every message holds a part of the same memory.

use super::super::message::{Hash, PIECE, ToWorker};
use super::outbox::Outbox;
use bytes::Bytes;

/// The parameters after a step.
#[derive(Debug, Clone)]
pub(super) struct Broadcast {
    /// Steps that were taken.
    pub step: u64,
    /// blake3 of the bytes.
    pub hash: Hash,
    bytes: Bytes,
}

impl Broadcast {
    pub fn new(step: u64, flat: &[f32]) -> Self {
        let bytes = little_endian(flat);
        let hash = *blake3::Hasher::new().update_rayon(&bytes).finalize().as_bytes();
        Broadcast { step, hash, bytes }
    }

    /// Queues all of them for a member; returns the bytes.
    pub fn send(&self, outbox: &Outbox) -> u64 {
        for at in (0..self.bytes.len()).step_by(PIECE) {
            let bytes = self.bytes.slice(at..(at + PIECE).min(self.bytes.len()));
            outbox.say(ToWorker::ParametersPiece { step: self.step, offset: (at / 4) as u64, bytes });
        }
        outbox.say(ToWorker::Parameters { step: self.step, hash: self.hash });
        self.bytes.len() as u64
    }
}

#[cfg(target_endian = "little")]
fn little_endian(flat: &[f32]) -> Bytes {
    Bytes::copy_from_slice(bytemuck::cast_slice(flat))
}

#[cfg(not(target_endian = "little"))]
fn little_endian(flat: &[f32]) -> Bytes {
    flat.iter().flat_map(|v| v.to_le_bytes()).collect()
}
