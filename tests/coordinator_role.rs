//! `--role coordinator` as a process: its refusals, its messages, the files that it leaves, and its exit codes.
#![cfg(unix)]

mod cli_fixture;

use cli_fixture::{Bench, stderr};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const HERE: &str = "--role coordinator --insecure --gpu-backend cpu";
const RUN: &str = "demo --data rows.jsonl --batch-size 8 --micro-batch-tokens 64 --rank 4";

/// Expects a run that fails.
#[track_caller]
fn fails(bench: &Bench, args: &str, code: i32, part: &str) -> String {
    let out = bench.run(args);
    let said = stderr(&out);
    assert_eq!(out.status.code(), Some(code), "finetune {args}\n{said}");
    let last = said.lines().last().unwrap_or_default();
    assert!(last.starts_with("error: ") && last.contains(part), "{part:?} in {last:?}");
    said
}

/// Starts a run that writes to `OUT.log`, on a port that the system chooses.
fn start(bench: &Bench, out: &str, args: &str) -> Child {
    let log = std::fs::File::create(bench.path(&format!("{out}.log"))).unwrap();
    let mut command = bench.command(&format!("{RUN} {HERE} --bind 127.0.0.1:0 -o {out} {args}"));
    command.stdout(Stdio::null()).stderr(log).spawn().unwrap()
}

fn wait_for(bench: &Bench, file: &str, part: &str) {
    let began = Instant::now();
    loop {
        let text = std::fs::read_to_string(bench.path(file)).unwrap_or_default();
        if text.contains(part) {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(120), "{part:?} never came in {file}:\n{text}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn second_coordinator_is_refused_in_one_line() {
    let bench = Bench::new();
    let mut first = start(&bench, "out", "--gpus 0 --expect-workers 2 --max-steps 4");
    wait_for(&bench, "out.log", "waiting for 2 devices: 1 here, 1 to come");
    // A checkpoint that is being written looks like one that a dead process left.
    let half = bench.path("out/.checkpoint-2.x.tmp");
    std::fs::create_dir(&half).unwrap();
    let role = format!("{RUN} {HERE} --bind 127.0.0.1:0 -o out --max-steps 4");
    let single = format!("{RUN} -o out --max-steps 4");
    for again in [format!("{role} --resume"), format!("{role} --overwrite"), format!("{single} --resume")] {
        fails(&bench, &again, 78, "another run has this folder");
    }
    assert!(half.exists(), "nothing in the first one's folder was cleared away");
    assert!(bench.path("out/run.yaml").exists(), "the first one's folder was not touched");
    Command::new("kill").args(["-TERM", &first.id().to_string()]).status().unwrap();
    assert_eq!(first.wait().unwrap().code(), Some(75));
}

#[test]
fn missing_devices_end_it_with_75_and_leave_nothing() {
    let bench = Bench::new();
    let args =
        format!("{RUN} {HERE} --gpus 0,1 --bind 127.0.0.1:0 -o out --expect-workers 3 --join-timeout 10s");
    let said = fails(&bench, &args, 75, "2 of 3 devices");
    assert!(!said.contains("in run "), "what workers say is not said here\n{said}");
    assert!(!said.contains("0 here"), "devices of this process are here from the start\n{said}");
    for part in [
        "listens on 127.0.0.1:",
        "on this machine type:",
        "finetune --role worker --coordinator 127.0.0.1:",
        "2 here, 1 to come",
    ] {
        assert!(said.contains(part), "{part}\n{said}");
    }
    assert!(!bench.path("out").exists(), "a run that never began leaves nothing");
}

#[test]
fn coordinator_computes_only_on_named_devices_and_resumes() {
    let bench = Bench::new();
    bench.ok(&format!("{RUN} --max-steps 6 --threads 1 -q -o alone"));
    let mut first = start(&bench, "out", "--max-steps 6 --expect-workers 1");
    wait_for(&bench, "out.log", "waiting for 1 device: 0 here, 1 to come");
    first.kill().unwrap();
    first.wait().unwrap();
    // Nothing was trained: the same run begins again at step 0, with the devices named now.
    let out = bench.run(&format!("{RUN} {HERE} --bind 127.0.0.1:0 -o out --max-steps 6 --gpus 0,1 --resume"));
    let said = stderr(&out);
    assert!(out.status.success(), "{said}");
    assert!(said.contains("begins again at step 0"), "{said}");
    let adapter = |out: &str| bench.read(&format!("{out}/adapter_model.safetensors"));
    assert!(adapter("out") == adapter("alone"), "{said}");
    let record: serde_json::Value = serde_json::from_slice(&bench.read("out/coordinator.json")).unwrap();
    assert_eq!(record["epoch"], 2);
    let metrics = String::from_utf8(bench.read("out/metrics.jsonl")).unwrap();
    assert_eq!(metrics.matches("\"event\":\"step\"").count(), 6);
    for part in ["\"what\":\"joined\"", "\"classes\":{", "\"hidden_seconds\":", "\"busy\":"] {
        assert!(metrics.contains(part), "{part}\n{metrics}");
    }
    let yaml = String::from_utf8(bench.read("out/run.yaml")).unwrap();
    assert!(yaml.contains("numeric_class: cpu-"), "{yaml}");
    // Another configuration is refused by name, even without a checkpoint to compare with.
    let other = format!("{RUN} {HERE} --bind 127.0.0.1:0 -o out --max-steps 6 --resume --learning-rate 0.5");
    fails(&bench, &other, 78, "learning_rate");
}

#[test]
fn resume_without_a_folder_begins_at_step_0() {
    let bench = Bench::new();
    let args = format!("{RUN} {HERE} --gpus 0 --bind 127.0.0.1:0 -o out --max-steps 2 --resume");
    let out = bench.run(&args);
    let said = stderr(&out);
    assert!(out.status.success(), "{said}");
    let note = "note: out: no such folder to resume from: the run begins again at step 0";
    assert!(said.contains(note) && !said.contains("without --resume"), "{said}");
    // A single device prints no speed-up and no warning about few microbatches.
    assert!(!said.contains("speed-up") && !said.contains("for 1 device"), "{said}");
}

#[test]
fn a_port_in_use_is_named_and_leaves_nothing() {
    let bench = Bench::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let args = format!("{RUN} {HERE} --bind 127.0.0.1:{port} -o out");
    fails(&bench, &args, 1, &format!("port {port} is in use"));
    assert!(!bench.path("out").exists());
}

#[test]
fn several_local_devices_give_the_bytes_of_one() {
    let bench = Bench::new();
    bench.ok(&format!("{RUN} --max-steps 5 --threads 1 -q -o one"));
    let out = bench.run(&format!("{RUN} --max-steps 5 --gpu-backend cpu --gpus 0,0,2 --threads 2 -o three"));
    let said = stderr(&out);
    assert!(out.status.success(), "{said}");
    let adapter = |out: &str| bench.read(&format!("{out}/adapter_model.safetensors"));
    assert!(adapter("one") == adapter("three"), "{said}");
    assert!(!said.contains("in run ") && !said.contains("waiting for"), "{said}");
    for part in ["here, cpu 0:", "here, cpu 0 (2):", "here, cpu 2:", "% idle", "repeats", "sync"] {
        assert!(said.contains(part), "{part}\n{said}");
    }
}
