//! The claims and reports about sums: a member's claim at the end of a sum, and the reducer's report on it.

use super::super::sum_chunk::SumChunkError;
use super::Member;
use crate::train::sum::Scalars;

/// A member's claim about a sum, sent after all of its pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// The sum's number.
    pub sum: u64,
    /// Number of microbatches in the sum.
    pub leases: usize,
    /// Total of their losses, weights and targets.
    pub scalars: Scalars,
}

/// A complete sum is in the total and waits for [`super::Reducer::take`]; or it is refused, and its member's sums
/// are to be taken back.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The sender.
    pub member: Member,
    /// Number of the sum.
    pub sum: u64,
    /// Why it is refused, if it is.
    pub result: Result<(), Refusal>,
}

/// A sum that no correct worker sends.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// An invalid piece.
    #[error(transparent)]
    Piece(#[from] SumChunkError),
    /// The sum ends before all of its pieces.
    #[error("sum {sum} ends after {have} of {want} pieces")]
    Incomplete {
        /// Number of the sum.
        sum: u64,
        /// Pieces received.
        have: usize,
        /// Pieces in the layout.
        want: usize,
    },
    /// Too many sums of one member that were not taken.
    #[error("more than {most} sums that were not taken")]
    Many {
        /// The limit.
        most: usize,
    },
    /// The number of microbatches is impossible.
    #[error("sum {sum} says it is of {leases} microbatches")]
    Leases {
        /// Number of the sum.
        sum: u64,
        /// The claimed number of microbatches.
        leases: usize,
    },
    /// A loss, weight or number of targets beyond the limit of its microbatches.
    #[error("sum {sum} has a loss, a weight or targets that {leases} microbatches cannot have")]
    Scalars {
        /// Number of the sum.
        sum: u64,
        /// Number of microbatches in it.
        leases: usize,
    },
}
