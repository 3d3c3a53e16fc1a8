//! Adapters for mlx-lm: the file against PEFT's, and mlx-lm itself, which tests/run.sh installs. Without it its test
//! prints `skipped`; FINETUNE_NEED_MLX makes that a failure.

use crate::cli_fixture::{Bench, stderr};
use crate::{random_base, read_json, tower};
use finetune::families::{ALL, wrapped};
use finetune::format::safetensors;
use finetune::numeric::tensor::Tensors;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

#[test]
fn mlx_adapter_is_that_of_peft_transposed() {
    let b = Bench::new();
    b.ok("demo --data rows.jsonl --max-steps 2 --rank 4 --alpha 6 --rslora --target-modules q_proj,down_proj -q -o out");
    let said = b.ok("export out --to mlx -o mlx");
    assert!(said.contains("read back: the same values"), "{said}");
    let open = |path: &str| safetensors::open(&b.path(path)).unwrap();
    let (peft, mlx) = (open("out/adapter_model.safetensors"), open("mlx/adapters.safetensors"));
    let names = |file: &dyn Tensors| file.names();
    assert_eq!(names(&mlx).len(), names(&peft).len());
    for name in peft.names() {
        let theirs = name.strip_prefix("base_model.model.").unwrap();
        let theirs = theirs.replace(".lora_A.weight", ".lora_a").replace(".lora_B.weight", ".lora_b");
        let (one, two) = (peft.get(&name).unwrap(), mlx.get(&theirs).unwrap());
        let [rows, cols] = one.shape[..] else { panic!("{name}") };
        assert_eq!(two.shape, [cols, rows], "{name}");
        let (values, transposed) = (one.dtype.widen(&one.bytes), two.dtype.widen(&two.bytes));
        assert!((0..rows * cols).all(|i| values[i] == transposed[i % cols * rows + i / cols]), "{name}");
    }
    let config = read_json(&b.path("mlx/adapter_config.json"));
    assert_eq!((&config["fine_tune_type"], &config["num_layers"]), (&json!("lora"), &json!(4)));
    let of = &config["lora_parameters"];
    assert_eq!((&of["rank"], &of["scale"], &of["dropout"]), (&json!(4), &json!(3.0), &json!(0.0)));
    assert_eq!(of["keys"], json!(["mlp.down_proj", "self_attn.q_proj"]));
    // Only an earlier export is replaced.
    b.ok("export out --to mlx --overwrite -o mlx");
}

/// Adds the keys of config.json that mlx-lm needs and we do not, and removes those without a value.
fn complete(path: &Path) {
    let mut config = read_json(path);
    config.as_object_mut().unwrap().retain(|_, value| !value.is_null());
    match config.get_mut("rope_parameters") {
        Some(of) => of["rope_theta"] = json!(1e4),
        None => config["rope_theta"] = json!(1e4),
    }
    if config.get("num_experts").is_some() {
        config["decoder_sparse_step"] = json!(1);
        config["mlp_only_layers"] = json!([]);
    }
    if config.get("linear_num_value_heads").is_some() {
        // mlx-lm reads no `layer_types`; every second layer has attention (own_keys.rs).
        config["full_attention_interval"] = json!(2);
    }
    if config["model_type"] == "lfm2" {
        let own = json!({
            "block_dim": config["hidden_size"], "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
            "conv_bias": false, "conv_L_cache": 3, "norm_eps": 1e-5,
        });
        for (key, value) in own.as_object().unwrap() {
            config.as_object_mut().unwrap().entry(key).or_insert(value.clone());
        }
    }
    std::fs::write(path, config.to_string()).unwrap();
}

/// Trains `base` and exports the adapter and the merged model.
fn case(b: &Bench, (name, base): (&str, &str), train: &str) -> Value {
    b.ok(&format!("./{base} --data rows.jsonl --rank 4 --alpha 6 {train} -q -o out"));
    b.ok("export out --to mlx -o mlx");
    b.ok("export out --to merged --save-dtype f32 -o merged");
    let path = |folder: &str| b.path(folder).display().to_string();
    json!({ "name": name, "base": path(base), "adapter": path("mlx"), "merged": path("merged") })
}

/// For every family, alone and beside a tower: the logits of the base with the adapter are those of the merged model;
/// for the demonstration's model the greedy tokens are those of `finetune generate`.
#[test]
fn mlx_lm_computes_what_the_adapter_says() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = root.join("target/mlx/bin/python");
    if !python.exists() {
        assert!(std::env::var_os("FINETUNE_NEED_MLX").is_none(), "mlx-lm must be installed here");
        eprintln!("skipped: no mlx-lm");
        return;
    }
    let random = "--max-steps 4 --learning-rate 5e-2";
    let (mut benches, mut cases) = (Vec::new(), Vec::new());
    // mlx-lm has the text model of Qwen3.5 only inside the vision-language model, which is below, and reads joined experts
    // in MXFP4 only.
    for family in ALL.iter().copied().filter(|family| !family.delta_rule && !family.biased_experts) {
        let b = Bench::new();
        random_base::write(&b, family);
        complete(&b.path("base/config.json"));
        let all = family.halved_in_gguf().is_none();
        let targets = if all { "" } else { "--target-modules q_proj,k_proj,v_proj,o_proj" };
        cases.push(case(&b, (family.name, "base"), &format!("{random} {targets}")));
        benches.push(b);
    }
    for wrapper in &wrapped::ALL {
        let b = Bench::new();
        random_base::write(&b, wrapper.family);
        complete(&b.path("base/config.json"));
        tower::wrap(&b, wrapper);
        let mut config = read_json(&b.path("whole/config.json"));
        // The first that fits: `qwen3_5_moe` begins with `qwen3_5`.
        let of_mlx = ["gemma3", "mistral3", "qwen3_vl", "qwen3_5_moe", "qwen3_5"];
        let class = wrapper.class.to_lowercase().replace('_', "");
        config["model_type"] = json!(of_mlx.iter().find(|t| class.starts_with(&t.replace('_', ""))));
        config["vocab_size"] = config["text_config"]["vocab_size"].clone();
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"].clone();
        b.file("whole/config.json", &config.to_string());
        cases.push(case(&b, (wrapper.class, "whole"), random));
        benches.push(b);
    }
    let b = Bench::new();
    b.model("base");
    let mut demo = case(&b, ("demo", "base"), "--max-steps 40 --learning-rate 5e-3");
    let prompt = "Show the branch ";
    demo["prompt"] = json!(prompt);
    let generate =
        format!("generate --adapter out --raw --dtype f32 --prompt '{prompt}' --max-new-tokens 12");
    demo["text"] = json!(b.ok(&generate));
    cases.push(demo);
    let file = b.file("cases.json", &Value::from(cases).to_string());
    let out = Command::new(python).arg(root.join("tests/export/with_mlx.py")).arg(file).output().unwrap();
    let (shown, wrong) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    println!("{shown}");
    assert!(out.status.success() && shown.ends_with("done\n"), "{shown}{wrong}");
}

#[test]
fn what_mlx_lm_reads_otherwise_is_noted() {
    let b = Bench::new();
    let notes = |args: &str| {
        let out = b.run(args);
        assert!(out.status.success(), "{}", stderr(&out));
        stderr(&out)
    };
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/quantised");
    for (case, base) in [("nf4", "model"), ("gguf", "model.gguf")] {
        let (adapter, base) = (golden.join(case).join("adapter_final"), golden.join(case).join(base));
        let (adapter, base) = (adapter.display(), base.display());
        let said = notes(&format!("export {adapter} --model {base} --to mlx --overwrite -o mlx"));
        assert!(said.contains("note: mlx-lm does not read"), "{case}: {said}");
    }
    b.file("own.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
    let run = "demo --data rows.jsonl --max-steps 1 --rank 2 -q";
    b.ok(&format!("{run} -o plain"));
    b.ok(&format!("{run} --chat-template own.jinja -o own"));
    let said = notes("export plain --to mlx -o plain-mlx");
    assert!(!said.contains("note:"), "{said}");
    let said = notes("export own --to mlx -o own-mlx");
    assert!(said.contains("note: mlx-lm uses the chat template of the base"), "{said}");
}
