//! The main guarantee, with real processes: the choice, number and death of workers change no byte of the adapter. A
//! condition that ends the run ends every process.
#![cfg(target_os = "linux")]

mod absence;
mod blocks;
mod chaos;
#[path = "../cli_fixture/mod.rs"]
mod cli_fixture;
mod coarse;
mod delay;
mod draw;
#[path = "../every_message/mod.rs"]
mod every_message;
mod fleet;
mod gpu;
mod hostile;
mod hostile_seats;
mod hosts;
mod islands;
mod journal;
mod lines;
mod messages;
mod network;
mod parts;
#[path = "../export/random_base.rs"]
mod random_base;
mod relays;
mod scores;
mod stages;
mod streamed_seats;
mod tap;
#[path = "../tested_adapters/mod.rs"]
mod tested_adapters;
mod verified;
mod wire;

use finetune::train::event::Event;
use fleet::{Fleet, RUN};
use rustix::process::Signal;
use std::time::Duration;

#[test]
fn any_number_of_workers_gives_the_bytes_of_one_process() {
    let run = format!("{RUN} --max-steps 8");
    let alone = Fleet::new().alone(&run);
    for count in [2usize, 3, 7] {
        let mut fleet = Fleet::new();
        fleet.coordinator(&format!("{run} --expect-workers {count}"));
        let names: Vec<String> = (0..count).map(|i| format!("worker-{i}")).collect();
        for (i, name) in names.iter().enumerate() {
            fleet.worker(name, &format!("--threads {}", 1 + i % 2));
        }
        fleet.all_end(&["coordinator"], 0);
        fleet.all_end(&names.iter().map(String::as_str).collect::<Vec<_>>(), 0);
        assert!(fleet.adapter("out") == alone, "{count} workers give other bytes\n{}", fleet.all());
    }
}

#[test]
fn local_and_remote_devices_give_the_bytes_of_one() {
    let run = format!("{RUN} --max-steps 6");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.bench.ok(&format!("{run} --gpu-backend cpu --gpus 0,1 --threads 2 -q -o two"));
    assert!(fleet.adapter("two") == alone, "two devices of one process");
    fleet.coordinator(&format!("{run} --gpu-backend cpu --gpus 0,1 --threads 2 --expect-workers 3"));
    fleet.worker("worker", "--threads 1");
    fleet.all_end(&["coordinator", "worker"], 0);
    assert!(fleet.adapter("out") == alone, "two devices here and one elsewhere\n{}", fleet.all());
}

/// 20 runs, one of three workers killed at a different moment of each.
#[test]
fn killed_worker_changes_no_byte() {
    let run = format!("{RUN} --max-steps 6");
    let alone = Fleet::new().alone(&run);
    let mut struck = 0;
    for round in 0..20u64 {
        let mut fleet = Fleet::new();
        fleet.coordinator(&format!("{run} --expect-workers 3"));
        for name in ["a", "b", "victim"] {
            fleet.faulty(name, "--threads 1", "slow=6");
        }
        // Moments that are spread over the run, by its steps and within them, without a pattern.
        fleet.wait_for_step(1 + round as usize % 4);
        std::thread::sleep(Duration::from_micros(round * 618_034 % 40_000));
        fleet.kill("victim");
        struck += usize::from(fleet.steps() < 6);
        fleet.all_end(&["coordinator", "a", "b"], 0);
        assert!(fleet.adapter("out") == alone, "round {round}\n{}", fleet.all());
    }
    assert!(struck >= 10, "only {struck} of 20 runs were still going when their worker was killed");
}

#[test]
fn frozen_worker_changes_no_byte() {
    let run = format!("{RUN} --max-steps 16");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --expect-workers 2"));
    // Both equally slow, so that half of every step belongs to the frozen one, and a step lasts longer than a poll.
    for name in ["a", "frozen"] {
        fleet.faulty(name, "--threads 1", "slow=20");
    }
    fleet.wait_for_step(2);
    fleet.signal("frozen", Signal::STOP);
    let step = fleet.steps();
    fleet.all_end(&["coordinator", "a"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    fleet.assert_excluded(&["frozen"], step);
}

#[test]
fn worker_that_joins_late_changes_no_byte() {
    let run = format!("{RUN} --max-steps 10");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --expect-workers 1"));
    fleet.faulty("first", "--threads 1", "slow=20");
    fleet.wait_for_step(3);
    fleet.worker("second", "--threads 1");
    fleet.all_end(&["coordinator", "first", "second"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    assert!(fleet.said("coordinator").contains("joined"), "{}", fleet.all());
}

#[test]
fn terminated_worker_exits_0_and_changes_no_byte() {
    let run = format!("{RUN} --max-steps 8");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --expect-workers 2"));
    fleet.worker("stays", "--threads 1");
    fleet.faulty("leaves", "--threads 1", "slow=3");
    fleet.wait_for_step(2);
    fleet.signal("leaves", Signal::TERM);
    fleet.all_end(&["leaves", "coordinator", "stays"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
}

/// Killed at several moments, once before the first checkpoint; its workers find the resumed one.
#[test]
fn killed_coordinator_resumes_to_the_same_bytes() {
    let run = format!("{RUN} --max-steps 9 --save-steps 3");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --expect-workers 2"));
    for name in ["a", "b"] {
        fleet.faulty(name, "--threads 1", "slow=16");
    }
    for (step, millis) in [(1, 40), (4, 10), (7, 70)] {
        fleet.wait_for_step(step);
        std::thread::sleep(Duration::from_millis(millis));
        fleet.kill("coordinator");
        fleet.coordinator(&format!("{run} --expect-workers 2 --resume"));
    }
    fleet.all_end(&["coordinator", "a", "b"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    assert_eq!(fleet.steps(), 9, "metrics.jsonl has every step once");
}

#[test]
fn nan_gradient_of_one_worker_ends_all_with_3() {
    let mut fleet = Fleet::new();
    fleet.coordinator(&format!("{RUN} --max-steps 8 --expect-workers 2"));
    fleet.faulty("good", "--threads 1", "slow=8"); // so that some work is left for the other
    fleet.faulty("bad", "--threads 1", "nan@4");
    fleet.all_end(&["coordinator", "good", "bad"], 3);
    let line = fleet.said("coordinator").lines().last().unwrap_or_default().to_string();
    for part in ["error:", "step 4", "lora_", "NaN", "row"] {
        assert!(line.contains(part), "{part:?} in {line:?}\n{}", fleet.all());
    }
    assert_eq!(fleet.steps(), 3);
    let saved = fleet.bench.path("out/checkpoint-3/trainer_state.json");
    assert!(saved.exists(), "a checkpoint from before the step\n{}", fleet.all());
}

#[test]
fn worker_with_damaged_parameters_is_expelled_and_replaced() {
    let run = format!("{RUN} --max-steps 6");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --expect-workers 2"));
    fleet.faulty("good", "--threads 1", "slow=8"); // so that some work is left for the other
    fleet.faulty("damaged", "--threads 1", "hash@3");
    fleet.all_end(&["coordinator", "good"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    assert!(fleet.said("coordinator").contains("other parameters"), "{}", fleet.all());
}

#[test]
fn device_error_falls_back_and_the_run_continues() {
    let run = format!("{RUN} --max-steps 6");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --expect-workers 1"));
    fleet.faulty("falls", "--threads 1", "error@3,pretend=wgpu");
    fleet.all_end(&["coordinator", "falls"], 0);
    // The pretended backend computes on the CPU too: equal bits show that nothing was lost or counted twice.
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    let metrics = String::from_utf8(fleet.bench.read("out/metrics.jsonl")).unwrap();
    assert!(metrics.contains("fallback") || metrics.contains("falls back"), "{metrics}");
}

/// Losses of a run's steps.
fn losses(fleet: &Fleet, out: &str) -> Vec<f64> {
    let events = finetune::report::read(&fleet.bench.path(&format!("{out}/metrics.jsonl"))).unwrap();
    let loss = |event: &Event| if let Event::Step(step) = event { Some(step.loss) } else { None };
    events.iter().filter_map(loss).collect()
}

#[test]
fn two_device_classes_stay_within_the_loss_bound() {
    let contract: serde_json::Value =
        serde_yaml::from_str(include_str!("../../contracts/F-DP-005.yaml")).unwrap();
    let bound = contract["tolerance"]["loss_relative"].as_f64().unwrap();
    let run = format!("{RUN} --max-steps 8");
    let mut fleet = Fleet::new();
    fleet.bench.ok(&format!("{run} --dtype f32 --threads 1 -q -o alone"));
    fleet.coordinator(&format!("{run} --expect-workers 2"));
    fleet.faulty("one", "--threads 1 --dtype f32", "slow=4");
    fleet.faulty("other", "--threads 1 --dtype bf16", "slow=4");
    fleet.all_end(&["coordinator", "one", "other"], 0);
    let (alone, mixed) = (losses(&fleet, "alone"), losses(&fleet, "out"));
    assert_eq!(alone.len(), mixed.len());
    for (a, m) in alone.iter().zip(&mixed) {
        assert!((a - m).abs() <= bound * a, "{a} alone, {m} mixed\n{}", fleet.all());
    }
    assert_ne!(alone, mixed, "two classes took part\n{}", fleet.all());
    assert!(fleet.said("coordinator").contains("2 classes"), "{}", fleet.all());
}
