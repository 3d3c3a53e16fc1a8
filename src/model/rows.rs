//! Rows of a matrix in the files that make up one projection of a block.

use bytes::Bytes;
use std::borrow::Cow;
use std::ops::Range;

/// Rows of a matrix, in the order of a projection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rows {
    /// Rows that follow each other.
    Range(Range<usize>),
    /// The row at each place.
    Each(Vec<usize>),
}

impl Rows {
    /// Number of rows.
    pub fn len(&self) -> usize {
        match self {
            Rows::Range(range) => range.len(),
            Rows::Each(rows) => rows.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Stretches of rows as (first row here, first row in the matrix, number).
    pub fn stretches(&self) -> Vec<(usize, usize, usize)> {
        match self {
            Rows::Range(range) => vec![(0, range.start, range.len())],
            Rows::Each(rows) => rows.iter().enumerate().map(|(here, there)| (here, *there, 1)).collect(),
        }
    }

    /// These rows of a matrix whose rows have `size` bytes.
    pub fn of<'a>(&self, bytes: &'a [u8], size: usize) -> Cow<'a, [u8]> {
        match self {
            Rows::Range(range) => Cow::Borrowed(&bytes[range.start * size..range.end * size]),
            Rows::Each(rows) => {
                let mut all = Vec::with_capacity(rows.len() * size);
                rows.iter().for_each(|row| all.extend_from_slice(&bytes[row * size..(row + 1) * size]));
                Cow::Owned(all)
            }
        }
    }

    /// The same, without a copy where they follow each other.
    pub fn shared(&self, bytes: &Bytes, size: usize) -> Bytes {
        match self {
            Rows::Range(range) => bytes.slice(range.start * size..range.end * size),
            Rows::Each(_) => self.of(bytes, size).into_owned().into(),
        }
    }
}
