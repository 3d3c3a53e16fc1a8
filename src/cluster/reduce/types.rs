//! What is said of sums: by members when they are sent, by the reducer when they are complete or refused.

use super::super::sum_chunk::SumChunkError;
use super::Member;
use crate::train::sum::Scalars;

/// What a member says of a sum when all pieces of it are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// The sum's number.
    pub sum: u64,
    /// Microbatches in it.
    pub leases: usize,
    /// Their losses, weights and targets.
    pub scalars: Scalars,
}

/// A sum is complete and in the total, and waits for [`super::Reducer::take`]; or it is refused, and its member is to be
/// taken back.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Whose.
    pub member: Member,
    /// Its number.
    pub sum: u64,
    /// Why it is refused.
    pub result: Result<(), Refusal>,
}

/// Something that no honest worker sends.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// A piece that is none.
    #[error(transparent)]
    Piece(#[from] SumChunkError),
    /// The end of a sum before all of it.
    #[error("sum {sum} ends after {have} of {want} pieces")]
    Incomplete {
        /// Its number.
        sum: u64,
        /// Pieces that came.
        have: usize,
        /// Pieces of the layout.
        want: usize,
    },
    /// More sums begun than one can have.
    #[error("more than {most} sums begun, none of them complete")]
    Many {
        /// That is the most.
        most: usize,
    },
    /// Its number of microbatches is impossible.
    #[error("sum {sum} says it is of {leases} microbatches")]
    Leases {
        /// Its number.
        sum: u64,
        /// What it says.
        leases: usize,
    },
    /// Loss or weight beyond what so many microbatches can have.
    #[error("sum {sum} has a loss, a weight or targets that {leases} microbatches cannot have")]
    Scalars {
        /// Its number.
        sum: u64,
        /// Microbatches in it.
        leases: usize,
    },
}
