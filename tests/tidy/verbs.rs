//! Each verb of `Backend` and each provided method of `Fused` is called in test code.

use crate::source::{Tree, item_end, words};

/// Memory and transport, which every test of a verb uses.
const PLUMBING: &[&str] = &[
    "class",
    "memory",
    "recycle",
    "upload",
    "read",
    "weight",
    "release",
    "weight_bytes",
    "tokens",
    "ids",
    "doing",
];

pub fn untested(tree: &Tree) -> Vec<String> {
    let verbs = [("kernels/src/backend/mod.rs", "Backend"), ("kernels/src/backend/fused.rs", "Fused")];
    let verbs = verbs.iter().flat_map(|(path, name)| methods(tree, path, name));
    let verbs: Vec<String> = verbs.filter(|v| !PLUMBING.contains(&v.as_str())).collect();
    if verbs.is_empty() {
        return vec!["kernels/src/backend/mod.rs: no trait Backend".into()];
    }
    let called = |verb: &String| tree.files.iter().any(|f| tests_of(f).contains(&format!(".{verb}(")));
    verbs.into_iter().filter(|v| !called(v)).collect()
}

/// Code that runs in tests only: files under `tests`, and the parts that `shipped` omits.
fn tests_of(file: &crate::source::File) -> String {
    if file.path.starts_with("tests/") {
        return file.code.clone();
    }
    let shipped = file.shipped.lines().chain(std::iter::repeat(""));
    file.code
        .lines()
        .zip(shipped)
        .filter(|(code, shipped)| code.trim() != shipped.trim())
        .map(|(c, _)| c.to_string() + "\n")
        .collect()
}

fn methods(tree: &Tree, path: &str, name: &str) -> Vec<String> {
    let Some(file) = tree.files.iter().find(|f| f.path == path) else { return Vec::new() };
    let Some(at) = file.code.find(&format!("pub trait {name}")) else { return Vec::new() };
    let body = &file.code[at..item_end(&file.code, at)];
    let name = |at: usize| {
        body[at + 2..].trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
    };
    words(body, "fn").map(name).collect()
}

#[test]
fn a_verb_without_a_test_is_found() {
    let seam = (
        "kernels/src/backend/mod.rs",
        "pub trait Backend { fn class(&self); fn rope(&mut self); fn add(&mut self); }",
    );
    let tests = (
        "kernels/src/backend/cpu/mod.rs",
        "fn f() { b.add(); }\n#[cfg(test)]\nmod tests {\n fn g() { b.rope(); } }",
    );
    assert_eq!(untested(&Tree::of(&[seam, tests])), ["add"]);
    assert_eq!(untested(&Tree::of(&[seam])), ["rope", "add"]);
}
