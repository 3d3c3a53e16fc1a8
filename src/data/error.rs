//! Errors of rows, tokenizers and templates: facts with fields, each printed as one line.

use std::fmt;

/// The position of a row: `rows.jsonl:12` by line, `rows.parquet row 12` for a file without lines (both from 1).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A line of a text file.
    Line {
        /// Name of the file as given.
        file: String,
        /// Line number, from 1.
        line: u64,
    },
    /// A row of a file without lines: Parquet, or a JSON array.
    Row {
        /// Name of the file as given.
        file: String,
        /// Row number, from 1.
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

/// All errors of this folder.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A file cannot be opened or read.
    #[error("{file}: {source}")]
    File {
        /// Name of the file as given.
        file: String,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The format of a file is unknown, or the file as a whole is invalid.
    #[error("{file}: {reason}")]
    Format {
        /// Name of the file as given.
        file: String,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// A row does not match its form.
    #[error("{place}: {reason}")]
    Row {
        /// Position of the row.
        place: Place,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// A label is not a class of the classifier.
    #[error("{place}: label {label} is outside {allowed}")]
    Label {
        /// Position of the row.
        place: Place,
        /// The label as in the row.
        label: String,
        /// The allowed classes, as text.
        allowed: String,
    },
    /// The files contain no rows.
    #[error("no rows in {files}: give --data a file with at least one row")]
    NoRows {
        /// The files that were read.
        files: String,
    },
    /// No row has a supervised token.
    #[error(
        "nothing is supervised in {files} (rows: {rows}, the first: {first}); check the fields, or raise --max-seq-len"
    )]
    NothingSupervised {
        /// The files that were read.
        files: String,
        /// Number of rows read.
        rows: u64,
        /// The first dropped row.
        first: Dropped,
    },
    /// More rows were dropped than --max-dropped allows.
    #[error(
        "{dropped} of {rows} rows have nothing supervised (first: {first}), --max-dropped allows {allowed}"
    )]
    TooManyDropped {
        /// Number of dropped rows.
        dropped: u64,
        /// Number of rows read.
        rows: u64,
        /// The first dropped row.
        first: Dropped,
        /// The value of --max-dropped.
        allowed: u64,
    },
    /// The tokenizer cannot be used.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The chat template does not compile, or fails for a conversation.
    #[error("chat template: {0}")]
    Template(String),
    /// The options cannot be satisfied.
    #[error("{0}")]
    Options(String),
}

impl DataError {
    /// Whether the error is in the configuration (exit code 78), not in the data (exit code 1).
    pub fn is_configuration(&self) -> bool {
        matches!(self, DataError::Label { .. } | DataError::Options(_))
    }

    /// Adds the position of the row to an error of its tokenisation.
    pub(crate) fn at(self, place: &Place) -> DataError {
        match self {
            DataError::Template(_) | DataError::Tokenizer(_) => {
                DataError::Row { place: place.clone(), reason: self.to_string() }
            }
            other => other,
        }
    }
}

/// A dropped row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dropped {
    /// Position of the row.
    pub place: Place,
    /// Why the row has no supervised token.
    pub why: String,
}

impl std::fmt::Display for Dropped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.place, self.why)
    }
}
