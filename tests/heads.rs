//! Heads whose outputs are numbers learn and score as in transformers' Trainer and TRL's RewardTrainer: loss, gradient
//! norm and rewards of every step, the final adapter, and its outputs. The same for heads that label tokens. The number
//! of devices, a line, streamed layers and a resume change no byte.
//!
//! More cases: `FINETUNE_HEADS=folder cargo test --test heads` runs those that make_heads.py and make_tokens.py wrote there.

mod cli_fixture;
#[path = "tested_adapters/mod.rs"]
mod tested_adapters;
#[path = "heads/tokens.rs"]
mod tokens;

use cli_fixture::{Bench, numbers, pairs, stderr, words};
use finetune::data::form::is_field;
use finetune::data::plan::{Plan, PlanOptions};
use finetune::data::{self, Options, Task, Tokenizer};
use finetune::format::peft;
use finetune::model::stage::Targets;
use finetune::train::{Batches, Work};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/heads")
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn cases(dir: &Path) -> Vec<Value> {
    cases_in(&dir.join("expected.json"))
}

fn cases_in(file: &Path) -> Vec<Value> {
    read_json(file)["cases"].as_array().unwrap().clone()
}

/// The command of a case, without its output.
fn command(dir: &Path, case: &Value, devices: &str) -> String {
    let (rows, options) = (&case["rows"], &case["options"]);
    let outputs = case["outputs"].to_string().replace('"', "");
    let [rows, options] = [rows, options].map(|value| value.as_str().unwrap());
    let dir = dir.display();
    format!(
        "{dir}/model --data {dir}/{rows}.jsonl --init-adapter {dir}/init-{outputs} --batch-size 4 --max-steps 5 \
         --no-shuffle --learning-rate 3e-3 --warmup-steps 2 --micro-batch-tokens 64 {devices} --dtype f32 -q {options}"
    )
}

/// Compares the steps of a run with those of a case. Sums of rewards are near zero: their errors are absolute.
fn compare(name: &str, got: &[Value], want: &[Value]) {
    assert_eq!(got.len(), want.len(), "{name}");
    for (step, (got, want)) in got.iter().zip(want).enumerate() {
        let number = |value: &Value, key: &str| {
            value[key].as_f64().unwrap_or_else(|| panic!("{name}, step {}: no {key} in {value}", step + 1))
        };
        let close = |key: &str, got: f64, want: f64, tolerance: f64| {
            let off = (got - want).abs() / want.abs();
            assert!(off < tolerance, "{name}, step {}: {key} {got}, expected {want}", step + 1);
        };
        close("loss", number(got, "loss"), number(want, "loss"), 1e-5);
        close("grad_norm", number(got, "grad_norm"), number(want, "grad_norm"), 1e-4);
        if want["margin"].is_null() {
            continue;
        }
        assert_eq!(number(got, "accuracy"), number(want, "accuracy"), "{name}, step {}", step + 1);
        let mean = (number(got, "rewards_chosen") + number(got, "rewards_rejected")) / 2.0;
        for (key, got) in [("margin", number(got, "margin")), ("mean_reward", mean)] {
            let off = (got - number(want, key)).abs();
            assert!(off < 1e-5, "{name}, step {}: {key} {got}, expected {}", step + 1, want[key]);
        }
        for key in ["min_reward", "max_reward"] {
            let off = (number(got, key) - number(want, key)).abs();
            assert!(off < 1e-5, "{name}, step {}: {key} {}, expected {}", step + 1, got[key], want[key]);
        }
    }
}

/// Compares the values of two adapters.
fn compare_adapters(name: &str, got: &Path, want: &Path) {
    let [got, want] = [got, want].map(|dir| peft::read(dir).unwrap().tensors);
    assert!(got.len() == want.len() && got.iter().any(|t| t.name.ends_with("score.weight")), "{name}");
    for (got, want) in got.iter().zip(&want) {
        assert_eq!((&got.name, got.rows, got.cols), (&want.name, want.rows, want.cols), "{name}");
        let off = got.values.iter().zip(&want.values).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(off < 2e-4, "{name}: {} is off by {off}", got.name);
    }
}

fn check(bench: &Bench, dir: &Path, devices: &str) {
    for case in [cases(dir), cases_in(&dir.join("tokens.json"))].concat() {
        let name = case["name"].as_str().unwrap();
        bench.ok(&format!("{} --overwrite -o {name}", command(dir, &case, devices)));
        compare(name, &bench.events(name, "step"), case["log"].as_array().unwrap());
        if dir.join(name).exists() {
            compare_adapters(name, &bench.path(name), &dir.join(name));
        }
    }
}

#[test]
fn steps_and_adapters_are_those_of_transformers_and_trl() {
    check(&Bench::new(), &golden(), "--gpus cpu");
}

#[test]
fn further_cases_are_those_of_transformers_and_trl() {
    let Some(dir) = std::env::var_os("FINETUNE_HEADS") else {
        println!("skipped: FINETUNE_HEADS names no folder of make_heads.py");
        return;
    };
    check(&Bench::new(), Path::new(&dir), "--gpus cpu");
    outputs_are_those_of(Path::new(&dir));
    tokens::probabilities_are_those_of(Path::new(&dir));
}

/// All cases on one adapter of tests/tested_adapters.
#[test]
fn steps_through_wgpu_are_those_of_transformers_and_trl() {
    let bench = Bench::new();
    let Some(tested) = tested_adapters::one() else { return };
    check(&bench, &golden(), &tested.options());
}

/// `predict` gives the outputs of PEFT's model, with PEFT's adapter and with a merged model.
fn outputs_are_those_of(dir: &Path) {
    let bench = Bench::new();
    for case in cases(dir) {
        let name = case["name"].as_str().unwrap();
        if !dir.join(name).exists() {
            continue;
        }
        let texts = case["texts"].as_array().unwrap();
        let rows: String = texts.iter().map(|text| json!({"text": text}).to_string() + "\n").collect();
        bench.file("texts.jsonl", &rows);
        let task = case["options"].as_str().unwrap();
        let model = dir.join("model").display().to_string();
        let adapter = dir.join(name).display().to_string();
        bench.ok(&format!("merge {adapter} --model {model} -o merged-{name}"));
        for from in [format!("{model} --adapter {adapter}"), format!("./merged-{name}")] {
            let said =
                bench.ok(&format!("predict {from} {task} --data texts.jsonl --gpus cpu --dtype f32 --json"));
            let lines: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            assert_eq!(lines.len(), texts.len(), "{name}: {said}");
            for (line, want) in lines.iter().zip(case["scores"].as_array().unwrap()) {
                let all = |value: &Value| match value {
                    Value::Array(all) => all.iter().map(|v| v.as_f64().unwrap()).collect(),
                    one => vec![one.as_f64().unwrap()],
                };
                let (got, want): (Vec<f64>, Vec<f64>) = (all(&line["value"]), all(want));
                assert_eq!(got.len(), want.len(), "{name}");
                let off = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                // Merged weights are rounded to the type of the base.
                let most = if from.contains("merged") { 0.1 } else { 2e-5 };
                assert!(off < most, "{name}, {from}: {got:?}, expected {want:?}");
            }
        }
        let config = read_json(&bench.path(&format!("merged-{name}/config.json")));
        // An adapter of PEFT with several outputs does not say what they mean.
        if case["outputs"] != 1 {
            continue;
        }
        assert_eq!(
            (&config["problem_type"], &config["id2label"]["0"]),
            (&json!("regression"), &json!("LABEL_0"))
        );
    }
}

#[test]
fn outputs_are_those_of_peft() {
    outputs_are_those_of(&golden());
}

/// Rows, and options of a run with several microbatches a step, dropout and an evaluation.
fn runs() -> [(&'static str, String); 3] {
    let common = "--dropout 0.1 --micro-batch-tokens 60 --batch-size 6 --max-steps 4 --eval-split 6 --threads 2 \
                  --rank 4 -q";
    [("regression", "numbers.jsonl"), ("reward", "pairs.jsonl"), ("token-classification", "words.jsonl")]
        .map(|(task, data)| (task, format!("demo --task {task} --data {data} {common}")))
}

fn bench() -> Bench {
    let bench = Bench::new();
    bench.file("numbers.jsonl", &numbers(30));
    bench.file("pairs.jsonl", &pairs(30));
    bench.file("words.jsonl", &words(30));
    bench
}

#[test]
fn devices_lines_streams_and_resumes_change_no_byte() {
    let bench = bench();
    for (task, run) in runs() {
        for more in ["", "--quantize nf4"] {
            let run = format!("{run} {more} --overwrite");
            bench.ok(&format!("{run} --gpus cpu -o one"));
            let keys = [
                "loss",
                "grad_norm",
                "margin",
                "accuracy",
                "min_reward",
                "max_reward",
                "pearson",
                "f1",
                "eval_loss",
            ];
            let log = |out: &str| {
                let all = [bench.events(out, "step"), bench.events(out, "eval")].concat();
                all.iter().map(|event| keys.map(|key| event[key].clone())).collect::<Vec<_>>()
            };
            for how in ["--gpu-backend cpu --gpus 0,1", "--gpus cpu+cpu", "--gpus cpu --offload 1"] {
                bench.ok(&format!("{run} {how} -o other"));
                bench.same_adapter("one", "other");
                assert_eq!(log("other"), log("one"), "{task}, {how}");
            }
            bench.ok(&format!("{run} --gpus cpu --save-steps 2 -o first"));
            let from = bench.path("first/checkpoint-2").display().to_string();
            bench.ok(&format!("{run} --gpus cpu --save-steps 2 --resume={from} -o second"));
            bench.same_adapter("one", "second");
        }
    }
}

#[test]
fn resume_with_another_coefficient_is_refused_by_name() {
    let bench = bench();
    let reward = runs()[1].1.clone();
    bench.ok(&format!("{reward} --save-steps 2 -o run"));
    let from = bench.path("run/checkpoint-2").display().to_string();
    let out = bench.run(&format!("{reward} --center-rewards-coefficient 0.1 --resume={from} -o other"));
    let line = stderr(&out);
    assert!(
        out.status.code() == Some(78) && line.contains("center_rewards_coefficient was unset, is 0.1"),
        "{line}"
    );
}

#[test]
fn eval_gives_the_numbers_of_the_run() {
    let bench = bench();
    for (task, run) in runs() {
        let held = run.split(" --data ").nth(1).unwrap().split(' ').next().unwrap().to_owned();
        let run = run.replace("--eval-split 6", &format!("--eval-data {held}"));
        bench.ok(&format!("{run} -o {task}"));
        let keys: &[&str] = match task {
            "reward" => {
                &["rewards_chosen", "rewards_rejected", "margin", "accuracy", "min_reward", "max_reward"]
            }
            "regression" => &["pearson", "spearman"],
            _ => &["accuracy", "macro_f1", "f1"],
        };
        bench.same_eval(task, &held, keys);
    }
}

#[test]
fn predict_scores_what_was_learnt() {
    let bench = bench();
    let run =
        runs()[0].1.replace("--max-steps 4", "--epochs 20").replace("--dropout 0.1", "--learning-rate 3e-3");
    bench.ok(&format!("{run} -o numbers"));
    let said = bench.ok("predict --adapter numbers --data numbers.jsonl --gpus cpu --json");
    let lines: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 31);
    assert!(lines[0]["value"].is_f64() && lines[0]["expected"].is_f64(), "{}", lines[0]);
    assert!(lines[30]["pearson"].as_f64().unwrap() > 0.8, "{}", lines[30]);
    let run =
        runs()[1].1.replace("--max-steps 4", "--epochs 20").replace("--dropout 0.1", "--learning-rate 3e-3");
    bench.ok(&format!("{run} -o rewards"));
    let said = bench.ok("predict --adapter rewards --data pairs.jsonl --gpus cpu --json");
    let lines: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((lines.len(), &lines[60]["pairs"]), (61, &json!(30)));
    assert!(lines[60]["accuracy"].as_f64().unwrap() > 0.9, "{}", lines[60]);
    assert_eq!((&lines[0]["answer"], &lines[1]["answer"]), (&json!("chosen"), &json!("rejected")));
    // The same answer as a row of its own.
    let pair: Value = serde_json::from_str(pairs(1).trim()).unwrap();
    let row = json!({"prompt": pair["prompt"], "completion": pair["chosen"]});
    let whole =
        json!({"text": format!("{}{}", pair["prompt"].as_str().unwrap(), pair["chosen"].as_str().unwrap())});
    bench.file("one.jsonl", &format!("{row}\n{whole}\n"));
    let said = bench.ok("predict --adapter rewards --data one.jsonl --gpus cpu --json");
    for line in said.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        assert_eq!(line["value"], lines[0]["value"], "{line}");
    }
    // Answers beside another text; the label of a text is not for a reward model.
    let rows = [
        json!({"instruction": "x", "input": "", "chosen": "y", "rejected": "z"}),
        json!({"text": "x", "label": "good"}),
    ];
    bench.file("two.jsonl", &rows.map(|row| format!("{row}\n")).concat());
    let said = bench.ok("predict --adapter rewards --data two.jsonl --gpus cpu --json");
    let lines: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let answers: Vec<_> = lines.iter().map(|line| line["answer"].as_str().unwrap_or_default()).collect();
    assert_eq!(answers, ["chosen", "rejected", "", ""], "{said}");
    assert!(lines[2]["expected"].is_null() && lines[3]["pairs"] == 1, "{said}");
}

#[test]
fn lists_of_numbers_come_from_tables_and_have_one_length() {
    let bench = bench();
    bench.file("two.csv", "text,label\na b,\"[0.5, -1]\"\nc d,\"[1, 2]\"\n");
    bench.file("one.csv", "text,label\na b,0.5\n");
    let run = "demo --task regression --data two.csv --max-steps 1 --rank 2 -q";
    bench.ok(&format!("{run} --eval-data two.csv -o out"));
    let out = bench.run(&format!("{run} --eval-data one.csv -o other"));
    let line = stderr(&out);
    let part = "`label` has 1 numbers there, and 2 in the rows to train on";
    assert!(out.status.code() == Some(78) && line.contains(part), "{line}");
    assert!(!bench.path("other").exists());
}

#[test]
fn rows_that_do_not_fit_are_refused_by_line() {
    let bench = bench();
    let sft = "demo --data rows.jsonl --max-steps 1 -q -o text";
    bench.ok(sft);
    for (name, rows, task, code, part) in [
        ("a", r#"{"text": "x", "label": "good"}"#, "regression", 1, "a.jsonl:1: `label` must be a number"),
        ("b", r#"{"text": "x", "label": 1e9}"#, "regression", 1, "from -100 to 100"),
        ("c", r#"{"text": "x", "label": []}"#, "regression", 1, "a list of such numbers"),
        ("d", r#"{"text": "x"}"#, "regression", 1, "`label` is missing"),
        (
            "e",
            "{\"text\": \"x\", \"label\": 1}\n{\"text\": \"y\", \"label\": [1, 2]}",
            "regression",
            1,
            "e.jsonl:2: `label` has 2 numbers, earlier rows have 1",
        ),
        ("f", r#"{"prompt": "x", "chosen": "y"}"#, "reward", 1, "no pair of answers"),
        (
            "g",
            r#"{"prompt": "x", "chosen": "y", "rejected": "z", "margin": "wide"}"#,
            "reward",
            1,
            "`margin` is",
        ),
        ("h", r#"{"text": "x", "label": 1}"#, "regression --num-classes 2", 78, "--task classify"),
        ("i", r#"{"text": "x", "label": 1}"#, "regression --sample-rows 2", 78, "writes no answers"),
        ("j", r#"{"text": "x", "label": 1}"#, "regression --best-metric accuracy", 78, "--task classify"),
        (
            "k",
            r#"{"text": "x", "label": 1}"#,
            "regression --center-rewards-coefficient 1",
            78,
            "--task reward",
        ),
        ("l", r#"{"text": "x", "label": 1}"#, "regression --init-adapter text", 78, "task_type CAUSAL_LM"),
    ] {
        bench.file(&format!("{name}.jsonl"), &format!("{rows}\n"));
        let out = bench.run(&format!("demo --data {name}.jsonl --task {task} -q -o {name}"));
        let line = stderr(&out);
        assert!(out.status.code() == Some(code) && line.contains(part), "{name}: {line}");
        assert!(!bench.path(name).exists(), "{name}");
    }
}

#[test]
fn heads_of_numbers_are_not_taken_for_classes() {
    let bench = bench();
    let (_, run) = &runs()[0];
    bench.ok(&format!("{run} -o numbers"));
    bench.ok("merge numbers -o merged");
    bench.file("classes.jsonl", &cli_fixture::classes(8));
    let out = bench.run("./merged --task classify --data classes.jsonl -q -o classes");
    let line = stderr(&out);
    assert!(out.status.code() == Some(78) && line.contains("gives numbers, not classes"), "{line}");
    bench.ok("./merged --task regression --data numbers.jsonl --max-steps 1 -q -o further");
    let map = read_json(&bench.path("numbers/label_map.json"));
    assert_eq!(
        map,
        json!({"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "problem_type": "regression"})
    );
    let config = read_json(&bench.path("numbers/adapter_config.json"));
    assert_eq!(
        (&config["task_type"], &config["modules_to_save"]),
        (&json!("SEQ_CLS"), &json!(["classifier", "score"]))
    );
    for verb in ["chat", "generate --prompt x"] {
        let out = bench.run(&format!("{verb} --adapter numbers"));
        assert_eq!(out.status.code(), Some(78), "{verb}: {}", stderr(&out));
    }
}

#[test]
fn pairs_stay_together_in_every_microbatch() {
    let read = |name: &str| std::fs::read_to_string(golden().join("model").join(name)).unwrap();
    let config = serde_json::from_str(&read("tokenizer_config.json")).unwrap();
    let template = read("chat_template.jinja");
    let tokenizer = Tokenizer::new(&read("tokenizer.json"), Some(&config), None, Some(&template)).unwrap();
    let options = Options { task: Task::Reward, ..Options::default() };
    let corpus = data::load(&[golden().join("margins.jsonl")], &options, &tokenizer).unwrap();
    let plan = PlanOptions {
        batch_size: 6,
        epochs: 1,
        max_steps: None,
        micro_batch_tokens: Some(90),
        packing: true,
        shuffle: true,
        seed: 3,
    };
    let plan = Plan::new(&corpus.samples, &plan);
    let work = Batches::new(&corpus.samples, &plan, None).ranking(0.5);
    let rows = std::fs::read_to_string(golden().join("margins.jsonl")).unwrap();
    let margins: Vec<f32> = rows
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["margin"].as_f64().unwrap() as f32)
        .collect();
    let mut seen: Vec<u64> = Vec::new();
    for batch in (1..=work.steps_per_epoch()).flat_map(|step| work.step(step)) {
        assert!(batch.rows.chunks(2).all(|pair| pair.len() == 2 && pair[0] == pair[1]), "{:?}", batch.rows);
        let Targets::Ranked(ranking) = &batch.targets else { panic!("{:?}", batch.targets) };
        assert_eq!((ranking.misfit(&batch), ranking.centre), (None, 0.5));
        for (row, margin) in batch.rows.iter().step_by(2).zip(&ranking.margins) {
            assert_eq!(*margin, margins[*row as usize], "the margin of its own row");
            seen.push(*row);
        }
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..20).collect::<Vec<u64>>(), "each pair once in an epoch");
    assert!(is_field("margin"));
}
