//! GGUF against what the Python `gguf` package and llama.cpp's own conversion make of it, and what damaged
//! files are told.

use finetune::format::{self, gguf::Gguf, rounded::Bf16};
use finetune::numeric::dtype::Dtype;
use finetune::numeric::tensor::Tensors;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/gguf").join(name)
}

#[test]
fn random_blocks_of_every_kind_have_the_reference_bits() {
    let file = Gguf::open(&golden("blocks.gguf")).unwrap();
    let expected = std::fs::read(golden("blocks.f32")).unwrap();
    assert_eq!(file.tensors().len(), 13);
    for ((name, info), expected) in file.tensors().iter().zip(expected.chunks_exact(4 * 1024)) {
        assert_eq!(info.shape, [2, 512]);
        assert_eq!(name, &format!("kind.{}", info.kind.name()));
        let values = file.values(name).unwrap();
        let expected = Dtype::F32.widen(expected);
        assert!(values.iter().any(|v| v.abs() > 1e-3), "{name} is all but zero");
        let bits = |all: &[f32]| all.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&values), bits(&expected), "{name}");
    }
}

/// Every tensor of `a` is in `b` with the same values, and the other way round.
fn same_weights(a: &dyn Tensors, b: &dyn Tensors) {
    assert_eq!(a.names(), b.names());
    for name in a.names() {
        let (x, y) = (a.tensor(&name).unwrap().unwrap(), b.tensor(&name).unwrap().unwrap());
        assert_eq!(x.shape, y.shape, "{name}");
        assert!(x.dtype.widen(&x.bytes) == y.dtype.widen(&y.bytes), "{name} differs");
    }
}

#[test]
fn a_small_llama_comes_back_under_hugging_face_names() {
    let model = format::open(&golden("tiny.gguf")).unwrap();
    let expected = format::safetensors::open(&golden("tiny.safetensors")).unwrap();
    same_weights(&*model.tensors, &expected);
    assert_eq!(model.base_id.as_deref(), Some("owner/tiny"));
    assert_eq!(model.kind, "gguf Q8_0");
    for (key, value) in [
        ("model_type", json!("llama")),
        ("hidden_size", json!(32)),
        ("head_dim", json!(8)),
        ("num_key_value_heads", json!(2)),
        ("rms_norm_eps", json!(1e-5)),
        ("tie_word_embeddings", json!(true)),
        ("vocab_size", json!(264)),
        ("eos_token_id", json!(2)),
    ] {
        assert_eq!(model.config[key], value, "{key}");
    }
    assert!(model.tokenizer.chat_template.is_some());
    let tokenizer: tokenizers::Tokenizer = model.tokenizer.tokenizer_json.parse().unwrap();
    let ids = tokenizer.encode("the<|im_end|> a 7é", false).unwrap();
    assert_eq!(tokenizer.decode(ids.get_ids(), false).unwrap(), "the<|im_end|> a 7é");
    assert_eq!(ids.get_tokens()[..4], ["t", "he", "<|im_end|>", "Ġa"]);
}

/// The real file against the directory that was made from it with other code.
#[test]
fn smollm2_is_the_same_model_from_either_source() {
    let of = |key: &str| std::env::var_os(key).map(PathBuf::from);
    let (Some(gguf), Some(dir)) = (of("FINETUNE_SMOLLM2_GGUF"), of("FINETUNE_SMOLLM2")) else {
        eprintln!("skipped: set FINETUNE_SMOLLM2_GGUF (a .gguf) and FINETUNE_SMOLLM2 (its bf16 directory)");
        return;
    };
    let (from, to) = (format::open(&gguf).unwrap(), format::open(&dir).unwrap());
    same_weights(&Bf16(from.tensors), &*to.tensors);
    for (key, value) in to.config.as_object().unwrap() {
        if !["torch_dtype", "initializer_range", "pretraining_tp"].contains(&key.as_str()) {
            assert_eq!(from.config.get(key).unwrap_or(&Value::Null), value, "{key}");
        }
    }
    // Merges may be written as pairs or with a space between.
    let json = |text: &str| {
        let mut json: Value = serde_json::from_str(text).unwrap();
        for merge in json["model"]["merges"].as_array_mut().unwrap() {
            if let Some(pair) = merge.as_array() {
                *merge = json!(format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()));
            }
        }
        json
    };
    let (a, b) = (json(&from.tokenizer.tokenizer_json), json(&to.tokenizer.tokenizer_json));
    for key in ["added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model"] {
        assert!(a[key] == b[key], "tokenizer.json: {key}");
    }
    assert_eq!(from.tokenizer.chat_template, to.tokenizer.chat_template);
    assert_eq!(from.generation, to.generation);
}
