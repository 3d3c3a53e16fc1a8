//! Files against options: end tokens, initial adapters, logs.

use super::check;
use crate::cli_fixture::{Bench, classes, stderr};
use serde_json::{Value, json};

#[test]
fn invalid_end_tokens_are_refused() {
    let b = Bench::new();
    for (model, ends) in [
        ("word", json!("x")),
        ("below", json!(-5)),
        ("above", json!(1_000_000_000u64)),
        ("list", json!([2, "x"])),
    ] {
        b.model_with(model, "config.json", |c| c["eos_token_id"] = ends.clone());
        let parts = format!("./{model}/config.json: `eos_token_id` is {ends}, not a token id (0 to 2047)");
        check(&b, &format!("./{model} --data rows.jsonl -o out"), 78, &parts);
    }
    b.model_with("generation", "generation_config.json", |c| c["eos_token_id"] = json!(2048));
    check(&b, "generate ./generation --prompt x", 78, "generation_config.json: `eos_token_id` is 2048");
    b.model_with("lists", "config.json", |c| c["eos_token_id"] = json!([2, 0]));
    b.ok("generate ./lists --prompt x --max-new-tokens 1");
}

/// A copy of an adapter with a changed configuration.
fn adapter(b: &Bench, name: &str, change: impl FnOnce(&mut Value)) {
    let mut config: Value = serde_json::from_slice(&b.read("first/adapter_config.json")).unwrap();
    change(&mut config);
    b.bytes(&format!("{name}/adapter_model.safetensors"), &b.read("first/adapter_model.safetensors"));
    b.file(&format!("{name}/adapter_config.json"), &config.to_string());
}

#[test]
fn init_adapters_are_validated() {
    let b = Bench::new();
    b.ok("demo --data rows.jsonl --max-steps 1 --rank 2 -q -o first");
    for (name, alpha) in
        [("huge", json!(1e300)), ("below", json!(-1)), ("zero", json!(0)), ("tiny", json!(1e-60))]
    {
        adapter(&b, name, |c| c["lora_alpha"] = alpha);
        let parts = format!("{name}/adapter_config.json: lora_alpha .. finite and above 0");
        let begin = format!("demo --data rows.jsonl --rank 2 --init-adapter {name} -o out");
        let (speak, merge) =
            (format!("generate demo --adapter {name} --prompt x"), format!("merge {name} -o out"));
        for command in [begin, speak, merge] {
            check(&b, &command, 1, &parts);
        }
    }
    adapter(&b, "other", |c| {
        c["lora_alpha"] = json!(64);
        c["use_rslora"] = json!(true);
    });
    let begin =
        "demo --data rows.jsonl --max-steps 1 --rank 2 --alpha 32 --rslora=false --init-adapter other -o out";
    let said = stderr(&b.run(begin));
    assert!(said.contains("note: --init-adapter other: alpha was 64, is 32"), "{said}");
    assert!(said.contains("rslora was true, is false"), "{said}");
    std::fs::remove_dir_all(b.path("out")).unwrap();
    adapter(&b, "classifier", |c| c["task_type"] = json!("SEQ_CLS"));
    let begin = "demo --data rows.jsonl --rank 2 --init-adapter classifier -o out";
    check(&b, begin, 78, "--init-adapter .. SEQ_CLS .. --task classify");
    b.file("classes.jsonl", &classes(8));
    let begin = "demo --task classify --data classes.jsonl --rank 2 --init-adapter first -o out";
    check(&b, begin, 78, "--init-adapter .. CAUSAL_LM");
}

#[test]
fn overridden_options_are_named() {
    let b = Bench::new();
    let run = "demo --data rows.jsonl --eval-data eval.jsonl --eval-split 99999999 --max-steps 1 -o out";
    let said = stderr(&b.run(run));
    let note = "note: --eval-split is not used: the rows for evaluation come from eval.jsonl (eval_data)";
    assert!(said.contains(note), "{said}");
}

#[cfg(target_os = "linux")]
#[test]
fn unwritable_log_is_refused_before_the_run() {
    let b = Bench::new();
    let out = b.run("demo --data rows.jsonl --max-steps 1 --log-json /dev/full -o out");
    let text = stderr(&out);
    assert_eq!(out.status.code(), Some(1), "{text}");
    assert!(
        text.ends_with("error: /dev/full: disk full; free some space, or write to another disk\n"),
        "{text}"
    );
    assert!(!text.contains("step"), "{text}");
    b.ok("demo --data rows.jsonl --max-steps 1 --log-json log.jsonl -q -o other");
    assert!(b.read("log.jsonl").starts_with(b"{"), "the first line is an event");
    b.ok("demo --data rows.jsonl --max-steps 1 --log-json /dev/null -q -o third");
}
