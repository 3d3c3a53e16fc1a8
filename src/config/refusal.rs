//! All failures of a command: one line with the problem, the place and the solution, and an exit code that tells a
//! scheduler whether to retry. No other part of `cli` sets exit codes.

use crate::backend::Fault;
use crate::data::DataError;
use crate::format::FormatError;
use crate::model::config::ConfigError;
use crate::model::lora::LoraError;
use crate::model::quantised::QuantiseError;
use crate::model::weights::ModelError;
use crate::train::TrainError;
use std::fmt;

/// Failure of a command; `Display` gives the line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{line}")]
pub struct Refusal {
    /// Kind of failure.
    pub kind: Kind,
    /// The problem, the place and the solution.
    pub line: String,
}

/// Kinds of failure; each has an exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Files, data, devices: 1.
    Failure,
    /// The command line does not parse: 2.
    Usage,
    /// A loss or gradient that is not finite: 3.
    NonFinite,
    /// The state is saved and the run can be resumed: 75 (EX_TEMPFAIL).
    Saved,
    /// Invalid configuration, a retry is pointless: 78 (EX_CONFIG).
    Configuration,
}

impl Refusal {
    /// A failure of files, data or devices.
    pub fn failure(line: impl fmt::Display) -> Self {
        Refusal { kind: Kind::Failure, line: one_line(line) }
    }

    /// An error in the command line.
    pub fn usage(line: impl fmt::Display) -> Self {
        Refusal { kind: Kind::Usage, line: one_line(line) }
    }

    /// An invalid configuration.
    pub fn configuration(line: impl fmt::Display) -> Self {
        Refusal { kind: Kind::Configuration, line: one_line(line) }
    }

    /// A failure of the given kind.
    pub fn of(kind: Kind, line: impl fmt::Display) -> Self {
        Refusal { kind, line: one_line(line) }
    }

    /// The process's exit code.
    pub fn code(&self) -> u8 {
        match self.kind {
            Kind::Failure => 1,
            Kind::Usage => 2,
            Kind::NonFinite => 3,
            Kind::Saved => 75,
            Kind::Configuration => 78,
        }
    }
}

/// Number of characters shown from a line's beginning and end: content of a file in place of a number or a name may be
/// megabytes long.
const SHOWN: (usize, usize) = (1200, 400);

/// Removes line breaks of causes, because a refusal is one line.
fn one_line(text: impl fmt::Display) -> String {
    let text = text.to_string();
    let line =
        shortened(text.lines().map(str::trim).filter(|l| !l.is_empty()).collect::<Vec<_>>().join("; "));
    // The most frequent cause gets a text with the solution.
    match line.strip_suffix(": No such file or directory (os error 2)") {
        Some(place) => {
            let from = std::env::current_dir().map(|dir| format!(" from {}", dir.display()));
            format!("{place}: no such file or directory: check the path{}", from.unwrap_or_default())
        }
        None => line,
    }
}

/// Removes the middle of a line that is longer than a screen.
fn shortened(line: String) -> String {
    let length = line.chars().count();
    let (head, tail) = SHOWN;
    if length <= head + tail + 50 {
        return line;
    }
    let (head, tail): (String, String) =
        (line.chars().take(head).collect(), line.chars().skip(length - tail).collect());
    format!("{head} [{} characters are left out] {tail}", length - SHOWN.0 - SHOWN.1)
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Self {
        let kind = if matches!(fault, Fault::NonFinite { .. }) { Kind::NonFinite } else { Kind::Failure };
        Refusal::of(kind, fault)
    }
}

impl From<DataError> for Refusal {
    fn from(e: DataError) -> Self {
        Refusal::of(if e.is_configuration() { Kind::Configuration } else { Kind::Failure }, e)
    }
}

impl From<FormatError> for Refusal {
    fn from(e: FormatError) -> Self {
        let kind = if e.is_configuration() { Kind::Configuration } else { Kind::Failure };
        Refusal::of(kind, e)
    }
}

impl From<ConfigError> for Refusal {
    fn from(e: ConfigError) -> Self {
        Refusal::configuration(e)
    }
}

impl From<QuantiseError> for Refusal {
    fn from(e: QuantiseError) -> Self {
        Refusal::configuration(e)
    }
}

impl From<LoraError> for Refusal {
    fn from(e: LoraError) -> Self {
        Refusal::configuration(e)
    }
}

impl From<ModelError> for Refusal {
    fn from(e: ModelError) -> Self {
        Refusal::of(if e.is_configuration() { Kind::Configuration } else { Kind::Failure }, e)
    }
}

impl From<TrainError> for Refusal {
    fn from(e: TrainError) -> Self {
        let kind = match e.exit_code() {
            3 => Kind::NonFinite,
            75 => Kind::Saved,
            78 => Kind::Configuration,
            _ => Kind::Failure,
        };
        Refusal::of(kind, e)
    }
}

/// The same refusal, with the file's path in front.
pub fn in_file(path: &std::path::Path, refusal: Refusal) -> Refusal {
    Refusal { line: format!("{}: {}", path.display(), refusal.line), ..refusal }
}

/// Adds the path to a `std::io::Error`, which contains none.
pub fn at(path: &std::path::Path) -> impl Fn(std::io::Error) -> Refusal + '_ {
    move |e| Refusal::failure(format!("{}: {e}", path.display()))
}

/// The most similar one of `known`; `None` where nothing is similar.
pub fn nearest<'a>(typed: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    known
        .map(|k| (strsim::damerau_levenshtein(typed, k), strsim::jaro_winkler(typed, k), k))
        .filter(|(d, j, k)| *d <= 1 + k.len().min(typed.len()) / 3 || *j > 0.85)
        .min_by(|a, b| a.0.cmp(&b.0).then(b.1.total_cmp(&a.1)))
        .map(|(_, _, k)| k)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suggestion_is_similar_or_absent() {
        let known = ["rank", "alpha", "learning-rate", "max-seq-len"];
        assert_eq!(nearest("rnak", known.into_iter()), Some("rank"));
        assert_eq!(nearest("learning-rte", known.into_iter()), Some("learning-rate"));
        assert_eq!(nearest("zzzzzzzz", known.into_iter()), None);
    }

    #[test]
    fn a_refusal_is_one_line() {
        assert_eq!(Refusal::failure("a\n\n  b\n").line, "a; b");
        let long = Refusal::failure(format!("config.json: {}: use another", "é".repeat(1 << 20))).line;
        assert!(long.starts_with("config.json: éé") && long.ends_with("é: use another"), "{}", long.len());
        assert!(long.contains(" characters are left out] ") && long.chars().count() < 1700);
        let missing = Refusal::failure("x.jsonl: No such file or directory (os error 2)").line;
        assert!(
            missing.starts_with("x.jsonl: no such file or directory: check the path from /"),
            "{missing}"
        );
    }
}
