//! The contracts of this program, for the verb that lists them and for a page about a run. The files of `contracts/` are
//! part of the binary, so that what is listed is what it was built with.

use super::page;
use serde::{Deserialize, Serialize};
use serde_json::Value;

macro_rules! files {
    ($($id:literal)*) => { [$(($id, include_str!(concat!("../../contracts/", $id, ".yaml"))),)*] };
}

/// By id: those that the specification names, then our own.
#[rustfmt::skip]
const FILES: [(&str, &str); 22] = files![
    "F-CUDA-001" "F-DP-001" "F-DP-002" "F-DP-003" "F-DP-004" "F-DP-005" "F-DP-006"
    "F-FT-001" "F-FT-002" "F-FT-003" "F-FT-004" "F-FT-005" "F-FT-006" "F-FT-007"
    "F-FT-008" "F-FT-009" "F-FT-010" "F-QT-001" "F-WGPU-001" "F-WGPU-002" "F-WGPU-003"
    "F-WGPU-004"
];

/// One promise.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contract {
    /// Its id.
    pub id: String,
    /// How much depends on it.
    pub severity: Severity,
    /// What is promised.
    pub statement: String,
    /// How far off a result may be.
    pub tolerance: Value,
    /// The code that enforces it, or `nowhere`.
    pub enforced_at: String,
    /// The tests that try to break it.
    pub tests: Vec<String>,
}

/// How much depends on a promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// `critical`
    Critical,
    /// `major`
    Major,
}

/// For a page about a run.
pub fn in_words() -> Vec<page::Contract> {
    let words = |c: Contract| {
        let enforced = Some(c.enforced_at).filter(|place| !place.starts_with("nowhere"));
        page::Contract { id: c.id, statement: c.statement, enforced }
    };
    all().unwrap_or_default().into_iter().map(words).collect()
}

/// All of them; the error names a file of this build.
pub fn all() -> Result<Vec<Contract>, String> {
    let read = |(id, text): &(&str, &str)| {
        let contract: Contract =
            serde_yaml::from_str(text).map_err(|e| format!("contracts/{id}.yaml of this build: {e}"))?;
        // YAML ends a folded text with a line end.
        Ok(Contract { statement: contract.statement.trim_end().into(), ..contract })
    };
    FILES.iter().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every file of the folder is in the list under its own id, and says everything.
    #[test]
    fn the_binary_carries_every_contract() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/contracts");
        let mut files: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|f| f.unwrap().file_name().to_str().unwrap().trim_end_matches(".yaml").to_string())
            .collect();
        files.sort();
        let contracts = all().unwrap();
        assert_eq!(contracts.iter().map(|c| c.id.clone()).collect::<Vec<_>>(), files);
        for (contract, (id, _)) in contracts.iter().zip(FILES) {
            assert_eq!(contract.id, id);
            assert!(!contract.tests.is_empty() && !contract.statement.trim_end().contains('\n'), "{id}");
        }
    }
}
