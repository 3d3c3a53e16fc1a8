//! Adapters on chosen modules and layers, with their own ranks and alphas, in whole runs.

use crate::cli_fixture::{Bench, stderr};
use serde_json::{Value, json};

/// The demonstration has four layers. Layer 0 has no adapter; layer 2 has none in the first half of a line.
const CHOSEN: &str = "--target-layers 1,3 --exclude-modules layers.3.mlp.down_proj --rank-pattern q_proj=6 \
                      --rank-pattern layers\\.3\\..*v_proj=2 --alpha-pattern o_proj=5";
const RUN: &str = "demo --data rows.jsonl --max-steps 4 --batch-size 4 --rank 3 --save-steps 2 -q";

fn config(b: &Bench, dir: &str) -> Value {
    serde_json::from_slice(&b.read(&format!("{dir}/adapter_config.json"))).unwrap()
}

#[test]
fn chosen_adapters_train_to_the_same_bytes_however_computed() {
    let b = Bench::new();
    for more in ["--dropout 0.2", "--quantize q8_0 --rslora", "--task classify --num-classes 2"] {
        let data = if more.contains("classify") { "classes.jsonl" } else { "rows.jsonl" };
        b.file("classes.jsonl", &crate::cli_fixture::classes(24));
        let run = format!("{} {CHOSEN} {more}", RUN.replace("rows.jsonl", data));
        b.ok(&format!("{run} -o one"));
        for how in ["--gpus cpu+cpu", "--gpus cpu,cpu", "--offload 2", "--threads 1"] {
            b.ok(&format!("{run} {how} --overwrite -o other"));
            b.same_adapter("one", "other");
        }
        b.ok("--config one/run.yaml --overwrite -o other -q");
        b.same_adapter("one", "other");
        std::fs::remove_dir_all(b.path("other/checkpoint-4")).unwrap();
        std::fs::remove_file(b.path("other/adapter_model.safetensors")).unwrap();
        let changed = run.replace("o_proj=5", "o_proj=6");
        let refused = b.run(&format!("{changed} -o other --resume"));
        assert!(refused.status.code() == Some(78), "{}", stderr(&refused));
        assert!(stderr(&refused).contains("adapters"), "{}", stderr(&refused));
        b.ok(&format!("{run} -o other --resume"));
        b.same_adapter("one", "other");
        std::fs::remove_dir_all(b.path("one")).unwrap();
        std::fs::remove_dir_all(b.path("other")).unwrap();
    }
}

#[test]
fn chosen_adapters_are_written_as_peft_reads_them() {
    let b = Bench::new();
    b.ok(&format!("{RUN} {CHOSEN} -o one"));
    let paths = |module: &str, layers: &[usize]| -> Vec<String> {
        layers.iter().map(|layer| format!("layers.{layer}.{module}")).collect()
    };
    let both = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"];
    let both = both.into_iter().chain(["mlp.gate_proj", "mlp.up_proj"]);
    let mut targets: Vec<String> = both.flat_map(|module| paths(module, &[1, 3])).collect();
    targets.extend(paths("mlp.down_proj", &[1]));
    let written = config(&b, "one");
    assert_eq!(written["target_modules"], json!(targets));
    assert_eq!(written["rank_pattern"], json!({"q_proj": 6, r"layers\.3\.self_attn\.v_proj": 2}));
    assert_eq!(written["alpha_pattern"], json!({"o_proj": 5}));
    b.ok(&format!("{RUN} --target-layers 2-3,1 -o layers"));
    let written = config(&b, "layers");
    assert_eq!(written["layers_to_transform"], json!([1, 2, 3]));
    assert_eq!(written["target_modules"].as_array().unwrap().len(), 7);
    // Another run begins with it, in all of its modules.
    b.ok(&format!("{RUN} --init-adapter one -o next"));
    assert_eq!(config(&b, "next"), config(&b, "one"));
    b.ok("--config next/run.yaml --overwrite -o again -q");
    b.same_adapter("next", "again");
    let notes = stderr(&b.run("export one --to peft -o peft"));
    assert!(notes.contains("converter ignore the patterns of rank and alpha"), "{notes}");
    let run = RUN.replace(" -q", "");
    let notes = stderr(&b.run(&format!("{run} --init-adapter one --alpha-pattern o_proj=6 -o louder")));
    assert!(notes.contains("the scale of o_proj in layer 1 was 1.6666666, is 2: it begins"), "{notes}");
    let shown: Value = serde_json::from_str(&b.ok("inspect one --json")).unwrap();
    assert_eq!((&shown["alpha_pattern"]["o_proj"], &shown["dora"]), (&json!(5), &json!(false)));
    b.file("pairs.jsonl", &crate::cli_fixture::pairs(8));
    let dpo = RUN.replace("rows.jsonl", "pairs.jsonl");
    let args =
        format!("{dpo} --task dpo --reference-adapter one --target-layers 1,3 --rank-pattern q_proj=6 -o no");
    let out = b.run(&args);
    let part = "it has rank 3, alpha 5 for o_proj of layer 1, this run rank 3, alpha 6 for o_proj of layer 1";
    assert!(out.status.code() == Some(78) && stderr(&out).contains(part), "{}", stderr(&out));
    // The verbs that read an adapter compute what training ended with.
    let loss = |args: &str| -> f64 {
        let said = b.ok(&format!("eval {args} --data eval.jsonl --json"));
        serde_json::from_str::<Value>(&said).unwrap()["loss"].as_f64().unwrap()
    };
    b.ok(&format!("{RUN} {CHOSEN} --learning-rate 2e-2 --overwrite -o one"));
    b.ok("export one --to merged --save-dtype f32 -o merged");
    b.ok("export one --to gguf-lora -o one.gguf");
    let loss = |args: &str| loss(&format!("{args} --dtype f32"));
    let (tuned, merged) = (loss("demo --adapter one"), loss("merged"));
    assert!((tuned - merged).abs() < 1e-5 * tuned, "{tuned} {merged}");
    assert!((tuned - loss("demo")).abs() > 1e-2, "{tuned}");
}

#[test]
fn yaml_has_patterns_as_mappings() {
    let b = Bench::new();
    b.file(
        "c.yaml",
        "lora:\n  lora_r: 3\n  peft_layers_to_transform: [1, 3]\n  rank_pattern:\n    q_proj: 6\n  alpha_pattern: {o_proj: 5}\n",
    );
    b.ok(&format!("--config c.yaml {} -o file", RUN.replace("--rank 3", "")));
    b.ok(&format!("{RUN} --target-layers 1,3 --rank-pattern q_proj=6 --alpha-pattern o_proj=5 -o typed"));
    b.same_adapter("file", "typed");
}

#[test]
fn choices_without_effect_end_with_one_line() {
    let b = Bench::new();
    for (args, code, part) in [
        ("--target-layers 4", 78, "--target-layers: layer 4 does not exist: the model has layers 0 to 3"),
        ("--target-layers 3-1", 2, "\"3-1\" is neither a layer nor a range as 8-15"),
        ("--rank-pattern q_proj", 2, "\"q_proj\" is not NAME=NUMBER"),
        ("--rank-pattern q_proj=0", 78, "a whole number from 1 to 65536"),
        ("--alpha-pattern q_proj=nan", 78, "finite and above 0"),
        ("--rank-pattern x_proj=2", 78, "--rank-pattern: \"x_proj\" applies to no module with an adapter"),
        ("--target-modules q_proj --exclude-modules q_proj", 78, "no target modules"),
        ("--exclude-modules ^$", 78, "--exclude-modules: \"^$\" is the whole path of no module"),
        ("--target-modules (q_proj", 78, "is not a regular expression"),
    ] {
        b.refuses(&format!("{RUN} {args}"), code, part);
    }
}

/// The rows of `weight` [n, k] times any factor have these lengths.
fn lengths(weight: &[u8], k: usize) -> Vec<f32> {
    let values: Vec<f32> =
        weight.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    values.chunks(k).map(|row| row.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>().sqrt() as f32).collect()
}

type Part = (String, Vec<usize>, Vec<u8>);

/// The tensors of the adapter in `run`, with the lengths that its rows have in `plain`, merged, as magnitudes.
fn with_magnitudes(b: &Bench, plain: &safetensors::SafeTensors) -> Vec<Part> {
    let adapter = b.read("run/adapter_model.safetensors");
    let adapter = safetensors::SafeTensors::deserialize(&adapter).unwrap();
    let mut all = Vec::new();
    for name in adapter.names() {
        let tensor = adapter.tensor(name).unwrap();
        all.push((name.to_owned(), tensor.shape().to_vec(), tensor.data().to_vec()));
        if let Some(path) = name.strip_suffix(".lora_A.weight") {
            let weight = plain.tensor(&format!("{}.weight", &path["base_model.model.".len()..])).unwrap();
            let lengths = lengths(weight.data(), weight.shape()[1]);
            let bytes = lengths.iter().flat_map(|x| x.to_le_bytes()).collect();
            all.push((format!("{path}.lora_magnitude_vector"), vec![lengths.len()], bytes));
        }
    }
    all
}

#[test]
fn dora_is_merged_and_otherwise_refused() {
    let b = Bench::new();
    b.ok(&format!("{RUN} --target-modules q_proj,down_proj --learning-rate 2e-2 -o run"));
    b.ok("export run --to merged --save-dtype f32 -o plain");
    let plain = b.read("plain/model.safetensors");
    let plain = safetensors::SafeTensors::deserialize(&plain).unwrap();
    let mut all = with_magnitudes(&b, &plain);
    let write = |all: &[Part]| {
        let views = all.iter().map(|(name, shape, bytes)| {
            let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes);
            (name.clone(), view.unwrap())
        });
        b.bytes("dora/adapter_model.safetensors", &safetensors::serialize(views, None).unwrap());
    };
    std::fs::create_dir(b.path("dora")).unwrap();
    let mut about = config(&b, "run");
    about["use_dora"] = json!(true);
    about["base_model_name_or_path"] = json!("demo");
    b.file("dora/adapter_config.json", &about.to_string());
    write(&all);
    let said = b.ok("export dora --to merged --save-dtype f32 -o merged");
    assert!(said.contains("of the merged weights in f32"), "{said}");
    let merged = b.read("merged/model.safetensors");
    let merged = safetensors::SafeTensors::deserialize(&merged).unwrap();
    let values = |t: &safetensors::tensor::TensorView| -> Vec<f32> {
        t.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    for name in plain.names() {
        let pairs = [&plain, &merged].map(|file| values(&file.tensor(name).unwrap()));
        let apart = pairs[0].iter().zip(&pairs[1]).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(apart < 1e-6, "{name}: {apart}");
    }
    let refused = |args: &str, part: &str| {
        let out = b.run(args);
        let said = stderr(&out);
        let last = said.lines().last().unwrap_or_default();
        assert!(out.status.code() == Some(78) && last.contains(part), "{args}: {said}");
    };
    for args in [
        "eval demo --adapter dora --data eval.jsonl",
        "generate demo --adapter dora --prompt x",
        "demo --data rows.jsonl --init-adapter dora -o no",
    ] {
        refused(args, "uses DoRA, which is read for merging only");
    }
    refused("export dora --model demo --to gguf-lora -o no.gguf", "uses DoRA, which is merged only");
    let cut = all.iter().position(|(name, ..)| name.ends_with("magnitude_vector")).unwrap();
    all.remove(cut);
    write(&all);
    refused("export dora --model demo --to merged -o no", "has 0 magnitudes (lora_magnitude_vector)");
}
