//! Exports that no runner accepts and outputs that must not be written: refused in one line before anything is written.

use crate::cli_fixture::{Bench, classes, demo, stderr};
use crate::{adapter_without_effect, read_json, written_again};
use finetune::format::gguf::Metadata;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// The rules of vLLM's `peft_helper` and of its ranks, taken from its source, for adapters of every size and a
/// classifier.
#[test]
fn exported_adapter_meets_the_rules_of_vllm() {
    let b = Bench::new();
    b.file("classes.jsonl", &classes(8));
    for (rank, alpha, more, most) in
        [(1, 1.0, "", 1), (8, 6.0, "--rslora", 8), (9, 0.5, "", 16), (48, 32.0, "", 64), (400, 16.0, "", 512)]
    {
        let task =
            "demo --data rows.jsonl --max-steps 1 --target-modules q_proj,down_proj -q --overwrite -o run";
        b.ok(&format!("{task} --rank {rank} --alpha {alpha} {more}"));
        let out = b.run("export run --to peft --overwrite -o out");
        let said = stderr(&out);
        assert!(out.status.success(), "{said}");
        let config = read_json(&b.path("out/adapter_config.json"));
        assert_eq!((config["r"].as_u64(), config["lora_alpha"].as_f64()), (Some(rank), Some(alpha)));
        let targets: BTreeSet<&str> =
            config["target_modules"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        assert_eq!(targets, BTreeSet::from(["down_proj", "q_proj"]));
        assert!(config["modules_to_save"].is_null() && config["use_rslora"] == json!(!more.is_empty()));
        assert_eq!((&config["use_dora"], &config["bias"]), (&json!(false), &json!("none")));
        // vLLM accepts ranks up to 16 by default; larger ones need an option.
        let asked = format!("vLLM needs --max-lora-rank {most} for this rank ({rank})");
        assert_eq!(said.contains(&asked), most > 16, "{said}");
        let card = String::from_utf8(b.read("out/README.md")).unwrap();
        assert!(card.contains(&format!("--max-lora-rank {most}")), "{card}");
    }
    b.ok("demo --task classify --data classes.jsonl --max-steps 1 --rank 2 -q -o labels");
    let said = stderr(&b.run("export labels --to peft -o head"));
    assert!(said.contains("note: vLLM and llama.cpp's converter refuse"), "{said}");
    let config = read_json(&b.path("head/adapter_config.json"));
    // vLLM's helper refuses `modules_to_save`: a classifier names them, and so is not served without its head.
    assert_eq!(config["modules_to_save"], json!(["classifier", "score"]));
}

/// Commands, and parts of the error of each; all are configuration errors.
const REFUSED: [(&str, &str); 25] = [
    ("export one --model demo --to gguf-lra", "did you mean gguf-lora?"),
    ("export one --model demo --to gguf-lora --outtype q4", "--outtype .. base, f32"),
    ("export one --model demo --to gguf-lora --outtype q4_k_m", "--outtype: q4_k_m .. an adapter takes f32"),
    (
        "export one --model demo --to merged-gguf --outtype IQ2_XS",
        "iq2_xs needs an importance matrix .. --imatrix",
    ),
    ("export one --model demo --to merged-gguf --outtype q2_k_s", "q2_k_s needs an importance matrix"),
    (
        "export one --model demo --to merged-gguf --outtype iq4_xs",
        "iq4_xs is not written here: .. --outtype f16",
    ),
    ("export one --model demo --to mlx --outtype q8_0", "--outtype .. GGUF"),
    ("export labels --to mlx", "mlx-lm has no place for its score head: use --to merged"),
    ("export one --model demo --to gguf-lora --save-dtype f32", "--save-dtype .. --outtype"),
    ("export one --model demo --to peft --outtype f16", "--outtype .. GGUF"),
    ("export labels --to gguf-lora", "score head: use --to merged"),
    ("export labels --to merged-gguf", "score head: use --to merged"),
    ("export labels --to ollama", "score head: use --to merged"),
    ("export one --model ./wide --to gguf-lora", "one .. no place in this model"),
    ("export one --model ./odd --to merged-gguf", "odd: .. no name in llama.cpp: use --to merged"),
    ("export one --model ./scaled --to merged-gguf", "scaled: Llama 3's rope scaling by 1, 4 and 256"),
    ("export one --model demo --to merged-gguf --memory-limit 100KB -o small.gguf", "raise --memory-limit"),
    ("export one --model demo --to merged --memory-limit 100KB -o small", "raise --memory-limit"),
    ("export one --model demo --to gguf-lora -o base.gguf", "base.gguf: already exists"),
    ("export one --model ./base.gguf --to gguf-lora --overwrite -o base.gguf", "is the base itself"),
    ("export one --model demo --to gguf-lora --overwrite -o notes.txt", "notes.txt: is no GGUF"),
    ("export one --model demo --to gguf-lora --overwrite -o folder", "folder: is a folder"),
    ("export one --model demo --to gguf-lora --overwrite -o foreign.gguf", "a model that no export wrote"),
    ("export one --model demo --to merged --overwrite -o foreign", "foreign: holds model.safetensors"),
    ("export one --model demo --to peft --overwrite -o theirs", "theirs: holds adapter_model.safetensors"),
];

/// Bases, adapters and files, each wrong in one way.
fn bench() -> Bench {
    let b = Bench::new();
    adapter_without_effect(&b, "one");
    b.file("classes.jsonl", &classes(8));
    b.ok("demo --task classify --data classes.jsonl --max-steps 1 --rank 2 -q -o labels");
    b.model_with("wide", "config.json", |c| c["num_hidden_layers"] = json!(1));
    b.file("notes.txt", "hi");
    std::fs::create_dir(b.path("folder")).unwrap();
    b.ok("export one --model demo --to merged-gguf -o base.gguf");
    let unmarked = |all: &mut Metadata| all.remove(|key| key == "finetune.export");
    written_again(&b.path("base.gguf"), &b.path("foreign.gguf"), unmarked, 0).unwrap();
    b.model("foreign");
    // as PEFT writes it: the same without our mark
    b.ok("export one --model demo --to peft -o theirs");
    let weights = b.read("theirs/adapter_model.safetensors");
    let (from, to) = ("written_by_finetune", "written_by_another_");
    let at = weights.windows(from.len()).position(|w| w == from.as_bytes()).unwrap();
    let mut other = weights.clone();
    other[at..at + from.len()].copy_from_slice(to.as_bytes());
    b.bytes("theirs/adapter_model.safetensors", &other);
    b.model_with("scaled", "config.json", |c| {
        c["rope_parameters"] = json!({
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        });
    });
    b.model_with("odd", "tokenizer.json", |t| t["pre_tokenizer"]["use_regex"] = json!(false));
    b
}

#[test]
fn bad_input_gets_one_line() {
    let b = bench();
    let before = std::fs::read_dir(b.dir.path()).unwrap().count();
    for (command, parts) in REFUSED {
        let out = b.run(command);
        let said = stderr(&out);
        assert_eq!(out.status.code(), Some(78), "{command}: {said}");
        // Without --output, the line before names the output.
        let lines = said.lines().filter(|line| !line.starts_with("writing one-")).count();
        assert_eq!(lines, 1, "{command}: {said}");
        assert!(parts.split(" .. ").all(|part| said.contains(part)), "{command}: {said}");
    }
    assert_eq!(std::fs::read_dir(b.dir.path()).unwrap().count(), before, "nothing is left behind");
    assert!(demo().join("model").is_dir());
    // classifiers have other export forms
    b.ok("export labels --to merged -o whole");
    let out = b.run("export labels --to peft -o head");
    assert!(out.status.success() && stderr(&out).contains("note: vLLM and llama.cpp's converter refuse"));
}

/// The adapters have the same shape: only run.yaml shows that the base is another one.
#[test]
fn adapter_of_another_base_gives_a_warning() {
    let b = Bench::new();
    b.ok("demo --data rows.jsonl --max-steps 1 --rank 2 -q -o out");
    b.model_weights("other", |_, data| data[0] ^= 1);
    for (model, warned) in [("demo", false), ("./other", true)] {
        let out = b.run(&format!("export out --model {model} --to gguf-lora --overwrite -o a.gguf"));
        let said = stderr(&out);
        assert!(out.status.success(), "{said}");
        assert_eq!(said.lines().count(), usize::from(warned), "{said}");
        assert_eq!(said.contains("warning: out: was trained on other files than ./other"), warned, "{said}");
    }
}
