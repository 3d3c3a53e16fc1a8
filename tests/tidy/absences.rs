//! Forbidden text. The words are put together at run time, so that this file does not contain them.

use crate::shape::judge;
use crate::source::{Tree, words};

const VAGUE: &[&str] = &["util", "utils", "common", "helper", "helpers", "misc", "core", "manager"];

pub fn unsafe_outside(tree: &Tree, allowed: &[(&str, &str)]) -> Vec<String> {
    let mut found = Vec::new();
    for file in tree.files.iter().filter(|f| f.path.ends_with(".rs")) {
        if let Some(at) = words(&file.code, "unsafe").next() {
            found.push((file.path.clone(), format!("{}:{}: unsafe", file.path, file.line(at))));
        }
    }
    judge(found, allowed)
}

pub fn vague_names(tree: &Tree) -> Vec<String> {
    let rust = tree.files.iter().filter(|f| f.path.ends_with(".rs"));
    rust.filter(|f| f.path.trim_end_matches(".rs").split('/').any(|part| VAGUE.contains(&part)))
        .map(|f| f.path.clone())
        .collect()
}

pub fn markers(tree: &Tree) -> Vec<String> {
    let in_code = ["todo".to_string() + "!", "unimplemented".to_string() + "!", "#[".to_string() + "ignore"];
    let anywhere = ["FIX".to_string() + "ME", "XX".to_string() + "X:"];
    let mut found = Vec::new();
    for file in tree.files.iter().filter(|f| f.path.ends_with(".rs") || f.path.ends_with(".wgsl")) {
        for word in &in_code {
            for (at, _) in file.code.match_indices(word.as_str()) {
                found.push(format!("{}:{}: {word}", file.path, file.line(at)));
            }
        }
        for (n, line) in file.text.lines().enumerate() {
            if let Some(word) = anywhere.iter().find(|w| line.contains(w.as_str())) {
                found.push(format!("{}:{}: {word}", file.path, n + 1));
            }
        }
    }
    found
}

/// Absolute paths of a build machine, and folders beside the checkout, which users do not have.
pub fn machine_paths(tree: &Tree) -> Vec<String> {
    let roots: Vec<String> = ["work", "farm", "root", "tmp/ref"].iter().map(|r| format!("/{r}/")).collect();
    let beside = "../".to_string() + "shared";
    let mut found = Vec::new();
    for file in tree.files.iter().filter(|f| f.path != "Cargo.lock") {
        for (n, line) in file.text.lines().enumerate() {
            let alone = |at: usize| {
                !line[..at].chars().next_back().is_some_and(|c| c.is_alphanumeric() || matches!(c, '_' | '.'))
            };
            let bad = roots.iter().any(|r| line.match_indices(r.as_str()).any(|(at, _)| alone(at)));
            if bad || line.contains(&beside) {
                let shown: String = line.trim().chars().take(80).collect();
                found.push(format!("{}:{}: {shown}", file.path, n + 1));
            }
        }
    }
    found
}

/// Shipped code that prints with a macro that panics if the reader has closed its end; `support::stderr` does not.
pub fn prints(tree: &Tree) -> Vec<String> {
    let mut found = Vec::new();
    for file in tree.program() {
        for word in ["eprintln", "eprint", "println", "print"] {
            let calls =
                words(&file.shipped, word).filter(|at| file.shipped[at + word.len()..].starts_with('!'));
            found.extend(calls.map(|at| format!("{}:{}: {word}!", file.path, file.line(at))));
        }
    }
    found
}

#[test]
fn each_absence_can_be_violated() {
    let dir = "ro".to_string() + "ot";
    let texts = [
        format!("fn f() {{ {}!() }}", "todo"),
        format!("// {}: later", "FIX".to_string() + "ME"),
        format!("#[{}]\nfn t() {{}}", "ignore"),
        format!("const P: &str = \"/{dir}/x\";"),
        format!("open(\"../{}/data\")", "shared"),
        "fn f() { unsafe { g() } }".to_string(),
    ];
    let of = |i: usize| Tree::of(&[("src/a.rs", texts[i].as_str())]);
    assert_eq!([markers(&of(0)).len(), markers(&of(1)).len(), markers(&of(2)).len()], [1, 1, 1]);
    let printing = ["fn f() { eprintln!(\"x\") }", "// eprintln!()\nfn f() { writeln!(x) }"];
    assert_eq!(printing.map(|text| prints(&Tree::of(&[("src/a/b.rs", text)])).len()), [1, 0]);
    assert_eq!([machine_paths(&of(3)).len(), machine_paths(&of(4)).len()], [1, 1]);
    assert_eq!(unsafe_outside(&of(5), &[]).len(), 1);
    assert_eq!(unsafe_outside(&of(5), &[("src/a.rs", "why")]).len(), 0);
    assert_eq!(unsafe_outside(&of(0), &[("src/a.rs", "why")]).len(), 1, "stale exception");
    assert_eq!(
        vague_names(&Tree::of(&[("src/helpers/x.rs", ""), ("src/a/core.rs", ""), ("src/a/score.rs", "")]))
            .len(),
        2
    );
    let fine = Tree::of(&[("src/a.rs", "// not unsafe, nothing to ignore; https://x.y/work/z is a page")]);
    assert!(
        markers(&fine).is_empty() && machine_paths(&fine).is_empty() && unsafe_outside(&fine, &[]).is_empty()
    );
}
