//! Workers that hold the layers of one model together (`--stages`): they change no byte, whatever the split, the model,
//! the task and the other devices of the run.

use crate::cli_fixture::{classes, numbers, pairs, rows, stderr, words};
use crate::fleet::{Fleet, RUN};
use crate::random_base;
use finetune::families::{GEMMA3, GPT_OSS, GRANITE, GRANITE_MOE_HYBRID, LFM2, OLMO3, QWEN3_5, QWEN3_MOE};
use rustix::process::Signal;
use std::time::Duration;

/// Runs with these stages on as many workers, and returns the fleet after its end.
fn line(run: &str, (stages, workers): (&str, usize), more: &str) -> Fleet {
    let mut fleet = Fleet::new();
    fleet.bench.file("classes.jsonl", &classes(240));
    fleet.bench.file("pairs.jsonl", &pairs(120));
    fleet.bench.file("numbers.jsonl", &numbers(120));
    fleet.bench.file("words.jsonl", &words(240));
    fleet.bench.file("weighted.jsonl", &weighted());
    fleet.coordinator(&format!("{run} --stages {stages} {more}"));
    let names: Vec<String> = (0..workers).map(|i| format!("seat-{i}")).collect();
    names.iter().for_each(|name| fleet.worker(name, "--threads 1"));
    fleet.all_end(&["coordinator"], 0);
    fleet.all_end(&names.iter().map(String::as_str).collect::<Vec<_>>(), 0);
    fleet
}

#[test]
fn a_line_of_workers_gives_the_bytes_of_one_process() {
    let run = format!("{RUN} --max-steps 5");
    let alone = Fleet::new().alone(&run);
    for (stages, workers) in [("2", 2), ("3", 3), ("3+1", 2), ("1+2+1", 3)] {
        let fleet = line(&run, (stages, workers), "");
        assert!(fleet.adapter("out") == alone, "--stages {stages}\n{}", fleet.all());
        assert!(fleet.said("seat-0").contains("holds    layers "), "{}", fleet.all());
        // Each microbatch has two passes in every seat.
        for step in events(&fleet, "out").iter().filter(|event| event["event"] == "step") {
            let count = step["shared"]["devices"][0]["microbatches"].as_u64().unwrap();
            let seats = step["shared"]["lines"][0]["seats"].as_array().unwrap();
            let passes = seats.iter().map(|seat| seat["spans"].as_array().unwrap().len() as u64);
            assert!(count > 0 && passes.eq(vec![2 * count; workers]), "{step}");
            assert!(
                seats.iter().all(|seat| seat["microbatches"] == count && seat["busy"].as_f64() > Some(0.0))
            );
        }
    }
}

/// Rows of which every second one is to become less probable.
fn weighted() -> String {
    let weigh = |(i, line): (usize, &str)| format!("{{\"weight\": {}, {}\n", [1.5, -0.25][i % 2], &line[1..]);
    rows(120).lines().enumerate().map(weigh).collect()
}

fn events(fleet: &Fleet, out: &str) -> Vec<serde_json::Value> {
    let text = String::from_utf8(fleet.bench.read(&format!("{out}/metrics.jsonl"))).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_line_of_workers_runs_every_kind_of_task() {
    let evaluated = "--eval-data rows.jsonl --eval-steps 2";
    for (more, data) in [
        (evaluated, "many"),
        ("--quantize nf4", "many"),
        ("--task classify --num-classes 2", "classes"),
        ("--task classify --num-classes 2 --add-tokens rce,atus", "classes"),
        ("--task dpo --nll-weight 0.5", "pairs"),
        ("--task regression", "numbers"),
        ("--task reward", "pairs"),
        ("--task token-classification", "words"),
        // The lower worker has nothing to train, then the upper one.
        ("--target-layers 2-3 --rank-pattern q_proj=2", "many"),
        ("--target-layers 0-1", "many"),
        ("", "weighted"),
    ] {
        let data = format!("--data {data}.jsonl");
        let run = format!("{} --max-steps 4 {more}", RUN.replace("--data many.jsonl", &data));
        let alone = Fleet::new();
        alone.bench.file("classes.jsonl", &classes(240));
        alone.bench.file("pairs.jsonl", &pairs(120));
        alone.bench.file("numbers.jsonl", &numbers(120));
        alone.bench.file("words.jsonl", &words(240));
        alone.bench.file("weighted.jsonl", &weighted());
        let bytes = alone.alone(&run);
        let fleet = line(&run, ("2", 2), "");
        assert!(fleet.adapter("out") == bytes, "{more}\n{}", fleet.all());
        let losses = |fleet: &Fleet, out: &str| {
            let text = String::from_utf8(fleet.bench.read(&format!("{out}/metrics.jsonl"))).unwrap();
            let evals = text.lines().filter(|line| line.contains("\"event\":\"eval\"")).count();
            (evals, crate::losses(fleet, out))
        };
        assert_eq!(losses(&fleet, "out"), losses(&alone, "alone"), "{more}\n{}", fleet.all());
    }
}

/// Prompts and held-out rows, more than the seats have at the same time, in lines of two and three seats.
#[test]
fn a_line_of_workers_gives_the_texts_of_one_process() {
    // The last one is longer than the longest microbatch.
    let prompts = format!("--sample-prompt Why? --sample-prompt 1+1= --sample-prompt {}", "1+1=".repeat(60));
    let run = format!("{RUN} --max-steps 4 {prompts} --eval-data rows.jsonl --sample-rows 6 --eval-steps 2");
    let alone = Fleet::new();
    let bytes = alone.alone(&run);
    let texts = |fleet: &Fleet, out: &str| {
        let all = events(fleet, out);
        let samples = all.iter().filter(|event| event["event"] == "sample");
        samples
            .map(|event| (event["step"].clone(), event["prompt"].clone(), event["text"].clone()))
            .collect::<Vec<_>>()
    };
    let want = texts(&alone, "alone");
    assert!(
        want.len() >= 16 && want.iter().any(|(_, _, text)| text.as_str().is_some_and(|t| t.len() > 8)),
        "{want:?}"
    );
    for (stages, workers, more) in
        [("2", 2, ""), ("1+2+1", 3, ""), ("2", 2, "--gpus cpu --threads 1 --expect-workers 2")]
    {
        let fleet = line(&run, (stages, workers), more);
        assert_eq!(texts(&fleet, "out"), want, "--stages {stages} {more}\n{}", fleet.all());
        assert!(fleet.adapter("out") == bytes, "--stages {stages} {more}\n{}", fleet.all());
    }
}

/// A run whose layers take more memory than the self-test. In f32 they take the same on every processor.
fn wide() -> String {
    format!("{} --dtype f32", RUN.replace("--rank 4", "--rank 16"))
}

/// Layers that a worker has said that it holds.
fn layers(fleet: &Fleet, name: &str) -> Option<usize> {
    fleet.said(name).lines().find_map(count)
}

/// Layers that a line of a worker's output says that it holds.
fn count(line: &str) -> Option<usize> {
    let (from, rest) = line.strip_prefix("holds    layers ")?.split_once(" to ")?;
    let to = rest.split_once(" of ")?.0;
    Some(to.parse::<usize>().ok()? + 1 - from.parse::<usize>().ok()?)
}

#[test]
fn unlike_workers_get_unlike_numbers_of_layers() {
    let run = format!("{} --max-steps 4", wide());
    let alone = Fleet::new().alone(&run);
    for (args, fault) in [("", "slow=50"), ("--offload never --memory-limit 6000KB", "slow=1")] {
        let mut fleet = Fleet::new();
        fleet.coordinator(&format!("{run} --stages 2"));
        fleet.faulty("weak", &format!("--threads 1 {args}"), fault);
        fleet.worker("strong", "--threads 1");
        fleet.all_end(&["coordinator", "weak", "strong"], 0);
        assert!(fleet.adapter("out") == alone, "{args}\n{}", fleet.all());
        let layers = (layers(&fleet, "weak"), layers(&fleet, "strong"));
        assert_eq!(layers, (Some(1), Some(3)), "{args}\n{}", fleet.all());
        // The topology of page and report comes from the event.
        let text = String::from_utf8(fleet.bench.read("out/metrics.jsonl")).unwrap();
        let events = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let formed = events.into_iter().find(|event| event["event"] == "line").expect("a line");
        assert_eq!(formed["token_bytes"], 512);
        let seats = formed["seats"].as_array().unwrap();
        let held: Vec<u64> = seats.iter().map(|seat| seat["layers"].as_u64().unwrap()).collect();
        assert!(held == [1, 3] || held == [3, 1], "{formed}");
        assert!(seats.iter().all(|seat| seat["memory"].as_u64() <= seat["limit"].as_u64()), "{formed}");
        assert!(String::from_utf8(fleet.bench.read("out/topology.svg")).unwrap().contains("each way a step"));
    }
}

#[test]
fn workers_without_room_for_the_model_hold_it_together() {
    let run = format!("{} --max-steps 4", wide());
    let alone = Fleet::new().alone(&run);
    let mut fleet = Fleet::new();
    fleet.coordinator(&format!("{run} --stages auto --expect-workers 2"));
    for name in ["a", "b"] {
        fleet.worker(name, "--threads 1 --offload never --memory-limit 7500KB");
    }
    fleet.worker("large", "--threads 1");
    fleet.all_end(&["coordinator", "a", "b", "large"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    let layers = ["a", "b", "large"].map(|name| layers(&fleet, name));
    assert_eq!(layers, [Some(2), Some(2), None], "{}", fleet.all());
}

#[test]
fn workers_that_are_too_small_together_are_refused_by_name() {
    let mut fleet = Fleet::new();
    fleet.coordinator(&format!("{} --max-steps 2 --stages 2", wide()));
    fleet.worker("little", "--threads 1 --offload never --memory-limit 5500KB");
    fleet.worker("less", "--threads 1 --offload never --memory-limit 5400KB");
    fleet.all_end(&["less"], 78);
    for name in ["less", "coordinator"] {
        assert!(fleet.said(name).contains("no split of the model"), "{}", fleet.all());
    }
    // The other one waits for a worker with more.
    fleet.worker("large", "--threads 1");
    fleet.all_end(&["coordinator", "little", "large"], 0);
}

/// Windows, two rotary bases, norms after the halves, factors, experts, sinks, convolutions and delta rules in a line of two seats, and on two whole workers.
#[test]
fn a_line_and_whole_workers_train_families_to_one_adapter() {
    let run = format!("{} --max-steps 3", RUN.replace("demo", "./base"));
    for family in [&GEMMA3, &GRANITE, &GRANITE_MOE_HYBRID, &OLMO3, &QWEN3_MOE, &LFM2, &QWEN3_5, &GPT_OSS] {
        for how in ["--stages 2+4", "--expect-workers 2"] {
            let mut fleet = Fleet::new();
            random_base::write(&fleet.bench, family);
            let alone = fleet.alone(&run);
            fleet.coordinator(&format!("{run} {how}"));
            fleet.worker("a", "--threads 1");
            fleet.worker("b", "--threads 1");
            fleet.all_end(&["coordinator", "a", "b"], 0);
            assert!(fleet.adapter("out") == alone, "{}, {how}\n{}", family.name, fleet.all());
        }
    }
}

#[test]
fn a_line_beside_a_whole_device_changes_no_byte() {
    let run = format!("{RUN} --max-steps 6");
    let alone = Fleet::new().alone(&run);
    let fleet = line(&run, ("2", 2), "--gpus cpu --threads 1 --expect-workers 2");
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    assert!(fleet.said("coordinator").contains("cpu + cpu"), "{}", fleet.all());
}

#[test]
fn what_a_line_cannot_do_is_refused_in_one_line() {
    let fleet = Fleet::new();
    for (args, why) in [
        ("--stages 5", "--stages: 5 workers for 4 layers"),
        ("--stages 2+1", "--stages: these are 3 layers, the model has 4"),
        ("--wire bf16", "--wire: only between workers that hold the model together"),
        (
            "--stages 2 --wire bf16 --gpus cpu",
            "--wire: the coordinator's own devices (--gpus) hold the whole model",
        ),
    ] {
        let out = fleet.bench.run(&format!("{RUN} --max-steps 1 --role coordinator {args} -q -o no"));
        let last = stderr(&out);
        let last = last.lines().last().unwrap_or_default();
        assert!(last.starts_with(&format!("error: {why}")), "{args}: {}", stderr(&out));
        assert_eq!(out.status.code(), Some(78), "{args}");
    }
}

#[test]
fn plan_shows_what_each_seat_holds() {
    let fleet = Fleet::new();
    let run = format!("plan {} --max-steps 4 --role coordinator --gpu-backend cpu", wide());
    let plan = |more: &str| fleet.bench.run(&format!("{run} {more} --json"));
    for (stages, limit, layers) in
        [("2", "", vec![3, 1]), ("auto", "--memory-limit 7500KB", vec![2, 2]), ("1+3", "", vec![1, 3])]
    {
        let out = plan(&format!("--offload never --stages {stages} {limit}"));
        assert!(out.status.success(), "{stages}: {}", stderr(&out));
        let shown: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        let line = &shown["line"];
        let held = line["seats"].as_array().unwrap();
        let counts: Vec<u64> = held.iter().map(|seat| seat["layers"].as_u64().unwrap()).collect();
        assert_eq!(counts, layers, "{stages}: {line}");
        assert!(
            held.iter()
                .all(|seat| seat["memory_bytes"]["total"].as_u64() < seat["memory_bytes"]["limit"].as_u64())
        );
        // Hidden states of 128 numbers in f32.
        assert_eq!(line["links"]["bytes_per_token_each_way"], 512);
        if stages != "auto" {
            let half = plan(&format!("--offload never --stages {stages} {limit} --wire bf16"));
            let half: serde_json::Value = serde_json::from_slice(&half.stdout).unwrap();
            assert_eq!(half["line"]["links"]["bytes_per_token_each_way"], 256);
        }
        let slow = plan(&format!("--offload never --stages {stages} {limit} --link 100mbit"));
        let slow: serde_json::Value = serde_json::from_slice(&slow.stdout).unwrap();
        let seconds = |key: &str| slow["line"][key].as_f64();
        if let (Some(step), Some(without)) = (seconds("step_seconds"), seconds("step_seconds_without_links"))
        {
            assert!(step > without && without > 0.0, "{stages}: {slow}");
        }
        assert!(slow["line"]["links"]["seconds_each_way"].as_f64() > Some(0.0), "{stages}: {slow}");
        let step = shown["steps"]["tokens"].as_u64().unwrap() / 4 * 512;
        assert_eq!(line["links"]["bytes_per_step_each_way"], step);
    }
    for (args, why) in [
        ("--stages 2 --memory-limit 6500KB", "use --stages 3"),
        ("--stages 3+1 --memory-limit 8000KB", "layers 0 to 2 need"),
    ] {
        let out = plan(&format!("--offload never {args}"));
        assert!(stderr(&out).contains("error: --stages") && stderr(&out).contains(why), "{}", stderr(&out));
        assert_eq!(out.status.code(), Some(78), "{args}");
    }
}

#[test]
fn a_seat_with_several_devices_is_refused_by_name() {
    let mut fleet = Fleet::new();
    fleet.coordinator(&format!("{RUN} --max-steps 2 --stages 2"));
    fleet.worker("several", "--gpu-backend cpu --gpus 0,1 --threads 2");
    fleet.all_end(&["several"], 78);
    for name in ["several", "coordinator"] {
        assert!(fleet.said(name).contains("is one device: name one with --gpus"), "{}", fleet.all());
    }
    // Two others hold the model.
    fleet.worker("a", "--threads 1");
    fleet.worker("b", "--threads 1");
    fleet.all_end(&["coordinator", "a", "b"], 0);
}

/// 20 runs with a spare worker, one seat killed at a different moment of each.
#[test]
fn a_seat_that_is_killed_changes_no_byte() {
    let run = format!("{RUN} --max-steps 6");
    let alone = Fleet::new().alone(&run);
    let mut struck = 0;
    for round in 0..20u64 {
        let mut fleet = Fleet::new();
        fleet.coordinator(&format!("{run} --stages 2"));
        let victim = if round % 2 == 0 { "first" } else { "second" };
        for name in ["first", "second"] {
            fleet.faulty(name, "--threads 1", "slow=6");
        }
        fleet.wait_for_step(1);
        fleet.worker("spare", "--threads 1");
        fleet.wait_for_step(1 + round as usize % 4);
        std::thread::sleep(Duration::from_micros(round * 618_034 % 40_000));
        fleet.kill(victim);
        struck += usize::from(fleet.steps() < 6);
        let other = if round % 2 == 0 { "second" } else { "first" };
        fleet.all_end(&["coordinator", other], 0);
        assert!(fleet.adapter("out") == alone, "round {round}\n{}", fleet.all());
    }
    assert!(struck >= 10, "only {struck} of 20 runs were still going when their seat was killed");
}

#[test]
fn a_seat_that_freezes_changes_no_byte() {
    let run = format!("{RUN} --max-steps 6");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --stages 2"));
    for name in ["a", "frozen"] {
        fleet.faulty(name, "--threads 1", "slow=20");
    }
    fleet.wait_for_step(2);
    fleet.signal("frozen", Signal::STOP);
    fleet.worker("spare", "--threads 1");
    fleet.all_end(&["coordinator", "a", "spare"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    assert!(fleet.said("a").contains("the line fell"), "{}", fleet.all());
}

#[test]
fn a_terminated_seat_is_replaced_and_changes_no_byte() {
    let run = format!("{RUN} --max-steps 8");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --stages 3"));
    for name in ["a", "leaves", "b"] {
        fleet.faulty(name, "--threads 1", "slow=3");
    }
    fleet.wait_for_step(2);
    fleet.signal("leaves", Signal::TERM);
    fleet.all_end(&["leaves"], 0);
    fleet.worker("spare", "--threads 1");
    fleet.all_end(&["coordinator", "a", "b", "spare"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
}

#[test]
fn a_device_error_of_a_seat_falls_back_and_changes_no_byte() {
    for fault in ["error@3,pretend=wgpu", "panic@3,pretend=wgpu"] {
        let run = format!("{RUN} --max-steps 5");
        let mut fleet = Fleet::new();
        let alone = fleet.alone(&run);
        fleet.coordinator(&format!("{run} --stages 2"));
        fleet.worker("sound", "--threads 1");
        fleet.faulty("falls", "--threads 1", fault);
        fleet.all_end(&["coordinator", "sound", "falls"], 0);
        assert!(fleet.adapter("out") == alone, "{fault}\n{}", fleet.all());
        assert!(fleet.said("falls").contains("an injected"), "{fault}\n{}", fleet.all());
    }
}

#[test]
fn a_bad_value_of_a_seat_ends_the_run_with_its_address() {
    let mut fleet = Fleet::new();
    fleet.coordinator(&format!("{RUN} --max-steps 8 --stages 2"));
    fleet.worker("good", "--threads 1");
    fleet.faulty("bad", "--threads 1", "nan@4");
    fleet.all_end(&["coordinator", "good", "bad"], 3);
    let line = fleet.said("coordinator").lines().last().unwrap_or_default().to_string();
    let seat = format!(" on {} became NaN", name_in_run(&fleet, "bad"));
    for part in ["error:", "step 4", "lora_", &seat, "row"] {
        assert!(line.contains(part), "{part:?} in {line:?}\n{}", fleet.all());
    }
    assert_eq!(fleet.steps(), 3);
}

/// Makes all values of a weight of `base` so large that their products have no bound.
fn spoil(fleet: &Fleet, name: &str) {
    let mut bytes = fleet.bench.read("base/model.safetensors");
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..start]).unwrap();
    let at = |end: usize| start + header[name]["data_offsets"][end].as_u64().unwrap() as usize;
    bytes[at(0)..at(1)].fill(0x7f);
    std::fs::write(fleet.bench.path("base/model.safetensors"), bytes).unwrap();
}

#[test]
fn bad_hidden_states_are_reported_with_layer_and_seat() {
    let mut fleet = Fleet::new();
    random_base::write(&fleet.bench, &GRANITE);
    spoil(&fleet, "model.layers.1.mlp.down_proj.weight");
    fleet.coordinator(&format!("{} --max-steps 2 --stages 1+2+3", RUN.replace("demo", "./base")));
    for name in ["first", "spoilt", "last"] {
        fleet.worker(name, "--threads 1");
        fleet.wait_for(name, "waits for its place");
    }
    fleet.all_end(&["coordinator"], 3);
    let line = fleet.said("coordinator").lines().last().unwrap_or_default().to_string();
    let what = format!("step 1: the hidden states after layer 2 on {} became", name_in_run(&fleet, "spoilt"));
    assert!(line.contains(&what), "{what:?} in {line:?}\n{}", fleet.all());
}

/// The name that the coordinator gave a worker.
fn name_in_run(fleet: &Fleet, name: &str) -> String {
    let said = fleet.said(name);
    let line =
        said.lines().find(|line| line.contains("in run ")).unwrap_or_else(|| panic!("{}", fleet.all()));
    line.split_once(" as ").unwrap().1.split_once(':').unwrap().0.to_string()
}

/// A seat that runs out of memory gets fewer layers; with typed numbers of layers it is refused.
#[test]
fn a_seat_without_memory_gets_fewer_layers() {
    let run = format!("{} --max-steps 5", wide());
    let alone = Fleet::new().alone(&run);
    let mut fleet = Fleet::new();
    fleet.coordinator(&format!("{run} --stages 2"));
    fleet.faulty("little", "--threads 1 --offload never", "memory@3");
    fleet.wait_for("little", "waits for its place");
    // The slower one has one layer of four at first.
    fleet.faulty("large", "--threads 1", "slow=50");
    fleet.all_end(&["coordinator", "large", "little"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    let said = fleet.said("little");
    assert!(said.contains("are too large for its memory"), "{}", fleet.all());
    let held: Vec<usize> = said.lines().filter_map(count).collect();
    assert!(held.len() == 2 && held[1] < held[0], "{held:?}\n{}", fleet.all());

    let mut typed = Fleet::new();
    typed.coordinator(&format!("{run} --stages 2+2"));
    typed.worker("large", "--threads 1");
    typed.wait_for("large", "waits for its place");
    typed.faulty("little", "--threads 1 --offload never", "memory@3");
    typed.all_end(&["little"], 78);
    assert!(typed.said("little").contains("give it fewer layers"), "{}", typed.all());
    typed.worker("other", "--threads 1");
    typed.all_end(&["coordinator", "large", "other"], 0);
    assert!(typed.adapter("out") == alone, "{}", typed.all());
}

#[test]
fn a_seat_with_damaged_parameters_changes_no_byte() {
    let run = format!("{RUN} --max-steps 6");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --gpus cpu --threads 1 --stages 2 --expect-workers 2"));
    fleet.worker("good", "--threads 1");
    fleet.faulty("damaged", "--threads 1", "hash@3");
    // The other seat is not sent away with it.
    fleet.all_end(&["coordinator", "good"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    assert!(fleet.said("coordinator").contains("other parameters"), "{}", fleet.all());
    assert!(fleet.said("damaged").contains("removed by the coordinator"), "{}", fleet.all());
}

/// The first seat has other parameters in an evaluation, of which only the last seat has a result.
#[test]
fn a_first_seat_with_damaged_parameters_changes_no_score() {
    let run = format!("{RUN} --max-steps 4 --eval-data rows.jsonl --eval-steps 2");
    let alone = Fleet::new();
    let bytes = alone.alone(&run);
    let scores = |fleet: &Fleet, out: &str| -> Vec<serde_json::Value> {
        let all = events(fleet, out);
        all.iter().filter(|event| event["event"] == "eval").map(|event| event["eval_loss"].clone()).collect()
    };
    let mut fleet = Fleet::new();
    fleet.coordinator(&format!("{run} --stages 2"));
    fleet.faulty("damaged", "--threads 1", "hash@3");
    fleet.wait_for("damaged", "waits for its place");
    fleet.worker("good", "--threads 1");
    fleet.worker("spare", "--threads 1");
    fleet.all_end(&["coordinator", "good", "spare"], 0);
    assert!(fleet.said("damaged").contains("removed by the coordinator"), "{}", fleet.all());
    assert_eq!(scores(&fleet, "out"), scores(&alone, "alone"), "{}", fleet.all());
    assert!(fleet.adapter("out") == bytes, "{}", fleet.all());
}

#[test]
fn a_killed_coordinator_of_a_line_resumes_to_the_same_bytes() {
    let run = format!("{RUN} --max-steps 9 --save-steps 3");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --stages 2"));
    for name in ["a", "b"] {
        fleet.faulty(name, "--threads 1", "slow=16");
    }
    for (step, millis) in [(1, 40), (4, 10)] {
        fleet.wait_for_step(step);
        std::thread::sleep(Duration::from_millis(millis));
        fleet.kill("coordinator");
        fleet.coordinator(&format!("{run} --stages 2 --resume"));
    }
    fleet.all_end(&["coordinator", "a", "b"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
}

#[test]
fn each_worker_needs_memory_for_its_layers_only() {
    let run = format!("{} --max-steps 3", wide());
    let little = "--threads 1 --offload never --memory-limit 7500KB";
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --stages 2+2"));
    for name in ["a", "b"] {
        fleet.worker(name, little);
    }
    fleet.all_end(&["coordinator", "a", "b"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    let mut whole = Fleet::new();
    whole.coordinator(&format!("{run} --expect-workers 1"));
    whole.worker("little", little);
    whole.all_end(&["little"], 78);
    assert!(whole.said("little").contains("too small for microbatches of 64 tokens"), "{}", whole.all());
}
