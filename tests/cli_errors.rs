//! Bad input gives one line that says what, where and what to do, an exit code, and no partly written file. Each case
//! is a command on the real binary.

mod cli_fixture;
#[path = "cli_errors/given.rs"]
mod given;
#[path = "cli_errors/gpus.rs"]
mod gpus;
#[path = "tested_adapters/mod.rs"]
mod tested_adapters;
#[path = "cli_errors/variables.rs"]
mod variables;

use cli_fixture::{Bench, classes, demo, rows, stderr};
use serde_json::json;

/// Exit code and parts of the last line of `finetune {command}`, separated by ` .. `.
#[track_caller]
fn check(bench: &Bench, command: &str, code: i32, parts: &str) {
    let out = bench.run(command);
    let text = stderr(&out);
    let last = text.lines().last().unwrap_or_default();
    let said = format!("finetune {command}\nexit {:?}\n{text}", out.status.code());
    assert_eq!(out.status.code(), Some(code), "{said}");
    assert!(last.starts_with("error: "), "{said}");
    assert_eq!(text.matches("error: ").count(), 1, "one line: {said}");
    for word in ["panicked", "RUST_BACKTRACE", "internal error"] {
        assert!(!text.contains(word), "{said}");
    }
    for part in parts.split(" .. ") {
        assert!(last.contains(part), "wanted {part:?} in\n{said}");
    }
    let left = |dir: &str| bench.path(dir).exists();
    assert!(!left("out") && !left("runs"), "something half-written was left: {said}");
}

#[test]
fn invalid_command_lines_are_refused() {
    let b = Bench::new();
    for (command, code, parts) in [
        ("--rnak 8", 2, "unknown option --rnak .. --rank .. --help"),
        ("--zzzzzzzzz", 2, "unknown option --zzzzzzzzz .. --help"),
        ("--rank", 2, "--rank .. needs a value"),
        ("--rank abc", 2, "--rank .. \"abc\" is not a whole number"),
        ("--rank 8 --rank 9", 2, "--rank .. twice"),
        ("--rank 8 --lora_r 9", 78, "rank is given twice"),
        ("demo other", 2, "unexpected argument \"other\""),
        ("genrate", 2, "\"genrate\" is neither a verb nor a path .. finetune generate"),
        ("qqqqqqq", 2, "\"qqqqqqq\" is neither a verb nor a path .. verbs: train"),
        ("dashboard", 2, "add --dashboard to a training command"),
        ("./no/such/model --data rows.jsonl", 1, "./no/such/model .. no such file"),
        ("no.gguf --data rows.jsonl", 1, "no.gguf .. no such file"),
        ("--role worker", 78, "--role worker .. --coordinator HOST:PORT"),
        ("--coordinator host:9000", 78, "only for --role worker"),
        ("--dtype f16", 78, "--dtype .. bf16"),
        ("--rank 0", 78, "--rank .. at least 1"),
        ("--alpha inf", 78, "--alpha .. finite"),
        ("--alpha nan", 78, "--alpha .. finite"),
        ("--dropout 1", 78, "--dropout"),
        ("--learning-rate -1", 78, "--learning-rate .. at least 0"),
        ("--batch-size 0", 78, "--batch-size .. at least 1"),
        ("--batch-size -1", 78, "--batch-size .. at least 1"),
        ("--max-seq-len 0", 78, "--max-seq-len .. at least 2"),
        ("--epochs 0", 78, "--epochs .. at least 1"),
        ("--max-steps 0", 78, "--max-steps .. at least 1"),
        ("--threads 0", 78, "--threads .. at least 1"),
        ("--micro-batch-tokens 0", 78, "--micro-batch-tokens .. at least 1"),
        ("--learning-rate nan", 78, "--learning-rate .. at least 0"),
        ("--max-seq-len 100000", 78, "--max-seq-len .. 512 positions"),
        ("--lr-scheduler polynomial", 78, "--lr-scheduler .. cosine"),
        (
            "--target-modules q_proj,w_pack",
            78,
            "--target-modules .. w_pack .. q_proj, k_proj, v_proj, o_proj",
        ),
        ("--target-modules lm_heads", 78, "lm_heads .. q_proj"),
        ("--neftune-noise-alpha 5", 78, "--neftune-noise-alpha .. not supported"),
        ("--load-in-8bit true", 78, "--load-in-8bit .. quantize: q8_0"),
        ("--quantize int3", 78, "--quantize .. int3 .. nf4, nf4-double, q8_0"),
        ("--class-weights 1,2", 78, "--class-weights .. --task classify"),
        ("--resume --overwrite -o out", 78, "--resume or --overwrite"),
        ("--resume=nowhere", 1, "nowhere .. nothing to resume"),
        ("inspect", 2, "PATH"),
        ("export", 2, "OUT"),
        ("generate --temperature -1 --prompt x", 78, "--temperature"),
        ("generate --system x --prompt x", 78, "--system .. --chat"),
        ("generate", 2, "--prompt"),
        (
            &format!("generate --prompt '{}'", "word ".repeat(2000)),
            1,
            "prompt has .. tokens .. 512 .. shorten it",
        ),
        ("predict --text x", 78, "is not a classifier"),
    ] {
        check(&b, command, code, parts);
    }
}

#[test]
fn common_wrong_commands_get_advice() {
    let b = Bench::new();
    for (command, code, parts) in [
        ("worker", 2, "--role worker --coordinator HOST:9000"),
        ("coordinator", 2, "--role coordinator"),
        ("dpo", 2, "--task dpo"),
        ("sft", 2, "finetune MODEL --data ROWS"),
        ("nowhere.yaml", 1, "nowhere.yaml .. no such file .. a YAML file of options"),
        ("--resume runs/demo-9", 1, "runs/demo-9: nothing to resume there"),
        ("--task kto", 78, "--task: KTO is not supported: its KL estimate"),
        ("generate --raw --system x --prompt x", 78, "--system .. --chat"),
        ("generate --chat --raw --prompt x", 78, "--raw .. not both"),
        ("--fp16", 78, "--fp16 .. no f16 .. --dtype auto"),
        ("rows.jsonl", 2, "rows.jsonl holds rows .. finetune MODEL --data rows.jsonl"),
        ("demo --data nowhere.jsonl", 1, "nowhere.jsonl .. check the path from /"),
        ("generate --adapter nowhere --prompt x", 1, "nowhere .. check the path from /"),
    ] {
        check(&b, command, code, parts);
    }
}

#[test]
fn misused_foreign_option_names_are_refused() {
    let b = Bench::new();
    for (command, code, parts) in [
        ("--lora-alpha", 2, "--lora-alpha .. needs a value"),
        ("--lr --rank 8", 2, "--lr .. needs a value"),
        ("--bf16 elsewhere", 2, "--bf16 .. \"elsewhere\" is neither true nor false"),
        ("--load-in-4bit --quantize nf4", 78, "--load-in-4bit .. leave one out"),
        ("--bnb-4bit-quant-type fp4", 78, "--bnb-4bit-quant-type .. only nf4"),
        ("--use-dora", 78, "--use-dora .. not supported"),
    ] {
        check(&b, command, code, parts);
    }
}

#[test]
fn invalid_configuration_files_are_refused() {
    let b = Bench::new();
    b.file("c.yaml", "rank: 8\n");
    check(&b, "c.yaml --config c.yaml", 78, "config is given twice");
    check(&b, "c.yaml demo", 2, "unexpected argument \"demo\"");
    for (text, code, parts) in [
        ("rank: 8\nrnak: 9\n", 78, "c.yaml:2: unknown key rnak .. did you mean rank"),
        ("rank: 8\n\nalpha: [1, 2]\n", 78, "c.yaml:3: alpha: expected one value"),
        ("lora:\n  rank: 0\n", 78, "c.yaml:2: rank .. at least 1"),
        ("lora:\n  rank: many\n", 78, "c.yaml:2: rank .. not a whole number"),
        ("lora:\n  epochs: 2\n", 78, "c.yaml:2: epochs belongs under optim"),
        ("rank: [\n", 78, "c.yaml: .. not YAML"),
        ("packing: maybe\n", 78, "c.yaml:1: packing .. neither true nor false"),
        ("neftune_noise_alpha: 5\n", 78, "c.yaml:1: neftune_noise_alpha .. not supported"),
        ("optim: sgd\n", 78, "c.yaml:1: optim .. AdamW"),
        ("gradient_accumulation_steps: 0\n", 78, "c.yaml:1: gradient_accumulation_steps"),
        (
            "push_to_hub: true\n",
            78,
            "c.yaml:1: push_to_hub .. `finetune push OUT owner/name` uploads .. leave it out",
        ),
        ("data: rows.jsonl\nkeep_best: true\n", 78, "c.yaml:2: keep_best .. --eval-steps epoch"),
    ] {
        b.file("c.yaml", text);
        check(&b, "--config c.yaml", code, parts);
    }
    for (command, parts) in [
        ("--keep-best --eval-steps 2", "--keep-best: needs rows to evaluate on .. --eval-split"),
        (
            "--early-stopping 2 --eval-steps epoch",
            "--early-stopping: needs rows to evaluate on .. --eval-split",
        ),
        ("--sample-rows 3", "--sample-rows: needs rows to evaluate on .. --eval-split"),
    ] {
        check(&b, &format!("demo --data rows.jsonl {command} -o out"), 78, parts);
        check(&b, &format!("plan demo --data rows.jsonl {command} -o out"), 78, parts);
    }
    check(&b, "--config missing.yaml", 1, "missing.yaml .. no such file .. YAML");
    b.file("c.yaml", "rank: 0\n");
    let out = b.command("demo --data rows.jsonl -o out").env("FINETUNE_CONFIG", "c.yaml").output().unwrap();
    assert_eq!(out.status.code(), Some(78), "{}", stderr(&out));
    assert!(stderr(&out).contains("c.yaml:1: rank"), "{}", stderr(&out));
}

#[test]
fn unknown_instruction_set_is_refused() {
    let b = Bench::new();
    let out = b.command("demo --data rows.jsonl -o out").env("FINETUNE_CPU", "avx3").output().unwrap();
    assert_eq!(out.status.code(), Some(78), "{}", stderr(&out));
    assert!(
        stderr(&out).contains("FINETUNE_CPU=avx3: no instructions of that name: one of"),
        "{}",
        stderr(&out)
    );
}

#[test]
fn a_wait_for_cards_that_is_no_number_is_refused() {
    let b = Bench::new();
    for wait in ["0", "abc", "0.5"] {
        let out =
            b.command("demo --data rows.jsonl -o out").env("FINETUNE_CUDA_WAIT", wait).output().unwrap();
        assert_eq!(out.status.code(), Some(78), "{}", stderr(&out));
        let line = format!("FINETUNE_CUDA_WAIT={wait}: not a whole number of seconds from 1 on");
        assert!(stderr(&out).contains(&line), "{}", stderr(&out));
    }
}

#[test]
fn unusable_rows_are_refused() {
    let b = Bench::new();
    let good = rows(2);
    b.file("broken.jsonl", &format!("{good}{{\"prompt\": \n"));
    b.file("fields.jsonl", &format!("{good}{{\"question\": \"a\", \"answer\": \"b\"}}\n"));
    b.file("type.jsonl", "{\"prompt\": 3, \"completion\": \"b\"}\n");
    b.file("empty.jsonl", "");
    b.file("rows.txt", "hello\n");
    b.file("text.jsonl", "{\"text\": \"a b c\"}\n");
    b.file("long.jsonl", &format!("{}\n", json!({ "prompt": "a b c ".repeat(200), "completion": "x" })));
    b.file("labels.jsonl", "{\"text\": \"a\", \"label\": 0}\n{\"text\": \"b\", \"label\": 3}\n");
    b.file("classes.jsonl", &classes(8));
    b.file("one.jsonl", &"{\"text\": \"a\", \"label\": 7}\n".repeat(4));
    b.file("chat.jsonl", "{\"messages\": [{\"role\": \"assistant\"}]}\n");
    std::fs::create_dir(b.path("empty")).unwrap();
    for (command, code, parts) in [
        ("--data missing.jsonl", 1, "missing.jsonl"),
        ("--data rows.jsonl --eval-data missing.jsonl", 1, "missing.jsonl"),
        ("--data empty", 1, "empty .. no train file"),
        ("--data rows.txt", 1, "rows.txt .. .jsonl"),
        ("--data broken.jsonl", 1, "broken.jsonl:3: .. JSON"),
        ("--data fields.jsonl", 1, "fields.jsonl:3: .. question, answer .. --data-fields"),
        ("--data type.jsonl", 1, "type.jsonl:1: .. prompt .. must be a string"),
        ("--data chat.jsonl", 1, "chat.jsonl:1"),
        ("--data empty.jsonl", 1, "no rows .. empty.jsonl"),
        ("--data -", 1, "no rows"),
        ("--data long.jsonl --max-seq-len 8", 1, "nothing is supervised .. long.jsonl"),
        ("--data rows.jsonl --max-seq-len 2 --max-dropped 5%", 1, "nothing is supervised"),
        ("--task classify --data labels.jsonl --num-classes 2", 78, "labels.jsonl:2: label 3"),
        (
            "--task classify --data classes.jsonl --class-weights 1,2,3",
            78,
            "--class-weights .. 3 weights for 2",
        ),
        ("--task classify --data one.jsonl", 78, "at least two classes .. labelled 7 .. --num-classes"),
        ("--task classify --data rows.jsonl", 1, "rows.jsonl:1: .. text"),
        ("--data rows.jsonl --eval-split 24", 78, "--eval-split: 24 of 24 rows .. none to train on"),
        ("--data rows.jsonl --data-fields a", 2, "FIELD=COLUMN"),
        (
            "--data rows.jsonl --eval-data text.jsonl --sample-rows 3",
            78,
            "--sample-rows: no row .. has a prompt .. --max-seq-len",
        ),
        (
            "--task classify --data classes.jsonl --sample-rows 3",
            78,
            "--sample-rows .. a model with a head writes no answers",
        ),
    ] {
        check(&b, &format!("demo {command} -o out"), code, parts);
    }
    let model = demo().join("model");
    check(&b, &format!("{} -o out", model.display()), 2, "no rows to train .. --data");
    b.ok("demo --task classify --data classes.jsonl --max-steps 1 -q -o classifier");
    b.ok("merge classifier -o merged");
    let sft = "./merged --data rows.jsonl -o out";
    check(&b, sft, 78, "./merged is a classifier .. --task classify");
}

/// Copies of the demonstration's model, each damaged in one place.
fn damaged_models(b: &Bench) {
    let remove = |model: &str, file: &str| std::fs::remove_file(b.model(model).join(file)).unwrap();
    remove("no_tokenizer", "tokenizer.json");
    remove("spm", "tokenizer.json");
    b.bytes("spm/tokenizer.model", b"\x0a");
    remove("bin", "model.safetensors");
    b.bytes("bin/pytorch_model.bin", b"PK");
    remove("no_weights", "model.safetensors");
    b.model("bad_config");
    b.file("bad_config/config.json", "{");
    b.model_with("mixtral", "config.json", |c| {
        c["architectures"] = json!(["MixtralForCausalLM"]);
        c["model_type"] = json!("mixtral");
    });
    b.model_with("gptq", "config.json", |c| {
        c["quantization_config"] = json!({ "quant_method": "gptq", "bits": 4 })
    });
    b.model_with("rope", "config.json", |c| {
        c["rope_scaling"] = json!({ "rope_type": "spiral", "factor": 2.0 });
        c["rope_parameters"] = json!({ "rope_type": "spiral", "rope_theta": 1e4, "factor": 2.0 });
    });
    b.model_with("dynamic", "config.json", |c| {
        c["rope_scaling"] = json!({ "rope_type": "dynamic", "factor": 2.0 })
    });
    b.model_with("small_vocab", "config.json", |c| c["vocab_size"] = json!(100));
    b.model_weights("nan", |h, data| {
        let at = h["model.norm.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
        data[at..at + 2].copy_from_slice(&[0xc0, 0x7f]);
    });
    b.model_weights("short", |_, data| data.truncate(data.len() - 10));
    b.model_weights("overlap", |h, _| {
        let other = h["model.norm.weight"]["data_offsets"].clone();
        h["model.layers.0.input_layernorm.weight"]["data_offsets"] = other;
    });
    b.model_weights("outside", |h, _| h["model.norm.weight"]["data_offsets"] = json!([0, 1u64 << 60]));
    b.model_weights("missing", |h, _| {
        let norm = h.as_object_mut().unwrap().remove("model.norm.weight").unwrap();
        h["model.other.weight"] = norm;
    });
    b.bytes("huge/x", b"");
    let magic = |n: &[u8]| [b"GGUF\x03\0\0\0".as_slice(), n].concat();
    b.bytes("cut.gguf", &magic(&[]));
    b.bytes("absurd.gguf", &magic(&[0xff; 16]));
    b.bytes("not.gguf", b"hello, this is no model at all");
}

#[test]
fn unusable_models_are_refused() {
    let b = Bench::new();
    damaged_models(&b);
    for (model, code, parts) in [
        ("no_tokenizer", 78, "no_tokenizer .. tokenizer.json"),
        ("spm", 78, "tokenizer.model"),
        ("bin", 78, "pytorch_model.bin .. safe_serialization"),
        ("no_weights", 78, "no_weights .. safetensors"),
        ("bad_config", 1, "config.json"),
        ("mixtral", 78, "mixtral .. Mixtral .. not supported"),
        ("gptq", 78, "gptq"),
        ("rope", 78, "spiral"),
        ("dynamic", 78, "dynamic"),
        ("small_vocab", 78, "small_vocab .. tokenizer .. 100 rows"),
        ("nan", 1, "nan/model.safetensors: tensor model.norm.weight .. not finite"),
        ("short", 1, "short .. model.safetensors"),
        ("overlap", 1, "overlap .. model.safetensors"),
        ("outside", 1, "model.safetensors"),
        ("missing", 1, "missing/model.safetensors: .. no tensor model.norm.weight"),
        ("huge", 78, "huge"),
        ("./cut.gguf", 1, "cut.gguf"),
        ("./absurd.gguf", 1, "absurd.gguf"),
        ("./not.gguf", 1, "not.gguf"),
    ] {
        let path = if model.starts_with('.') { model.into() } else { format!("./{model}") };
        check(&b, &format!("{path} --data rows.jsonl -o out"), code, parts);
    }
}

#[test]
fn unreachable_hub_gives_one_error() {
    let b = Bench::new();
    let out = b
        .command("owner/name --data rows.jsonl -o out")
        .env("HF_ENDPOINT", "http://127.0.0.1:9")
        .output()
        .unwrap();
    let text = stderr(&out);
    assert_eq!(out.status.code(), Some(1), "{text}");
    let last = text.lines().last().unwrap_or_default();
    assert!(last.starts_with("error: owner/name: "), "{text}");
    assert_eq!(text.matches("error: ").count(), 1, "{text}");
    assert!(!b.path("out").exists());
}

#[test]
fn non_finite_values_halt_with_step_and_rows() {
    let b = Bench::new();
    b.model_weights("inf", |h, data| {
        let at = h["model.norm.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
        let end = h["model.norm.weight"]["data_offsets"][1].as_u64().unwrap() as usize;
        // bfloat16 1e38: the value itself is finite, but its products overflow.
        data[at..end].chunks_exact_mut(2).for_each(|c| c.copy_from_slice(&[0x96, 0x7e]));
    });
    check(&b, "./inf --data rows.jsonl -o out --batch-size 4", 3, "step 1 .. microbatch 0 .. rows");
    check(&b, "generate ./inf --prompt a", 3, "logit .. became");
}

#[test]
fn output_folder_of_another_run_is_refused() {
    let b = Bench::new();
    b.ok("demo --data rows.jsonl -o one --max-steps 4 --save-steps 2 -q");
    let adapter = b.read("one/adapter_model.safetensors");
    let same = "demo --data rows.jsonl --max-steps 4 --save-steps 2";
    b.file("other.jsonl", &rows(25));
    b.model_weights("other", |_, data| data[0] ^= 1);
    std::fs::create_dir(b.path("full")).unwrap();
    b.file("full/thesis.tex", "x");
    for (command, code, parts) in [
        (format!("{same} -o one"), 78, "one: belongs to another run .. --resume .. --overwrite"),
        (format!("{same} -o full"), 78, "full: is not empty and holds no run"),
        (format!("{same} -o full --overwrite"), 78, "full: is not empty and holds no run"),
        (format!("{same} -o one --resume --rank 8"), 78, "one .. cannot resume .. rank was 16, is 8"),
        (format!("{same} -o one --resume --learning-rate 1e-3"), 78, "learning_rate was 0.0002, is 0.001"),
        (format!("{same} -o one --resume --seed 7"), 78, "seed was 42, is 7"),
        ("demo --data other.jsonl --max-steps 4 -o one --resume".into(), 78, "data was"),
        ("./other --data rows.jsonl --max-steps 4 -o one --resume".into(), 78, "model was"),
        (format!("{same} -o rows.jsonl"), 1, "rows.jsonl"),
        (format!("{same} -o rows.jsonl/deeper"), 1, "rows.jsonl"),
        ("generate demo --adapter rows.jsonl --prompt x".into(), 1, "rows.jsonl"),
        ("generate demo --adapter full --prompt x".into(), 78, "full .. adapter_config.json"),
        ("generate demo --adapter missing --prompt x".into(), 1, "missing"),
        ("export one --to gguf".into(), 78, "--to"),
        (
            "export one --to merged-gguf --outtype IQ4_NL".into(),
            78,
            "--outtype: iq4_nl is not written here .. llama-quantize makes it of a file with --outtype f16",
        ),
        ("export one --to merged-gguf --outtype int4".into(), 78, "--outtype .. expected one of base, f32"),
        ("export missing".into(), 1, "missing"),
        ("export one -o full".into(), 78, "full: is not empty"),
        ("inspect missing.jsonl".into(), 1, "missing.jsonl .. no such file .. give a model"),
    ] {
        check(&b, &command, code, parts);
    }
    // Refused after the run has claimed its own folder: nothing in it changes.
    let log = "--log-json no/such/folder/log.jsonl";
    check(&b, &format!("{same} -o one --overwrite {log}"), 1, "no/such/folder");
    assert_eq!(b.read("one/adapter_model.safetensors"), adapter, "a refused run touches nothing");
    assert!(b.path("one/run.yaml").exists() && b.path("one/checkpoint-2").exists());
    assert!(!b.path("one/.previous").exists());
    b.model_with("wide", "config.json", |c| c["num_hidden_layers"] = json!(1));
    check(&b, "generate ./wide --adapter one --prompt x", 78, "one .. no place in this model");
}

#[test]
fn prompt_without_room_for_an_answer_is_refused() {
    let b = Bench::new();
    let prompt = "ab,".repeat(600);
    check(
        &b,
        &format!("--sample-prompt {prompt} -o out"),
        78,
        "--sample-prompt .. 512 positions .. shorten it",
    );
}
