//! A key as it was typed, and where it stood.

use super::refusal::Refusal;
use std::path::PathBuf;

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The command line.
    Flag,
    /// A line of a YAML file.
    File {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: u64,
    },
    /// An environment variable.
    Variable(String),
    /// Worked out from others.
    Computed(String),
    /// Nobody said.
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

/// A key as it was typed (with underscores).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Typed {
    /// The key.
    pub key: String,
    /// Its values.
    pub values: Vec<String>,
    /// Where it stood.
    pub source: Origin,
}

/// The refusal of a key, which says where it stood.
pub fn place(t: &Typed, why: &str) -> Refusal {
    Refusal::configuration(match &t.source {
        Origin::Flag => format!("--{}: {why}", t.key.replace('_', "-")),
        source => format!("{source}: {}: {why}", t.key),
    })
}
