//! Training on preferences gives the numbers of TRL's own trainers: loss, rewards, accuracy and gradient norm of every
//! step, and the tokens of rows. The number of devices, a line, a resume and a stopped run change no byte.

mod cli_fixture;
#[path = "tested_adapters/mod.rs"]
mod tested_adapters;

use cli_fixture::{Bench, stderr};
use finetune::data::form::is_field;
use finetune::data::plan::{Plan, PlanOptions};
use finetune::data::{self, Options, Task, Tokenizer};
use finetune::model::preference::{Aim, Loss, Objective};
use finetune::model::stage::{Microbatch, Targets};
use finetune::train::{Batches, Known, Work};
use serde_json::Value;
use std::cell::RefCell;
use std::path::{Path, PathBuf};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/preference")
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The command of a case, without its output.
fn command(dir: &Path, rows: &str, options: &str) -> String {
    let dir = dir.display();
    let options = options.replace("ADAPTER", &format!("{dir}/adapter_init"));
    format!(
        "{dir}/model --data {dir}/{rows}.jsonl --init-adapter {dir}/adapter_init --batch-size 4 --max-steps 5 \
         --no-shuffle --learning-rate 3e-3 --warmup-steps 2 --gpus cpu --dtype f32 -q {options}"
    )
}

/// The steps of a run's log.
fn steps(bench: &Bench, out: &str) -> Vec<Value> {
    let log = String::from_utf8(bench.read(&format!("{out}/metrics.jsonl"))).unwrap();
    let lines = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|line| line["event"] == "step").collect()
}

/// Compares a run with the log of a case: losses within 1e-5, other numbers within 1e-4. Rewards are differences of
/// sums in f32: near zero their error is that of the sums.
fn compare(name: &str, got: &[Value], case: &Value) {
    let want = case["log"].as_array().unwrap();
    assert_eq!(got.len(), want.len(), "{name}");
    for (step, (got, want)) in got.iter().zip(want).enumerate() {
        let sums = ["logps_chosen", "logps_rejected"].map(|key| want[key].as_f64().unwrap().abs());
        let floor = case["beta"].as_f64().unwrap() * sums[0].max(sums[1]) / 200.0;
        let keys = [
            ("loss", 1e-5, 0.0),
            ("rewards_chosen", 1e-4, floor),
            ("rewards_rejected", 1e-4, floor),
            ("margin", 1e-4, floor),
            ("accuracy", 1e-9, 1.0),
            ("grad_norm", 1e-4, 0.0),
        ];
        for (key, tolerance, floor) in keys {
            // TRL reports no accuracy of unpaired rows.
            let Some(want) = want[key].as_f64() else { continue };
            let got = got[key].as_f64().unwrap_or_else(|| panic!("{name}, step {}: no {key}", step + 1));
            let off = (got - want).abs() / want.abs().max(floor);
            assert!(off < tolerance || got == want, "{name}, step {}: {key} {got}, TRL {want}", step + 1);
        }
    }
}

fn check(bench: &Bench, dir: &Path) {
    for case in json(&dir.join("expected.json"))["cases"].as_array().unwrap() {
        let [name, rows, options] = ["name", "rows", "options"].map(|key| case[key].as_str().unwrap());
        bench.ok(&format!("{} -o {name}", command(dir, rows, options)));
        compare(name, &steps(bench, name), case);
    }
}

#[test]
fn losses_rewards_and_norms_are_those_of_trl() {
    check(&Bench::new(), &golden());
}

/// Each kind of loss once on one adapter of tests/tested_adapters.
#[test]
fn losses_through_wgpu_are_those_of_trl() {
    let bench = Bench::new();
    let Some(tested) = tested_adapters::one() else { return };
    let expected = json(&golden().join("expected.json"));
    for case in expected["cases"].as_array().unwrap() {
        let [name, rows, options] = ["name", "rows", "options"].map(|key| case[key].as_str().unwrap());
        if ["nll", "ipo", "orpo", "apo_zero_unpaired"].contains(&name) {
            let run = command(&golden(), rows, options).replace("--gpus cpu", &tested.options());
            bench.ok(&format!("{run} -o {name}"));
            compare(name, &steps(&bench, name), case);
        }
    }
}

fn tokenizer() -> Tokenizer {
    let read = |name: &str| std::fs::read_to_string(golden().join("model").join(name)).unwrap();
    let config = serde_json::from_str(&read("tokenizer_config.json")).unwrap();
    Tokenizer::new(&read("tokenizer.json"), Some(&config), None, Some(&read("chat_template.jinja"))).unwrap()
}

fn load(bench: &Bench, rows: &str, options: Options) -> Result<data::Corpus, String> {
    let path = bench.file("these.jsonl", rows);
    data::load(&[path], &options, &tokenizer()).map_err(|e| e.to_string())
}

fn pairs() -> Options {
    Options { task: Task::Pairs, ..Options::default() }
}

#[test]
fn rows_have_the_tokens_of_trl() {
    let bench = Bench::new();
    for want in json(&golden().join("forms.json")).as_array().unwrap() {
        let corpus = load(&bench, &want["row"].to_string(), pairs()).unwrap();
        let sample = corpus.samples.get(0);
        let ids = |key: &str| want[key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32);
        for (row, answer) in sample.rows().zip(["chosen", "rejected"]) {
            let whole: Vec<u32> = ids("prompt").chain(ids(answer)).collect();
            assert_eq!(&sample.ids[row.clone()], whole, "{answer} of {}", want["row"]);
            let supervised: Vec<bool> = row.map(|i| sample.supervised(i)).collect();
            let prompt = ids("prompt").count();
            let expected: Vec<bool> = (0..whole.len()).map(|i| i >= prompt).collect();
            assert_eq!(supervised, expected, "{answer} of {}", want["row"]);
        }
    }
}

/// Checks that two rows have the same tokens.
#[track_caller]
fn same(bench: &Bench, one: &str, other: &str) {
    let [one, other] = [one, other].map(|row| load(bench, row, pairs()).unwrap());
    assert_eq!(one.samples, other.samples);
}

#[test]
fn usual_forms_of_pairs_mean_the_same() {
    let bench = Bench::new();
    let list =
        r#"{"prompt": [{"role": "user", "content": "a"}], "chosen": [{"role": "assistant", "content": "b"}],
        "rejected": [{"role": "assistant", "content": "c"}]}"#
            .replace('\n', " ");
    for other in [
        // Both answers with the prompt; one with a text beside it, as in UltraFeedback.
        r#"{"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]}"#,
        r#"{"prompt": "a", "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]}"#,
        r#"{"prompt": "a", "chosen": [{"role": "assistant", "content": "b"}], "rejected": [{"role": "assistant", "content": "c"}]}"#,
        // ShareGPT turns, as LLaMA-Factory has them.
        r#"{"conversations": [{"from": "human", "value": "a"}], "chosen": {"from": "gpt", "value": "b"}, "rejected": {"from": "gpt", "value": "c"}}"#,
        r#"{"messages": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": "c"}"#,
        r#"{"instruction": "a", "chosen": "b", "rejected": "c"}"#,
    ] {
        same(&bench, &list, other);
    }
    same(
        &bench,
        r#"{"prompt": "The step:", "chosen": " b", "rejected": " c"}"#,
        r#"{"chosen": "The step: b", "rejected": "The step: c"}"#,
    );
    let unpaired = Options { task: Task::Unpaired, ..Options::default() };
    let rows = "{\"prompt\": \"a:\", \"completion\": \" b\", \"label\": true}\n{\"prompt\": \"a:\", \"completion\": \" c\", \"label\": \"False\"}\n";
    let corpus = load(&bench, rows, unpaired).unwrap();
    assert_eq!([0, 1].map(|i| corpus.samples.get(i).label), [Some(1), Some(0)]);
}

#[test]
fn rows_that_are_no_pairs_are_refused_by_line() {
    let bench = Bench::new();
    for (row, part) in [
        (r#"{"prompt": "a", "completion": "b"}"#, "these.jsonl:1: no pair of answers"),
        (
            r#"{"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c"}]}"#,
            "both be texts",
        ),
        (r#"{"prompt": "a", "chosen": 1, "rejected": 2}"#, "must be a text or messages"),
        (
            r#"{"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "b"}]}"#,
            "no common first message",
        ),
        (r#"{"messages": 3, "chosen": "b", "rejected": "c"}"#, "`messages` must be a list"),
    ] {
        let refused = load(&bench, row, pairs()).unwrap_err();
        assert!(refused.contains(part), "{row}: {refused}");
    }
    let unpaired = Options { task: Task::Unpaired, ..Options::default() };
    let refused = load(&bench, r#"{"prompt": "a", "completion": "b", "label": 2}"#, unpaired).unwrap_err();
    assert!(refused.contains("`label` must be true or false"), "{refused}");
    assert!(["chosen", "rejected", "label"].iter().all(|name| is_field(name)));
}

#[test]
fn prompt_that_leaves_no_answer_is_left_out() {
    let bench = Bench::new();
    let rows = "{\"prompt\": \"a b c d e f g h i j k l\", \"chosen\": \" x\", \"rejected\": \" y\"}\n{\"prompt\": \"a:\", \"chosen\": \" x\", \"rejected\": \" y z y z y z y z\"}\n";
    let corpus = load(&bench, rows, Options { max_seq_len: 8, ..pairs() }).unwrap();
    assert_eq!((corpus.counts.dropped, corpus.counts.truncated, corpus.samples.len()), (1, 2, 1));
    let first = corpus.counts.first_dropped.unwrap().to_string();
    assert!(first.contains("its first 8 tokens (--max-seq-len) hold no answer"), "{first}");
}

#[test]
fn pairs_stay_together_in_every_microbatch() {
    let path = golden().join("pairs.jsonl");
    let corpus = data::load(&[path], &pairs(), &tokenizer()).unwrap();
    let plan = PlanOptions {
        batch_size: 6,
        epochs: 2,
        max_steps: None,
        micro_batch_tokens: Some(90),
        packing: true,
        shuffle: true,
        seed: 3,
    };
    let plan = Plan::new(&corpus.samples, &plan);
    let known = RefCell::new(Known::default());
    let objective = Objective { loss: Loss::Sigmoid, beta: 0.1, smoothing: 0.0, gamma: 0.0, nll: 0.0 };
    let work = Batches::new(&corpus.samples, &plan, None).comparing(objective, &known);
    // Log-probabilities under the reference that name the row and the side.
    let side = |i: usize| if i.is_multiple_of(2) { 0.25 } else { 0.5 };
    for index in 0..work.unscored() {
        let batch = work.unscored_at(index, 0);
        let scores: Vec<f64> = batch.rows.iter().enumerate().map(|(i, row)| *row as f64 + side(i)).collect();
        work.scored(index, &scores);
    }
    let mut seen: Vec<u64> = Vec::new();
    let mut see = |batch: Microbatch| {
        assert!(batch.rows.chunks(2).all(|pair| pair.len() == 2 && pair[0] == pair[1]), "{:?}", batch.rows);
        let Targets::Answers(answers) = &batch.targets else { panic!("{:?}", batch.targets) };
        assert_eq!(answers.misfit(&batch), None);
        let Aim::Learn(lesson) = &answers.aim else { panic!("{:?}", answers.aim) };
        for (i, (row, score)) in batch.rows.iter().zip(&lesson.reference).enumerate() {
            assert_eq!(*score, *row as f64 + side(i), "the reference of its own row");
        }
        seen.extend(batch.rows.iter().step_by(2));
    };
    (1..=work.steps_per_epoch()).flat_map(|step| work.step(step)).for_each(&mut see);
    seen.sort_unstable();
    assert_eq!(seen, (0..20).collect::<Vec<u64>>(), "each pair once in an epoch");
}

/// Options of the runs whose bytes are compared: several microbatches a step, dropout, an evaluation.
const RUN: &str =
    "--task dpo --nll-weight 0.5 --dropout 0.1 --micro-batch-tokens 60 --eval-split 4 --threads 2";

#[test]
fn devices_lines_and_streams_change_no_byte() {
    let bench = Bench::new();
    let run = command(&golden(), "pairs", RUN);
    bench.ok(&format!("{run} -o one"));
    let log = steps(&bench, "one");
    for (name, gpus) in
        [("two", "--gpu-backend cpu --gpus 0,1"), ("line", "--gpus cpu+cpu"), ("streamed", "--offload 1")]
    {
        let run = run.replace("--gpus cpu ", if gpus.contains("gpus") { "" } else { "--gpus cpu " });
        bench.ok(&format!("{run} {gpus} -o {name}"));
        bench.same_adapter("one", name);
        for (got, want) in steps(&bench, name).iter().zip(&log) {
            for key in ["loss", "rewards_chosen", "rewards_rejected", "margin", "accuracy", "grad_norm"] {
                assert_eq!(got[key], want[key], "{name}: {key}");
            }
        }
    }
}

#[test]
fn resumed_run_needs_no_reference_again() {
    let bench = Bench::new();
    let run = command(&golden(), "pairs", RUN);
    bench.ok(&format!("{run} --save-steps 2 -o whole"));
    bench.ok(&format!("{run} --save-steps 2 -o first"));
    // The log of a run that goes on in another folder begins with the events before its start.
    let scored = |out: &str| {
        let log = String::from_utf8(bench.read(&format!("{out}/metrics.jsonl"))).unwrap();
        let last = log.rsplit("\"event\":\"run\"").next().unwrap();
        last.matches("the reference scored").count()
    };
    // From a checkpoint in another folder, and there without the file of the reference.
    bench.ok(&format!(
        "{run} --save-steps 2 --resume={}/checkpoint-2 -o second",
        bench.path("first").display()
    ));
    bench.same_adapter("whole", "second");
    assert_eq!((scored("whole"), scored("second")), (1, 0));
    std::fs::remove_file(bench.path("first/reference.bin")).unwrap();
    bench.ok(&format!(
        "{run} --save-steps 2 --resume={}/checkpoint-2 -o third",
        bench.path("first").display()
    ));
    bench.same_adapter("whole", "third");
    assert_eq!(scored("third"), 1);
    // Damaged: said, and computed again.
    let mut bytes = bench.read("third/reference.bin");
    bytes[60] ^= 1;
    bench.bytes("first/reference.bin", &bytes);
    let out = bench.run(&format!(
        "{run} --save-steps 2 --resume={}/checkpoint-2 -o fourth",
        bench.path("first").display()
    ));
    assert!(out.status.success() && stderr(&out).contains("reference.bin: damaged"), "{}", stderr(&out));
    bench.same_adapter("whole", "fourth");
}

#[test]
fn resume_with_another_loss_is_refused_by_name() {
    let bench = Bench::new();
    bench.ok(&format!("{} -o run", command(&golden(), "pairs", "--task dpo --save-steps 2")));
    for (options, part) in [
        ("--task dpo --beta 0.2", "beta was 0.1, is 0.2"),
        ("--task dpo --loss ipo", "loss was sigmoid, is ipo"),
        ("--task dpo --reference-adapter ADAPTER", "reference_adapter was"),
    ] {
        let run = command(&golden(), "pairs", options);
        let out = bench.run(&format!("{run} --resume={}/checkpoint-2 -o other", bench.path("run").display()));
        assert!(out.status.code() == Some(78) && stderr(&out).contains(part), "{options}: {}", stderr(&out));
    }
}

#[test]
fn quantised_base_learns_from_preferences() {
    let bench = Bench::new();
    let model = cli_fixture::demo().join("model");
    let rows: String = (0..16)
        .map(|i| format!("{{\"prompt\": \"turn {i}:\", \"chosen\": \" on\", \"rejected\": \" off\"}}\n"))
        .collect();
    bench.file("pairs.jsonl", &rows);
    let run = format!("{} --data pairs.jsonl --epochs 4 --learning-rate 1e-3 --gpus cpu -q", model.display());
    for (name, options) in [("dpo", "--task dpo --quantize q8_0"), ("orpo", "--task orpo --quantize nf4")] {
        bench.ok(&format!("{run} {options} -o {name}"));
        let steps = steps(&bench, name);
        let loss = |i: usize| steps[i]["loss"].as_f64().unwrap();
        assert!(loss(steps.len() - 1) < loss(0), "{name}: {} -> {}", loss(0), loss(steps.len() - 1));
        assert!(steps[steps.len() - 1]["margin"].as_f64().unwrap() > 0.0, "{name}");
    }
}

#[test]
fn eval_gives_the_numbers_of_the_run() {
    let bench = Bench::new();
    let rows = std::fs::read_to_string(golden().join("pairs.jsonl")).unwrap();
    bench.file("held.jsonl", &rows.lines().take(6).map(|row| format!("{row}\n")).collect::<String>());
    for (name, options) in [("dpo", "--task dpo --beta 0.3"), ("cpo", "--task cpo")] {
        bench.ok(&format!("{} --eval-data held.jsonl -o {name}", command(&golden(), "pairs", options)));
        bench.same_eval(name, "held.jsonl", &["rewards_chosen", "rewards_rejected", "margin", "accuracy"]);
    }
}

#[test]
fn pairs_are_shown_by_inspect() {
    let bench = Bench::new();
    let rows = golden().join("pairs.jsonl");
    let forms = bench.ok(&format!("inspect {}", rows.display()));
    assert!(forms.contains("chosen/rejected 20"), "{forms}");
    let unpaired = bench.ok(&format!("inspect {}", golden().join("unpaired.jsonl").display()));
    assert!(unpaired.contains("completion/label 20"), "{unpaired}");
    let model = golden().join("model");
    let shown =
        bench.ok(&format!("inspect {} --model {} --task dpo --rows 1", rows.display(), model.display()));
    let first: Value =
        serde_json::from_str(std::fs::read_to_string(rows).unwrap().lines().next().unwrap()).unwrap();
    for key in ["chosen", "rejected"] {
        let answer = format!("⟦{}<|end|>⟧", first[key].as_str().unwrap());
        assert!(shown.contains(&format!("{key}: {}", first["prompt"].as_str().unwrap())), "{shown}");
        assert!(shown.contains(&answer), "{answer} in {shown}");
    }
}
