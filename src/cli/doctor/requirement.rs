//! The file of requirements. Unknown checks, unknown fields and invalid sizes are refused with the file's name: a
//! requirement that is silently skipped is worse than none.

use crate::config::groups::size;
use crate::config::refusal::{self, Refusal};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The requirements embedded in every binary.
const EMBEDDED: &str = include_str!("../../../recipes/gpu-training.yaml");

/// The available checks.
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
    /// The named coordinator answers.
    Coordinator,
    /// The clock is synchronised.
    Clock,
    /// Limit of open files of a process.
    Files,
    /// Limit of the address space of a process.
    Space,
    /// There is a usable token.
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
    /// The check.
    pub check: Check,
    /// Purpose of the requirement.
    pub about: String,
    /// Whether a run is impossible without it.
    #[serde(default)]
    pub required: bool,
    /// Minimum amount.
    #[serde(default)]
    at_least: Option<String>,
    /// Port number.
    #[serde(default)]
    pub port: Option<u16>,
    /// The command that fixes it.
    fix: String,
    /// The command that fixes it on Windows, where it is another one.
    #[serde(default)]
    windows_fix: Option<String>,
}

impl Requirement {
    /// The command that fixes it on this system.
    pub fn fix(&self) -> String {
        let own = self.windows_fix.as_ref().filter(|_| cfg!(windows));
        own.unwrap_or(&self.fix).clone()
    }

    /// Minimum amount in bytes or pieces; 0 where the file has none.
    pub fn amount(&self) -> u64 {
        self.at_least.as_deref().and_then(amount).unwrap_or(0)
    }
}

fn amount(text: &str) -> Option<u64> {
    text.replace('_', "").parse().ok().or_else(|| size(text))
}

/// The requirements embedded in the binary.
pub fn embedded() -> Result<Vec<Requirement>, Refusal> {
    parse(EMBEDDED, Path::new("gpu-training.yaml"))
}

/// The requirements of a file.
pub fn read(path: &Path) -> Result<Vec<Requirement>, Refusal> {
    parse(&std::fs::read_to_string(path).map_err(refusal::at(path))?, path)
}

/// Parses `text` of the file `path`.
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

    /// The error contains `part`, or the amount of the first requirement is `part`.
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
