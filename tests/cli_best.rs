//! Which adapter a run keeps, when a run ends early, and how often a run evaluates.

mod cli_fixture;

use cli_fixture::{ADAPTER, Bench, rows, stderr};
use serde_json::Value;

/// Step 2 has the best evaluation; the run ends after two more evaluations.
#[test]
fn early_stopped_run_returns_the_best_adapter() {
    let b = Bench::new();
    b.file("many.jsonl", &rows(240));
    let run = "demo --data many.jsonl --eval-data rows.jsonl --batch-size 24 --rank 4 --alpha 32 --learning-rate 0.05 \
               --keep-best --early-stopping 2 --save-total-limit 1 --threads 2";
    let out = b.run(&format!("{run} --max-steps 12 --eval-steps 2 -o out"));
    let said = stderr(&out);
    assert!(out.status.success(), "{said}");
    let early = "ended early after step 6: 2 evals in a row were no better than that of step 2 (loss ";
    for part in [early, "\nbest     eval ", " at step 2: the adapter is that of step 2\n"] {
        assert!(said.contains(part), "{part}\n{said}");
    }
    b.same_adapter("out", "out/checkpoint-2");
    assert_ne!(b.read(&format!("out/{ADAPTER}")), b.read(&format!("out/checkpoint-6/{ADAPTER}")));
    let text = |name: &str| String::from_utf8(b.read(&format!("out/{name}"))).unwrap();
    for (name, part) in [
        ("README.md", " at step 2"),
        ("metrics.jsonl", r#"{"event":"best","step":2,"metric":"loss","value":"#),
        ("metrics.jsonl", r#"{"event":"early","step":6,"evals":2}"#),
        ("report.html", " at step 2"),
        ("report.html", early),
        ("run.yaml", "  eval_steps: 2  # flag\n"),
    ] {
        assert!(text(name).contains(part), "{part} in {name}");
    }
    // The run is finished; a resume into another folder copies the best adapter.
    let again = b.run("--resume=out");
    assert!(again.status.success() && stderr(&again).contains(early), "{}", stderr(&again));
    b.same_adapter("out", "out/checkpoint-2");
    b.ok("--resume=out -o moved -q");
    b.same_adapter("moved", "out/checkpoint-2");
    b.same_adapter("moved", "moved/checkpoint-2");
}

/// Steps after which the model was evaluated.
fn evals(b: &Bench, out: &str) -> Vec<u64> {
    let text = String::from_utf8(b.read(&format!("{out}/metrics.jsonl"))).unwrap();
    let events = text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    events.filter(|e| e["event"] == "eval").map(|e| e["step"].as_u64().unwrap()).collect()
}

/// An epoch has ten steps: 240 rows, 24 per step.
#[test]
fn eval_and_save_steps_accept_epochs_and_shares() {
    let b = Bench::new();
    b.file("many.jsonl", &rows(240));
    let plain = "demo --data many.jsonl --eval-data eval.jsonl --batch-size 24 --rank 4 -q";
    for (every, max, want) in [
        ("25%", 12, vec![0, 3, 6, 9, 12]),
        ("0.25", 12, vec![0, 3, 6, 9, 12]),
        ("epoch", 12, vec![0, 10, 12]),
        ("epoch/4", 10, vec![0, 3, 6, 9, 10]),
    ] {
        b.ok(&format!(
            "{plain} --max-steps {max} --eval-steps {every} --save-steps {every} --overwrite -o often"
        ));
        assert_eq!(evals(&b, "often"), want, "{every}");
        for step in &want[1..] {
            assert!(b.path(&format!("often/checkpoint-{step}")).is_dir(), "{every}: {step}");
        }
        let yaml = String::from_utf8(b.read("often/run.yaml")).unwrap();
        assert!(yaml.contains(&format!("  eval_steps: {every}  # flag\n")), "{yaml}");
    }
}

/// LoRA+: B learns at a rate of its own, alone and with two devices; a resume with another ratio is refused.
#[test]
fn b_learns_faster_by_the_ratio_that_is_asked_for() {
    let b = Bench::new();
    let run = "demo --data rows.jsonl --rank 4 --dropout 0.1 --batch-size 12 -q";
    b.ok(&format!("{run} --max-steps 3 -o plain"));
    b.ok(&format!("{run} --max-steps 3 --loraplus-lr-ratio 1 -o one"));
    b.same_adapter("plain", "one");
    b.ok(&format!("{run} --max-steps 3 --loraplus-lr-ratio 8 --save-steps 2 -o plus"));
    assert_ne!(b.read(&format!("plain/{ADAPTER}")), b.read(&format!("plus/{ADAPTER}")));
    b.ok(&format!("{run} --max-steps 3 --loraplus-lr-ratio 8 --gpu-backend cpu --gpus 0,1 -o two"));
    b.same_adapter("plus", "two");
    b.ok(&format!("--resume={}/checkpoint-2 -o again -q", b.path("plus").display()));
    b.same_adapter("plus", "again");
    let other = b.run("--resume=plus/checkpoint-2 --loraplus-lr-ratio 4 -o other -q");
    assert!(stderr(&other).contains("loraplus_lr_ratio was 8, is 4"), "{}", stderr(&other));
}
