//! A key as typed, and its source.

use super::refusal::Refusal;
use std::path::PathBuf;

/// Source of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The command line.
    Flag,
    /// A line of a YAML file.
    File {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: u64,
    },
    /// An environment variable.
    Variable(String),
    /// Computed from other values.
    Computed(String),
    /// The default.
    Default,
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self {
            Origin::Flag => f.write_str("flag"),
            Origin::File { path, line } => write!(f, "{}:{line}", path.display()),
            Origin::Variable(v) => write!(f, "environment {v}"),
            Origin::Computed(from) => write!(f, "{from}"),
            Origin::Default => f.write_str("default"),
        }
    }
}

/// A key as typed (with underscores).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Typed {
    /// The key.
    pub key: String,
    /// Its values.
    pub values: Vec<String>,
    /// Source of the key.
    pub source: Origin,
}

/// The refusal of a key, with its source.
pub fn place(t: &Typed, why: &str) -> Refusal {
    Refusal::configuration(match &t.source {
        Origin::Flag => format!("--{}: {why}", t.key.replace('_', "-")),
        source => format!("{source}: {}: {why}", t.key),
    })
}
