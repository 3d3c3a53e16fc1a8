//! Documents that name tests: `contracts/*.yaml` and the invariants of docs/explain/architecture.md. The name of a
//! missing test is a finding, and so is a contract or an invariant without a test.

use crate::source::{Tree, words};
use std::collections::HashSet;

/// Names of all test functions: those after a `#[test]`, also inside a `proptest!`.
pub fn test_names(tree: &Tree) -> HashSet<String> {
    let mut names = HashSet::new();
    for file in tree.files.iter().filter(|f| f.path.ends_with(".rs")) {
        let marker = "#[".to_string() + "test]";
        for (at, _) in file.code.match_indices(&marker) {
            let Some(f) = words(&file.code[at..], "fn").next() else { continue };
            let rest = file.code[at + f + 2..].trim_start();
            names.insert(rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect());
        }
    }
    names
}

pub fn check_contracts(tree: &Tree) -> Vec<String> {
    let names = test_names(tree);
    let mut found = Vec::new();
    for file in tree.files.iter().filter(|f| f.path.starts_with("contracts/") && f.path.ends_with(".yaml")) {
        let contract: serde_json::Value = match serde_yaml::from_str(&file.text) {
            Ok(value) => value,
            Err(error) => {
                found.push(format!("{}: {error}", file.path));
                continue;
            }
        };
        for key in ["id", "severity", "statement", "tolerance", "enforced_at"] {
            if contract.get(key).is_none() {
                found.push(format!("{}: no `{key}`", file.path));
            }
        }
        let name = file.path.trim_start_matches("contracts/").trim_end_matches(".yaml");
        if contract.get("id").and_then(|id| id.as_str()).is_some_and(|id| id != name) {
            found.push(format!("{}: its id is not the file's name", file.path));
        }
        let tests = contract.get("tests").and_then(|t| t.as_array()).cloned().unwrap_or_default();
        if tests.is_empty() {
            found.push(format!("{}: names no test", file.path));
        }
        for test in tests {
            let name = test.as_str().unwrap_or_default();
            if !names.contains(last(name)) {
                found.push(format!("{}: there is no test `{name}`", file.path));
            }
        }
    }
    found
}

/// In docs/explain/architecture.md, every numbered line below `## Invariants` ends with `(test: ..., ...)` in backticks.
pub fn check_invariants(tree: &Tree) -> Vec<String> {
    let Some(file) = tree.files.iter().find(|f| f.path == "docs/explain/architecture.md") else {
        return vec!["docs/explain/architecture.md is missing".into()];
    };
    let names = test_names(tree);
    let section = file.text.split("\n## ").find(|s| s.starts_with("Invariants")).unwrap_or_default();
    let numbered = |l: &str| l.split_once(". ").is_some_and(|(n, _)| n.parse::<u32>().is_ok());
    let mut items: Vec<String> = Vec::new();
    for line in section.lines().skip(1) {
        match items.last_mut() {
            _ if numbered(line) => items.push(line.into()),
            Some(item) => item.push_str(line),
            None => {}
        }
    }
    let mut found = Vec::new();
    if items.is_empty() {
        found.push("docs/explain/architecture.md: no numbered invariants below `## Invariants`".into());
    }
    for item in items {
        let shown: String = item.chars().take(60).collect();
        let tests = item.split_once("(test: ").map(|(_, t)| t).unwrap_or_default();
        let named: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        if named.is_empty() {
            found.push(format!("invariant names no test: {shown}"));
        }
        for name in named.iter().filter(|n| !names.contains(last(n))) {
            found.push(format!("invariant names `{name}`, which does not exist: {shown}"));
        }
    }
    found
}

fn last(name: &str) -> &str {
    name.rsplit("::").next().unwrap_or(name)
}

#[test]
fn a_name_without_a_test_is_found() {
    let good =
        "id: A\nseverity: critical\nstatement: s\ntolerance: 0\nenforced_at: x\ntests: [a::b::holds]\n";
    let test = ("tests/x.rs", "#[test]\nfn holds() {}");
    let cases = [
        (good.to_string(), 0),
        (good.replace("holds", "held"), 1),
        (good.replace("tolerance: 0\n", ""), 1),
        (good.replace("[a::b::holds]", "[]"), 1),
        ("id: [".to_string(), 1),
        (good.replace("id: A", "id: B"), 1),
    ];
    for (text, want) in cases {
        let found = check_contracts(&Tree::of(&[("contracts/A.yaml", text.as_str()), test]));
        assert_eq!(found.len(), want, "{text}: {found:?}");
    }
    let doc = |line: &str| format!("# A\n\n## Invariants\n{line}\n\n## Next\n");
    for (line, want) in [
        ("1. No x\n   ever. (test: `x::holds`)", 0),
        ("1. No x. (test: `gone`)", 1),
        ("1. No x.", 1),
        ("none", 1),
    ] {
        let text = doc(line);
        let found = check_invariants(&Tree::of(&[("docs/explain/architecture.md", text.as_str()), test]));
        assert_eq!(found.len(), want, "{line}: {found:?}");
    }
}
