//! What can be wrong with a file. Every message is one line: what, where, what to do. Nothing carries a
//! `source`, so that no printer repeats a cause.

use std::io;
use std::path::{Path, PathBuf};

/// A fault in, or on the way to, a file.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// The system refused: missing, unreadable, not writable.
    #[error("{}: {cause}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// No room left.
    #[error("{}: disk full{}; free some space, or write to another disk", path.display(), wanted(*bytes))]
    DiskFull {
        /// What was being written.
        path: PathBuf,
        /// How many bytes it was to have, where that is known.
        bytes: Option<u64>,
    },
    /// The file is not what it says it is.
    #[error("{}: {what}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// One tensor of a file is wrong.
    #[error("{}: tensor '{tensor}': {what}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// Its name in the file.
        tensor: String,
        /// What is wrong with it.
        what: String,
    },
    /// Well formed, but not something that can be used here: a configuration error (exit code 78).
    #[error("{}: {what}; {way_out}", path.display())]
    Unsupported {
        /// The file or directory.
        path: PathBuf,
        /// What it is.
        what: String,
        /// What to do instead.
        way_out: String,
    },
    /// The Hub refused, or is out of reach.
    #[error("{id}: {what}; {way_out}")]
    Hub {
        /// `owner/name`.
        id: String,
        /// What happened.
        what: String,
        /// What to do.
        way_out: String,
        /// True where asking again cannot help: a wrong name or revision, a licence not accepted.
        permanent: bool,
    },
}

fn wanted(bytes: Option<u64>) -> String {
    bytes.map(|n| format!(" ({n} bytes to write)")).unwrap_or_default()
}

impl FormatError {
    /// True where the exit code is 78 (bad configuration, do not retry) and not 1.
    pub fn is_configuration(&self) -> bool {
        matches!(self, FormatError::Unsupported { .. } | FormatError::Hub { permanent: true, .. })
    }

    /// What the system said about `path`; a full disk is told apart.
    pub fn io(path: &Path, cause: io::Error) -> Self {
        match cause.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                FormatError::DiskFull { path: path.to_owned(), bytes: None }
            }
            _ => FormatError::Io { path: path.to_owned(), cause },
        }
    }

    pub(super) fn malformed(path: &Path, what: impl Into<String>) -> Self {
        FormatError::Malformed { path: path.to_owned(), what: what.into() }
    }

    pub(super) fn tensor(path: &Path, tensor: &str, what: impl Into<String>) -> Self {
        FormatError::Tensor { path: path.to_owned(), tensor: tensor.to_owned(), what: what.into() }
    }

    pub(super) fn unsupported(path: &Path, what: impl Into<String>, way_out: impl Into<String>) -> Self {
        FormatError::Unsupported { path: path.to_owned(), what: what.into(), way_out: way_out.into() }
    }
}
