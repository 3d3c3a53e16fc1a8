//! What can be wrong with rows, tokenizers and templates: facts with fields, each one line when printed.

use super::Dropped;
use std::fmt;

/// Where a row stands: `rows.jsonl:12` by line, `rows.parquet row 12` where a file has no lines (both from 1).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A line of a text file.
    Line {
        /// The file as it was named.
        file: String,
        /// From 1.
        line: u64,
    },
    /// A row of a file without lines: Parquet, or a JSON array.
    Row {
        /// The file as it was named.
        file: String,
        /// From 1.
        row: u64,
    },
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Line { file, line } => write!(f, "{file}:{line}"),
            Place::Row { file, row } => write!(f, "{file} row {row}"),
        }
    }
}

/// Everything that data can get wrong.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A file that cannot be opened or read.
    #[error("{file}: {source}")]
    File {
        /// The file as it was named.
        file: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file whose kind is not known, or that is broken as a whole.
    #[error("{file}: {reason}")]
    Format {
        /// The file as it was named.
        file: String,
        /// What is wrong, and the way out.
        reason: String,
    },
    /// A row that is not what its form asks for.
    #[error("{place}: {reason}")]
    Row {
        /// File and line.
        place: Place,
        /// What is wrong, and the way out.
        reason: String,
    },
    /// A label that the classifier has no class for.
    #[error("{place}: label {label} is outside {allowed}")]
    Label {
        /// File and line.
        place: Place,
        /// The label as it stands in the row.
        label: String,
        /// The classes that there are, in words.
        allowed: String,
    },
    /// Files that hold no row at all.
    #[error("no rows in {files}: give --data a file with at least one row")]
    NoRows {
        /// The files that were read.
        files: String,
    },
    /// Rows, but nothing in them to learn from.
    #[error(
        "nothing is supervised in {files} (rows: {rows}, the first: {first}); check the fields, or raise --max-seq-len"
    )]
    NothingSupervised {
        /// The files that were read.
        files: String,
        /// Rows read.
        rows: u64,
        /// The first of them.
        first: Dropped,
    },
    /// More rows dropped than were allowed.
    #[error(
        "{dropped} of {rows} rows have nothing supervised (first: {first}), --max-dropped allows {allowed}"
    )]
    TooManyDropped {
        /// Rows dropped.
        dropped: u64,
        /// Rows read.
        rows: u64,
        /// The first of them.
        first: Dropped,
        /// --max-dropped.
        allowed: u64,
    },
    /// A tokenizer that cannot be used.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// A chat template that does not compile, or that refuses or mangles a conversation.
    #[error("chat template: {0}")]
    Template(String),
    /// Options that cannot be met.
    #[error("{0}")]
    Options(String),
}

impl DataError {
    /// Bad configuration (exit 78), as opposed to bad data (exit 1).
    pub fn is_configuration(&self) -> bool {
        matches!(self, DataError::Label { .. } | DataError::Options(_))
    }

    /// The same fault with the row's address in front, for faults found while a row was turned into tokens.
    pub(crate) fn at(self, place: &Place) -> DataError {
        match self {
            DataError::Template(_) | DataError::Tokenizer(_) => {
                DataError::Row { place: place.clone(), reason: self.to_string() }
            }
            other => other,
        }
    }
}
