//! Commands as users of other trainers type them, and the lines that say what came of them.

use crate::cli_fixture::{Bench, rows, stderr};
use serde_json::{Value, json};

/// The adapter's rank and alpha.
fn scale(b: &Bench, out: &str) -> (Option<u64>, Option<f64>) {
    let config: Value = serde_json::from_slice(&b.read(&format!("{out}/adapter_config.json"))).unwrap();
    (config["r"].as_u64(), config["lora_alpha"].as_f64())
}

/// What a successful command says.
#[track_caller]
fn said(b: &Bench, args: &str) -> String {
    let out = b.run(args);
    assert!(out.status.success(), "finetune {args}\n{}", stderr(&out));
    stderr(&out)
}

#[test]
fn a_yaml_file_in_the_place_of_the_model_is_read() {
    let b = Bench::new();
    b.file("a.yaml", "model: demo\ndata: rows.jsonl\nmax_steps: 1\nrank: 4\nalpha: 8\nquiet: true\n");
    b.ok("a.yaml -o one");
    b.ok("train a.yaml --force -o one");
    b.ok("-c a.yaml -o two");
    b.ok("-m demo -d rows.jsonl --max-steps 1 --lora_r 4 --device cpu -q -o three");
    b.same_adapter("one", "two");
    b.same_adapter("one", "three");
    let plan = b.ok("plan a.yaml --force -o one");
    assert!(plan.contains("adapter  rank 4, alpha 8 (scale 2) on q_proj"), "{plan}");
}

#[test]
fn head_lines_name_scale_batch_and_cut_rows() {
    let b = Bench::new();
    let head = said(&b, "demo --data rows.jsonl --max-steps 1 --max-seq-len 16 --batch-size 6 -o one");
    for part in [
        "adapter  rank 16, alpha 32 (scale 2) on q_proj",
        "batch    6 rows per step, over all devices, in microbatches of up to ",
        " cut at --max-seq-len\n",
    ] {
        assert!(head.contains(part), "{part:?} in\n{head}");
    }
    assert!(!head.contains("2 x rank"), "{head}");
    let head = said(&b, "demo --data rows.jsonl --max-steps 1 --rank 4 -o two");
    assert!(
        head.contains("note: alpha 8 = 2 x rank 4 (earlier versions: 32); --alpha sets another\n"),
        "{head}"
    );
    assert!(head.contains("rank 4, alpha 8 (scale 2) on"), "{head}");
    assert!(!head.contains("cut at"), "{head}");
    assert_eq!(scale(&b, "two"), (Some(4), Some(8.0)));
    let head = said(&b, "demo --data rows.jsonl --max-steps 1 --rank 64 --rslora -o three");
    assert!(head.contains("rank 64, alpha 32 (scale 4, rsLoRA) on"), "{head}");
}

/// A run of a version whose alpha was 32 at every rank goes on with it.
#[test]
fn a_recorded_alpha_outlives_its_default() {
    let b = Bench::new();
    let run = "demo --data rows.jsonl --max-steps 4 --rank 4 --save-steps 2 -q";
    b.ok(&format!("{run} --alpha 32 -o whole"));
    b.ok(&format!("{run} --alpha 32 -o out"));
    let recorded = String::from_utf8(b.read("out/run.yaml")).unwrap();
    b.file("out/run.yaml", &recorded.replace("alpha: 32  # flag", "alpha: 32  # default"));
    for left in ["adapter_model.safetensors", "checkpoint-4/adapter_model.safetensors"] {
        std::fs::remove_file(b.path("out").join(left)).unwrap();
    }
    std::fs::remove_dir_all(b.path("out/checkpoint-4")).unwrap();
    b.ok("--resume out -q");
    b.same_adapter("whole", "out");
    assert_eq!(scale(&b, "out"), (Some(4), Some(32.0)));
}

/// Rows in chat form: the adapter answers turns. Other rows: it continues text.
#[test]
fn prompts_are_turns_where_the_adapter_was_trained_on_turns() {
    let b = Bench::new();
    let turns = |i: usize| {
        json!({ "messages": [
            { "role": "user", "content": format!("List branch {i}") },
            { "role": "assistant", "content": format!("git branch {i}") },
        ] })
    };
    b.file("chat.jsonl", &(0..8).map(|i| turns(i).to_string() + "\n").collect::<String>());
    b.ok("demo --data chat.jsonl --max-steps 6 --learning-rate 5e-3 -q -o chat");
    b.ok("demo --data rows.jsonl --max-steps 1 -q -o plain");
    let run = String::from_utf8(b.read("chat/run.yaml")).unwrap();
    assert!(run.contains("\n  prompts: chat\n"), "{run}");
    let prompt = "--prompt 'List branch 3' --max-new-tokens 8";
    let note = "note: prompts are turns of the chat template, as in training";
    let say = |args: &str| {
        let out = b.run(&format!("generate {args} {prompt}"));
        assert!(out.status.success(), "{args}: {}", stderr(&out));
        (String::from_utf8(out.stdout.clone()).unwrap(), stderr(&out).contains(note))
    };
    let (turn, noted) = say("--adapter chat");
    assert!(noted, "a default is named");
    assert_eq!(say("--adapter chat --chat"), (turn.clone(), false));
    assert_eq!(say("--adapter chat/checkpoint-6"), (turn.clone(), true));
    let (raw, noted) = say("--adapter chat --raw");
    assert!(!noted && raw != turn, "{raw:?} {turn:?}");
    assert_eq!(say("--adapter chat --chat=false").0, raw);
    b.ok(&format!("generate --adapter chat --system 'Be brief' {prompt}"));
    let (continued, noted) = say("--adapter plain");
    assert!(!noted);
    assert_eq!(say("--adapter plain --raw").0, continued);
    // An adapter of another program or of an earlier version does not say it.
    b.file("chat/run.yaml", &run.replace("  prompts: chat\n", ""));
    assert_eq!(say("--adapter chat"), (raw, false));
}

#[test]
fn versions_and_devices_are_printed_for_a_report() {
    let b = Bench::new();
    let text = b.ok("env");
    let version = format!("finetune   {}\n", env!("CARGO_PKG_VERSION"));
    assert!(text.starts_with(&version) && text.contains("\ntarget     "), "{text}");
    assert!(text.contains("\ncpu     "), "{text}");
    let facts: Value = serde_json::from_str(&b.ok("env --json")).unwrap();
    assert!(facts["devices"].as_array().is_some_and(|all| !all.is_empty()), "{facts}");
}

#[test]
fn foreign_wishes_without_effect_are_warnings() {
    let b = Bench::new();
    b.file("many.jsonl", &rows(9));
    let text = said(&b, "demo --data many.jsonl --max-steps 1 --report_to wandb --max_length 64 -o out");
    assert!(text.contains("warning: report_to wandb (flag): nothing is sent there"), "{text}");
    assert!(
        text.contains("note: defaults that differ from TRL's (in brackets): dropout 0 (0.05), "),
        "{text}"
    );
}
