//! Delayed gradients (`--delay 1`): the next step is computed while sums and parameters travel, and the adapter has the bytes
//! of one process wherever it is computed.

use crate::draw::{Draw, seed, setting};
use crate::fleet::{Fleet, RUN};
use std::time::Duration;

#[test]
fn delayed_steps_have_the_same_bytes_wherever_they_are_computed() {
    let small = "--batch-size 24 --micro-batch-tokens 64 --rank 4";
    let classifier = "demo --data classes.jsonl --task classify --num-classes 2 --quantize nf4";
    let looks = "--eval-split 8 --eval-steps 3 --keep-best --sum-bits 6 --update-bits 8";
    let preference = format!("demo --data pairs.jsonl --task dpo {looks}");
    let workers = [
        ("--expect-workers 1", &["a"][..]),
        ("--expect-workers 2", &["a", "b"]),
        ("--expect-workers 3", &["a", "b", "c"]),
    ];
    for run in [RUN, &format!("{classifier} {small}"), &format!("{preference} {small}")] {
        Fleet::all_ways_are_equal(&format!("{run} --max-steps 7"), "--delay 1", &workers);
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
    let kills = setting("FINETUNE_CHAOS_BLOWS").unwrap_or(6) as usize;
    let run = format!("{RUN} --max-steps {} --delay 1", 12 * kills);
    let mut draw = Draw(seed());
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --expect-workers 2"));
    fleet.faulty("b", "--threads 1", "slow=4");
    let mut before = 0;
    for _ in 0..kills {
        fleet.faulty("a", "--threads 1", "slow=4");
        fleet.wait_for_step(before + 2);
        std::thread::sleep(Duration::from_micros(draw.below(300_000)));
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
        ("--delay 1 --islands 2", "islands exchange their results"),
        ("--delay 1 --role coordinator --stages 2", "compute one step at a time"),
        ("--delay 1 --role coordinator --verify 50%", "are checked (--verify) within their step"),
    ] {
        fleet.bench.refuses(&format!("{RUN} --max-steps 2 {more}"), 78, part);
    }
}
