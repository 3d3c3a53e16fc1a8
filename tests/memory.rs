//! Memory of the real binary: what a trained value takes, and what becomes of a run for which there is none.
#![cfg(target_os = "linux")]

mod cli_fixture;

use cli_fixture::{Bench, stderr};
use std::process::{Command, Stdio};
use std::time::Duration;

/// The most that a run had in memory at once, as the system counts it while it lasts.
fn peak(b: &Bench, args: &str) -> u64 {
    let mut run = b.command(args).stderr(Stdio::null()).spawn().unwrap();
    let mut peak = 0;
    while run.try_wait().unwrap().is_none() {
        let status = std::fs::read_to_string(format!("/proc/{}/status", run.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
        peak = peak.max(line.split_whitespace().next().map_or(0, |kb| kb.parse().unwrap()));
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(run.wait().unwrap().success(), "{args}");
    peak * 1024
}

/// Parameter, two moments, sum of 8 bytes, and the device's parameter and gradient: 28. Rows are short, so that the
/// activations that grow with the rank are a hundredth of that.
#[test]
fn a_trained_value_takes_28_bytes() {
    let b = Bench::new();
    b.file("short.jsonl", &"{\"prompt\":\"a\",\"completion\":\"b\"}\n".repeat(8));
    let run = |rank: usize| {
        let options =
            "--gpus cpu --dtype f32 --batch-size 1 --micro-batch-tokens 16 --max-steps 3 --save-steps 1";
        peak(&b, &format!("demo --data short.jsonl --rank {rank} {options} -q -o rank{rank}")) as f64
    };
    let bytes = (run(512) - run(128)) / (384.0 * 9728.0);
    assert!((26.0..29.0).contains(&bytes), "{bytes}");
}

/// Under `ulimit -v`.
fn limited(b: &Bench, kilobytes: u64, args: &str) -> (Option<i32>, String) {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("ulimit -v {kilobytes}; exec \"$@\""), "sh", env!("CARGO_BIN_EXE_finetune")]);
    let inner = b.command(args);
    shell.args(inner.get_args()).current_dir(b.dir.path()).stdin(Stdio::null());
    for (name, value) in inner.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    let out = shell.output().unwrap();
    (out.status.code(), stderr(&out))
}

#[test]
fn a_run_beyond_the_limits_of_its_process_ends_by_a_line() {
    let b = Bench::new();
    let run = "demo --data rows.jsonl --gpus cpu --threads 1 --rank 65536 -q -o out";
    for (typed, code, said) in [
        // The limit bounds what is free.
        ("", 78, "needs about 17."),
        // Who types more than there is is believed, until nothing is left.
        (" --memory-limit 100GB", 1, "error: out of memory: "),
    ] {
        let (ended, text) = limited(&b, 2_000_000, &format!("{run}{typed}"));
        assert_eq!(ended, Some(code), "{typed}: {text}");
        assert!(
            text.lines().last().is_some_and(|last| last.starts_with("error: ") && last.contains(said)),
            "{text}"
        );
    }
}
