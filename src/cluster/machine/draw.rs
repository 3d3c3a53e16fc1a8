//! Which microbatches are computed again: a draw with a key that no member knows.

use super::super::message::LeaseId;

/// Which microbatches are computed again.
#[derive(Clone, PartialEq)]
pub struct Verify {
    share: f64,
    key: [u8; 32],
}

impl std::fmt::Debug for Verify {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "Verify({})", self.share)
    }
}

impl Verify {
    /// This share of the microbatches, from 0 to 1, drawn with a key that no member knows.
    pub fn new(share: f64, key: [u8; 32]) -> Self {
        Verify { share, key }
    }

    /// After how many of its microbatches a member that forges each is found: on average, and with probability 99 %.
    pub fn found_after(share: f64) -> (u64, u64) {
        let nearly_all = 0.01f64.ln() / (-share).ln_1p();
        ((1.0 / share).round() as u64, nearly_all.ceil().max(1.0) as u64)
    }

    /// A number from 0 to 1 for a lease. Lease numbers are never used twice with one key.
    pub(super) fn draw(&self, lease: LeaseId, purpose: u8) -> f64 {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&lease.to_le_bytes()).update(&[purpose]);
        let bytes = hasher.finalize();
        let number = bytes.as_bytes().iter().take(8).fold(0u64, |n, b| n << 8 | u64::from(*b));
        (number >> 11) as f64 / (1u64 << 53) as f64
    }

    pub(super) fn takes(&self, lease: LeaseId) -> bool {
        self.draw(lease, 0) < self.share
    }
}
