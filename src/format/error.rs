//! Errors of files. Each message is one line: what, where, what to do. No error has a `source`, so that no output
//! repeats a cause.

use std::io;
use std::path::{Path, PathBuf};

/// An error of a file, or of its download.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// An error of the operating system: missing, unreadable, not writable.
    #[error("{}: {cause}", path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// The error of the operating system.
        cause: io::Error,
    },
    /// The disk is full.
    #[error("{}: disk full{}; free some space, or write to another disk", path.display(), wanted(*bytes))]
    DiskFull {
        /// The file that was being written.
        path: PathBuf,
        /// Its full size in bytes, if known.
        bytes: Option<u64>,
    },
    /// The file is invalid or damaged.
    #[error("{}: {what}", path.display())]
    Malformed {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// A tensor in the file is invalid.
    #[error("{}: tensor '{tensor}': {what}", path.display())]
    Tensor {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor in the file.
        tensor: String,
        /// What is wrong.
        what: String,
    },
    /// The file is valid but not supported: a configuration error (exit code 78).
    #[error("{}: {what}; {way_out}", path.display())]
    Unsupported {
        /// Path of the file or directory.
        path: PathBuf,
        /// What is not supported.
        what: String,
        /// What to do instead.
        way_out: String,
    },
    /// The Hub rejected the request, or is unreachable.
    #[error("{id}: {what}; {way_out}")]
    Hub {
        /// `owner/name`.
        id: String,
        /// What happened.
        what: String,
        /// What to do.
        way_out: String,
        /// True if a retry cannot help: a wrong name or revision, a licence that was not accepted.
        permanent: bool,
    },
}

fn wanted(bytes: Option<u64>) -> String {
    bytes.map(|n| format!(" ({n} bytes to write)")).unwrap_or_default()
}

impl FormatError {
    /// True if the exit code is 78 (invalid configuration, do not retry), otherwise 1.
    pub fn is_configuration(&self) -> bool {
        matches!(self, FormatError::Unsupported { .. } | FormatError::Hub { permanent: true, .. })
    }

    /// The error for an I/O error at `path`; a full disk is a separate variant.
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
