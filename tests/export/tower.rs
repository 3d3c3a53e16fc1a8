//! The text model of a checkpoint with a vision tower computes what the same text model alone computes; the tower stays
//! as it is.

use crate::cli_fixture::{Bench, classes, stderr};
use crate::random_base;
use finetune::families::wrapped::{ALL, PATH, Wrapper};
use finetune::format::safetensors::{self, Spec};
use finetune::numeric::dtype::Dtype;
use finetune::numeric::tensor::{Tensor, Tensors};
use serde_json::{Value, json};
use std::path::Path;

fn tensors(path: &Path) -> Vec<(String, Tensor<'static>)> {
    let file = safetensors::open(path).unwrap();
    let owned = |name: String| {
        let tensor = file.get(&name).unwrap();
        let bytes = tensor.bytes.into_owned().into();
        (name, Tensor { bytes, ..tensor })
    };
    file.names().into_iter().map(owned).collect()
}

fn config(b: &Bench, folder: &str) -> Value {
    serde_json::from_slice(&b.read(&format!("{folder}/config.json"))).unwrap()
}

/// Writes the folder `whole`: the text model of `base` beside a tower with projections of the same names.
pub fn wrap(b: &Bench, wrapper: &Wrapper) {
    b.model_with("whole", "config.json", |whole| {
        let mut text = config(b, "base");
        text["model_type"] = json!(wrapper.text_type);
        *whole = json!({
            "architectures": [wrapper.class], "model_type": "of_a_test", "dtype": "bfloat16",
            "text_config": text, "vision_config": {},
        });
        // A head in the files is not tied, whatever is said here.
        whole["tie_word_embeddings"] = json!(true);
    });
    let mut all: Vec<(Spec, Vec<u8>)> = Vec::new();
    for (name, t) in tensors(&b.path("base/model.safetensors")) {
        let spec = Spec { name: format!("language_model.{name}"), dtype: t.dtype, shape: t.shape };
        all.push((spec, t.bytes.into_owned()));
    }
    let name = "vision_tower.layers.0.self_attn.q_proj.weight".to_owned();
    let tower = Spec { name, dtype: Dtype::F16, shape: vec![3, 5] };
    all.push((tower, Dtype::F16.narrow(&[0.25; 15])));
    let all: Vec<(Spec, &[u8])> = all.iter().map(|(spec, bytes)| (spec.clone(), &bytes[..])).collect();
    safetensors::write(&b.path("whole/model.safetensors"), &all).unwrap();
}

/// Asserts that two files hold the same tensors; `name` gives the name in the second file.
fn same_tensors(b: &Bench, (one, other): (&str, &str), name: impl Fn(&str) -> String) {
    let other = tensors(&b.path(other));
    for (stored, tensor) in tensors(&b.path(one)) {
        let (_, found) = other.iter().find(|(n, _)| *n == name(&stored)).expect(&stored);
        assert_eq!((&found.shape, &found.bytes), (&tensor.shape, &tensor.bytes), "{stored}");
    }
}

#[test]
fn the_text_model_beside_a_tower_trains_as_alone() {
    for wrapper in &ALL {
        let b = Bench::new();
        random_base::write(&b, wrapper.family);
        wrap(&b, wrapper);
        let train =
            "--data rows.jsonl --max-steps 2 --learning-rate 5e-3 --rank 4 --dropout 0.1 -q --overwrite";
        for (way, options) in [
            ("NF4", "--quantize nf4"),
            ("streamed", "--gpus cpu --offload 4"),
            ("a line", "--gpus cpu+cpu"),
            ("f32", "--dtype f32 --gpus cpu"),
        ] {
            b.ok(&format!("./base {train} {options} -o alone"));
            b.ok(&format!("./whole {train} {options} -o beside"));
            println!("{} {way}", wrapper.class);
            let files = ("alone/adapter_model.safetensors", "beside/adapter_model.safetensors");
            same_tensors(&b, files, |name| name.replace("model.layers", &format!("model.{PATH}layers")));
        }
        let plan = b.ok("plan ./whole --data rows.jsonl");
        assert!(plan.contains(wrapper.class), "{plan}");
        // PEFT finds the modules by a pattern: names alone would also match those of the tower.
        let adapter: Value = serde_json::from_slice(&b.read("beside/adapter_config.json")).unwrap();
        let pattern = adapter["target_modules"].as_str().unwrap();
        assert!(pattern.starts_with(r"model\.language_model\.layers\.\d+\."), "{pattern}");

        // An adapter goes on where it was, and is written again with the same tensors.
        let still = train.replace("5e-3", "0");
        b.ok(&format!("./whole {still} --init-adapter beside -o again"));
        b.ok("export beside --to peft -o copy");
        for other in ["again", "copy"] {
            b.same_adapter("beside", other);
        }

        let prompt = "--prompt 'Show the branch that I am on' --max-new-tokens 12 --dtype f32";
        let tuned = b.ok(&format!("generate --adapter alone {prompt}"));
        assert_eq!(b.ok(&format!("generate --adapter beside {prompt}")), tuned, "{}", wrapper.class);
        b.ok("export alone --to gguf-lora -o lora.gguf");
        b.ok("export beside --to gguf-lora -o again/lora.gguf");
        assert!(b.read("lora.gguf") == b.read("again/lora.gguf"), "{}: gguf-lora", wrapper.class);
        b.ok("export beside --to merged-gguf --outtype f32 -o merged.gguf");
        assert_eq!(b.ok(&format!("generate ./merged.gguf {prompt}")), tuned, "{}: GGUF", wrapper.class);
    }
}

#[test]
fn a_merged_checkpoint_keeps_its_tower() {
    for wrapper in &ALL {
        let b = Bench::new();
        random_base::write(&b, wrapper.family);
        wrap(&b, wrapper);
        let train = "--data rows.jsonl --max-steps 2 --learning-rate 5e-3 --rank 4 -q";
        for base in ["base", "whole"] {
            b.ok(&format!("./{base} {train} -o {base}-out"));
            b.ok(&format!("export {base}-out --to merged -o {base}-merged"));
        }
        let files = ("base-merged/model.safetensors", "whole-merged/model.safetensors");
        same_tensors(&b, files, |name| format!("language_model.{name}"));
        let tower = tensors(&b.path("whole-merged/model.safetensors"));
        let (_, tower) = tower.iter().find(|(name, _)| name.starts_with("vision_tower")).unwrap();
        assert_eq!((tower.dtype, &*tower.bytes), (Dtype::F16, &*Dtype::F16.narrow(&[0.25; 15])));
        let mut want = config(&b, "whole");
        if tensors(&b.path("whole/model.safetensors"))
            .iter()
            .any(|(name, _)| name.ends_with("lm_head.weight"))
        {
            want["tie_word_embeddings"] = json!(false);
        }
        assert_eq!(config(&b, "whole-merged"), want, "{}", wrapper.class);
    }
}

#[test]
fn added_tokens_enlarge_the_text_model_beside_a_tower() {
    for wrapper in &ALL {
        let b = Bench::new();
        random_base::write(&b, wrapper.family);
        wrap(&b, wrapper);
        let prompt = "--prompt 'Show the <call> that I am on' --max-new-tokens 12 --dtype f32";
        b.ok("./whole --data rows.jsonl --max-steps 2 --rank 4 --learning-rate 5e-3 --add-tokens '<call>' -q -o out");
        let tuned = b.ok(&format!("generate --adapter out {prompt}"));
        b.ok("export out --to merged -o merged");
        let mut want = config(&b, "whole")["text_config"].clone();
        want["vocab_size"] = json!(2049);
        assert_eq!(config(&b, "merged")["text_config"], want, "{}", wrapper.class);
        let written = tensors(&b.path("merged/model.safetensors"));
        let rows = |end: &str| written.iter().find(|(name, _)| name.ends_with(end)).map(|(_, t)| t.shape[0]);
        assert_eq!(rows("embed_tokens.weight"), Some(2049), "{}", wrapper.class);
        assert!(rows("vision_tower.layers.0.self_attn.q_proj.weight") == Some(3), "{}", wrapper.class);
        assert_eq!(b.ok(&format!("generate ./merged {prompt}")), tuned, "{}", wrapper.class);
    }
}

#[test]
fn what_a_tower_excludes_is_refused_by_name() {
    let b = Bench::new();
    random_base::write(&b, ALL[0].family);
    wrap(&b, &ALL[0]);
    b.file("classes.jsonl", &classes(8));
    let refused = |args: &str, what: &str| {
        let out = b.run(args);
        assert!(!out.status.success() && stderr(&out).contains(what), "{args}: {}", stderr(&out));
    };
    refused(
        "./whole --task classify --data classes.jsonl -o x",
        "a classifier on Gemma3ForConditionalGeneration",
    );
    let mut changed = config(&b, "whole");
    changed["text_config"]["model_type"] = json!("gemma4_text");
    b.file("whole/config.json", &changed.to_string());
    refused("./whole --data rows.jsonl -o x", "gemma4_text");
    changed["text_config"] = Value::Null;
    b.file("whole/config.json", &changed.to_string());
    refused("./whole --data rows.jsonl -o x", "text_config");
}
