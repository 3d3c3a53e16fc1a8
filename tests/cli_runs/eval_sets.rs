//! Several named sets of rows to evaluate on.

use crate::cli_fixture::{Bench, rows, stderr};
use serde_json::{Value, json};

const RUN: &str = "demo --data rows.jsonl --max-steps 2 --eval-steps 1";

fn bench() -> Bench {
    let b = Bench::new();
    let row = |i: usize| json!({"prompt": format!("Delete branch {i}"), "completion": format!(" git branch -d {i}")});
    b.file("code.jsonl", &rows(5));
    b.file("chat.jsonl", &(0..7).map(|i| row(i).to_string() + "\n").collect::<String>());
    b
}

/// The evaluations of a run, without their duration.
fn evals(b: &Bench, run: &str) -> Vec<Value> {
    let log = String::from_utf8(b.read(&format!("{run}/metrics.jsonl"))).unwrap();
    let all = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut evals: Vec<Value> = all.filter(|event| event["event"] == "eval").collect();
    evals.iter_mut().for_each(|eval| eval["seconds"] = Value::Null);
    evals
}

/// Each set has the scores that it has alone, and the first one decides.
#[test]
fn each_set_is_scored_as_alone() {
    let b = bench();
    let said =
        stderr(&b.run(&format!("{RUN} --eval-data code=code.jsonl --eval-data chat=chat.jsonl -o both")));
    b.ok(&format!("{RUN} --eval-data code.jsonl -o code -q"));
    b.ok(&format!("{RUN} --eval-data chat.jsonl -o chat -q"));
    let both = evals(&b, "both");
    assert_eq!(both.len(), 3);
    for ((eval, code), chat) in both.iter().zip(evals(&b, "code")).zip(evals(&b, "chat")) {
        let sets = eval["sets"].as_array().unwrap();
        for (set, (name, alone)) in sets.iter().zip([("code", &code), ("chat", &chat)]) {
            assert_eq!(set["name"], name);
            for number in ["eval_loss", "perplexity", "tokens"] {
                assert_eq!(set[number], alone[number], "{name} {number}");
            }
        }
        assert_eq!((&eval["eval_loss"], &eval["tokens"]), (&code["eval_loss"], &code["tokens"]));
        assert!(code.get("sets").is_none());
    }
    assert!(said.contains("eval after step 2: code loss ") && said.contains("; chat loss "), "{said}");
    b.same_adapter("both", "code");
    let plan =
        b.ok(&format!("plan {RUN} --eval-data code=code.jsonl --eval-data chat=chat.jsonl --gpus cpu"));
    assert!(plan.contains("eval     12 rows (code 5, chat 7), "), "{plan}");
}

#[test]
fn a_named_set_decides_on_any_number_of_workers() {
    let b = bench();
    b.file(
        "c.yaml",
        "eval_data: {code: code.jsonl, chat: [chat.jsonl]}\nbest_metric: chat_loss\nkeep_best: true\n",
    );
    b.ok(&format!("{RUN} -c c.yaml -o one -q"));
    b.ok(&format!("{RUN} -c c.yaml -o two -q --gpus cpu,cpu --threads 2"));
    assert_eq!(evals(&b, "one"), evals(&b, "two"));
    let last = evals(&b, "one").pop().unwrap();
    assert_eq!(
        (&last["sets"][0]["name"], &last["sets"][0]["eval_loss"]),
        (&json!("chat"), &last["eval_loss"])
    );
    let log = String::from_utf8(b.read("one/metrics.jsonl")).unwrap();
    let best = log.lines().rfind(|line| line.contains("\"event\":\"best\"")).unwrap();
    let best: Value = serde_json::from_str(best).unwrap();
    assert_eq!(best["value"], last["eval_loss"]);
    // run.yaml is valid in any folder.
    let recorded = String::from_utf8(b.read("one/run.yaml")).unwrap();
    assert!(recorded.contains(&format!("code={}", b.path("code.jsonl").display())), "{recorded}");
    b.ok("--config one/run.yaml -o three -q");
    assert_eq!(evals(&b, "one"), evals(&b, "three"));
    let out = b.run(&format!("{RUN} -c c.yaml --best-metric text_loss -o four"));
    assert_eq!(out.status.code(), Some(78));
    assert!(stderr(&out).contains("no set of --eval-data has the name text"), "{}", stderr(&out));
}

/// The first 24 rows of demo/eval.jsonl: SFTTrainer of TRL 1.16 gives eval_mean_token_accuracy 0.50335568 over 149 tokens
/// in f32, with `assistant_only_loss` and one batch, and eval_loss 4.97161913.
#[test]
fn token_accuracy_equals_that_of_trl() {
    let b = bench();
    let all = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/demo/eval.jsonl")).unwrap();
    b.file("e.jsonl", &all.lines().take(24).map(|line| line.to_string() + "\n").collect::<String>());
    let said = b.ok("eval demo --data e.jsonl --token-accuracy --dtype f32 --gpus cpu --json");
    let scores: Value = serde_json::from_str(said.lines().last().unwrap()).unwrap();
    assert_eq!((&scores["token_accuracy"], &scores["supervised"]), (&json!(75.0 / 149.0), &json!(149)));
    assert!((scores["loss"].as_f64().unwrap() - 4.97161913).abs() < 1e-5, "{scores}");
    for base in ["", " --quantize q8_0"] {
        let run = format!("{RUN} --eval-data e.jsonl --dtype f32 --quiet{base}");
        b.ok(&format!("{run} --overwrite -o plain"));
        assert!(evals(&b, "plain")[0].get("token_accuracy").is_none());
        b.ok(&format!("{run} --overwrite --token-accuracy -o one --gpus cpu"));
        b.same_adapter("plain", "one");
        let one = evals(&b, "one");
        assert!(
            one.iter().all(|eval| eval["token_accuracy"].as_f64().is_some_and(|share| share > 0.3)),
            "{one:?}"
        );
        for gpus in ["cpu,cpu", "cpu+cpu"] {
            b.ok(&format!("{run} --overwrite --token-accuracy -o other --gpus {gpus} --threads 2"));
            assert_eq!(evals(&b, "other"), one, "{gpus}{base}");
        }
    }
}
