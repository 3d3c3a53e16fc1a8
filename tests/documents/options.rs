//! Options that documents name, against those that the program's help lists.

use std::collections::BTreeSet;
use std::process::Command;

/// Options of other programs, as far as the documents name them.
#[rustfmt::skip]
const OF_OTHERS: &[&str] = &[
    "--release", "--path", "--no-install", "--install", "--test", "--device", "--max-lora-rank", "--lora",
    "--ntasks-per-node", "--cpus-per-task", "--array", "--bind-to", "--mca", "--strict", "--match",
];

fn help(args: &[&str]) -> String {
    let out = Command::new(env!("CARGO_BIN_EXE_finetune")).args(args).output().unwrap();
    assert!(out.status.success(), "finetune {args:?}");
    String::from_utf8(out.stdout).unwrap()
}

/// Every option of every verb.
pub fn known() -> BTreeSet<String> {
    let overview = help(&["help"]);
    let verbs = overview.split("verbs:").nth(1).unwrap().lines().filter_map(|l| l.split_whitespace().next());
    let mut all = help(&["help", "options"]);
    for verb in verbs {
        all += &help(&["help", verb]);
    }
    named(&all).map(|(_, name)| name).collect()
}

/// Line and name of every option in a text.
fn named(text: &str) -> impl Iterator<Item = (usize, String)> {
    let part = |c: char| c.is_ascii_alphanumeric() || c == '-';
    text.lines().enumerate().flat_map(move |(n, line)| {
        line.match_indices("--").filter_map(move |(at, _)| {
            let before = line[..at].chars().next_back();
            let name = line[at..].split(|c| !part(c)).next().unwrap_or_default();
            let begins = before.is_none_or(|c| " `(\"[/".contains(c));
            (begins && name[2..].starts_with(|c: char| c.is_ascii_lowercase()))
                .then(|| (n + 1, name.to_string()))
        })
    })
}

/// Options in `text` that no verb has.
pub fn unknown(text: &str, known: &BTreeSet<String>) -> Vec<String> {
    let strange =
        named(text).filter(|(_, name)| !known.contains(name) && !OF_OTHERS.contains(&name.as_str()));
    strange.map(|(line, name)| format!("line {line}: {name} is an option of no verb")).collect()
}

#[test]
fn options_that_do_not_exist_are_found() {
    let known: BTreeSet<String> = ["--rank", "--no-packing"].map(String::from).into();
    assert_eq!(unknown("a `--rank 8`, --no-packing; a--b, `--` and --- end", &known).len(), 0);
    assert_eq!(unknown("`--rnak`\n(--ranks=1)", &known).len(), 2);
}
