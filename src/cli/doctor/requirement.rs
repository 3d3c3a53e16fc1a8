//! The file of requirements. A check that is not known, a field that is not known and a size that does not parse are
//! refused with the file's name: a requirement that is passed over in silence is worse than none.

use crate::config::groups::size;
use crate::config::refusal::{self, Refusal};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// What every binary carries.
const EMBEDDED: &str = include_str!("../../../recipes/gpu-training.yaml");

/// What can be looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Check {
    /// A real GPU is found through its driver.
    Driver,
    /// Free memory.
    Memory,
    /// Free space where models, checkpoints and reports go.
    Disk,
    /// The folders of base models can be written.
    Cache,
    /// The port that a coordinator listens on is free.
    Port,
    /// The coordinator that was named answers.
    Coordinator,
    /// The clock is kept right.
    Clock,
    /// Open files of a process.
    Files,
    /// Its address space.
    Space,
    /// There is a token that can be used.
    Token,
}

impl std::fmt::Display for Check {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(match self {
            Check::Driver => "driver",
            Check::Memory => "memory",
            Check::Disk => "disk",
            Check::Cache => "cache",
            Check::Port => "port",
            Check::Coordinator => "coordinator",
            Check::Clock => "clock",
            Check::Files => "files",
            Check::Space => "space",
            Check::Token => "token",
        })
    }
}

/// One requirement.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Requirement {
    /// What is looked at.
    pub check: Check,
    /// What it is good for.
    pub about: String,
    /// Without it nothing goes.
    #[serde(default)]
    pub required: bool,
    /// How much of it.
    #[serde(default)]
    at_least: Option<String>,
    /// Which port.
    #[serde(default)]
    pub port: Option<u16>,
    /// The command that helps.
    pub fix: String,
}

impl Requirement {
    /// How much is needed, in bytes or pieces; 0 where the file does not say.
    pub fn amount(&self) -> u64 {
        self.at_least.as_deref().and_then(amount).unwrap_or(0)
    }
}

fn amount(text: &str) -> Option<u64> {
    text.replace('_', "").parse().ok().or_else(|| size(text))
}

/// The binary's own.
pub fn embedded() -> Result<Vec<Requirement>, Refusal> {
    parse(EMBEDDED, Path::new("gpu-training.yaml"))
}

/// A file's.
pub fn read(path: &Path) -> Result<Vec<Requirement>, Refusal> {
    parse(&std::fs::read_to_string(path).map_err(refusal::at(path))?, path)
}

/// Parses `text`, which came from `path`.
pub fn parse(text: &str, path: &Path) -> Result<Vec<Requirement>, Refusal> {
    let options = serde_yaml::options! { with_snippet: false };
    let requirements: Vec<Requirement> = serde_yaml::from_str_with_options(text, options).map_err(|e| {
        let line = e.location().map(|l| format!(":{}", l.line())).unwrap_or_default();
        let way = "recipes/gpu-training.yaml shows the form";
        Refusal::configuration(format!("{}{line}: {} ({way})", path.display(), e.without_snippet()))
    })?;
    for r in &requirements {
        if let Some(text) = r.at_least.as_deref().filter(|text| amount(text).is_none()) {
            let why =
                format!("{}: {}: at_least {text:?} is no size (20GB) and no number", path.display(), r.check);
            return Err(Refusal::configuration(why));
        }
    }
    Ok(requirements)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The error's line holds `part`, or the first requirement's amount is `part`.
    fn check(text: &str, part: &str) {
        let got = match parse(text, Path::new("r.yaml")) {
            Ok(all) => all.first().map(|r| r.amount().to_string()).unwrap_or_default(),
            Err(e) => e.line,
        };
        assert!(got.contains(part), "{text}: {got}");
    }

    #[test]
    fn requirement_files_are_parsed_or_refused() {
        check("- {check: disk, about: a, fix: b, at_least: 20GB}", "20000000000");
        check("- {check: files, about: a, fix: b, at_least: 4096}", "4096");
        check("- {check: files, about: a, fix: b}", "0");
        check("- {check: disk, about: a, fix: b, at_least: much}", "r.yaml: disk: at_least \"much\"");
        check("- {check: disc, about: a, fix: b}", "r.yaml:1");
        check("- {check: disk, about: a, fix: b, atleast: 1}", "atleast");
        check("- {check: disk, about: a}", "fix");
        check("check: disk", "r.yaml");
        assert!(embedded().unwrap().len() >= 8);
    }
}
