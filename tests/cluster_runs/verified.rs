//! `--verify`: workers compute microbatches of each other again. A liar, a faulty device, kills and resumes change no byte.

use crate::cli_fixture::{classes, pairs, stderr};
use crate::fleet::{Fleet, RUN};
use std::time::Duration;

/// Asserts that the coordinator removed this worker with the numbers.
#[track_caller]
fn removed(fleet: &mut Fleet, name: &str) {
    let id = format!("-{}", fleet.id(name));
    let said = fleet.said("coordinator");
    let line = said.lines().find(|line| line.contains(&id) && line.contains("removed: in step"));
    let line = line.unwrap_or_else(|| panic!("{name} ({id}) was not removed\n{}", fleet.all()));
    for part in ["microbatch", " has ", " have ", "of its microbatches"] {
        assert!(line.contains(part), "{part:?} in {line:?}");
    }
}

#[test]
fn every_kind_of_liar_is_removed_and_changes_no_byte() {
    let run = format!("{RUN} --max-steps 5");
    let alone = Fleet::new().alone(&run);
    for forgery in ["scaled", "stale", "random", "flipped", "bit"] {
        let mut fleet = Fleet::new();
        fleet.coordinator(&format!("{run} --expect-workers 3 --verify 100%"));
        for name in ["a", "b"] {
            fleet.faulty(name, "--threads 1", "slow=3"); // so that some work is left for the liar
        }
        fleet.faulty("liar", "--threads 1", &format!("forge={forgery}"));
        fleet.all_end(&["coordinator", "a", "b"], 0);
        assert!(fleet.adapter("out") == alone, "{forgery}\n{}", fleet.all());
        removed(&mut fleet, "liar");
        let said = fleet.said("coordinator");
        assert!(said.contains("found after 1 of its microbatches on average"), "{said}");
        assert!(said.contains("computed again by another worker and compared:"), "{said}");
    }
}

#[test]
fn a_liar_is_found_where_a_half_is_checked() {
    let mut fleet = Fleet::new();
    fleet.coordinator(&format!("{RUN} --max-steps 12 --expect-workers 3 --verify 0.5"));
    for name in ["a", "b"] {
        fleet.faulty(name, "--threads 1", "slow=3");
    }
    fleet.faulty("liar", "--threads 1", "forge=flipped");
    fleet.all_end(&["coordinator", "a", "b"], 0);
    removed(&mut fleet, "liar");
    assert!(fleet.said("coordinator").contains("with probability 99 % after 7"), "{}", fleet.all());
}

#[test]
fn checked_work_gives_the_bytes_of_one_process() {
    for (more, data) in [
        ("--eval-data rows.jsonl --eval-steps 2 --sample-prompt Why?", "many"),
        ("--quantize nf4", "many"),
        ("--task classify --num-classes 2", "classes"),
        ("--task dpo --nll-weight 0.5", "pairs"),
        ("--task reward --eval-split 8 --eval-steps 2", "pairs"),
    ] {
        let run = format!("{} --max-steps 4 {more}", RUN.replace("--data many", &format!("--data {data}")));
        let mut fleet = Fleet::new();
        fleet.bench.file("classes.jsonl", &classes(240));
        fleet.bench.file("pairs.jsonl", &pairs(120));
        let alone = fleet.alone(&run);
        // A device of this process, one with two devices, and a line of two devices.
        fleet.coordinator(&format!("{run} --gpus cpu --threads 1 --expect-workers 4 --verify 60%"));
        fleet.worker("two", "--gpu-backend cpu --gpus 0,1 --threads 2");
        fleet.worker("line", "--gpus cpu+cpu --threads 2");
        fleet.all_end(&["coordinator", "two", "line"], 0);
        assert!(fleet.adapter("out") == alone, "{more}\n{}", fleet.all());
        let said = fleet.said("coordinator");
        assert!(said.contains("computed again by another worker and compared:"), "{more}\n{}", fleet.all());
        assert!(!said.contains("removed"), "{more}\n{}", fleet.all());
    }
}

#[test]
fn kills_and_resumes_between_checks_change_no_byte() {
    let run = format!("{RUN} --max-steps 8 --save-steps 3");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    let how = "--expect-workers 3 --verify 100%";
    fleet.coordinator(&format!("{run} {how}"));
    for name in ["a", "b", "victim"] {
        fleet.faulty(name, "--threads 1", "slow=8");
    }
    fleet.wait_for_step(2);
    std::thread::sleep(Duration::from_millis(30));
    fleet.kill("victim");
    fleet.wait_for_step(4);
    std::thread::sleep(Duration::from_millis(20));
    fleet.kill("coordinator");
    fleet.faulty("c", "--threads 1", "slow=8");
    fleet.coordinator(&format!("{run} {how} --resume"));
    fleet.all_end(&["coordinator", "a", "b", "c"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    assert_eq!(fleet.steps(), 8);
}

/// Only one other worker: the device of this process decides.
#[test]
fn own_device_decides_and_changes_no_byte() {
    let run = format!("{RUN} --max-steps 5");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --gpus cpu --threads 1 --expect-workers 2 --verify 100%"));
    fleet.faulty("liar", "--threads 1", "forge=scaled");
    fleet.all_end(&["coordinator"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    removed(&mut fleet, "liar");
}

#[test]
fn two_workers_that_differ_end_the_run_with_both_names() {
    let run = format!("{RUN} --max-steps 6");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    let how = format!("{run} --expect-workers 2 --verify 100%");
    fleet.coordinator(&how);
    fleet.worker("good", "--threads 1");
    fleet.faulty("stale", "--threads 1", "forge=stale");
    fleet.all_end(&["coordinator"], 75);
    let last = fleet.said("coordinator").lines().last().unwrap_or_default().to_string();
    let names = ["good", "stale"].map(|name| format!("-{}", fleet.id(name)));
    for part in ["error: step", "differs between devices of one class", "--resume", &names[0], &names[1]] {
        assert!(last.contains(part), "{part:?} in {last:?}\n{}", fleet.all());
    }
    // Without the liar, and with another one, the run goes on to the same bytes.
    fleet.kill("stale");
    fleet.worker("other", "--threads 1");
    fleet.coordinator(&format!("{how} --resume"));
    fleet.all_end(&["coordinator", "good", "other"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
}

#[test]
fn workers_of_single_classes_get_no_work_and_are_named() {
    let mut fleet = Fleet::new();
    fleet.coordinator(&format!("{RUN} --max-steps 2 --expect-workers 2 --verify 2% --join-timeout 4s"));
    fleet.worker("one", "--threads 1 --dtype f32");
    fleet.worker("other", "--threads 1 --dtype bf16");
    fleet.all_end(&["coordinator"], 75);
    let said = fleet.said("coordinator");
    for name in ["one", "other"] {
        let id = format!("-{}", fleet.id(name));
        let named = |line: &str| line.contains(&id) && line.contains("gets no work: no other worker has");
        assert!(said.lines().any(named), "{name}\n{}", fleet.all());
    }
    assert!(said.lines().last().is_some_and(|line| line.contains("0 of 1 checkable devices")), "{said}");
}

#[test]
fn verification_without_workers_is_refused() {
    let fleet = Fleet::new();
    for (more, part) in [
        ("--verify 2%", "--verify: only for --role coordinator"),
        ("--role coordinator --verify 2% --stages 2", "--verify: workers that hold the model together"),
        ("--role coordinator --verify 2", "--verify"),
    ] {
        let said = fleet.bench.run(&format!("{RUN} --max-steps 2 {more} -o no"));
        assert_ne!(said.status.code(), Some(0));
        assert!(stderr(&said).contains(part), "{more}: {}", stderr(&said));
    }
}
