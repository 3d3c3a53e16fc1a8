//! Trained rows of tokens in whole runs, on a model whose head is its embedding and on one with a head of its own.

use crate::cli_fixture::{Bench, classes, pairs, stderr};
use serde_json::{Value, json};

const TOKENS: &str = "--train-tokens '<|im_end|>,git,<|endoftext|>'";
/// Adapters on embedding and head.
const ENDS: &str =
    "--target-modules q_proj,lm_head,embed_tokens --rank-pattern embed_tokens=2 --alpha-pattern lm_head=3";
const RUN: &str = "--max-steps 4 --batch-size 4 --rank 3 --learning-rate 5e-3 --save-steps 2 -q";

/// A copy of the demonstration with a head of its own, whose rows are those of the embedding in another order.
fn untied(b: &Bench) {
    b.model_weights("untied", |header, data| {
        let about = header["model.embed_tokens.weight"].clone();
        let at = |i: usize| about["data_offsets"][i].as_u64().unwrap() as usize;
        let mut rows = data[at(0)..at(1)].to_vec();
        rows.rotate_left(256 * 5);
        header["lm_head.weight"] = json!({
            "dtype": about["dtype"], "shape": about["shape"], "data_offsets": [data.len(), data.len() + rows.len()],
        });
        data.extend(rows);
    });
    let mut config: Value = serde_json::from_slice(&b.read("untied/config.json")).unwrap();
    config["tie_word_embeddings"] = json!(false);
    b.file("untied/config.json", &config.to_string());
}

fn config(b: &Bench, dir: &str) -> Value {
    serde_json::from_slice(&b.read(&format!("{dir}/adapter_config.json"))).unwrap()
}

#[test]
fn rows_of_tokens_train_to_the_same_bytes_however_computed() {
    let b = Bench::new();
    untied(&b);
    b.file("classes.jsonl", &classes(24));
    b.file("pairs.jsonl", &pairs(24));
    for (model, of, more, data) in [
        ("demo", TOKENS, "--dropout 0.2 --weight-decay 0.1", "rows"),
        ("untied", TOKENS, "--quantize q8_0 --target-layers 2-3", "rows"),
        ("untied", TOKENS, "--task classify --num-classes 2", "classes"),
        ("demo", TOKENS, "--task dpo", "pairs"),
        ("untied", ENDS, "--dropout 0.2", "rows"),
        ("demo", ENDS, "--task dpo --quantize q8_0", "pairs"),
    ] {
        let run = format!("{model} --data {data}.jsonl {RUN} {of} {more}");
        b.ok(&format!("{run} -o one"));
        for how in ["--gpus cpu,cpu", "--gpus cpu+cpu", "--offload 2", "--threads 1"] {
            if (model, of, how) == ("demo", TOKENS, "--gpus cpu+cpu") {
                let part = "--gpus: does not go with --train-tokens on this model: its head is its embedding";
                b.refuses(&format!("{run} {how}"), 78, part);
                continue;
            }
            b.ok(&format!("{run} {how} --overwrite -o other"));
            b.same_adapter("one", "other");
        }
        b.ok("--config one/run.yaml --overwrite -o other -q");
        b.same_adapter("one", "other");
        std::fs::remove_dir_all(b.path("other/checkpoint-4")).unwrap();
        std::fs::remove_file(b.path("other/adapter_model.safetensors")).unwrap();
        let changed = run.replace(",git", "").replace("lm_head=3", "lm_head=5");
        let out = b.run(&format!("{changed} -o other --resume"));
        assert!(out.status.code() == Some(78) && stderr(&out).contains("adapters"), "{}", stderr(&out));
        b.ok(&format!("{run} -o other --resume"));
        b.same_adapter("one", "other");
        if data == "pairs" {
            // At the first step the policy is the reference.
            let first = b.events("one", "step")[0]["loss"].as_f64().unwrap();
            assert!((first - 2f64.ln()).abs() < 1e-6, "{first}");
        }
        std::fs::remove_dir_all(b.path("one")).unwrap();
        std::fs::remove_dir_all(b.path("other")).unwrap();
    }
}

/// Rows of `name` in a file of safetensors, as f32, [rows][cols].
fn matrix(b: &Bench, path: &str, name: &str) -> Vec<Vec<f32>> {
    let bytes = b.read(path);
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = file.tensor(name).unwrap();
    let values: Vec<f32> = match tensor.dtype() {
        safetensors::Dtype::F32 => {
            tensor.data().as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect()
        }
        _ => tensor.data().as_chunks().0.iter().map(|x| half::bf16::from_le_bytes(*x).to_f32()).collect(),
    };
    values.chunks(tensor.shape()[1]).map(<[f32]>::to_vec).collect()
}

#[test]
fn rows_of_tokens_are_written_as_peft_reads_them() {
    let b = Bench::new();
    untied(&b);
    let ids = [2, 364, 0];
    let embedding = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta";
    let head = "base_model.model.lm_head.token_adapter.trainable_tokens_delta";
    for (model, written) in [("demo", json!(ids)), ("untied", json!({"embed_tokens": ids, "lm_head": ids}))] {
        let evaluated = "--eval-data eval.jsonl --eval-steps 4";
        b.ok(&format!("{model} --data rows.jsonl {evaluated} {RUN} {TOKENS} --overwrite -o run"));
        assert_eq!(config(&b, "run")["trainable_token_indices"], written, "{model}");
        let last = b.events("run", "eval").pop().unwrap();
        let said = b.ok("eval --adapter run --data eval.jsonl --gpus cpu --json");
        let said: Value = serde_json::from_str(&said).unwrap();
        assert_eq!(said["loss"], last["eval_loss"], "{model}");
        // Another run begins with it.
        b.ok(&format!("{model} --data rows.jsonl {RUN} --init-adapter run --overwrite -o next"));
        assert_eq!(config(&b, "next"), config(&b, "run"));
        // As many rows of other tokens are not those.
        let other = TOKENS.replace("git", "log");
        b.refuses(
            &format!("{model} --data rows.jsonl {RUN} {other} --init-adapter run"),
            78,
            "rows of other tokens",
        );
        b.ok(&format!("export run --model {model} --to merged --save-dtype f32 --overwrite -o merged"));
        let folder = if model == "demo" { crate::cli_fixture::demo().join("model") } else { b.path(model) };
        std::fs::copy(folder.join("model.safetensors"), b.path("base.safetensors")).unwrap();
        let trained = [("model.embed_tokens.weight", embedding), ("lm_head.weight", head)];
        for (name, of_adapter) in &trained[..if model == "demo" { 1 } else { 2 }] {
            let own = matrix(&b, "run/adapter_model.safetensors", of_adapter);
            let [base, merged] =
                ["base.safetensors", "merged/model.safetensors"].map(|file| matrix(&b, file, name));
            for (row, (base, merged)) in base.iter().zip(&merged).enumerate() {
                let at = ids.iter().position(|id| *id == row);
                assert_eq!(merged, at.map_or(base, |at| &own[at]), "{model}: row {row} of {name}");
                // No token follows <|im_end|>, and the rows have no <|endoftext|>: only a head moves their rows.
                let moves = at.is_some() && (row == 364 || model == "demo" || *name == "lm_head.weight");
                assert_eq!(base != merged, moves, "{model}: row {row} of {name}");
            }
        }
    }
}

#[test]
fn exports_hold_rows_of_tokens_or_are_refused() {
    let b = Bench::new();
    let run = "--data rows.jsonl --max-steps 40 --learning-rate 5e-3 --rank 8 -q";
    b.ok(&format!("demo {run} {TOKENS} -o run"));
    let prompt = "--prompt 'Show the branch ' --max-new-tokens 16";
    let tuned = b.ok(&format!("generate --adapter run {prompt}"));
    assert!(tuned.starts_with("git branch"), "{tuned:?}");
    b.ok("export run --to merged -o merged");
    assert_eq!(b.ok(&format!("generate ./merged {prompt}")), tuned);
    b.ok("export run --to merged-gguf --outtype f16 -o m.gguf");
    assert_eq!(b.ok(&format!("generate ./m.gguf {prompt}")), tuned);
    b.ok("export run --to peft -o peft");
    b.same_adapter("run", "peft");
    b.refuses("export run --to gguf-lora", 78, "for llama.cpp in a merged model only: use --to merged-gguf");
    b.refuses("export run --to mlx", 78, "mlx-lm does not hold trained rows of tokens");
    // A table of a GGUF file; rows that are not trained keep their blocks.
    b.ok("demo --data rows.jsonl --max-steps 1 --learning-rate 0 -q -o plain");
    b.ok("export plain --to merged-gguf --outtype q8_0 -o base.gguf");
    b.ok(&format!("./base.gguf {run} {TOKENS} -o run8"));
    b.refuses("export run8 --to ollama", 78, "for llama.cpp in a merged model only");
    b.ok("export run8 --to merged-gguf -o m8.gguf");
    let tuned = b.ok(&format!("generate --adapter run8 {prompt}"));
    assert!(tuned.starts_with("git branch"), "{tuned:?}");
    assert_eq!(b.ok(&format!("generate ./m8.gguf {prompt}")), tuned);
    use finetune::format::gguf::Gguf;
    let [base, merged] = ["base.gguf", "m8.gguf"].map(|file| Gguf::open(&b.path(file)).unwrap());
    let rows = |file: &Gguf| {
        let info = &file.tensors()["token_embd.weight"];
        let bytes = file.bytes(info);
        bytes.chunks(bytes.len() / info.shape[0]).map(<[u8]>::to_vec).collect::<Vec<_>>()
    };
    let changed = rows(&base).into_iter().zip(rows(&merged)).enumerate().filter(|(_, (a, b))| a != b);
    assert_eq!(changed.map(|(row, _)| row).collect::<Vec<_>>(), [0, 2, 364]);
}

#[test]
fn adapters_on_embedding_and_head_are_exported_or_refused() {
    let b = Bench::new();
    untied(&b);
    for model in ["demo", "untied"] {
        b.ok(&format!(
            "{model} --data rows.jsonl {} {ENDS} -o {model}-run",
            RUN.replace("--max-steps 4", "--max-steps 30")
        ));
        let written = config(&b, &format!("{model}-run"));
        assert_eq!(written["target_modules"], json!(["q_proj", "embed_tokens", "lm_head"]));
        assert_eq!(written["rank_pattern"], json!({"embed_tokens": 2}));
        assert_eq!(written["alpha_pattern"], json!({"lm_head": 3}));
        b.ok(&format!("{model} --data rows.jsonl {RUN} --init-adapter {model}-run -o {model}-next"));
        assert_eq!(config(&b, &format!("{model}-next")), written);
        b.ok(&format!("export {model}-run --model {model} --to peft -o {model}-peft"));
        b.same_adapter(&format!("{model}-run"), &format!("{model}-peft"));
        let part =
            "an adapter on embed_tokens or lm_head, which is written for llama.cpp in a merged model only";
        b.refuses(&format!("export {model}-run --model {model} --to gguf-lora"), 78, part);
        b.refuses(&format!("export {model}-run --model {model} --to mlx"), 78, "mlx-lm does not hold");
    }
    b.refuses("export demo-run --to merged", 78, "embedding and head of this model are one matrix");
    let loss = |model: &str| -> f64 {
        let said = b.ok(&format!("eval {model} --data eval.jsonl --dtype f32 --gpus cpu --json"));
        serde_json::from_str::<Value>(&said).unwrap()["loss"].as_f64().unwrap()
    };
    let tuned = loss("untied --adapter untied-run");
    b.ok("export untied-run --model untied --to merged --save-dtype f32 -o merged");
    b.ok("export untied-run --model untied --to merged-gguf --outtype f32 -o m.gguf");
    for merged in ["./merged", "./m.gguf"] {
        let off = (loss(merged) - tuned).abs();
        assert!(off < 1e-5 * tuned, "{merged}: {off} of {tuned}");
    }
    assert!((loss("untied") - tuned).abs() > 0.1, "the adapter matters");
    for (args, part) in [
        ("--target-modules q_proj,lm_head --task classify --num-classes 2", "has no lm_head"),
        (
            "--target-modules q_proj,lm_head --train-tokens git",
            "a matrix has trained rows or an adapter, not both",
        ),
        ("--target-modules q_proj,lm_head --target-layers 1", "lm_head is in no layer"),
    ] {
        b.refuses(&format!("demo --data rows.jsonl {RUN} {args}"), 78, part);
    }
}

#[test]
fn tokens_without_a_row_end_with_one_line() {
    let b = Bench::new();
    for (tokens, code, part) in [
        ("'<|new|>'", 78, "--train-tokens: the tokenizer has no token \"<|new|>\""),
        ("git,git", 78, "--train-tokens: the row of token 364 is trained twice"),
    ] {
        b.refuses(&format!("demo --data rows.jsonl {RUN} --train-tokens {tokens}"), code, part);
    }
}
