//! A row as people look at it: its text in pieces, supervised and not, for `inspect` to colour.

use crate::data::error::DataError;
use crate::data::samples::Sample;
use crate::data::tokenizer::{Skip, Tokenizer};

/// Neighbouring tokens of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Decoded, special tokens shown.
    pub text: String,
    /// Whether these tokens count in the loss.
    pub supervised: bool,
    /// How many they are.
    pub tokens: usize,
}

/// The row's pieces in order. Decoding happens piece by piece, so a character whose bytes fall into two
/// pieces shows as U+FFFD in both.
pub fn preview(sample: &Sample<'_>, tokenizer: &Tokenizer) -> Result<Vec<Piece>, DataError> {
    let mut pieces = Vec::new();
    let mut start = 0;
    for end in 1..=sample.ids.len() {
        if end < sample.ids.len() && sample.supervised(end) == sample.supervised(start) {
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
