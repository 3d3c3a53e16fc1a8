//! `finetune eval` gives the numbers of a training run's evaluation.

use crate::cli_fixture::{Bench, classes, stderr};
use serde_json::Value;

/// The last evaluation of a run.
fn of_run(bench: &Bench, out: &str) -> Value {
    let log = String::from_utf8(bench.read(&format!("{out}/metrics.jsonl"))).unwrap();
    let mut events = log.lines().rev().map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.find(|e| e["event"] == "eval").unwrap()
}

/// Trains with `options` and evaluates the adapter on the run's eval rows: the same numbers, to the bit.
#[track_caller]
fn check(bench: &Bench, out: &str, (options, eval): (&str, &str)) -> Value {
    let run = format!("demo {options} --eval-data {eval} --learning-rate 2e-3 --gpus none -q -o {out}");
    bench.ok(&run);
    let of_run = of_run(bench, out);
    let said = bench.ok(&format!("eval --adapter {out} --data {eval} --gpus none --json"));
    let said: Value = serde_json::from_str(said.trim()).unwrap();
    assert_eq!(said["loss"], of_run["eval_loss"], "{run}\n{said}\n{of_run}");
    for name in ["perplexity", "accuracy", "macro_f1", "confusion"] {
        assert_eq!(said[name], of_run[name], "{run}\n{said}\n{of_run}");
    }
    said
}

#[test]
fn eval_gives_the_loss_of_the_run() {
    let bench = Bench::new();
    let said = check(&bench, "out", ("--data rows.jsonl --max-steps 6", "eval.jsonl"));
    assert!(said["perplexity"].as_f64().unwrap() > 1.0 && said["rows"] == 3, "{said}");
    assert!(said["tokens"].as_u64() > said["supervised"].as_u64(), "{said}");
    // The run's settings decide the result: truncation, renamed fields, microbatches, precision, quantised weights.
    let renamed = String::from_utf8(bench.read("rows.jsonl")).unwrap().replace("\"prompt\"", "\"q\"");
    bench.file("renamed.jsonl", &renamed);
    let options = "--data renamed.jsonl --data-fields prompt=q --max-seq-len 20 --micro-batch-tokens 40 --max-steps 4 \
                   --dtype f32 --quantize q8_0 --target-modules q_proj,down_proj";
    let said = check(&bench, "other", (options, "renamed.jsonl"));
    assert!(said["truncated"].as_u64().unwrap() > 0, "{said}");
    // A model alone, and the output for a terminal.
    let lines = bench.ok("eval demo --data eval.jsonl --gpus none");
    let names: Vec<&str> = lines.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, ["rows", "loss", "perplexity"], "{lines}");
}

#[test]
fn eval_gives_the_scores_of_a_classifier() {
    let bench = Bench::new();
    bench.file("train.jsonl", &classes(40));
    bench.file("test.jsonl", &classes(9));
    let options = "--task classify --data train.jsonl --class-weights 1,3 --epochs 2";
    let said = check(&bench, "out", (options, "test.jsonl"));
    assert_eq!(said["labels"], serde_json::json!(["safe", "unsafe"]));
    let lines = bench.ok("eval --adapter out --data test.jsonl --gpus none");
    assert!(
        lines.contains("accuracy") && lines.contains("macro F1") && lines.contains("confusion"),
        "{lines}"
    );
    assert!(!lines.contains("perplexity"), "{lines}");
}

#[test]
fn eval_without_rows_is_refused() {
    let bench = Bench::new();
    let out = bench.run("eval demo");
    assert!(out.status.code() == Some(2) && stderr(&out).contains("give --data FILE"), "{}", stderr(&out));
}
