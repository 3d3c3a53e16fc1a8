//! Every family through the whole program, with random weights of its shapes: training, plan, merged directory, GGUF and
//! quantised bases, each read back; and the same bytes however it is computed.

use crate::cli_fixture::{Bench, classes, pairs, stderr};
use crate::random_base;
use finetune::families::{
    ALL, Classifier, GPT_OSS, GRANITE_MOE_HYBRID, MINISTRAL3, OLMO3, PHI3, QWEN3_5_MOE,
};
use finetune::format::gguf::{Gguf, Value as Stored};
use finetune::format::safetensors;
use finetune::numeric::tensor::Tensors;
use serde_json::{Value, json};

#[test]
fn every_family_is_trained_merged_and_read_back() {
    for family in ALL {
        let (b, name) = (Bench::new(), family.name);
        random_base::write(&b, family);
        let train = "--data rows.jsonl --max-steps 2 --learning-rate 5e-3 --rank 4 -q --overwrite";
        b.ok(&format!("./base {train} -o out"));
        let plan = b.ok("plan ./base --data rows.jsonl");
        assert!(plan.contains(&format!("{name}ForCausalLM")), "{plan}");
        let prompt =
            "--prompt 'Show the branch that I am on and the last commits' --max-new-tokens 24 --dtype f32";
        let tuned = b.ok(&format!("generate --adapter out {prompt}"));
        b.ok("export out --to merged --save-dtype f32 -o merged");
        assert_eq!(b.ok(&format!("generate ./merged {prompt}")), tuned, "{name}: merged");
        assert!(b.read("merged/chat_template.jinja") == b.read("base/chat_template.jinja"), "{name}");
        b.ok(&format!("./base --quantize nf4 {train} -o four"));
        let gguf = b.run("export out --to merged-gguf --outtype f32 -o m.gguf");
        assert!(gguf.status.success(), "{name}: {}", stderr(&gguf));
        assert_eq!(b.ok(&format!("generate ./m.gguf {prompt}")), tuned, "{name}: GGUF");
        b.ok("export out --to merged-gguf --outtype q8_0 -o q.gguf");
        b.ok(&format!("./q.gguf {train} -o of_gguf"));
        b.ok("export out --to merged-gguf --outtype q4_k_m -o mixed.gguf");
    }
}

/// Runs `train` in each way, and asserts that the adapters have the same bytes.
fn same_bytes(b: &Bench, (train, what): (&str, &str), ways: &[(&str, &str)]) {
    b.ok(&format!("{train} --gpus cpu --overwrite -o one"));
    for (way, options) in ways {
        b.ok(&format!("{train} {options} --overwrite -o other"));
        assert!(
            b.read("one/adapter_model.safetensors") == b.read("other/adapter_model.safetensors"),
            "{what}, {way}: other bytes"
        );
    }
}

#[test]
fn no_way_of_computing_changes_a_byte_of_any_family() {
    let ways = [
        ("streamed", "--gpus cpu --offload 4"),
        ("a line", "--gpus cpu+cpu"),
        ("two devices", "--gpu-backend cpu --gpus 0,1"),
    ];
    for family in ALL {
        let (b, name) = (Bench::new(), family.name);
        random_base::write(&b, family);
        b.file("classes.jsonl", &classes(24));
        b.file("pairs.jsonl", &pairs(12));
        let train = "./base --max-steps 3 --batch-size 12 --micro-batch-tokens 64 --rank 4 --dropout 0.1 -q";
        let text = format!("{train} --data rows.jsonl");
        same_bytes(&b, (&format!("{text} --dtype f32"), name), &ways);
        same_bytes(&b, (&format!("{text} --dtype bf16"), &format!("{name} in bf16")), &ways);
        same_bytes(&b, (&format!("{text} --quantize nf4"), &format!("{name} in NF4")), &ways[..1]);
        b.ok(&format!("{text} --gpus cpu --overwrite -o one"));
        b.ok(&format!("{text} --gpus cpu --save-steps 2 -o first"));
        b.ok(&format!("{text} --gpus cpu --resume={}/checkpoint-2 -o second", b.path("first").display()));
        b.same_adapter("one", "second");
        let preferences =
            "./base --task dpo --data pairs.jsonl --max-steps 2 --batch-size 6 --rank 4 --dropout 0.1 -q";
        same_bytes(&b, (preferences, &format!("{name}, preferences")), &ways[..2]);
        if family.classifier != Classifier::Missing {
            let classifier = format!("{train} --task classify --data classes.jsonl");
            same_bytes(&b, (&classifier, &format!("{name}, a classifier")), &ways[..2]);
        }
    }
}

/// Sets keys of the base's config.json.
fn configure(b: &Bench, keys: &[(&str, Value)]) {
    let mut config: Value = serde_json::from_slice(&b.read("base/config.json")).unwrap();
    keys.iter().for_each(|(key, value)| config[*key] = value.clone());
    b.file("base/config.json", &config.to_string());
}

/// LongRoPE with rows on both sides of the length before scaling, YaRN on the layers that do not slide, and YaRN with
/// queries that grow with their position.
#[test]
fn scaled_rotations_have_the_same_bytes_from_a_gguf() {
    let long = json!({
        "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.25, 1.5, 2.0, 2.5],
        "long_factor": [1.5, 2.0, 4.0, 7.3, 12.0, 20.0],
    });
    let of_full = json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16,
        "attention_factor": 1.2079441541679836, "rope_theta": 1e6});
    let sliding = json!({"rope_type": "default", "rope_theta": 1e6});
    let grows = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8,
        "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.1});
    let both = json!({"full_attention": of_full, "sliding_attention": sliding});
    for (family, original, rope, keys) in [
        (&PHI3, 48, long, "phi3.rope.scaling.attn_factor phi3.rope.scaling.original_context_length"),
        (&OLMO3, 16, both, "olmo2.attention.sliding_window_pattern olmo2.rope.freq_base_swa"),
        (
            &MINISTRAL3,
            8,
            grows,
            "mistral3.rope.scaling.yarn_log_multiplier mistral3.attention.temperature_scale",
        ),
    ] {
        let (b, name) = (Bench::new(), family.name);
        random_base::write(&b, family);
        configure(&b, &[("rope_parameters", rope), ("original_max_position_embeddings", json!(original))]);
        let train = "--data rows.jsonl --max-steps 3 --learning-rate 5e-3 --rank 4 -q --overwrite";
        b.ok(&format!("./base {train} -o out"));
        b.ok("export out --to merged --save-dtype f32 -o merged");
        b.ok("export out --to merged-gguf --outtype f32 -o m.gguf");
        let file = Gguf::open(&b.path("m.gguf")).unwrap();
        keys.split(' ').for_each(|key| assert!(file.get(key).is_some(), "{key}"));
        let pattern = file.get("olmo2.attention.sliding_window_pattern").and_then(Stored::as_bools);
        assert!(pattern.is_none_or(|each| each == [true, true, true, false, true, true]));
        b.ok(&format!("./merged {train} -o of_merged"));
        b.ok(&format!("./m.gguf {train} -o of_gguf"));
        assert!(
            b.read("of_merged/adapter_model.safetensors") == b.read("of_gguf/adapter_model.safetensors"),
            "{name}: other bytes"
        );
        let prompt = "--prompt 'Show the branch that I am on' --max-new-tokens 40 --dtype f32";
        let text = b.ok(&format!("generate --adapter of_gguf {prompt}"));
        b.ok("export of_gguf --to merged --save-dtype f32 -o again");
        b.ok("export of_gguf --to merged-gguf --outtype f32 -o again.gguf");
        assert_eq!(b.ok(&format!("generate ./again {prompt}")), text, "{name}: merged");
        assert_eq!(b.ok(&format!("generate ./again.gguf {prompt}")), text, "{name}: GGUF");
        b.ok("export out --to merged-gguf --outtype q4_k_m -o mixed.gguf");
        b.ok(&format!("./mixed.gguf {train} -o of_mixed"));
    }
}

/// llama.cpp takes every fourth layer as full, and computes YaRN's factor of cosines and sines itself.
#[test]
fn what_llama_cpp_would_compute_otherwise_is_not_written() {
    let (b, kinds) = (Bench::new(), ["sliding_attention", "full_attention"]);
    random_base::write(&b, &OLMO3);
    let export = |keys: &[(&str, Value)]| {
        configure(&b, keys);
        b.ok("./base --data rows.jsonl --max-steps 1 --rank 4 -q --overwrite -o out");
        let run = b.run("export out --to merged-gguf --outtype f32 -o m.gguf");
        assert!(!run.status.success());
        stderr(&run)
    };
    let own = (0..6).map(|layer| kinds[layer % 2]).collect();
    let said = export(&[("layer_types", own)]);
    assert!(said.contains("this order of sliding layers is not written to GGUF"), "{said}");
    let yarn = json!({"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.3,
        "original_max_position_embeddings": 16, "rope_theta": 1e6});
    let both =
        json!({"full_attention": yarn, "sliding_attention": {"rope_type": "default", "rope_theta": 1e6}});
    let said = export(&[("layer_types", Value::Null), ("rope_parameters", both)]);
    assert!(said.contains("this rotary embedding is not written to GGUF"), "{said}");
}

/// Gate and up of Granite 4 are one matrix, and two tensors of the file.
#[test]
fn streamed_halves_of_a_gguf_have_the_bytes_of_resident_ones() {
    let b = Bench::new();
    random_base::write(&b, &GRANITE_MOE_HYBRID);
    b.ok("./base --data rows.jsonl --max-steps 2 --learning-rate 5e-3 --rank 4 -q -o out");
    let options = "--data rows.jsonl --max-steps 3 --batch-size 12 --micro-batch-tokens 64 --rank 4 -q";
    for outtype in ["q8_0", "bf16", "q4_k_m"] {
        b.ok(&format!("export out --to merged-gguf --outtype {outtype} -o {outtype}.gguf"));
        for dtype in ["f32", "bf16"] {
            let train = format!("./{outtype}.gguf {options} --dtype {dtype}");
            same_bytes(
                &b,
                (&train, &format!("{outtype} in {dtype}")),
                &[("streamed", "--gpus cpu --offload 6")],
            );
        }
    }
}

/// transformers saves a tensor for each expert, and other programs read joined ones.
#[test]
fn experts_that_are_apart_are_joined_in_a_merged_folder() {
    let b = Bench::new();
    let names = |folder: &str| {
        let path = b.path(&format!("{folder}/model.safetensors"));
        let mut names = safetensors::open(&path).unwrap().names();
        names.sort();
        names
    };
    random_base::write(&b, &QWEN3_5_MOE);
    let joined = names("base");
    random_base::with_experts(&b, &QWEN3_5_MOE, 64, None);
    assert!(names("base").len() > joined.len());
    b.ok("./base --data rows.jsonl --max-steps 2 --learning-rate 5e-3 --rank 4 -q -o out");
    b.ok("export out --to merged --save-dtype f32 -o merged");
    assert_eq!(names("merged"), joined);
    let prompt = "--prompt 'Show the branch that I am on' --max-new-tokens 24 --dtype f32";
    assert_eq!(
        b.ok(&format!("generate ./merged {prompt}")),
        b.ok(&format!("generate --adapter out {prompt}"))
    );
}

/// The files of OpenAI, with frequencies that are not scaled: experts are blocks while it is trained, streamed or not, and
/// in a GGUF.
#[test]
fn experts_in_mxfp4_stay_blocks() {
    let b = Bench::new();
    random_base::write(&b, &GPT_OSS);
    random_base::in_mxfp4(&b);
    let mut config: serde_json::Value = serde_json::from_slice(&b.read("base/config.json")).unwrap();
    config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 10_000.0});
    b.file("base/config.json", &config.to_string());
    assert!(b.ok("inspect ./base").contains("MXFP4"));
    let train = "./base --data rows.jsonl --max-steps 3 --learning-rate 5e-3 --rank 4 --dropout 0.1 -q";
    for dtype in ["f32", "bf16"] {
        same_bytes(
            &b,
            (&format!("{train} --dtype {dtype}"), dtype),
            &[("streamed", "--gpus cpu --offload 6")],
        );
    }
    b.ok(&format!("{train} -o out"));
    let prompt = "--prompt 'Show the branch that I am on' --max-new-tokens 24 --dtype f32";
    let tuned = b.ok(&format!("generate --adapter out {prompt}"));
    b.ok("export out --to merged --save-dtype f32 -o merged");
    assert_eq!(b.ok(&format!("generate ./merged {prompt}")), tuned, "merged");
    b.ok("export out --to merged-gguf --outtype base -o m.gguf");
    assert!(b.ok("inspect ./m.gguf").contains("MXFP4"));
    let again = b.ok("export out --to merged-gguf --outtype f32 -o wide.gguf");
    assert_eq!(b.ok(&format!("generate ./wide.gguf {prompt}")), tuned, "GGUF: {again}");
}
