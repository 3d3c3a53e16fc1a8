//! Whole runs of the real binary: equal bytes for any number of threads, after a stop and a resume, and from run.yaml;
//! the effect of signals; the choice of folders; and the verbs that follow training.

#[path = "cli_runs/chosen.rs"]
mod chosen;
mod cli_fixture;
#[path = "cli_runs/eval_sets.rs"]
mod eval_sets;
#[path = "cli_runs/imported.rs"]
mod imported;
#[path = "cli_runs/learn.rs"]
mod learn;
#[path = "cli_runs/rows_of_a_run.rs"]
mod rows_of_a_run;
#[path = "cli_runs/spellings.rs"]
mod spellings;
#[path = "cli_runs/tokens.rs"]
mod tokens;
#[path = "cli_runs/weighted_rows.rs"]
mod weighted_rows;

use cli_fixture::{ADAPTER, Bench, classes, rows, stderr};
use serde_json::Value;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn threads_and_run_yaml_give_the_same_bytes() {
    let b = Bench::new();
    let run = "demo --data rows.jsonl --max-steps 7 --batch-size 5 --dropout 0.1 --rank 4 -q";
    b.ok(&format!("{run} --threads 1 -o one"));
    b.ok(&format!("{run} --threads 2 -o two"));
    b.ok("--config one/run.yaml -o three -q");
    b.ok(&format!("{run} --seed 43 -o other"));
    b.same_adapter("one", "two");
    b.same_adapter("one", "three");
    assert_ne!(b.read(&format!("one/{ADAPTER}")), b.read(&format!("other/{ADAPTER}")), "the seed matters");
    let yaml = String::from_utf8(b.read("one/run.yaml")).unwrap();
    for line in [
        "  rank: 4  # flag",
        "  learning_rate: 2e-4  # default",
        "  fixed_point_exponent: 40",
        "  total_steps: 7",
    ] {
        assert!(yaml.contains(&format!("{line}\n")), "{line:?} in\n{yaml}");
    }
}

#[test]
fn init_adapter_is_the_start_of_training() {
    let b = Bench::new();
    b.ok("demo --data rows.jsonl --max-steps 3 --rank 4 --alpha 6 --target-modules q_proj,v_proj -q -o one");
    b.ok("demo --data rows.jsonl --max-steps 1 --learning-rate 0 --init-adapter one -q -o two");
    b.same_adapter("one", "two");
    let config: Value = serde_json::from_slice(&b.read("two/adapter_config.json")).unwrap();
    assert_eq!((config["r"].as_u64(), config["lora_alpha"].as_f64()), (Some(4), Some(6.0)));
}

/// AutoPeftModel needs the id of a base. If adapter_config.json has none, the run warns at its start and at its end.
#[test]
fn a_base_without_a_hub_id_is_reported() {
    let b = Bench::new();
    b.model("base");
    let run = |args: &str| stderr(&b.run(&format!("{args} --data rows.jsonl --max-steps 1 --rank 2")));
    let line = "base     no Hub id is known: for PEFT's AutoPeftModel give --base-id ID";
    assert_eq!(run("base -o one").matches(line).count(), 2);
    assert_eq!(run("base --base-id owner/name -o two").matches(line).count(), 0);
    assert_eq!(run("demo -o three").matches(line).count(), 0);
}

/// Waits until the run has taken `n` steps.
fn wait_for_steps(b: &Bench, child: &mut Child, n: usize) {
    let began = Instant::now();
    let metrics = b.path("out/metrics.jsonl");
    loop {
        let text = std::fs::read_to_string(&metrics).unwrap_or_default();
        if text.matches("\"event\":\"step\"").count() >= n {
            return;
        }
        assert!(child.try_wait().unwrap().is_none(), "the run ended by itself after {text}");
        assert!(began.elapsed() < Duration::from_secs(120), "no step {n} in two minutes");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn send(child: &Child, signal: &str) {
    let sent = Command::new("kill").args([&format!("-{signal}"), &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
}

fn end(child: Child) -> (Option<i32>, String) {
    let out = child.wait_with_output().unwrap();
    (out.status.code(), stderr(&out))
}

#[test]
fn stopped_run_resumes_to_the_same_bytes() {
    let b = Bench::new();
    b.file("many.jsonl", &rows(400));
    let run = "demo --data many.jsonl --eval-data eval.jsonl --max-steps 300 --batch-size 3 --dropout 0.1 --save-steps 0";
    b.ok(&format!("{run} -o whole"));
    for signal in ["TERM", "INT"] {
        let _ = std::fs::remove_dir_all(b.path("out"));
        let mut child = b.start(&format!("{run} -o out"));
        wait_for_steps(&b, &mut child, 3);
        let asked = Instant::now();
        send(&child, signal);
        let (code, text) = end(child);
        assert!(asked.elapsed() < Duration::from_secs(20), "{signal} took {:?}", asked.elapsed());
        assert_eq!(code, Some(75), "{signal}: {text}");
        let last = text.lines().last().unwrap_or_default();
        assert!(
            last.starts_with("error: stopped by a signal after step ") && last.contains("--resume=out"),
            "{text}"
        );
        assert!(!b.path(&format!("out/{ADAPTER}")).exists(), "a stopped run has checkpoints, no adapter");
        b.ok("--resume=out");
        b.same_adapter("whole", "out");
    }
}

#[test]
fn signals_save_continue_or_stop() {
    let b = Bench::new();
    let mut child = b.start("demo --data rows.jsonl --max-steps 1000000 --batch-size 24 -o out");
    wait_for_steps(&b, &mut child, 2);
    send(&child, "USR1");
    let began = Instant::now();
    let saved = || {
        let entries = std::fs::read_dir(b.path("out")).unwrap().flatten();
        entries.filter(|e| e.file_name().to_string_lossy().starts_with("checkpoint-")).count()
    };
    while saved() == 0 {
        assert!(began.elapsed() < Duration::from_secs(60), "SIGUSR1 saved nothing");
        std::thread::sleep(Duration::from_millis(5));
    }
    let steps =
        || String::from_utf8(b.read("out/metrics.jsonl")).unwrap().matches("\"event\":\"step\"").count();
    let then = steps();
    wait_for_steps(&b, &mut child, then + 2);
    assert!(child.try_wait().unwrap().is_none(), "it goes on after SIGUSR1");
    send(&child, "INT");
    send(&child, "INT");
    let (code, text) = end(child);
    // The first signal may end the run before the second one arrives.
    assert!(matches!(code, Some(130 | 75)), "{code:?} {text}");
}

#[test]
fn demo_learns_and_runs_take_the_next_free_folder() {
    let b = Bench::new();
    let run = |args: &str| {
        let out = b.run(args);
        assert!(out.status.success(), "{}", stderr(&out));
        stderr(&out)
    };
    let said = run("--max-steps 24");
    let evals: Vec<f64> = said
        .lines()
        .filter_map(|l| {
            l.strip_prefix("eval after step ")?.split("loss ").nth(1)?.split_whitespace().next()?.parse().ok()
        })
        .collect();
    assert!(evals.len() == 2 && evals[1] < evals[0] - 0.5, "{evals:?}\n{said}");
    assert!(
        said.contains("0 of 10 rows right\n") && said.contains("held-out 0 of 10 right before"),
        "{said}"
    );
    assert_eq!(said.matches("\nasked    ").count(), 10, "{said}");
    let log = String::from_utf8(b.read("runs/demo-1/metrics.jsonl")).unwrap();
    let answers = log.lines().filter(|line| line.contains(r#""event":"sample""#));
    assert_eq!(answers.filter(|line| line.contains(r#""right":"#)).count(), 20, "{log}");
    // The prompt is shown without the template around it.
    assert!(said.contains("asked    send grape.md to the host trade\n"), "{said}");
    assert!(said.contains("output   runs/demo-1\n") && said.ends_with("adapter  runs/demo-1\n"), "{said}");
    let said = run("--max-steps 1");
    assert!(said.ends_with("adapter  runs/demo-2\n"), "{said}");
    std::fs::remove_dir_all(b.path("runs/demo-1")).unwrap();
    let said = run("--max-steps 1 --data rows.jsonl --eval-split 0.2");
    assert!(said.ends_with("adapter  runs/demo-1\n"), "{said}");
    assert!(said.contains("19 rows, 5 for evaluation"), "{said}");
    run("--max-steps 2 --data rows.jsonl -o runs/demo-1 --overwrite --log-json here.jsonl");
    assert!(b.path("here.jsonl").exists() && !b.path("runs/demo-1/metrics.jsonl").exists());
    // The log is a pipe, which is written and never read.
    let out = b.run("--max-steps 2 --data rows.jsonl -o piped --log-json /dev/stdout");
    let log = String::from_utf8(out.stdout).unwrap();
    assert!(log.lines().last().is_some_and(|line| line.contains(r#""event":"done""#)), "{log}");
    // The log stays in the folder, and standard output gets its lines.
    let out = b.run("--max-steps 2 --data rows.jsonl -o printed --log-json -");
    assert_eq!(out.stdout, b.read("printed/metrics.jsonl"));
    let recorded = String::from_utf8(b.read("printed/run.yaml")).unwrap();
    assert!(recorded.contains("\n  log_json: \"-\"  # flag\n"), "{recorded}");
}

#[test]
fn foreign_option_names_are_explained() {
    let b = Bench::new();
    b.file(
        "c.yaml",
        "model_name_or_path: demo\ndata: rows.jsonl\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 3\n\
         lora_r: 4\nmax_steps: 1\nbf16: true\noutput_dir: out\nwarmup_ratio: 0.5\n",
    );
    let out = b.run("--config c.yaml");
    let said = stderr(&out);
    assert!(out.status.success(), "{said}");
    assert!(
        said.contains("note: batch_size 6 = per_device_train_batch_size 2 x gradient_accumulation_steps 3"),
        "{said}"
    );
    assert!(said.contains("note: bf16 (c.yaml:7): "), "{said}");
    let yaml = String::from_utf8(b.read("out/run.yaml")).unwrap();
    assert!(
        yaml.contains("  rank: 4  # c.yaml:5\n") && yaml.contains("  batch_size: 6  # c.yaml:4"),
        "{yaml}"
    );
}

/// The limit covers all thread pools: the backend's, and the one shared by optimizer and sums.
#[cfg(target_os = "linux")]
#[test]
fn run_respects_its_thread_limit() {
    let b = Bench::new();
    let command = "demo --data rows.jsonl --max-steps 1000000 --batch-size 24 --threads 2 -o out";
    let mut child = b.command(command).env("RAYON_NUM_THREADS", "40").stderr(Stdio::piped()).spawn().unwrap();
    wait_for_steps(&b, &mut child, 2);
    let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap().count();
    child.kill().unwrap();
    end(child);
    // Two threads in each of two pools, and threads that mostly wait: caller, model, signals, progress, hash.
    assert!(tasks < 16, "{tasks} threads");
}

#[test]
fn adapter_generates_and_merges() {
    let b = Bench::new();
    b.ok("demo --data rows.jsonl --max-steps 40 --learning-rate 5e-3 -q -o out");
    let prompt = "--prompt 'Show the branch ' --max-new-tokens 16";
    let base = b.ok(&format!("generate demo {prompt}"));
    let tuned = b.ok(&format!("generate --adapter out {prompt}"));
    assert!(tuned.starts_with("git branch"), "it learnt its rows: {tuned:?}");
    assert_ne!(base, tuned);
    let said = b.ok("merge out --save-dtype f32 -o merged");
    assert!(said.contains("read back: logits within"), "{said}");
    assert_eq!(b.ok(&format!("generate ./merged {prompt}")), tuned);
    let said = stderr(&b.run("export out --to peft"));
    assert!(said.contains("writing out-peft (--output names another place)"), "{said}");
    b.ok("export out --to peft -o peft");
    b.same_adapter("out", "peft");
    let drawn =
        |seed: u64| b.ok(&format!("generate demo {prompt} --temperature 1.5 --top-p 0.95 --seed {seed}"));
    assert_eq!(drawn(1), drawn(1));
    assert_ne!(drawn(1), drawn(2), "the seed matters");
    let line = b.ok(&format!("generate demo {prompt} --json --chat"));
    let line: Value = serde_json::from_str(line.trim()).unwrap();
    assert!(line["tokens"].as_u64().unwrap() <= 16 && line["text"].is_string(), "{line}");
}

#[test]
fn exports_replace_only_exports() {
    let b = Bench::new();
    let base = b.model("base");
    b.ok("./base --data rows.jsonl --max-steps 2 --rank 4 -q -o deep/run");
    b.file("precious/thesis.txt", "hi");
    b.file("notes/README.md", "hi");
    b.file("file", "hi");
    let refused = |args: &str, code: i32, part: &str| {
        let out = b.run(args);
        let said = stderr(&out);
        assert_eq!(out.status.code(), Some(code), "{args}: {said}");
        assert!(said.lines().count() == 1 && said.contains(part), "{args}: {said}");
    };
    for to in ["merged", "peft"] {
        let export = format!("export deep/run --to {to} --overwrite -o");
        for (out, part) in [
            ("precious", "precious: holds thesis.txt"),
            ("notes", "notes: holds no export"),
            ("file", "file: is no folder"),
            ("deep/run", "deep/run: is the exported folder itself"),
            ("deep/../deep/run/", "is the exported folder itself"),
            ("deep", "deep: holds "),
            ("base", "base: is the base's folder itself"),
            (".", ".: holds "),
        ] {
            refused(&format!("{export} {out}"), 78, part);
        }
        b.ok(&format!("{export} fresh"));
        b.ok(&format!("{export} fresh"));
    }
    for kept in ["precious/thesis.txt", "notes/README.md", "file", "deep/run/run.yaml"] {
        assert!(b.path(kept).exists(), "{kept}");
    }
    assert!(base.join("model.safetensors").exists());
    // an adapter with non-finite values: the failed export leaves nothing, and the earlier export stays
    let earlier = b.read("fresh/adapter_config.json");
    let mut file = b.read("deep/run/adapter_model.safetensors");
    let header = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    file[header..].chunks_exact_mut(4).for_each(|c| c.copy_from_slice(&1e38f32.to_le_bytes()));
    b.bytes("deep/run/adapter_model.safetensors", &file);
    let before = std::fs::read_dir(b.dir.path()).unwrap().count();
    for out in ["fresh --overwrite", "new"] {
        let out = b.run(&format!("merge deep/run -o {out}"));
        assert!(!out.status.success(), "{}", stderr(&out));
    }
    assert_eq!(std::fs::read_dir(b.dir.path()).unwrap().count(), before);
    assert_eq!(b.read("fresh/adapter_config.json"), earlier);
}

#[test]
fn integer_labels_are_names_and_not_indices() {
    let b = Bench::new();
    let row = |label: u32| format!("{{\"text\": \"text {label}\", \"label\": {label}}}\n");
    b.file("train.jsonl", &(row(1) + &row(2) + &row(3)));
    b.ok("demo --task classify --data train.jsonl --max-steps 1 -q -o out");
    b.ok("predict --adapter out --data train.jsonl");
    b.file("zero.jsonl", &(row(1) + &row(0)));
    let out = b.run("predict --adapter out --data zero.jsonl");
    let said = stderr(&out);
    assert_eq!(out.status.code(), Some(78), "{said}");
    assert!(said.contains("zero.jsonl:2: label 0 is outside the classes 1, 2, 3"), "{said}");
}

#[test]
fn a_classifier_is_trained_scored_and_merged() {
    let b = Bench::new();
    b.file("train.jsonl", &classes(40));
    b.file("test.jsonl", &classes(8));
    let said = stderr(&b.run("demo --task classify --data train.jsonl --eval-data test.jsonl --epochs 6 --learning-rate 2e-3 -o out"));
    assert!(said.contains("accuracy 1.0000"), "{said}");
    let labels: Value = serde_json::from_slice(&b.read("out/label_map.json")).unwrap();
    assert_eq!(labels["id2label"]["1"], "unsafe");
    let last = |text: String| serde_json::from_str::<Value>(text.lines().last().unwrap()).unwrap();
    let scores = last(b.ok("predict --adapter out --data test.jsonl --json"));
    assert_eq!((scores["accuracy"].as_f64(), scores["macro_f1"].as_f64()), (Some(1.0), Some(1.0)));
    assert_eq!(scores["confusion"], serde_json::json!([[4, 0], [0, 4]]));
    let one = last(b.ok("predict --adapter out --text 'git push --force 99' --json"));
    assert_eq!(one["label"], "unsafe");
    let sum: f64 = one["probabilities"].as_object().unwrap().values().map(|p| p.as_f64().unwrap()).sum();
    assert!((sum - 1.0).abs() < 1e-12, "{one}");
    b.file("bare.jsonl", "{\"text\": \"git status 5\"}\n");
    let said = b.ok("predict --adapter out --data bare.jsonl");
    assert!(said.starts_with("safe  [") && said.lines().count() == 1, "{said}");
    b.ok("merge out --save-dtype f32 -o merged");
    let merged = last(b.ok("predict ./merged --text 'git push --force 99' --json"));
    let p = |v: &Value| v["probabilities"]["unsafe"].as_f64().unwrap();
    assert!((p(&merged) - p(&one)).abs() < 1e-4, "{merged} {one}");
}

#[test]
fn models_adapters_and_rows_are_inspected() {
    let b = Bench::new();
    b.ok("demo --data rows.jsonl --max-steps 1 --rank 2 -q -o out");
    for (what, parts) in [
        ("demo", "LlamaForCausalLM .. 1049728 .. <|im_end|>"),
        ("out", "rank            2 .. trained_on      demo"),
        ("out/checkpoint-1", "rank            2"),
        ("rows.jsonl", "rows    24 .. prompt/completion 24 .. completion 24, prompt 24"),
        ("rows.jsonl --model demo --rows 1", "supervised .. tokens .. ⟦git branch --list 0<|im_end|>⟧"),
        ("rows.jsonl --model demo --json", "\"rows\":24 .. \"truncated\":0"),
    ] {
        let said = b.ok(&format!("inspect {what}"));
        for part in parts.split(" .. ") {
            assert!(said.contains(part), "inspect {what}: wanted {part:?} in\n{said}");
        }
    }
    let said = b.ok("devices --json");
    let devices: Value = serde_json::from_str(&said).unwrap();
    let last = devices["devices"].as_array().unwrap().last().unwrap();
    assert!(last["class"].as_str().unwrap().starts_with("cpu-"), "{said}");
}

#[test]
fn bench_prints_the_time_of_each_verb() {
    let b = Bench::new();
    for dtype in ["f32", "bf16"] {
        let said = b.ok(&format!("bench --rows 2 --length 40 --repeats 1 --dtype {dtype} --json"));
        let facts: serde_json::Value = serde_json::from_str(&said).unwrap();
        assert!(facts["class"].as_str().unwrap().ends_with(dtype), "{said}");
        for (pass, tokens, verbs) in [
            ("training", 80, ["lora_linear", "lora_linear_grad", "lm_head_loss", "attention_grad"]),
            ("decoding", 32, ["lora_linear", "linear", "attention_cached", "gated"]),
        ] {
            let pass = &facts[pass];
            assert_eq!(pass["tokens"], tokens);
            let rows = pass["verbs"].as_array().unwrap();
            let find = |verb: &str| {
                rows.iter().find(|r| r["verb"] == verb).unwrap_or_else(|| panic!("{verb}: {said}"))
            };
            for row in verbs.map(find) {
                assert!(row["seconds"].as_f64().unwrap() > 0.0 && row["calls"].as_u64().unwrap() > 0);
            }
            let share: f64 = rows.iter().map(|r| r["share"].as_f64().unwrap()).sum();
            assert!(share > 0.1 && share <= 1.0, "{share}");
            let all =
                pass["verbs"].as_array().unwrap().iter().map(|r| r["seconds"].as_f64().unwrap()).sum::<f64>();
            let rest = pass["outside_verbs_seconds"].as_f64().unwrap();
            assert!((all + rest - pass["seconds"].as_f64().unwrap()).abs() < 1e-6);
            assert!(pass["of_roofline"].as_f64().unwrap() > 0.0);
        }
    }
    assert!(b.ok("bench --rows 1 --length 16 --repeats 1").contains("decoding: "));
}
