//! Every family through the whole program, with random weights of its shapes: training, plan, merged directory, GGUF and
//! quantised bases, each read back; and the same bytes however it is computed.

use crate::cli_fixture::{Bench, classes, pairs, stderr};
use crate::random_base;
use finetune::families::{ALL, Classifier, GPT_OSS, GRANITE_MOE_HYBRID, QWEN3_5_MOE};
use finetune::format::safetensors;
use finetune::numeric::tensor::Tensors;
use serde_json::json;

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
        if let Some(missing) = family.not_in_gguf() {
            assert!(stderr(&gguf).contains(missing) && !gguf.status.success(), "{name}: {}", stderr(&gguf));
            continue;
        }
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
