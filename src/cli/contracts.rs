//! `finetune contracts`: what this program promises, what enforces each promise while it runs, and the tests that
//! try to break it. The files of `contracts/` are part of the binary, so that what it lists is what it was built
//! with. (No existing verb says anything about the program itself.)

use super::refusal::Refusal;
use super::verb::Invocation;
use crate::report::page;
use serde::{Deserialize, Serialize};
use serde_json::Value;

macro_rules! files {
    ($($id:literal)*) => { [$(($id, include_str!(concat!("../../contracts/", $id, ".yaml"))),)*] };
}

/// By id: those that the specification names, then our own.
#[rustfmt::skip]
const FILES: [(&str, &str); 19] = files![
    "F-CUDA-001" "F-DP-001" "F-DP-002" "F-DP-003" "F-DP-004" "F-DP-005" "F-DP-006"
    "F-FT-001" "F-FT-002" "F-FT-003" "F-FT-004" "F-FT-005" "F-FT-006" "F-FT-007"
    "F-FT-008" "F-QT-001" "F-WGPU-001" "F-WGPU-002" "F-WGPU-003"
];

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Contract {
    id: String,
    severity: Severity,
    statement: String,
    tolerance: Value,
    enforced_at: String,
    tests: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Severity {
    Critical,
    Major,
}

/// Lists them.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let contracts = all()?;
    if inv.json {
        return inv.say(&serde_json::json!({ "contracts": contracts }).to_string());
    }
    for (i, c) in contracts.iter().enumerate() {
        if i > 0 {
            inv.say("")?;
        }
        let severity = if c.severity == Severity::Critical { "critical" } else { "major" };
        inv.say(&format!("{} ({severity})", c.id))?;
        inv.say(&format!("  {}", c.statement))?;
        inv.say(&format!("  tolerance: {}", shown(&c.tolerance)))?;
        inv.say(&format!("  enforced at: {}", c.enforced_at))?;
        inv.say(&format!("  tests: {}", c.tests.join(", ")))?;
    }
    Ok(())
}

/// For a page about a run.
pub fn in_words() -> Vec<page::Contract> {
    let words = |c: Contract| {
        let enforced = Some(c.enforced_at).filter(|place| !place.starts_with("nowhere"));
        page::Contract { id: c.id, statement: c.statement, enforced }
    };
    all().unwrap_or_default().into_iter().map(words).collect()
}

fn all() -> Result<Vec<Contract>, Refusal> {
    let read = |(id, text): &(&str, &str)| {
        let contract: Contract = serde_yaml::from_str(text)
            .map_err(|e| Refusal::failure(format!("contracts/{id}.yaml of this build: {e}")))?;
        // YAML ends a folded text with a line end.
        Ok(Contract { statement: contract.statement.trim_end().into(), ..contract })
    };
    FILES.iter().map(read).collect()
}

/// A word, or names with their bounds.
fn shown(tolerance: &Value) -> String {
    match tolerance {
        Value::String(text) => text.clone(),
        Value::Object(bounds) => {
            bounds.iter().map(|(name, bound)| format!("{name} {bound}")).collect::<Vec<_>>().join(", ")
        }
        other => other.to_string(),
    }
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
