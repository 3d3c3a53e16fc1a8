//! Rows with a weight, which multiplies the loss of their tokens.

use crate::cli_fixture::{Bench, rows, stderr};
use serde_json::{Value, json};

const RUN: &str = "demo --max-steps 3 --batch-size 6 --rank 2 --save-steps 1";

/// The rows of the fixture, row i with the weight `of(i)`; null: without one.
fn weighted(of: impl Fn(usize) -> Value) -> String {
    let all = rows(18);
    let row = |(i, line): (usize, &str)| {
        let mut row: Value = serde_json::from_str(line).unwrap();
        row["weight"] = of(i);
        row.to_string() + "\n"
    };
    all.lines().enumerate().map(row).collect()
}

fn losses(b: &Bench, dir: &str) -> Vec<f64> {
    let text = String::from_utf8(b.read(&format!("{dir}/metrics.jsonl"))).unwrap();
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.filter(|e| e["event"] == "step").map(|e| e["loss"].as_f64().unwrap()).collect()
}

#[test]
fn weights_multiply_losses_on_any_devices() {
    let b = Bench::new();
    b.file("plain.jsonl", &weighted(|_| Value::Null));
    b.file("ones.jsonl", &weighted(|_| json!(1)));
    b.file("halves.jsonl", &weighted(|_| json!("0.5")));
    b.file("mixed.jsonl", &weighted(|i| json!([2.5, -0.5, 0.0, 1.0][i % 4])));
    b.ok(&format!("{RUN} -q --data plain.jsonl -o plain"));
    b.ok(&format!("{RUN} -q --data ones.jsonl -o ones"));
    b.same_adapter("plain", "ones");
    let out = b.run(&format!("{RUN} --data halves.jsonl -o halves"));
    assert!(stderr(&out).contains("supervised; 18 with a weight (0.5 to 0.5)"), "{}", stderr(&out));
    let (plain, halves) = (losses(&b, "plain"), losses(&b, "halves"));
    assert!((halves[0] - plain[0] / 2.0).abs() < 1e-6 * plain[0], "{plain:?} {halves:?}");

    let run = format!("{RUN} -q --data mixed.jsonl --quantize q8_0 --dropout 0.1");
    b.ok(&format!("{run} -o mixed"));
    for how in ["--gpus cpu+cpu", "--gpus cpu,cpu", "--offload 2", "--threads 1"] {
        b.ok(&format!("{run} {how} --overwrite -o other"));
        b.same_adapter("mixed", "other");
    }
    std::fs::remove_dir_all(b.path("other/checkpoint-3")).unwrap();
    std::fs::remove_file(b.path("other/adapter_model.safetensors")).unwrap();
    b.ok(&format!("{run} --resume -o other"));
    b.same_adapter("mixed", "other");
    // Another weight is another set of rows.
    let other = format!("{} -o mixed --resume", run.replace("mixed", "halves"));
    let refused = b.run(&other);
    assert!(refused.status.code() == Some(78), "{}", stderr(&refused));
}

/// A microbatch of 4,096 tokens with the largest weight stays within the exact sums.
#[test]
fn the_largest_weight_fits_a_full_microbatch() {
    let b = Bench::new();
    let row = json!({ "text": "git log ".repeat(120), "weight": -100 }).to_string() + "\n";
    b.file("heavy.jsonl", &row.repeat(16));
    let run = "demo --max-steps 1 --batch-size 16 --micro-batch-tokens 4096 -q";
    b.ok(&format!("{run} --data heavy.jsonl -o heavy"));
    assert!(losses(&b, "heavy")[0] < -500.0, "{:?}", losses(&b, "heavy"));
}

#[test]
fn evaluations_do_not_weigh_rows() {
    let b = Bench::new();
    b.file("plain.jsonl", &weighted(|_| Value::Null));
    b.file("mixed.jsonl", &weighted(|i| json!([2.5, -0.5, 0.0, 1.0][i % 4])));
    let eval = |data: &str| b.ok(&format!("eval demo --data {data} --json"));
    let loss = |data: &str| serde_json::from_str::<Value>(&eval(data)).unwrap()["loss"].clone();
    assert_eq!(loss("plain.jsonl"), loss("mixed.jsonl"));
}

#[test]
fn weights_have_a_column_and_a_range() {
    let b = Bench::new();
    let renamed = weighted(|i| json!(i as f64 / 9.0)).replace("\"weight\"", "\"advantage\"");
    b.file("renamed.jsonl", &renamed);
    b.file("named.jsonl", &renamed.replace("\"advantage\"", "\"weight\""));
    b.ok(&format!("{RUN} -q --data renamed.jsonl --data-fields weight=advantage -o renamed"));
    b.ok(&format!("{RUN} -q --data named.jsonl -o named"));
    b.same_adapter("renamed", "named");
    for bad in [json!(100.5), json!("much"), json!([1])] {
        b.file("bad.jsonl", &weighted(|i| if i == 4 { bad.clone() } else { json!(1) }));
        let out = b.run(&format!("{RUN} --data bad.jsonl -o no"));
        let said = stderr(&out);
        let last = said.lines().last().unwrap_or_default();
        assert!(last.contains("bad.jsonl:5: `weight` multiplies the loss of the row"), "{said}");
        assert!(out.status.code() == Some(1) && !b.path("no").exists(), "{:?}: {said}", out.status);
    }
}
