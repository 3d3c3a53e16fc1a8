//! The reported results are deterministic as well as the adapter: losses of evaluations, predictions of a classifier
//! for every row, and samples have the same bits for any workers.

use crate::cli_fixture::{classes, numbers, pairs, words};
use crate::fleet::{Fleet, RUN};
use serde_json::Value;

/// Every evaluation or sample in a run's metrics.jsonl, without its time. A number is compared as text, which
/// metrics.jsonl writes so that it parses back to the same bits.
fn written(fleet: &Fleet, out: &str, kind: &str) -> Vec<Value> {
    let text = String::from_utf8(fleet.bench.read(&format!("{out}/metrics.jsonl"))).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let evals = lines.filter(|event| event["event"] == kind);
    let timeless = evals.map(|mut event| {
        let fields = event.as_object_mut().unwrap();
        fields.retain(|name, _| name != "seconds" && name != "time");
        event
    });
    timeless.collect()
}

fn check(run: &str, field: &str) {
    let rows = |fleet: &Fleet| {
        fleet.bench.file("classes.jsonl", &classes(60));
        fleet.bench.file("numbers.jsonl", &numbers(60));
        fleet.bench.file("words.jsonl", &words(60));
        fleet.bench.file("pairs.jsonl", &pairs(60));
    };
    let alone = Fleet::new();
    rows(&alone);
    let adapter = alone.alone(run);
    let expected = written(&alone, "alone", "eval");
    let samples = written(&alone, "alone", "sample");
    assert_eq!(samples.is_empty(), !run.contains("--sample-prompt"), "{samples:?}");
    assert!(expected.len() >= 3 && expected.iter().all(|e| !e[field].is_null()), "{expected:?}");
    for count in [2usize, 3] {
        let mut fleet = Fleet::new();
        rows(&fleet);
        fleet.coordinator(&format!("{run} --expect-workers {count}"));
        let names: Vec<String> = (0..count).map(|i| format!("worker-{i}")).collect();
        names.iter().for_each(|name| fleet.worker(name, "--threads 1"));
        fleet.all_end(&["coordinator"], 0);
        assert!(fleet.adapter("out") == adapter, "{count} workers: the adapter\n{}", fleet.all());
        assert_eq!(written(&fleet, "out", "eval"), expected, "{count} workers\n{}", fleet.all());
        assert_eq!(written(&fleet, "out", "sample"), samples, "{count} workers\n{}", fleet.all());
        for kind in ["best", "early"] {
            let said = written(&fleet, "out", kind);
            assert_eq!(said, written(&alone, "alone", kind), "{count} workers\n{}", fleet.all());
            assert_eq!(said.is_empty(), !run.contains("--keep-best"), "{count} workers: {kind}");
        }
    }
}

#[test]
fn eval_loss_has_the_same_bits_for_any_workers() {
    check(
        &format!(
            "{RUN} --max-steps 4 --eval-data rows.jsonl --eval-steps 2 --sample-prompt Hello --sample-rows 2"
        ),
        "eval_loss",
    );
}

/// With this learning rate the first of three evaluations is the best one.
#[test]
fn best_adapter_and_early_end_are_equal_for_any_workers() {
    let choice = "--keep-best --early-stopping 2 --save-total-limit 1 --alpha 32 --learning-rate 0.05";
    check(&format!("{RUN} --max-steps 12 --eval-data rows.jsonl --eval-steps 2 {choice}"), "eval_loss");
}

#[test]
fn classifier_scores_are_equal_for_any_workers() {
    let run = "demo --task classify --data classes.jsonl --eval-split 0.3 --batch-size 12 --micro-batch-tokens 64 \
               --rank 4 --max-steps 4 --eval-steps 2";
    check(run, "confusion");
    check(&run.replace("classify --data classes", "regression --data numbers"), "pearson");
    check(&run.replace("classify --data classes", "reward --data pairs"), "max_reward");
    check(&run.replace("classify --data classes", "token-classification --data words"), "f1");
}
