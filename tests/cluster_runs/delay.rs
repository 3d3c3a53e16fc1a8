//! Delayed gradients (`--delay 1`): the next step is computed while sums and parameters travel, and the adapter has the bytes
//! of one process wherever it is computed.

use crate::cli_fixture::{classes, pairs};
use crate::fleet::{Fleet, RUN};
use std::time::Duration;

/// A fleet with the rows of all tasks.
fn fleet() -> Fleet {
    let fleet = Fleet::new();
    fleet.bench.file("classes.jsonl", &classes(96));
    fleet.bench.file("pairs.jsonl", &pairs(96));
    fleet
}

#[test]
fn delayed_steps_have_the_same_bytes_wherever_they_are_computed() {
    let small = "--batch-size 24 --micro-batch-tokens 64 --rank 4";
    let classifier = "demo --data classes.jsonl --task classify --num-classes 2 --quantize nf4";
    let looks = "--eval-split 8 --eval-steps 3 --keep-best --sum-bits 6 --update-bits 8";
    let preference = format!("demo --data pairs.jsonl --task dpo {looks}");
    for run in [RUN, &format!("{classifier} {small}"), &format!("{preference} {small}")] {
        let here = fleet();
        let (undelayed, run) = (format!("{run} --max-steps 7"), format!("{run} --max-steps 7 --delay 1"));
        let alone = here.alone(&run);
        assert!(alone != here.alone(&format!("{undelayed} --overwrite")), "no step was delayed");
        for (out, gpus) in [("devices", "cpu,cpu,cpu"), ("line", "cpu+cpu")] {
            here.bench.ok(&format!("{run} --gpus {gpus} --threads 2 -q -o {out}"));
            assert!(here.adapter(out) == alone, "{gpus}");
        }
        for names in [&["a"][..], &["a", "b"], &["a", "b", "c"]] {
            let mut fleet = fleet();
            fleet.coordinator(&format!("{run} --expect-workers {}", names.len()));
            names.iter().for_each(|name| fleet.worker(name, "--threads 1"));
            fleet.all_end(&[&["coordinator"], names].concat(), 0);
            assert!(fleet.adapter("out") == alone, "{} workers\n{}", names.len(), fleet.all());
        }
    }
}

#[test]
fn a_killed_worker_and_a_resume_change_no_delayed_byte() {
    let run = format!("{RUN} --max-steps 12 --save-steps 4");
    Fleet::new().survives((&run, "--delay 1"), 6, &[("--delay 0", "delay was 1, is unset")]);
}

/// `FINETUNE_CHAOS_BLOWS` is the number of kills (default: 6).
#[test]
fn a_worker_killed_at_any_moment_changes_no_delayed_byte() {
    let kills = std::env::var("FINETUNE_CHAOS_BLOWS").map_or(6, |n| n.parse().expect("FINETUNE_CHAOS_BLOWS"));
    let run = format!("{RUN} --max-steps {} --delay 1", 12 * kills);
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let mut random = clock.as_nanos() as u64 % 1_000_000;
    println!("seed {random}");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --expect-workers 2"));
    fleet.faulty("b", "--threads 1", "slow=4");
    let mut before = 0;
    for _ in 0..kills {
        fleet.faulty("a", "--threads 1", "slow=4");
        fleet.wait_for_step(before + 2);
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        std::thread::sleep(Duration::from_micros((random >> 40) % 300_000));
        if !fleet.is_running("coordinator") {
            break;
        }
        before = fleet.steps();
        fleet.kill("a");
    }
    fleet.all_end(&["coordinator", "b"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    assert_eq!(fleet.steps(), 12 * kills);
}

/// A bad value halts the run in its step, also if it was found while the step before was not complete.
#[test]
fn a_bad_value_halts_a_delayed_run_in_its_step() {
    let run = format!("{RUN} --max-steps 8 --delay 1");
    let mut fleet = Fleet::new();
    fleet.coordinator(&format!("{run} --expect-workers 2"));
    fleet.worker("a", "--threads 1");
    fleet.faulty("b", "--threads 1", "nan@4");
    fleet.all_end(&["coordinator"], 3);
    let said = fleet.said("coordinator");
    assert!(said.contains("step 4"), "{said}");
    assert_eq!(fleet.steps(), 3, "{said}");
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --resume --expect-workers 1"));
    fleet.worker("c", "--threads 1");
    fleet.all_end(&["c"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
}

#[test]
fn delays_that_cannot_be_computed_are_refused() {
    let fleet = Fleet::new();
    for (more, part) in [
        ("--delay 2", "expected 0 or 1"),
        ("--delay 1 --islands 2", "islands exchange their results"),
        ("--delay 1 --role coordinator --stages 2", "compute one step at a time"),
        ("--delay 1 --role coordinator --verify 50%", "are checked (--verify) within their step"),
    ] {
        fleet.bench.refuses(&format!("{RUN} --max-steps 2 {more}"), 78, part);
    }
}
