//! Trained rows of tokens in whole runs, on a model whose head is its embedding and on one with a head of its own.

use crate::cli_fixture::{Bench, classes, pairs, stderr};
use serde_json::{Value, json};

const TOKENS: &str = "--train-tokens '<|im_end|>,git,<|endoftext|>'";
/// Tokens that the tokenizer gets, and some that it has.
const NEW: &str =
    "--add-tokens '<call>,</call>' --add-special-tokens '<|done|>' --train-tokens '<|im_end|>,git'";
/// Adapters on embedding and head.
const ENDS: &str =
    "--target-modules q_proj,lm_head,embed_tokens --rank-pattern embed_tokens=2 --alpha-pattern lm_head=3";
const RUN: &str = "--max-steps 4 --batch-size 4 --rank 3 --learning-rate 5e-3 --save-steps 2 -q";

/// Rows with the tokens of [`NEW`].
fn calls(n: usize) -> String {
    let row = |i: usize| {
        let say = ["git branch", "git log --oneline"][i % 2];
        let answer = format!("<call>{say}</call><|done|>");
        json!({ "prompt": format!("Show the {} {}", ["branch", "log"][i % 2], i / 2), "completion": answer })
    };
    (0..n).map(|i| row(i).to_string() + "\n").collect()
}

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
    b.file("calls.jsonl", &calls(24));
    for (model, of, more, data) in [
        ("demo", NEW, "--dropout 0.2", "calls"),
        ("untied", NEW, "--quantize q8_0 --dtype f32", "calls"),
        ("untied", NEW, "--task classify --num-classes 2", "classes"),
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
            if model == "demo" && of != ENDS && how == "--gpus cpu+cpu" {
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
    let [base, merged] = ["base.gguf", "m8.gguf"].map(|file| stored_rows(&b.path(file), "token_embd.weight"));
    let changed = base.into_iter().zip(merged).enumerate().filter(|(_, (a, b))| a != b);
    assert_eq!(changed.map(|(row, _)| row).collect::<Vec<_>>(), [0, 2, 364]);
}

/// The rows of the matrix in a GGUF file, as bytes.
fn stored_rows(path: &std::path::Path, name: &str) -> Vec<Vec<u8>> {
    let file = finetune::format::gguf::Gguf::open(path).unwrap();
    let info = &file.tensors()[name];
    let bytes = file.bytes(info);
    bytes.chunks(bytes.len() / info.shape[0]).map(<[u8]>::to_vec).collect()
}

#[test]
fn added_tokens_are_answered_and_exported() {
    let b = Bench::new();
    untied(&b);
    b.file("calls.jsonl", &calls(24));
    b.file("held.jsonl", &calls(6));
    b.ok("demo --data rows.jsonl --max-steps 1 --learning-rate 0 -q -o plain");
    b.ok("export plain --to merged-gguf --outtype q8_0 -o base.gguf");
    let prompt = "--prompt 'Show the branch 3' --max-new-tokens 16";
    let run = format!("--data calls.jsonl --max-steps 40 --learning-rate 1e-2 --rank 8 -q {NEW}");
    for model in ["demo", "untied", "./base.gguf"] {
        b.ok(&format!("{model} {run} --eval-data held.jsonl --eval-steps 40 --overwrite -o run"));
        // The vocabulary has 2,048 tokens.
        let ids = json!([2, 364, 2048, 2049, 2050]);
        let both = json!({"embed_tokens": ids, "lm_head": ids});
        let written = if model == "untied" { both } else { ids };
        assert_eq!(config(&b, "run")["trainable_token_indices"], written, "{model}");
        let tokenizer: Value = serde_json::from_slice(&b.read("run/tokenizer.json")).unwrap();
        let added = tokenizer["added_tokens"].as_array().unwrap();
        let new: Vec<_> = added.iter().filter(|t| t["id"].as_u64() >= Some(2048)).collect();
        let texts: Vec<_> = new.iter().map(|t| (t["content"].as_str().unwrap(), &t["special"])).collect();
        assert_eq!(
            texts,
            [("<call>", &json!(false)), ("</call>", &json!(false)), ("<|done|>", &json!(true))]
        );
        // Special tokens are not shown.
        let tuned = b.ok(&format!("generate --adapter run {prompt}"));
        assert!(tuned.trim_end().starts_with("<call>git branch</call>"), "{model}: {tuned:?}");
        assert!(!tuned.contains("done"), "{model}: {tuned:?}");
        let last = b.events("run", "eval").pop().unwrap();
        let said = b.ok("eval --adapter run --data held.jsonl --gpus cpu --json");
        let said: Value = serde_json::from_str(&said).unwrap();
        assert_eq!(said["loss"], last["eval_loss"], "{model}");
        // Another run begins with it and has its tokens, also where it is resumed.
        let again = RUN.replace("--rank 3", "--rank 8");
        b.ok(&format!("{model} --data calls.jsonl {again} --init-adapter run --overwrite -o next"));
        assert_eq!(config(&b, "next"), config(&b, "run"), "{model}");
        assert_eq!(b.read("next/tokenizer.json"), b.read("run/tokenizer.json"));
        std::fs::remove_dir_all(b.path("next/checkpoint-4")).unwrap();
        let whole = b.read("next/adapter_model.safetensors");
        std::fs::remove_file(b.path("next/adapter_model.safetensors")).unwrap();
        b.ok("--resume=next -q");
        assert!(b.read("next/adapter_model.safetensors") == whole, "{model}");
        b.ok("export run --to merged --overwrite -o merged");
        let merged: Value = serde_json::from_slice(&b.read("merged/config.json")).unwrap();
        assert_eq!(merged["vocab_size"], 2051);
        assert_eq!(b.ok(&format!("generate ./merged {prompt}")), tuned, "{model}");
        b.ok("export run --to merged-gguf --overwrite -o m.gguf");
        assert_eq!(b.ok(&format!("generate ./m.gguf {prompt}")), tuned, "{model}");
        b.ok("export run --to peft --overwrite -o peft");
        b.same_adapter("run", "peft");
        assert_eq!(b.read("run/tokenizer.json"), b.read("peft/tokenizer.json"));
    }
    // Blocks of rows that are not trained stay.
    let [base, merged] = ["base.gguf", "m.gguf"].map(|file| stored_rows(&b.path(file), "token_embd.weight"));
    assert_eq!((base.len(), merged.len()), (2048, 2051));
    let changed = base.into_iter().zip(merged).enumerate().filter(|(_, (a, b))| a != b);
    assert_eq!(changed.map(|(row, _)| row).collect::<Vec<_>>(), [2, 364]);
}

#[test]
fn a_classifier_reads_added_tokens() {
    let b = Bench::new();
    untied(&b);
    b.file("classes.jsonl", &classes(24));
    let of_classes =
        "--task classify --num-classes 2 --add-tokens rce,atus --max-steps 8 --rank 4 -q -o classes";
    b.ok(&format!("untied --data classes.jsonl {of_classes}"));
    b.ok("export classes --model untied --to merged --save-dtype f32 -o merged-classes");
    let read = "--data classes.jsonl --gpus cpu --dtype f32 --json";
    let said = |model: &str| -> f64 {
        let said = b.ok(&format!("eval {model} --task classify {read}"));
        serde_json::from_str::<Value>(&said).unwrap()["loss"].as_f64().unwrap()
    };
    let off = (said("./merged-classes") - said("untied --adapter classes")).abs();
    assert!(off < 1e-5, "{off}");
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
        ("'<|new|>'", 78, "--train-tokens: the tokenizer has no token \"<|new|>\": give --add-tokens"),
        ("git,git", 78, "--train-tokens: the row of token 364 is trained twice"),
    ] {
        b.refuses(&format!("demo --data rows.jsonl {RUN} --train-tokens {tokens}"), code, part);
    }
    let twice = "--add-special-tokens: \"<a>\" is given twice";
    b.refuses(
        &format!("demo --data rows.jsonl {RUN} --add-tokens '<a>' --add-special-tokens '<a>'"),
        78,
        twice,
    );
    let line = format!("demo --data rows.jsonl {RUN} --add-tokens '<a>' --gpus cpu+cpu");
    b.refuses(&line, 78, "--add-tokens on this model");
    // An adapter whose token is another one in the named base.
    b.ok(&format!("demo --data rows.jsonl {RUN} --add-tokens '<a>' -o first"));
    b.ok(&format!("demo --data rows.jsonl {RUN} --add-tokens '<b>' -o other"));
    let part = "token \"<a>\" is 2048, in the base 2048 is \"<b>\"";
    b.ok("export other --to merged -o enlarged");
    for command in [
        "generate ./enlarged --adapter first --prompt x",
        "serve --adapter other --adapter first --bind 127.0.0.1:0",
        "eval demo --adapter other --reference-adapter first --data rows.jsonl",
    ] {
        let out = b.run(command);
        assert!(out.status.code() == Some(78) && stderr(&out).contains(part), "{command}: {}", stderr(&out));
    }
    // Rows of a run are those of its initial adapter.
    let run = format!("demo --data rows.jsonl {RUN} --add-tokens '<a>,<c>'");
    b.refuses(&format!("{run} --init-adapter first"), 78, "--add-tokens: first has rows of other tokens");
    b.ok(&format!("demo --data rows.jsonl {RUN} -o plain"));
    b.refuses(&format!("{run} --init-adapter plain"), 78, "token_adapter.trainable_tokens_delta");
}

/// Tokens in an adapter's tokenizer without trained rows, and rows of a GGUF file without tokens.
#[test]
fn tokens_of_an_adapter_keep_their_ids() {
    let b = Bench::new();
    b.file("calls.jsonl", &calls(24));
    let run = "--data calls.jsonl --max-steps 30 --learning-rate 1e-2 --rank 4 -q";
    b.ok(&format!("demo {run} --add-tokens '<pad>,<call>,</call>' --add-special-tokens '<|done|>' -o run"));
    let prompt = "--prompt 'Show the branch 3' --max-new-tokens 16";
    let tuned = b.ok(&format!("generate --adapter run {prompt}"));
    assert!(tuned.starts_with("<call>git branch</call>"), "{tuned}");
    // Another trainer trains no row of its padding token.
    let mut config = config(&b, "run");
    config["trainable_token_indices"] = json!([2049, 2050, 2051]);
    b.file("run/adapter_config.json", &config.to_string());
    let weights = b.read("run/adapter_model.safetensors");
    let file = safetensors::SafeTensors::deserialize(&weights).unwrap();
    let view = |name: &str| {
        let tensor = file.tensor(name).unwrap();
        let (mut shape, mut data) = (tensor.shape().to_vec(), tensor.data());
        if name.ends_with("trainable_tokens_delta") {
            (shape[0], data) = (3, &data[shape[1] * 4..]);
        }
        safetensors::tensor::TensorView::new(tensor.dtype(), shape, data).unwrap()
    };
    let views: Vec<_> = file.names().into_iter().map(|name| (name.to_string(), view(name))).collect();
    b.bytes("run/adapter_model.safetensors", &safetensors::serialize(views, None).unwrap());
    assert_eq!(b.ok(&format!("generate --adapter run {prompt}")), tuned);
    // The base as a GGUF file whose last rows have no tokens.
    b.ok("demo --data rows.jsonl --max-steps 1 --learning-rate 0 --rank 1 --add-tokens '<p>,<q>,<r>,<s>' -q -o four");
    b.ok("export four --to merged -o base");
    let demo = crate::cli_fixture::demo().join("model");
    std::fs::copy(demo.join("tokenizer.json"), b.path("base/tokenizer.json")).unwrap();
    b.ok("./base --data rows.jsonl --max-steps 1 --learning-rate 0 --rank 1 -q -o nothing");
    b.ok("export nothing --to merged-gguf -o padded.gguf");
    assert_eq!(b.ok(&format!("generate ./padded.gguf --adapter run {prompt}")), tuned);
}
