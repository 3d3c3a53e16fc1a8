//! Heads that label each word: rows, predictions, files, and what is refused. What is learnt is in the parent.

use super::{cases_in, golden, read_json};
use crate::cli_fixture::{Bench, stderr, words};
use finetune::format::safetensors;
use finetune::numeric::tensor::Tensors;
use serde_json::{Value, json};
use std::path::Path;

const TASK: &str = "--task token-classification";

fn lines(said: &str) -> Vec<Value> {
    said.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// What a run that succeeds writes to stderr.
fn shown(bench: &Bench, args: &str) -> String {
    let out = bench.run(args);
    assert!(out.status.success(), "{}", stderr(&out));
    stderr(&out)
}

/// `predict` gives the classes of PEFT's model for the words that have tokens, with PEFT's adapter and with a merged model.
pub fn probabilities_are_those_of(dir: &Path) {
    let bench = Bench::new();
    let names = read_json(&dir.join("tokens.json"))["names"].clone();
    let names: Vec<&str> = names.as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    for case in cases_in(&dir.join("tokens.json")) {
        let name = case["name"].as_str().unwrap();
        if !dir.join(name).exists() {
            continue;
        }
        // PEFT's adapter does not say what its classes are.
        std::fs::create_dir_all(bench.path(name)).unwrap();
        for file in ["adapter_config.json", "adapter_model.safetensors"] {
            std::fs::copy(dir.join(name).join(file), bench.path(name).join(file)).unwrap();
        }
        let by_id = names.iter().enumerate().map(|(i, name)| (i.to_string(), json!(name)));
        let by_id = by_id.collect::<serde_json::Map<_, _>>();
        bench.file(&format!("{name}/label_map.json"), &json!({ "id2label": by_id }).to_string());
        let (model, rows) = (dir.join("model"), dir.join("names.jsonl"));
        let (model, rows) = (model.display(), rows.display());
        bench.ok(&format!("merge {name} --model {model} -o merged-{name}"));
        for from in [format!("{model} --adapter {name}"), format!("./merged-{name}")] {
            let said = bench.ok(&format!("predict {from} --data {rows} --gpus cpu --dtype f32 --json"));
            let said = lines(&said);
            for (line, want) in said.iter().zip(case["probabilities"].as_array().unwrap()) {
                let words = line["tokens"].as_array().unwrap().len();
                let mut seen = vec![false; words];
                for word in want.as_array().unwrap() {
                    let at = word[0].as_u64().unwrap() as usize;
                    let p: Vec<f64> =
                        word[1].as_array().unwrap().iter().map(|p| p.as_f64().unwrap()).collect();
                    let best = (0..p.len()).max_by(|a, b| p[*a].total_cmp(&p[*b])).unwrap();
                    let got = line["probabilities"][at].as_f64().unwrap();
                    seen[at] = true;
                    // Merged weights are rounded to the type of the base.
                    if from.contains("merged") {
                        assert!((got - p[best]).abs() < 0.1, "{name}: {line}, expected {word}");
                        continue;
                    }
                    assert_eq!(line["tags"][at], json!(names[best]), "{name}: {line}");
                    assert!((got - p[best]).abs() < 2e-5, "{name}: {line}, expected {word}");
                }
                for at in (0..words).filter(|at| !seen[*at]) {
                    assert!(line["tags"][at].is_null(), "a word without a token has no class: {line}");
                }
            }
            let scores = said.last().unwrap();
            assert!(scores["f1"].is_f64() && scores["accuracy"].is_f64(), "{scores}");
        }
        let config = read_json(&bench.path(&format!("merged-{name}/config.json")));
        let class = config["architectures"][0].as_str().unwrap();
        assert!(class.ends_with("ForTokenClassification"), "{class}");
        assert_eq!((&config["id2label"]["4"], &config["problem_type"]), (&json!("O"), &Value::Null));
        let merged = safetensors::Sharded::open(&bench.path(&format!("merged-{name}"))).unwrap();
        assert_eq!(merged.about("score.bias").unwrap().unwrap().shape, [5]);
        assert!(merged.about("lm_head.weight").unwrap().is_none());
    }
}

#[test]
fn classes_of_words_are_those_of_peft() {
    probabilities_are_those_of(&golden());
}

fn bench() -> Bench {
    let bench = Bench::new();
    bench.file("words.jsonl", &words(40));
    bench
}

#[test]
fn what_is_learnt_of_words_is_predicted_and_exported() {
    let bench = bench();
    let run = format!(
        "demo {TASK} --data words.jsonl --eval-data words.jsonl --eval-steps epoch --keep-best --best-metric f1 \
         --batch-size 8 --epochs 20 --learning-rate 5e-3 --rank 4 --gpus cpu"
    );
    let said = shown(&bench, &format!("{run} -o out"));
    assert!(said.contains("entity F1"), "{said}");
    let last = bench.events("out", "eval").pop().unwrap();
    assert!(last["f1"].as_f64().unwrap() > 0.9 && last["macro_f1"].as_f64().unwrap() > 0.9, "{last}");
    let said = lines(&bench.ok("predict --adapter out --data words.jsonl --gpus cpu --json"));
    assert_eq!(said.len(), 41);
    let best = bench.events("out", "eval").iter().map(|e| e["f1"].as_f64().unwrap()).fold(0.0, f64::max);
    assert_eq!(said[40]["f1"], json!(best), "the scores of the best evaluation: {}", said[40]);
    assert_eq!(said[0]["tags"].as_array().unwrap().len(), said[0]["tokens"].as_array().unwrap().len());
    let config = read_json(&bench.path("out/adapter_config.json"));
    assert_eq!(
        (&config["task_type"], &config["modules_to_save"]),
        (&json!("TOKEN_CLS"), &json!(["classifier", "score"]))
    );
    // A text is split at white space, and no word of it has a label to compare with.
    let plain =
        bench.command("predict --adapter out --gpus cpu").args(["--text", "git  push"]).output().unwrap();
    let plain = String::from_utf8(plain.stdout).unwrap();
    let labelled: Vec<&str> = plain.lines().collect();
    assert!(
        labelled.len() == 3 && labelled[0].starts_with("git  ") && labelled[1].starts_with("push  "),
        "{plain}"
    );
    let scores = bench.ok("eval --adapter out --data words.jsonl --gpus cpu");
    assert!(scores.contains("entity F1   "), "{scores}");
    bench.ok("merge out -o merged");
    let again = lines(&bench.ok("predict ./merged --data words.jsonl --gpus cpu --json"));
    assert_eq!(again[0]["tags"], said[0]["tags"]);
    // A head that the base has is the beginning of a further run.
    let further =
        shown(&bench, &format!("./merged {TASK} --data words.jsonl --max-steps 1 --gpus cpu -o further"));
    assert!(further.contains("classes  B-TOOL, B-VERB, I-VERB, O"), "{further}");
    bench.ok("plan ./merged --task token-classification --data words.jsonl --gpus cpu");
    let rows = bench.ok(&format!("inspect words.jsonl --model demo {TASK}"));
    assert!(rows.contains("B-TOOL (") && rows.contains("words)"), "{rows}");
    assert!(bench.ok("inspect words.jsonl").contains("tokens/tags 40"));
    for verb in ["chat", "generate --prompt x", "export --to gguf-lora -o f.gguf"] {
        let out = bench.run(&format!("{verb} --adapter out"));
        assert!(matches!(out.status.code(), Some(78 | 2)), "{verb}: {}", stderr(&out));
    }
}

#[test]
fn labels_may_be_numbers_text_of_tables_or_missing() {
    let bench = bench();
    let rows = [
        json!({"tokens": ["a", "b", "c"], "ner_tags": [0, -100, 1]}),
        json!({"tokens": ["d", "e"], "ner_tags": [null, 2]}),
        json!({"tokens": ["f"], "ner_tags": [-100]}),
    ];
    bench.file("n.jsonl", &rows.map(|row| row.to_string() + "\n").concat());
    bench.file("n.csv", "words,labels\n\"[\"\"a\"\", \"\"b\"\"]\",\"[0, 1]\"\n");
    let run = format!("demo {TASK} --max-steps 1 --rank 2 --gpus cpu");
    let said = shown(&bench, &format!("{run} --data n.jsonl --num-classes 3 --class-weights 1,2,3 -o out"));
    assert!(said.contains("3 supervised; 1 without anything to train on left out"), "{said}");
    assert!(said.contains("classes  0, 1, 2"), "{said}");
    bench.ok(&format!("{run} --data n.csv --data-fields tokens=words -o table"));
    // Neither labels nor names that mark entities: there is nothing to score.
    bench.file("plain.jsonl", "{\"tokens\": [\"a\", \"b\"]}\n");
    let said = lines(&bench.ok("predict --adapter out --data plain.jsonl --gpus cpu --json"));
    assert!(said.len() == 1 && said[0].get("expected").is_none(), "{said:?}");
    let eval = bench.ok("eval --adapter out --data n.jsonl --gpus cpu --json");
    assert!(lines(&eval)[0]["f1"].is_null() && lines(&eval)[0]["supervised"] == 3, "{eval}");
}

#[test]
fn rows_of_words_that_do_not_fit_are_refused_by_line() {
    let bench = bench();
    bench.file("classes.jsonl", &crate::cli_fixture::classes(8));
    bench.ok("demo --task classify --data classes.jsonl --max-steps 1 --rank 2 -q -o rows");
    bench.ok("merge rows -o rows-merged");
    bench.ok(&format!("demo {TASK} --data words.jsonl --max-steps 1 --rank 2 -q -o tags"));
    bench.ok("merge tags -o tags-merged");
    let good = r#"{"tokens": ["a", "b"], "tags": ["O", "B-X"]}"#;
    for (name, rows, run, code, part) in [
        ("a", r#"{"tokens": ["a", "b"], "tags": ["O"]}"#, "demo TASK", 1, "`tags` has 1 labels for 2 words"),
        ("b", r#"{"tokens": "a b", "tags": ["O"]}"#, "demo TASK", 1, "`tokens` is a text but not JSON"),
        ("c", r#"{"tokens": ["a", 1], "tags": ["O", "O"]}"#, "demo TASK", 1, "it has a number"),
        ("d", r#"{"tokens": ["a"]}"#, "demo TASK", 1, "`tags` is missing (also: ner_tags, labels)"),
        ("e", r#"{"words": ["a"], "tags": ["O"]}"#, "demo TASK", 1, "`tokens` is missing"),
        ("f", r#"{"tokens": ["a"], "tags": [0.5]}"#, "demo TASK", 1, "must be an integer or a string"),
        ("g", r#"{"tokens": ["a"], "tags": ["O"]}"#, "demo TASK", 78, "at least two classes"),
        ("h", good, "demo TASK --long-rows split", 78, "split goes with --task sft"),
        ("i", good, "demo TASK --sample-rows 1", 78, "writes no answers"),
        ("j", good, "demo TASK --class-weights 1,2,3", 78, "3 weights for 2 classes"),
        ("k", good, "./rows-merged TASK", 78, "is for whole rows"),
        ("l", r#"{"text": "x", "label": "O"}"#, "./tags-merged --task classify", 78, "is for each token"),
        ("m", r#"{"text": "x"}"#, "./tags-merged", 78, "give --task token-classification"),
        ("n", good, "demo TASK --init-adapter rows", 78, "task_type SEQ_CLS"),
        ("o", r#"{"text": "x", "label": "O"}"#, "demo --task classify --init-adapter tags", 78, "TOKEN_CLS"),
        ("p", good, "demo --task classify --best-metric f1", 78, "token-classification"),
        (
            "q",
            r#"{"tokens": ["a", "b"], "tags": ["NOUN", "VERB"]}"#,
            "demo TASK --best-metric f1",
            78,
            "do not mark",
        ),
    ] {
        bench.file(&format!("{name}.jsonl"), &format!("{rows}\n"));
        let run = run.replace("TASK", TASK);
        let out = bench.run(&format!("{run} --data {name}.jsonl -q -o {name}"));
        let line = stderr(&out);
        assert!(out.status.code() == Some(code) && line.contains(part), "{name}: {line}");
        assert!(!bench.path(name).exists(), "{name}");
    }
}
