//! Words that readers with another mother tongue misread, in sentences and in parts of names. Each one is put together
//! at run time, so that this file does not contain it.

use crate::shape::judge;
use crate::source::{File, Tree};

/// The first part of each word, the rest, and what is written instead.
const BANNED: &[(&str, &str, &str)] = &[
    ("no", "body", "no thread, no caller, no worker"),
    ("who", "ever", "the caller, the first thread"),
    ("a", "new", "again"),
    ("l", "ie", "are stored at, are inside"),
    ("l", "ies", "is stored at, is inside"),
    ("to", "ld", "reported, shown, set"),
    ("unt", "old", "unreported"),
    ("tw", "in", "reference, second"),
    ("tw", "ins", "references, equal devices"),
    ("tur", "ned", "transposed, rotated, permuted"),
    ("me", "nd", "fix"),
    ("rec", "kon", "estimate"),
    ("so ", "many", "this number of"),
    ("of ", "late", "recently"),
];
const KINDS: &[&str] = &[".rs", ".wgsl", ".ptx", ".md", ".yaml"];
const JOURNAL: &str = "docs/journal/";

/// Finds banned words in any case, also as a part of a name such as `snake_case`. Exceptions name `file:word`.
pub fn banned_words(tree: &Tree, allowed: &[(&str, &str)]) -> Vec<String> {
    let banned: Vec<(String, &str)> =
        BANNED.iter().map(|(head, tail, instead)| (format!("{head}{tail}"), *instead)).collect();
    let read = |f: &&File| !f.path.starts_with(JOURNAL) && KINDS.iter().any(|kind| f.path.ends_with(kind));
    let mut found = Vec::new();
    for file in tree.files.iter().filter(read) {
        for (n, line) in file.text.lines().enumerate() {
            let line = line.to_ascii_lowercase();
            for (word, instead) in banned.iter().filter(|(word, _)| contains_word(&line, word)) {
                let finding = format!("{}:{}: {word:?}: write {instead}", file.path, n + 1);
                found.push((format!("{}:{word}", file.path), finding));
            }
        }
    }
    judge(found, allowed)
}

/// Whether `word` occurs in `line` without a letter before it or after it.
fn contains_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        ![before, after].into_iter().flatten().any(char::is_alphabetic)
    })
}

#[test]
fn planted_banned_words_are_found() {
    for (head, tail, _) in BANNED {
        let word = format!("{head}{tail}");
        let capital = word.to_uppercase();
        for text in [format!("/// One {word}.\n"), format!("let a_{capital}_2 = 1;\n")] {
            let tree = Tree::of(&[("src/a.rs", &text), ("docs/a.md", &text), ("docs/journal/a.md", &text)]);
            let found = banned_words(&tree, &[]);
            assert_eq!(found.len(), 2, "{text}: {found:?}");
            assert!(
                found[0].starts_with("src/a.rs:1: ") && found[1].starts_with("docs/a.md:1: "),
                "{found:?}"
            );
            let excepted = format!("src/a.rs:{word}");
            assert_eq!(banned_words(&tree, &[(&excepted, "why")]).len(), 1, "{text}");
        }
        for text in [format!("x{word}"), format!("{word}x")] {
            assert_eq!(banned_words(&Tree::of(&[("src/a.rs", &text)]), &[]).len(), 0, "{text}");
        }
    }
    let stale = banned_words(&Tree::of(&[("kernels/a.ptx", "// fine\n")]), &[("kernels/a.ptx:word", "why")]);
    assert_eq!(stale.len(), 1, "stale exception");
}
