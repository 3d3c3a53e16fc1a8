//! Numbers between workers in bf16 (`--wire bf16`): the bytes of the adapter depend on where the layers are divided, and
//! on nothing else.

use crate::cli_fixture::stderr;
use crate::fleet::{Fleet, RUN};
use std::time::Duration;

const BF16: &str = "--stages 2+2 --wire bf16";

/// A fleet with these workers, each with its faults, after its end.
fn run(args: &str, workers: &[(&str, &str)]) -> Fleet {
    let mut fleet = Fleet::new();
    fleet.coordinator(args);
    for (name, faults) in workers {
        fleet.faulty(name, "--threads 1", faults);
    }
    let names: Vec<&str> =
        std::iter::once("coordinator").chain(workers.iter().map(|(name, _)| *name)).collect();
    fleet.all_end(&names, 0);
    fleet
}

fn events(fleet: &Fleet, out: &str) -> Vec<serde_json::Value> {
    let text = String::from_utf8(fleet.bench.read(&format!("{out}/metrics.jsonl"))).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn losses(fleet: &Fleet, out: &str) -> Vec<f64> {
    let steps = events(fleet, out).into_iter().filter(|event| event["event"] == "step");
    steps.map(|event| event["loss"].as_f64().unwrap()).collect()
}

#[test]
fn bf16_between_workers_depends_on_the_cuts_alone() {
    let args = format!("{RUN} --max-steps 6 --eval-data rows.jsonl --eval-steps 3 --sample-prompt Hello");
    let two = run(&format!("{args} {BF16}"), &[("a", ""), ("b", "")]);
    let adapter = two.adapter("out");
    for workers in [&[("a", "slow=9"), ("b", "")][..], &[("a", ""), ("b", "slow=9"), ("c", ""), ("d", "")]] {
        let other = run(&format!("{args} {BF16}"), workers);
        assert!(other.adapter("out") == adapter, "{workers:?}\n{}", other.all());
    }
    let cut = run(&format!("{args} --stages 1+3 --wire bf16"), &[("a", ""), ("b", "")]);
    assert!(cut.adapter("out") != adapter, "another cut rounds other numbers");

    let alone = Fleet::new();
    assert!(alone.alone(&args) != adapter, "nothing was rounded");
    // The measured difference is below 0.0004; a bf16 number is off by up to 0.4 %.
    let (rounded, exact) = (losses(&two, "out"), losses(&alone, "alone"));
    assert_eq!(rounded.len(), 6);
    for (a, b) in rounded.iter().zip(&exact) {
        assert!((a / b - 1.0).abs() < 0.002, "{rounded:?} {exact:?}");
    }
    let all = events(&two, "out");
    let line = all.iter().find(|event| event["event"] == "line").unwrap();
    let exact = run(&format!("{args} --stages 2+2"), &[("a", ""), ("b", "")]);
    let all = events(&exact, "out");
    let full = all.iter().find(|event| event["event"] == "line").unwrap();
    assert_eq!(2 * line["token_bytes"].as_u64().unwrap(), full["token_bytes"].as_u64().unwrap());
    let text = String::from_utf8(two.bench.read("out/metrics.jsonl")).unwrap();
    assert!(text.contains("+wire-bf16@2\""), "{text}");
}

#[test]
fn a_killed_seat_changes_no_byte_of_bf16_between_workers() {
    let args = format!("{RUN} --max-steps 6 {BF16}");
    let adapter = run(&args, &[("a", ""), ("b", "")]).adapter("out");
    for victim in ["a", "b"] {
        let mut fleet = Fleet::new();
        fleet.coordinator(&args);
        for name in ["a", "b"] {
            fleet.faulty(name, "--threads 1", "slow=16");
        }
        fleet.wait_for_step(1);
        fleet.worker("spare", "--threads 1");
        fleet.wait_for_step(2);
        std::thread::sleep(Duration::from_millis(17));
        fleet.kill(victim);
        let other = if victim == "a" { "b" } else { "a" };
        fleet.all_end(&["coordinator", other, "spare"], 0);
        assert!(fleet.said(other).contains("the line fell"), "{}", fleet.all());
        assert!(fleet.adapter("out") == adapter, "{victim}\n{}", fleet.all());
    }
}

#[test]
fn a_resume_keeps_the_type_between_workers() {
    let args = format!("{RUN} --max-steps 9 --save-steps 3");
    let adapter = run(&format!("{args} {BF16}"), &[("a", ""), ("b", "")]).adapter("out");
    let mut fleet = Fleet::new();
    fleet.coordinator(&format!("{args} {BF16}"));
    for name in ["a", "b"] {
        fleet.faulty(name, "--threads 1", "slow=16");
    }
    fleet.wait_for_step(4);
    fleet.kill("coordinator");
    for (other, what) in [
        ("--wire f32", "wire was bf16 (--stages 2+2), is unset"),
        ("--stages 3+1", "wire was bf16 (--stages 2+2), is bf16 (--stages 3+1)"),
    ] {
        // The rest comes from run.yaml.
        let resume = format!("{args} {other} --role coordinator --bind {} -o out --resume -q", fleet.at());
        let out = fleet.bench.run(&resume);
        assert_eq!(out.status.code(), Some(78), "{}", stderr(&out));
        assert!(stderr(&out).contains(what), "{}", stderr(&out));
    }
    fleet.coordinator(&format!("{args} {BF16} --resume"));
    fleet.all_end(&["coordinator", "a", "b"], 0);
    assert!(fleet.adapter("out") == adapter, "{}", fleet.all());
}
