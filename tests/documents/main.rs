//! README.md and docs/guide.md against the program: their commands run in a temporary folder, and their output has the
//! shape that the documents show. Every option that a document names exists.
//!
//! A block is a ```console block if it holds a command. A block that cannot run here has the line
//! `<!-- not run: reason -->` above it. `...` in the output stands for any lines; numbers, paths with numbers and units
//! are not compared (`markdown::shape`).
#![cfg(unix)]

#[path = "../cli_fixture/mod.rs"]
mod cli_fixture;
mod markdown;
mod options;
mod session;

use session::Session;
use std::path::Path;

fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

#[track_caller]
fn check(path: &str, found: &[String]) {
    assert!(found.is_empty(), "{path}:\n{}\n", found.join("\n\n"));
}

#[track_caller]
fn commands_have_the_shown_output(path: &str) {
    let mut session = Session::new();
    let (mut found, mut ran) = (Vec::new(), 0);
    for block in markdown::blocks(&read(path)) {
        let commands = markdown::commands(&block);
        if block.kind != "console" {
            let hidden = block.lines.iter().any(|line| line.starts_with("finetune ")) || !commands.is_empty();
            if hidden {
                found.push(format!("line {}: a block with commands begins with ```console", block.line));
            }
            continue;
        }
        if block.not_run.is_some() {
            continue;
        }
        if commands.is_empty() {
            found.push(format!("line {}: no line begins with `$ `", block.line));
        }
        for command in commands {
            ran += 1;
            found.extend(session.run(command));
        }
    }
    found.extend(session.finish());
    check(path, &found);
    assert!(ran > 5, "{path}: only {ran} commands were found");
}

#[test]
fn commands_of_the_readme_print_what_it_shows() {
    commands_have_the_shown_output("README.md");
}

#[test]
fn commands_of_the_guide_print_what_it_shows() {
    commands_have_the_shown_output("docs/guide.md");
}

#[test]
fn every_option_in_the_documents_exists() {
    let known = options::known();
    for (path, runs) in [
        ("README.md", true),
        ("docs/guide.md", true),
        ("docs/export.md", false),
        ("docs/gpu.md", false),
        ("docs/systems.md", false),
    ] {
        let text = read(path);
        let mut lines: Vec<&str> = text.lines().collect();
        // The commands of a block that runs are checked by running them.
        for block in
            markdown::blocks(&text).iter().filter(|b| runs && b.kind == "console" && b.not_run.is_none())
        {
            lines[block.line..block.line + block.lines.len()].fill("");
        }
        check(path, &options::unknown(&lines.join("\n"), &known));
    }
}
