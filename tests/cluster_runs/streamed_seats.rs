//! Seats of a line whose devices have too little memory for their layers: they read some of them again in each pass, and
//! change no byte.

use crate::cli_fixture::{classes, pairs, stderr};
use crate::fleet::{Fleet, RUN};
use crate::random_base;
use finetune::families::{LFM2, OLMO2, QWEN3_5, QWEN3_MOE};
use std::process::Output;
use std::time::Duration;

/// A fleet with a base of six layers that fill much of the workers' memory, and the command of a run.
fn fleet(more: &str) -> (Fleet, String) {
    let fleet = Fleet::new();
    random_base::sized(&fleet.bench, &OLMO2, 256);
    fleet.bench.file("classes.jsonl", &classes(240));
    fleet.bench.file("pairs.jsonl", &pairs(120));
    (fleet, format!("{} {more}", RUN.replace("demo", "./base")))
}

/// The plan of two workers with that many kilobytes each.
fn plan(fleet: &Fleet, run: &str, kilobytes: u64) -> Output {
    let device = format!("--gpu-backend cpu --memory-limit {kilobytes}KB --role coordinator --stages 2");
    fleet.bench.run(&format!("plan {run} {device} --json"))
}

/// The least kilobytes in which two workers hold the model together, found in steps: they stream layers.
fn little(fleet: &Fleet, run: &str) -> u64 {
    let steps: Vec<u64> = (8..64).map(|step| 250 * step).collect();
    steps[steps.partition_point(|kilobytes| !plan(fleet, run, *kilobytes).status.success())]
}

/// The options of a worker with that many kilobytes.
fn worker(kilobytes: u64) -> String {
    format!("--threads 1 --memory-limit {kilobytes}KB")
}

/// Streamed layers that a worker has said that it has, in each line of it.
fn streamed(fleet: &Fleet, name: &str) -> Vec<usize> {
    let said = fleet.said(name);
    let lines = said.lines().filter_map(|line| line.strip_prefix("streams  "));
    lines.map(|line| line.split(' ').next().unwrap().parse().unwrap()).collect()
}

#[test]
fn seats_without_room_stream_layers_and_change_no_byte() {
    let evaluated = "--eval-data rows.jsonl --eval-steps 2 --sample-prompt Why?";
    for (more, data) in [
        (evaluated, "many"),
        ("--quantize nf4", "many"),
        ("--task classify --num-classes 2", "classes"),
        ("--task dpo", "pairs"),
    ] {
        let (mut fleet, run) = fleet(&format!("--max-steps 3 {more}"));
        let run = run.replace("many.jsonl", &format!("{data}.jsonl"));
        let alone = fleet.alone(&run);
        fleet.coordinator(&format!("{run} --stages 2"));
        let limit = little(&fleet, &run);
        fleet.worker("a", &worker(limit));
        fleet.worker("b", &worker(limit));
        fleet.all_end(&["coordinator", "a", "b"], 0);
        assert!(fleet.adapter("out") == alone, "{more}\n{}", fleet.all());
        let both = [streamed(&fleet, "a"), streamed(&fleet, "b")].concat();
        assert!(
            !both.is_empty() && both.iter().all(|count| (2..6).contains(count)),
            "{more}\n{}",
            fleet.all()
        );
        let formed = fleet.bench.events("out", "line").remove(0);
        let seats = formed["seats"].as_array().unwrap();
        let streamed: u64 = seats.iter().map(|seat| seat["streamed"].as_u64().unwrap()).sum();
        assert_eq!(streamed, both.iter().sum::<usize>() as u64, "{formed}");
        assert!(seats.iter().all(|seat| seat["memory"].as_u64() <= seat["limit"].as_u64()), "{formed}");
    }
}

/// What a worker's user typed counts: without streaming the same workers are too small together.
#[test]
fn a_seat_streams_what_its_own_option_says() {
    let (mut fleet, run) = fleet("--max-steps 2");
    fleet.coordinator(&format!("{run} --stages 2"));
    let limit = little(&fleet, &run);
    fleet.worker("a", &format!("{} --offload never", worker(limit)));
    fleet.worker("b", &format!("{} --offload never", worker(limit - 50)));
    fleet.all_end(&["b"], 78);
    for name in ["b", "coordinator"] {
        let said = fleet.said(name);
        assert!(said.contains("no split of the model") && said.contains("--offload auto"), "{}", fleet.all());
    }
    // A number of layers, where there is memory for all.
    let alone = fleet.alone(&run);
    fleet.worker("c", "--threads 1 --offload 2");
    fleet.all_end(&["coordinator", "a", "c"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    assert_eq!((streamed(&fleet, "a"), streamed(&fleet, "c")), (vec![], vec![2]), "{}", fleet.all());
}

#[test]
fn a_killed_seat_that_streams_changes_no_byte() {
    for victim in ["first", "second"] {
        let (mut fleet, run) = fleet("--max-steps 6");
        let alone = fleet.alone(&run);
        let little = worker(little(&fleet, &run));
        fleet.coordinator(&format!("{run} --stages 2"));
        for name in ["first", "second"] {
            fleet.faulty(name, &little, "slow=4");
        }
        fleet.wait_for_step(1);
        fleet.worker("spare", &little);
        fleet.wait_for_step(2);
        std::thread::sleep(Duration::from_millis(30));
        fleet.kill(victim);
        assert!(fleet.steps() < 6, "{victim} was killed too late");
        let other = if victim == "first" { "second" } else { "first" };
        fleet.all_end(&["coordinator", other, "spare"], 0);
        assert!(fleet.adapter("out") == alone, "{victim}\n{}", fleet.all());
        let counts = [other, "spare"].map(|name| streamed(&fleet, name));
        assert!(counts.iter().any(|counts| !counts.is_empty()), "{}", fleet.all());
    }
}

/// A seat that runs out of memory with layers that it has streamed or held streams more of them, or holds fewer.
#[test]
fn a_seat_without_memory_streams_more() {
    let (mut fleet, run) = fleet("--max-steps 4");
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --stages 3+3"));
    fleet.faulty("little", "--threads 1", "memory@2");
    fleet.wait_for("little", "waits for its place");
    fleet.worker("large", "--threads 1");
    fleet.all_end(&["coordinator", "little", "large"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    assert!(fleet.said("little").contains("are too large for its memory"), "{}", fleet.all());
    assert_eq!((streamed(&fleet, "little"), streamed(&fleet, "large")), (vec![2], vec![]), "{}", fleet.all());
}

/// Two workers wait for a third one before they stream; a killed coordinator resumes.
#[test]
fn workers_whose_number_is_open_stream_after_a_while() {
    let (mut fleet, run) = fleet("--max-steps 6 --save-steps 2");
    let alone = fleet.alone(&run);
    let little = worker(little(&fleet, &run));
    fleet.coordinator(&format!("{run} --stages auto"));
    for name in ["a", "b"] {
        fleet.faulty(name, &little, "slow=4");
    }
    fleet.wait_for_step(3);
    fleet.kill("coordinator");
    fleet.coordinator(&format!("{run} --stages auto --resume"));
    fleet.all_end(&["coordinator", "a", "b"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    // Which of them depends on the measured speeds.
    let both = [streamed(&fleet, "a"), streamed(&fleet, "b")].concat();
    assert!(!both.is_empty(), "{}", fleet.all());
}

/// Experts, convolutions and delta rules; each worker fetches its layers only, and reads those that it streams from its cache.
#[test]
fn other_families_are_streamed_in_seats() {
    for family in [&QWEN3_MOE, &LFM2, &QWEN3_5] {
        let mut fleet = Fleet::new();
        random_base::sized(&fleet.bench, family, 256);
        let run = format!("{} --max-steps 2", RUN.replace("demo", "./base"));
        let alone = fleet.alone(&run);
        fleet.coordinator(&format!("{run} --stages 3+3"));
        for name in ["a", "b"] {
            fleet.worker(name, "--threads 1 --offload 2");
        }
        fleet.all_end(&["coordinator", "a", "b"], 0);
        assert!(fleet.adapter("out") == alone, "{}\n{}", family.name, fleet.all());
        assert_eq!((streamed(&fleet, "a"), streamed(&fleet, "b")), (vec![2], vec![2]), "{}", fleet.all());
    }
}

#[test]
fn plan_shows_the_streamed_layers_of_each_seat() {
    let (fleet, run) = fleet("--max-steps 2");
    let limit = little(&fleet, &run);
    let out = plan(&fleet, &run, limit);
    assert!(out.status.success(), "{}", stderr(&out));
    let shown: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let seats = shown["line"]["seats"].as_array().unwrap();
    let streamed: u64 = seats.iter().map(|seat| seat["streamed_layers"].as_u64().unwrap()).sum();
    assert!(seats.len() == 2 && streamed >= 2, "{shown}");
    let fits = |seat: &serde_json::Value| {
        let memory = &seat["memory_bytes"];
        memory["total"].as_u64() <= memory["limit"].as_u64()
    };
    assert!(seats.iter().all(fits), "{shown}");
    let device = format!("--gpu-backend cpu --memory-limit {limit}KB --role coordinator --stages 2");
    let text = String::from_utf8(fleet.bench.run(&format!("plan {run} {device}")).stdout).unwrap();
    assert!(text.contains("layers are streamed: read again in each pass"), "{text}");
    let out = plan(&fleet, &format!("{run} --offload never"), limit);
    assert_eq!(out.status.code(), Some(78), "{}", stderr(&out));
    assert!(stderr(&out).contains("error: --stages"), "{}", stderr(&out));
}
