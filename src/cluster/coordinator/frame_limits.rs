//! The size limit of a message: a run whose leases or manifest would exceed a frame is refused before it starts,
//! because no worker could compute it.

use super::super::message::{FRAME_LIMIT, Manifest};

/// Most bytes of a lease besides its microbatch's rows and tokens, and of a welcome besides the coordinator's
/// manifest: the worker's name is added to it.
const HEADER: usize = 2048;
/// Most bytes of a row: its position in the data, its bounds and its weight.
const ROW: usize = 14;
/// Bytes of a target; most targets may be ignored positions.
const TARGET: usize = 5;

/// The sizes that bound a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Longest {
    /// Tokens of the longest microbatch.
    pub tokens: usize,
    /// Tokens of the longest island; 0 without islands.
    pub island: usize,
    /// Tokens of the shortest row.
    pub shortest: usize,
    /// All token ids are below this.
    pub vocabulary: usize,
}

/// The message that does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Misfit {
    /// A lease.
    #[error(
        "--micro-batch-tokens, --max-seq-len: a microbatch of {tokens} tokens is too long to be sent to a worker: at \
         most {most} fit with these rows"
    )]
    Lease {
        /// Tokens of the longest microbatch.
        tokens: usize,
        /// Tokens that would fit.
        most: usize,
    },
    /// An island.
    #[error(
        "--islands, --inner-steps: the microbatches of an island have {tokens} tokens, too many to be sent to a worker: \
         at most {most} fit with these rows; use fewer inner steps, or more islands"
    )]
    Island {
        /// Tokens of the longest island.
        tokens: usize,
        /// Tokens that would fit.
        most: usize,
    },
    /// A prompt.
    #[error(
        "--sample-prompt, --sample-rows: a prompt of {tokens} tokens is too long to be sent to a worker: use prompts of at most {most}"
    )]
    Prompt {
        /// Tokens of the prompt.
        tokens: usize,
        /// Tokens that would fit.
        most: usize,
    },
    /// The manifest.
    #[error(
        "what a worker receives about this run takes {bytes} bytes, {most} fit: use fewer or shorter labels, or a \
         model of fewer files"
    )]
    Manifest {
        /// Its size in bytes.
        bytes: usize,
        /// Bytes that would fit.
        most: usize,
    },
}

impl Longest {
    /// Refuses a run whose longest lease or whose manifest exceeds a frame.
    pub fn fits(&self, manifest: &Manifest) -> Result<(), Misfit> {
        let room = FRAME_LIMIT - HEADER;
        let bytes = postcard::to_stdvec(manifest).map_or(usize::MAX, |bytes| bytes.len());
        if bytes > room {
            return Err(Misfit::Manifest { bytes, most: room });
        }
        // At most one of every `shortest` tokens begins a row.
        let shortest = self.shortest.max(1);
        let each = shortest * (varint(self.vocabulary) + TARGET) + ROW;
        let most = room / each * shortest;
        match (self.tokens <= most, self.island <= most) {
            (true, true) => Ok(()),
            (false, _) => Err(Misfit::Lease { tokens: self.tokens, most }),
            (true, false) => Err(Misfit::Island { tokens: self.island, most }),
        }
    }
}

/// Refuses a prompt whose lease exceeds a frame; ids are below `vocabulary`.
pub fn prompt_fits(tokens: usize, vocabulary: usize) -> Result<(), Misfit> {
    let most = (FRAME_LIMIT - HEADER) / varint(vocabulary);
    if tokens <= most { Ok(()) } else { Err(Misfit::Prompt { tokens, most }) }
}

/// Bytes of a number up to `most` as a varint.
fn varint(most: usize) -> usize {
    (usize::BITS - most.leading_zeros()).div_ceil(7).max(1) as usize
}

#[cfg(test)]
mod tests {
    use super::super::gate::tests::manifest;
    use super::*;
    use crate::cluster::message::{Lease, ToWorker, Work};
    use crate::model::stage::{IGNORE, Microbatch, Sampling, Targets};

    #[test]
    fn longest_accepted_lease_fits_and_a_longer_one_is_refused() {
        for (vocabulary, shortest) in [(300, 1), (49152, 7), (1 << 17, 4096)] {
            let longest = |tokens| Longest { tokens, island: 0, shortest, vocabulary };
            let Err(Misfit::Lease { most, .. }) = longest(1 << 30).fits(&manifest()) else { panic!() };
            longest(most).fits(&manifest()).unwrap();
            assert!(longest(most + 1).fits(&manifest()).is_err());
            let rows = most / shortest;
            let batch = Microbatch {
                step: u64::MAX,
                rows: vec![u64::from(u32::MAX); rows],
                ids: vec![vocabulary as u32 - 1; most],
                bounds: vec![u32::MAX; rows + 1],
                targets: Targets::Weighted { targets: vec![IGNORE; most], weights: vec![1.0; rows] },
            };
            let lease = Lease { lease: u64::MAX, device: 9, after: 9, of: 9, work: Work::Recheck(batch) };
            let bytes = postcard::to_stdvec(&ToWorker::Lease(Box::new(lease))).unwrap().len();
            assert!((FRAME_LIMIT * 9 / 10..=FRAME_LIMIT).contains(&bytes), "{bytes}");
        }
    }

    #[test]
    fn longest_accepted_prompt_fits_and_a_longer_one_is_refused() {
        let Err(Misfit::Prompt { most, .. }) = prompt_fits(1 << 30, 1 << 17) else { panic!() };
        prompt_fits(most, 1 << 17).unwrap();
        assert!(prompt_fits(most + 1, 1 << 17).is_err());
        let sampling = Sampling { stop: vec![u32::MAX; 8], ..Sampling::default() };
        let work = Work::Prompt { ids: vec![(1 << 17) - 1; most], sampling };
        let lease = Lease { lease: u64::MAX, device: 9, after: 9, of: 9, work };
        let bytes = postcard::to_stdvec(&ToWorker::Lease(Box::new(lease))).unwrap().len();
        assert!((FRAME_LIMIT * 9 / 10..=FRAME_LIMIT).contains(&bytes), "{bytes}");
    }

    #[test]
    fn manifest_with_too_many_labels_is_refused() {
        let labels = Some((0..200_000).map(|i| format!("label {i}")).collect());
        let longest = Longest { tokens: 8, island: 0, shortest: 1, vocabulary: 300 };
        let refused = longest.fits(&Manifest { labels, ..manifest() });
        assert!(refused.unwrap_err().to_string().contains("fewer or shorter labels"));
    }
}
