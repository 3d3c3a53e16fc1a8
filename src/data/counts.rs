//! What was read: numbers of rows and tokens, and the first row that was left out.

use super::error::Dropped;

/// Statistics of the rows read.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Counts {
    /// Number of rows read.
    pub rows: u64,
    /// Number of rows dropped because no token is supervised.
    pub dropped: u64,
    /// Number of rows truncated at `max_seq_len`, including dropped rows.
    pub truncated: u64,
    /// Number of rows that were split at `max_seq_len`, and of the rows that they became.
    pub split: (u64, u64),
    /// Number of rows left out because they are longer than `max_seq_len`; `dropped` does not include them.
    pub too_long: u64,
    /// Number of rows, or parts of long rows, left out because they equal an earlier one.
    pub duplicates: u64,
    /// Number of rows with a supervised empty think block.
    pub empty_thoughts: u64,
    /// Number of rows whose reasoning the chat template leaves out.
    pub lost_thoughts: u64,
    /// Number of rows that are turns of the chat template, including dropped rows.
    pub chat: u64,
    /// Tokens in the kept rows.
    pub tokens: u64,
    /// Divisor of the loss: supervised targets, labelled words, or rows for a classifier.
    pub supervised: u64,
    /// Number of kept rows with a weight other than 1.
    pub weighted: u64,
    /// The smallest and the largest weight of a kept row.
    pub weights: [f32; 2],
    /// The first dropped row.
    pub first_dropped: Option<Dropped>,
}

impl Counts {
    /// The number of rows with a weight and the range of weights, to append to a line about rows.
    pub fn weights(&self) -> String {
        let [least, most] = self.weights;
        match self.weighted {
            0 => String::new(),
            n => format!("; {n} with a weight ({least} to {most})"),
        }
    }

    /// What was done with rows longer than --max-seq-len, to append to a line about rows.
    pub fn lengths(&self) -> String {
        let (truncated, (split, pieces), too_long) = (self.truncated, self.split, self.too_long);
        let mut line = String::new();
        if truncated > 0 {
            line += &format!("; {truncated} cut at --max-seq-len");
        }
        if split > 0 {
            line += &format!("; {split} split into {pieces} at --max-seq-len");
        }
        if too_long > 0 {
            line += &format!("; {too_long} longer than --max-seq-len left out");
        }
        if self.duplicates > 0 {
            line += &format!("; {} equal to an earlier one left out", self.duplicates);
        }
        line
    }
}
