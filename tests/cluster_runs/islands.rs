//! Islands (`--islands`): the adapter depends on their number and their steps, and not on who computes them.

use crate::fleet::{Fleet, RUN};

const ISLANDS: &str = "--islands 3 --inner-steps 2";

#[test]
fn islands_have_the_same_bytes_wherever_they_are_computed() {
    let classifier =
        "demo --data classes.jsonl --task classify --num-classes 2 --quantize nf4 --batch-size 24";
    let preference = "demo --data pairs.jsonl --task dpo --batch-size 24";
    let small = |run: &str| format!("{run} --micro-batch-tokens 64 --rank 4");
    let workers = [("--expect-workers 1", &["a"][..]), ("--expect-workers 3 --verify 50%", &["a", "b", "c"])];
    for run in [RUN, &small(classifier), &small(preference)] {
        Fleet::all_ways_are_equal(&format!("{run} --max-steps 5"), ISLANDS, &workers);
    }
}

#[test]
fn a_killed_worker_and_a_resume_change_no_island() {
    let run = format!("{RUN} --max-steps 12 --save-steps 4");
    let others = [("--islands 3 --inner-steps 3", "islands was 3, of 2 steps, is 3, of 3 steps")];
    // An exchange is one event of two steps.
    Fleet::new().survives((&run, ISLANDS), 3, &others);
    // The coordinator has a velocity of its own.
    let outer = format!("{ISLANDS} --outer-learning-rate 0.7 --outer-momentum 0.9");
    let others = [
        (&*outer.replace("0.9", "0"), "outer_momentum was 0.9, is unset"),
        (&*outer.replace("0.7", "1"), "outer_learning_rate was 0.7, is unset"),
    ];
    Fleet::new().survives((&run, &outer), 3, &others);
}

/// A bad value is found again by another device before it ends the run, and a worker that forges results is removed.
#[test]
fn a_bad_island_halts_the_run_and_a_forged_one_does_not_count() {
    let run = format!("{RUN} --max-steps 8 {ISLANDS}");
    let mut halted = Fleet::new();
    halted.coordinator(&format!("{run} --expect-workers 2"));
    halted.worker("a", "--threads 1");
    halted.faulty("b", "--threads 1", "nan@3");
    halted.all_end(&["coordinator"], 3);
    let said = halted.said("coordinator");
    assert!(said.contains("steps 3 to 4: the result of an island became NaN in island"), "{said}");
    assert!(said.contains("the parameters of step 2 stand"), "{said}");

    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --expect-workers 3 --verify 100%"));
    for name in ["a", "b"] {
        fleet.worker(name, "--threads 1");
    }
    fleet.faulty("liar", "--threads 1", "forge=scaled");
    fleet.all_end(&["coordinator"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    assert!(fleet.said("liar").contains("removed by the coordinator: in step"), "{}", fleet.all());
}

/// With H steps between exchanges each value travels three times in H steps instead of once in each.
#[test]
fn islands_send_fewer_bytes() {
    let sent = |more: &str| {
        let mut fleet = Fleet::new();
        fleet.coordinator(&format!("{RUN} --max-steps 16 {more}"));
        fleet.worker("a", "--threads 1");
        fleet.all_end(&["coordinator", "a"], 0);
        let steps = fleet.bench.events("out", "step");
        let bytes = |name: &str| steps.iter().map(|step| step["shared"][name].as_u64().unwrap()).sum::<u64>();
        (steps.len(), bytes("bytes_in") + bytes("bytes_out"))
    };
    let ((sixteen, every), (two, islands)) = (sent(""), sent("--islands 1 --inner-steps 8"));
    assert_eq!((sixteen, two), (16, 2));
    // Sums of several microbatches are packed, a single island's result is f32.
    assert!(islands * 2 < every, "{islands} of {every} bytes");
}

#[test]
fn islands_that_cannot_be_computed_are_refused() {
    let fleet = Fleet::new();
    for (more, part) in [
        ("--islands 2 --role coordinator --stages 2", "an island is computed by one device"),
        ("--islands 2 --sum-bits 8", "what islands exchange is not rounded"),
        ("--islands 65", "expected at most 64"),
        ("--inner-steps 4", "is only for runs with islands"),
        ("--outer-momentum 0.5", "is only for runs with islands"),
        ("--outer-learning-rate 0.5", "is only for runs with islands"),
        ("--islands 2 --outer-momentum 1", "must be at least 0 and below 1, is 1"),
        ("--islands 2 --outer-momentum nan", "must be at least 0 and below 1, is NaN"),
        ("--islands 2 --outer-momentum=-0.5", "must be at least 0 and below 1, is -0.5"),
        ("--islands 2 --outer-learning-rate 0", "must be above 0 and at most 10, is 0"),
        ("--islands 2 --outer-learning-rate inf", "must be above 0 and at most 10, is inf"),
        ("--islands 60", "each of 60 islands needs a microbatch of every step"),
    ] {
        fleet.bench.refuses(&format!("{RUN} --max-steps 2 {more}"), 78, part);
    }
}
