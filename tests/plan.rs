//! `finetune plan`: what it counts is what a run then does, it writes nothing, and it refuses what a run refuses.

mod cli_fixture;

use cli_fixture::{Bench, classes, rows};
use serde_json::Value;

fn plan(b: &Bench, args: &str) -> Value {
    let out = b.ok(&format!("plan {args} --json"));
    serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}"))
}

/// Every event of a kind.
fn events(b: &Bench, out: &str, kind: &str) -> Vec<Value> {
    let text = String::from_utf8(b.read(&format!("{out}/metrics.jsonl"))).unwrap();
    let all = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    all.filter(|e| e["event"] == kind).collect()
}

/// Plans, runs on two devices (whose events count microbatches), and compares.
fn check(args: &str) {
    let b = Bench::new();
    b.file("many.jsonl", &rows(90));
    b.file("classes.jsonl", &classes(60));
    let args = format!("{args} --gpu-backend cpu --gpus 0,1 --rank 2 -q");
    let planned = plan(&b, &format!("{args} -o out"));
    assert!(!b.path("out").exists() && !b.path("runs").exists(), "a plan writes nothing");
    b.ok(&format!("{args} -o out"));
    let steps = events(&b, "out", "step");
    let sum = |of: &dyn Fn(&Value) -> u64| steps.iter().map(of).sum::<u64>();
    let microbatches = sum(&|s| {
        s["shared"]["devices"].as_array().unwrap().iter().map(|d| d["microbatches"].as_u64().unwrap()).sum()
    });
    let start = &events(&b, "out", "run")[0];
    let counted = [
        ("total", steps.len() as u64),
        ("microbatches", microbatches),
        ("tokens", sum(&|s| s["total_tokens"].as_u64().unwrap())),
        ("per_epoch", start["steps_per_epoch"].as_u64().unwrap()),
        ("checkpoints", events(&b, "out", "checkpoint").len() as u64),
    ];
    for (name, did) in counted {
        assert_eq!(planned["steps"][name].as_u64(), Some(did), "{name}: {args}");
    }
    assert_eq!(planned["rows"]["trained_on"], start["rows"], "{args}");
    assert_eq!(planned["adapter"]["trained_values"], start["parameters"], "{args}");
    assert_eq!(planned["eval"]["rows"], start["eval_rows"], "{args}");
    let evals = events(&b, "out", "eval").len() as u64;
    assert_eq!(planned["eval"]["times"].as_u64(), Some(evals), "{args}");
}

#[test]
fn what_is_counted_is_what_a_run_does() {
    check("demo --data many.jsonl --batch-size 7 --epochs 2 --save-steps 5");
    check("demo --data many.jsonl --eval-split 10% --eval-steps 4 --max-steps 10 --save-steps 0");
    check("demo --data many.jsonl --no-packing --batch-size 16 --no-shuffle --max-steps 3");
    check("demo --data many.jsonl --micro-batch-tokens 40 --max-seq-len 30 --batch-size 20");
    check("demo --data classes.jsonl --task classify --batch-size 9 --epochs 2");
}
