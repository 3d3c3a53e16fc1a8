//! A run on a terminal that `script` simulates: redrawn lines, permanent lines, and colours only if enabled. Without
//! `script` (util-linux) the test prints `skipped`.

use crate::cli_fixture::Bench;
use std::io::Write;
use std::process::{Command, Stdio};

/// All output of a run on a terminal of 100 columns.
fn shown(bench: &Bench, out: &str, variables: &[(&str, &str)]) -> Option<String> {
    let run = format!(
        "demo --data rows.jsonl --eval-data eval.jsonl --max-steps 12 --eval-steps 6 --batch-size 8 \
         --micro-batch-tokens 64 --gpus 0,1 --gpu-backend cpu -o {out}"
    );
    on_terminal(bench, (&run, ""), variables)
}

/// All output of `finetune {run}` on such a terminal, with typed input.
fn on_terminal(bench: &Bench, (run, typed): (&str, &str), variables: &[(&str, &str)]) -> Option<String> {
    let run = format!("stty cols 100 rows 30; '{}' {run}", env!("CARGO_BIN_EXE_finetune"));
    let mut script = Command::new("script");
    // Only for its environment, which has no settings from outside.
    for (name, value) in bench.command("").get_envs() {
        match value {
            Some(value) => script.env(name, value),
            None => script.env_remove(name),
        };
    }
    script.env_remove("NO_COLOR").env("TERM", "xterm").envs(variables.iter().copied());
    let script = script.current_dir(bench.path("")).args(["-q", "-e", "-c", &run, "/dev/null"]);
    let script = script.stdin(Stdio::piped()).stdout(Stdio::piped());
    let Ok(mut child) = script.spawn() else {
        eprintln!("skipped: no script");
        return None;
    };
    child.stdin.take().unwrap().write_all(typed.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}");
    Some(text)
}

#[test]
fn terminal_view_is_redrawn_and_keeps_events() {
    let bench = Bench::new();
    let Some(text) = shown(&bench, "a", &[]) else { return };
    for part in [
        "joined   ",
        "eval after step 6: ",
        "12/12",
        "loss ",
        "grad norm ",
        "memory ",
        "cpu 0 ",
        "cpu 1 ",
        "% idle",
    ] {
        assert!(text.contains(part), "{part:?} in {text}");
    }
    // Cursor up one line, and the colours of a state and of the bar.
    for sequence in ["\x1b[1A", "\x1b[32mrunning", "\x1b[36m"] {
        assert!(text.contains(sequence), "{sequence:?} in {text:?}");
    }
    assert!(!text.contains("step 1/12"), "plain lines are for pipes: {text}");
    let Some(plain) = shown(&bench, "b", &[("NO_COLOR", "1")]) else { return };
    assert!(plain.contains("\x1b[1A") && plain.contains("running"), "{plain:?}");
    assert!(!plain.contains("\x1b[32m") && !plain.contains("\x1b[36m"), "{plain:?}");
    // A terminal that cannot move its cursor gets the same lines as a pipe.
    let Some(dumb) = shown(&bench, "c", &[("TERM", "dumb")]) else { return };
    assert!(dumb.contains("12/12  loss") && !dumb.contains("\x1b["), "{dumb:?}");
}

#[test]
fn chat_on_a_terminal_reads_line_by_line() {
    let bench = Bench::new();
    let run = "generate demo --chat --max-new-tokens 4 --gpus none";
    let typed = "List files\nMore\n/reset\nList files\n\x04";
    let Some(text) = on_terminal(&bench, (run, typed), &[]) else { return };
    assert!(text.contains("/reset begins a new conversation"), "{text:?}");
    assert!(text.matches("> ").count() >= 5, "{text:?}");
    // If stdin is no terminal, all of it is one prompt.
    let mut child = bench.command(run).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"List files\nMore\n").unwrap();
    let piped = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    assert!(!piped.contains("> "), "{piped:?}");
}
