//! Environment variables: each one that is named anywhere is known, so that a run does not refuse a variable that a
//! test, a recipe or the guide sets; and the guide lists those that are no options.

use crate::source::Tree;

/// Files with deliberately misspelt names.
const MISSPELT: &[&str] =
    &["src/config/variables.rs", "tests/cli_errors/variables.rs", "tests/tidy/variables.rs"];
/// A placeholder for any of them in a sentence.
const ANY: &str = "FINETUNE_KEY";

/// Names that no code reads, with their files.
pub fn unknown(tree: &Tree, known: impl Fn(&str) -> bool) -> Vec<String> {
    let read = |path: &str| !MISSPELT.contains(&path) && !path.starts_with("docs/journal/");
    let mut found = Vec::new();
    for file in tree.files.iter().filter(|file| read(&file.path)) {
        for (at, _) in file.text.match_indices("FINETUNE_") {
            let rest = &file.text[at..];
            let end = rest.find(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'));
            let name = &rest[..end.unwrap_or(rest.len())];
            if name != "FINETUNE_" && name != ANY && !known(name) {
                found.push(format!("{}: {name} is read by nothing", file.path));
            }
        }
    }
    found.dedup();
    found
}

/// Variables that are no options and are missing in the guide.
pub fn undocumented(tree: &Tree, others: impl Iterator<Item = &'static str>) -> Vec<String> {
    let guide = tree.files.iter().find(|f| f.path == "docs/guide.md").map_or("", |f| &f.text);
    others
        .filter(|name| !guide.contains(name))
        .map(|name| format!("docs/guide.md: no word of {name}"))
        .collect()
}

#[test]
fn a_variable_that_nothing_reads_is_found() {
    let tree = Tree::of(&[("docs/guide.md", "FINETUNE_A=1 FINETUNE_B FINETUNE_KEY, FINETUNE_ and the key")]);
    assert_eq!(unknown(&tree, |name| name == "FINETUNE_A"), ["docs/guide.md: FINETUNE_B is read by nothing"]);
    assert_eq!(
        undocumented(&tree, ["FINETUNE_A", "FINETUNE_C"].into_iter()),
        ["docs/guide.md: no word of FINETUNE_C"]
    );
}
