//! The text of a row in supervised and unsupervised pieces, for the colours of `inspect`.

use crate::data::error::DataError;
use crate::data::samples::Sample;
use crate::data::tokenizer::{Skip, Tokenizer};
use std::ops::Range;

/// Adjacent tokens that are all supervised or all unsupervised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Decoded text with special tokens.
    pub text: String,
    /// Whether the tokens count in the loss.
    pub supervised: bool,
    /// Number of tokens.
    pub tokens: usize,
}

/// The pieces of a row of the sample in order. Each piece is decoded separately, so a character whose bytes belong to two pieces is
/// shown as U+FFFD in both.
pub fn preview(
    sample: &Sample<'_>,
    row: Range<usize>,
    tokenizer: &Tokenizer,
) -> Result<Vec<Piece>, DataError> {
    let mut pieces = Vec::new();
    let mut start = row.start;
    for end in row.start + 1..=row.end {
        if end < row.end && sample.supervised(end) == sample.supervised(start) {
            continue;
        }
        pieces.push(Piece {
            text: tokenizer.decode(&sample.ids[start..end], Skip::Nothing)?,
            supervised: sample.supervised(start),
            tokens: end - start,
        });
        start = end;
    }
    Ok(pieces)
}
