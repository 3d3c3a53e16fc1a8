//! Devices that hold the layers of one model together: they change no byte, whatever the model, the task and the other
//! devices of the run; a fault of one of them costs time alone.

use crate::cli_fixture::{classes, stderr};
use crate::fleet::{Fleet, RUN};

#[test]
fn a_line_gives_the_bytes_of_one_process() {
    let sampled = "--eval-data rows.jsonl --eval-steps 2 --sample-prompt Why?";
    for more in [sampled, "--quantize nf4", "--task classify --num-classes 2"] {
        let fleet = Fleet::new();
        fleet.bench.file("classes.jsonl", &classes(240));
        let data = if more.contains("classify") { "--data classes.jsonl" } else { "--data many.jsonl" };
        let run = format!("{} --max-steps 5 {more}", RUN.replace("--data many.jsonl", data));
        let alone = fleet.alone(&run);
        // Four threads for three devices: unlike ones.
        let lines = [("two", "cpu+cpu", 2), ("three", "cpu+cpu+cpu", 4), ("beside", "cpu+cpu,cpu", 3)];
        for (out, gpus, threads) in lines {
            let said = fleet.bench.run(&format!("{run} --gpus {gpus} --threads {threads} --output {out}"));
            assert_eq!(said.status.code(), Some(0), "{}", stderr(&said));
            assert!(stderr(&said).contains("line     cpu: embedding, layers 0 to"), "{}", stderr(&said));
            assert!(fleet.adapter(out) == alone, "{more}, {gpus}\n{}", stderr(&said));
        }
    }
}

/// Each device streams as many layers as are typed, or as its memory asks for.
#[test]
fn a_line_that_streams_gives_the_bytes_of_one_process() {
    for more in ["", "--quantize nf4"] {
        let fleet = Fleet::new();
        let run = format!("{RUN} --max-steps 5 {more}");
        let alone = fleet.alone(&run);
        let line = "--gpus cpu+cpu --threads 2";
        let mut ways = vec![
            ("one", "--offload 1".to_owned(), "streams  2 of 4 layers"),
            ("all", "--offload 9".to_owned(), "streams  4 of 4 layers"),
        ];
        if more.is_empty() {
            // The least memory in which the run and the self-test before it fit.
            let limits = (60..100).step_by(2).map(|n| format!("--memory-limit {n}00KB"));
            let fits = |limit: &String| {
                fleet
                    .bench
                    .run(&format!("{run} {line} {limit} --output tried --overwrite -q"))
                    .status
                    .success()
            };
            ways.push(("auto", limits.into_iter().find(fits).unwrap(), "streams  "));
        }
        for (out, how, streamed) in ways {
            let said = fleet.bench.run(&format!("{run} {line} {how} --output {out}"));
            assert_eq!(said.status.code(), Some(0), "{}", stderr(&said));
            assert!(stderr(&said).contains(streamed), "{how}: {}", stderr(&said));
            assert!(fleet.adapter(out) == alone, "{more}, {how}\n{}", stderr(&said));
        }
        let planned = fleet.bench.ok(&format!("plan {run} {line} --offload 1 --json"));
        let planned: serde_json::Value = serde_json::from_str(&planned).unwrap();
        let seats = planned["devices"][0]["seats"].as_array().unwrap();
        assert!(seats.iter().all(|seat| seat["streamed_layers"] == 1), "{planned}");
    }
}

#[test]
fn a_worker_with_a_line_gives_the_bytes_of_one_process() {
    let run = format!("{RUN} --max-steps 6");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --expect-workers 2"));
    fleet.worker("line", "--gpus cpu+cpu --threads 2");
    fleet.faulty("slow", "--threads 1", "slow=3");
    fleet.all_end(&["coordinator", "line", "slow"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    assert!(fleet.all().contains("cpu + cpu (2)"), "{}", fleet.all());
}

#[test]
fn a_fault_in_a_line_falls_back_and_changes_no_byte() {
    for fault in ["error@3", "panic@3"] {
        let run = format!("{RUN} --max-steps 5");
        let mut fleet = Fleet::new();
        let alone = fleet.alone(&run);
        fleet.coordinator(&format!("{run} --expect-workers 1"));
        fleet.faulty("line", "--gpus cpu+cpu --threads 2", fault);
        fleet.all_end(&["coordinator", "line"], 0);
        assert!(fleet.adapter("out") == alone, "{fault}\n{}", fleet.all());
        assert!(fleet.said("line").contains("falls back to cpu"), "{fault}\n{}", fleet.all());
    }
}

#[test]
fn a_bad_value_in_a_line_ends_the_run_with_its_address() {
    let mut fleet = Fleet::new();
    fleet.coordinator(&format!("{RUN} --max-steps 8 --expect-workers 1"));
    fleet.faulty("line", "--gpus cpu+cpu --threads 2", "nan@4");
    fleet.all_end(&["coordinator", "line"], 3);
    let line = fleet.said("coordinator").lines().last().unwrap_or_default().to_string();
    for part in ["error:", "step 4", "lora_", "NaN", "row"] {
        assert!(line.contains(part), "{part:?} in {line:?}\n{}", fleet.all());
    }
}

#[test]
fn a_line_generates_and_predicts_like_one_device() {
    let fleet = Fleet::new();
    fleet.alone(&format!("{RUN} --max-steps 2"));
    for verb in [
        "generate demo --adapter alone --prompt Why? --max-new-tokens 8",
        "eval demo --adapter alone --data rows.jsonl",
    ] {
        let said = ["cpu", "cpu+cpu", "cpu+cpu+cpu", "cpu+cpu --offload 1"].map(|gpus| {
            let out = fleet.bench.run(&format!("{verb} --gpus {gpus} --threads 2"));
            assert_eq!(out.status.code(), Some(0), "{verb}: {}", stderr(&out));
            String::from_utf8(out.stdout).unwrap()
        });
        assert!(said.iter().all(|text| *text == said[0]), "{verb}: {said:?}");
    }
}

#[test]
fn a_line_that_cannot_be_is_refused_in_one_line() {
    let fleet = Fleet::new();
    for (args, why) in [
        ("--gpus cpu+", "is no device"),
        ("--gpus auto+cpu", "is no device"),
        ("--gpus cpu+cpu --memory-limit 2MB", "a larger --memory-limit"),
        ("--gpus cpu+cpu --memory-limit 5MB --offload never", "a larger --memory-limit"),
    ] {
        let out = fleet.bench.run(&format!("{RUN} --max-steps 1 {args} -q -o no"));
        let last = stderr(&out);
        let last = last.lines().last().unwrap_or_default();
        assert!(last.starts_with("error:") && last.contains(why), "{args}: {}", stderr(&out));
        assert!(out.status.code() == Some(78) || out.status.code() == Some(2), "{args}: {:?}", out.status);
        assert!(!fleet.bench.path("no").exists(), "{args}");
    }
}
