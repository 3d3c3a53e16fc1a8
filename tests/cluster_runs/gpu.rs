//! Whole runs on a wgpu adapter: Mesa's software driver, which every CI machine has, or the one that is named
//! (tests/tested_adapters). One driver, few steps, small models: the software driver computes a few GFLOP/s.

use crate::cli_fixture::{classes, rows, stderr};
use crate::fleet::Fleet;
use crate::losses;
use crate::tested_adapters::{self, Tested};
use finetune::format::peft::{self, TaskType};
use finetune::train::event::Event;
use serde_json::Value;
use std::collections::BTreeMap;

/// About 4 microbatches a step; dropout is on, so that a dependence on the computing device would change the result.
const RUN: &str = "demo --data many.jsonl --batch-size 8 --micro-batch-tokens 64 --rank 4 --dropout 0.1";

/// Number of microbatches of each class over a whole run.
fn classes_of(fleet: &Fleet, out: &str) -> BTreeMap<String, u64> {
    let events = finetune::report::read(&fleet.bench.path(&format!("{out}/metrics.jsonl"))).unwrap();
    let mut total = BTreeMap::new();
    for event in events {
        let Event::Step(step) = event else { continue };
        for (class, count) in step.shared.map(|s| s.classes).unwrap_or_default() {
            *total.entry(class.to_string()).or_insert(0) += count;
        }
    }
    total
}

#[test]
fn two_devices_on_one_adapter_give_the_bytes_of_one() {
    let Some(Tested { index: i, adapter }) = tested_adapters::one() else { return };
    let fleet = Fleet::new();
    let run = format!("{RUN} --max-steps 3 --gpu-backend wgpu");
    fleet.bench.ok(&format!("{run} --gpus {i} -q -o one"));
    let out = fleet.bench.run(&format!("{run} --gpus {i},{i} -o two"));
    let said = stderr(&out);
    assert!(out.status.success(), "{said}");
    assert!(fleet.adapter("one") == fleet.adapter("two"), "{said}");
    // Without additions of the driver.
    let name = adapter.name().split(" (").next().unwrap();
    assert!(said.contains(&format!("wgpu {i} {name} (2)")), "two devices took part\n{said}");
    assert_eq!(said.contains("is a software driver: --gpus cpu is faster"), adapter.is_software(), "{said}");
    let classes = classes_of(&fleet, "two");
    assert_eq!(classes.len(), 1, "{classes:?}");
    assert!(classes.keys().all(|class| class.starts_with("wgpu-")), "{classes:?}");
}

#[test]
fn gpu_and_cpu_together_stay_within_the_loss_bound() {
    let Some(Tested { index: i, .. }) = tested_adapters::one() else { return };
    let contract: Value = serde_yaml::from_str(include_str!("../../contracts/F-DP-005.yaml")).unwrap();
    let bound = contract["tolerance"]["loss_relative"].as_f64().unwrap();
    // Enough microbatches that both devices get some, whichever is faster.
    let run = format!("{RUN} --max-steps 30").replace("--batch-size 8", "--batch-size 16");
    let mut fleet = Fleet::new();
    fleet.bench.ok(&format!("{run} --gpus cpu --dtype f32 --threads 1 -q -o alone"));
    fleet.coordinator(&format!("{run} --expect-workers 2 --gpus {i} --gpu-backend wgpu"));
    // So slow that some work is left for the adapter.
    fleet.faulty("processor", "--gpus cpu --threads 1", "slow=40");
    fleet.all_end(&["coordinator", "processor"], 0);
    let (alone, mixed) = (losses(&fleet, "alone"), losses(&fleet, "out"));
    assert_eq!((alone.len(), mixed.len()), (30, 30));
    for (a, m) in alone.iter().zip(&mixed) {
        assert!((a - m).abs() <= bound * a, "{a} alone, {m} mixed\n{}", fleet.all());
    }
    let classes = classes_of(&fleet, "out");
    let of = |start: &str| classes.keys().any(|class| class.starts_with(start));
    assert!(of("wgpu-") && of("cpu-"), "both took part: {classes:?}\n{}", fleet.all());
    assert!(fleet.said("coordinator").contains("2 classes"), "{}", fleet.all());
    let events = finetune::report::read(&fleet.bench.path("out/metrics.jsonl")).unwrap();
    let traffic = events.iter().filter_map(|e| if let Event::Step(step) = e { step.traffic } else { None });
    let on_wgpu: u64 = classes.iter().filter(|(class, _)| class.starts_with("wgpu-")).map(|(_, n)| n).sum();
    assert_eq!(traffic.map(|t| t.read_backs).sum::<u64>(), on_wgpu, "one read-back for each that counts");
}

/// Of the 4 layers, 3 are read again in each pass; a worker chooses for itself.
#[test]
fn streamed_layers_on_a_gpu_change_no_byte() {
    let Some(Tested { index: i, .. }) = tested_adapters::one() else { return };
    let mut fleet = Fleet::new();
    fleet.bench.file("few.jsonl", &rows(6));
    let run = format!("{RUN} --max-steps 2 --eval-data few.jsonl");
    let card = format!("--gpus {i} --gpu-backend wgpu");
    for (base, out) in [("", "plain"), ("--quantize nf4", "blocks")] {
        fleet.bench.ok(&format!("{run} {card} {base} -q -o {out}"));
        let streamed = fleet.bench.run(&format!("{run} {card} {base} --offload 3 -o {out}_streamed"));
        let said = stderr(&streamed);
        assert!(streamed.status.success() && said.contains("streams  3 of 4 layers"), "{said}");
        assert!(fleet.adapter(out) == fleet.adapter(&format!("{out}_streamed")), "{base}\n{said}");
    }
    let answer = |more: &str| {
        fleet
            .bench
            .ok(&format!("generate demo --adapter plain {card} --prompt hello --max-new-tokens 6 {more}"))
    };
    assert_eq!(answer("--offload 4"), answer(""));
    fleet.coordinator(&format!("{run} --expect-workers 1"));
    fleet.worker("worker", &format!("{card} --offload 2"));
    fleet.all_end(&["coordinator", "worker"], 0);
    assert!(fleet.said("worker").contains("streams  2 of 4 layers"), "{}", fleet.all());
    assert!(fleet.adapter("out") == fleet.adapter("plain"), "{}", fleet.all());
}

/// A coordinator with two devices and a worker, each started by one command.
#[test]
fn two_commands_train_a_classifier_adapter() {
    let Some(Tested { index: i, .. }) = tested_adapters::one() else { return };
    let mut fleet = Fleet::new();
    fleet.bench.file("classes.jsonl", &classes(24));
    let named = "demo --data classes.jsonl --task classify --num-classes 2";
    let few = "--max-steps 2 --micro-batch-tokens 32 --rank 4";
    fleet.coordinator(&format!("{named} {few} --gpus {i},{i} --gpu-backend wgpu --expect-workers 3"));
    fleet.worker("worker", &format!("{named} --gpus cpu"));
    fleet.all_end(&["coordinator", "worker"], 0);
    assert!(
        fleet.said("coordinator").contains("waiting for 3 devices: 2 here, 1 to come"),
        "{}",
        fleet.all()
    );
    let adapter = peft::read(&fleet.bench.path("out")).unwrap();
    assert_eq!(adapter.config.task, TaskType::SeqCls);
    assert!(adapter.tensors.iter().any(|t| t.name == "base_model.model.score.weight" && t.rows == 2));
    assert!(adapter.tensors.iter().all(|t| t.values.iter().all(|v| v.is_finite())));
    assert!(
        adapter
            .tensors
            .iter()
            .any(|t| t.name.ends_with("lora_B.weight") && t.values.iter().any(|v| *v != 0.0))
    );
    let said = fleet.bench.ok(&format!("predict --adapter out --text 'git status 1' --gpus {i} --json"));
    assert!(said.contains("safe"), "{said}");
}

/// The device is lost during a microbatch, as after a reset of the driver.
#[test]
fn lost_gpu_falls_back_to_the_cpu() {
    let Some(Tested { index: i, .. }) = tested_adapters::one() else { return };
    let run = format!("{RUN} --max-steps 4 --dtype f32");
    let mut fleet = Fleet::new();
    fleet.bench.ok(&format!("{run} --gpus cpu --threads 1 -q -o alone"));
    fleet.coordinator(&format!("{run} --expect-workers 1"));
    fleet.faulty("falls", &format!("--gpus {i} --gpu-backend wgpu --threads 1"), "lost@2");
    fleet.all_end(&["coordinator", "falls"], 0);
    let classes = classes_of(&fleet, "out");
    let of = |start: &str| classes.keys().any(|class| class.starts_with(start));
    assert!(of("wgpu-") && of("cpu-"), "{classes:?}\n{}", fleet.all());
    let said = fleet.said("falls");
    assert!(said.contains("lost") && said.contains("falls back to cpu-"), "{said}");
    for (a, m) in losses(&fleet, "alone").iter().zip(&losses(&fleet, "out")) {
        assert!((a - m).abs() <= 1e-3 * a, "{a} alone, {m} with a loss of the device\n{}", fleet.all());
    }
}

#[test]
fn gpu_generates_like_the_cpu_and_passes_its_self_test() {
    let Some(Tested { index: i, adapter }) = tested_adapters::one() else { return };
    let fleet = Fleet::new();
    let speak = "generate demo --prompt 'Show the branch' --max-new-tokens 6 --dtype f32";
    let cpu = fleet.bench.ok(&format!("{speak} --gpus cpu"));
    assert_eq!(fleet.bench.ok(&format!("{speak} --gpus {i} --gpu-backend wgpu")), cpu);
    let said = fleet.bench.ok("selftest --json --report=facts.json");
    let said: Value = serde_json::from_str(&said).unwrap();
    let report: Value = serde_json::from_slice(&fleet.bench.read("facts.json")).unwrap();
    for listed in [&said["devices"], &report["devices"]] {
        // A list may begin with devices of another driver.
        let is_it =
            |d: &&Value| d["index"] == i && d["class"].as_str().is_some_and(|c| c.starts_with("wgpu-"));
        let device = listed.as_array().unwrap().iter().find(is_it).unwrap_or_else(|| panic!("{listed}"));
        assert_eq!(device["kind"] == "software", adapter.is_software(), "{device}");
        assert!(device["check"]["failed"].is_null(), "{device}");
        assert!(device["check"]["speed"]["gflops"].as_f64().unwrap() > 0.0, "{device}");
        let last = listed.as_array().unwrap().last().unwrap();
        assert_eq!((&last["name"], &last["check"]["failed"]), (&"cpu".into(), &Value::Null));
    }
    assert!(report["vulkan"]["loader"].is_null() && report["finetune"].is_string(), "{report}");
}

#[test]
fn portable_runs_have_one_adapter_on_cpu_and_gpu() {
    let Some(tested) = tested_adapters::one() else { return };
    let fleet = Fleet::new();
    fleet.bench.file("classes.jsonl", &classes(24));
    let run = format!("{RUN} --max-steps 1 --dtype portable");
    let classifier = run.replace("many.jsonl", "classes.jsonl --task classify --num-classes 2");
    for (run, streamed) in [(format!("{run} --quantize nf4"), "--offload 3"), (classifier, "")] {
        fleet.bench.ok(&format!("{run} --gpus cpu --threads 1 -q --overwrite -o cpu"));
        fleet.bench.ok(&format!("{run} {} {streamed} -q --overwrite -o card", tested.options()));
        assert!(fleet.adapter("card") == fleet.adapter("cpu"), "{run}");
    }
}

/// CPUs and a GPU are workers of one run that compute each other's work again; one of them is killed.
#[test]
fn cpus_and_a_gpu_of_the_portable_class_verify_each_other() {
    let Some(tested) = tested_adapters::one() else { return };
    let run = format!("{RUN} --max-steps 3 --dtype portable").replace("--batch-size 8", "--batch-size 24");
    let mut fleet = Fleet::new();
    fleet.bench.ok(&format!("{run} --gpus cpu --threads 1 -q -o alone"));
    fleet.coordinator(&format!("{run} --gpus none --expect-workers 3 --verify 100%"));
    for name in ["cpu", "killed"] {
        fleet.faulty(name, "--gpus cpu --threads 1", "slow=40"); // so that some work is left for the adapter
    }
    fleet.worker("card", &tested.options());
    fleet.wait_for_step(1);
    fleet.kill("killed");
    fleet.all_end(&["coordinator", "cpu", "card"], 0);
    assert!(fleet.adapter("out") == fleet.adapter("alone"), "{}", fleet.all());
    let classes = classes_of(&fleet, "out");
    assert_eq!(classes.keys().collect::<Vec<_>>(), ["portable-f32"], "{}", fleet.all());
    assert!(fleet.said("coordinator").contains("computed again by another worker"), "{}", fleet.all());
}

/// As [`lost_gpu_falls_back_to_the_cpu`], and no byte changes.
#[test]
fn lost_gpu_of_the_portable_class_changes_no_byte() {
    let Some(Tested { index: i, .. }) = tested_adapters::one() else { return };
    let run = format!("{RUN} --max-steps 2 --dtype portable");
    let mut fleet = Fleet::new();
    fleet.bench.ok(&format!("{run} --gpus cpu --threads 1 -q -o alone"));
    fleet.coordinator(&format!("{run} --expect-workers 1"));
    fleet.faulty("falls", &format!("--gpus {i} --gpu-backend wgpu --threads 1"), "lost@2");
    fleet.all_end(&["coordinator", "falls"], 0);
    assert!(fleet.said("falls").contains("falls back to portable-f32"), "{}", fleet.all());
    assert!(fleet.adapter("out") == fleet.adapter("alone"), "{}", fleet.all());
}

/// A CPU begins a run, and a GPU ends it.
#[test]
fn portable_run_of_a_cpu_is_resumed_by_a_gpu() {
    let Some(tested) = tested_adapters::one() else { return };
    let run = format!("{RUN} --max-steps 3 --save-steps 1 --dtype portable");
    let mut fleet = Fleet::new();
    fleet.bench.ok(&format!("{run} --gpus cpu --threads 1 -q -o alone"));
    fleet.coordinator(&format!("{run} --gpus none --expect-workers 1"));
    fleet.faulty("cpu", "--gpus cpu --threads 1", "slow=300"); // so that it does not end the run
    fleet.wait_for_step(1);
    fleet.kill("coordinator");
    fleet.kill("cpu");
    assert!(fleet.steps() < 3, "{}", fleet.all());
    fleet.coordinator(&format!("{run} --gpus none --expect-workers 1 --resume"));
    fleet.worker("card", &tested.options());
    fleet.all_end(&["coordinator", "card"], 0);
    assert!(fleet.adapter("out") == fleet.adapter("alone"), "{}", fleet.all());
}
