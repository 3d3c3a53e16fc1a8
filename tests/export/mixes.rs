//! Mixes of types against llama.cpp's own `llama_model_quantize` (`tests/golden/export/mixes.json`): the type of every
//! tensor, and the bytes of a whole model; and what such a file is worth.

use crate::cli_fixture::Bench;
use crate::{adapter_without_effect, golden, read_json, sha, written_again};
use finetune::format::gguf::mix::{Mix, Model};
use finetune::format::gguf::{Gguf, Info, Meta, Metadata, decode};
use finetune::format::safetensors::{self, Spec};
use finetune::numeric::block::Encoding;
use finetune::numeric::dtype::Dtype;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The type of each tensor whose name has this part, by layer: `usual`, or what is listed for the part as `Q6_K*2 Q4_K`.
fn listed(types: &Value, part: &str, count: usize) -> Vec<String> {
    let Some(runs) = types[part].as_str() else {
        return vec![types["usual"].as_str().unwrap().to_owned(); count];
    };
    let each = runs.split(' ').flat_map(|run| {
        let (kind, times) = run.split_once('*').unwrap_or((run, "1"));
        vec![kind.to_owned(); times.parse().unwrap()]
    });
    each.collect()
}

#[test]
fn mixes_have_the_types_of_llama_cpp() {
    let all = read_json(&golden("export/mixes.json"));
    let mut compared = 0;
    for (name, shape) in all["shapes"].as_object().unwrap() {
        let number = |key: &str| shape[key].as_u64().unwrap() as usize;
        let (layers, hidden, inner, experts) =
            (number("layers"), number("hidden"), number("inner"), number("experts"));
        let heads = |i: usize| shape["heads"][i].as_u64().unwrap() as usize;
        let model = Model {
            architecture: shape["architecture"].as_str().unwrap(),
            layers,
            heads: (heads(0), heads(1)),
            experts,
            convolutions: &[],
            tied: shape["head"] == false,
        };
        let attention = match model.architecture {
            "phi3" => vec!["attn_qkv", "attn_output"],
            _ => vec!["attn_q", "attn_k", "attn_v", "attn_output"],
        };
        let of_inner = if experts > 0 { "_exps" } else { "" };
        for &mix in Mix::ALL {
            let types = &shape["mixes"][mix.name()];
            // llama.cpp refuses a block of 32 for shorter rows.
            if types.is_null() {
                assert!(!hidden.is_multiple_of(32) || !inner.is_multiple_of(32), "{name}");
                continue;
            }
            let mut check = |part: &str, row: usize, of: &[String]| {
                let want = listed(types, part, of.len());
                let kinds: Vec<&str> = of.iter().map(|name| mix.kind(&model, name, row).name()).collect();
                assert_eq!(kinds, want, "{name}: {} {part}", mix.name());
                compared += kinds.len();
            };
            check("token_embd", hidden, &["token_embd.weight".into()]);
            if !model.tied {
                check("output", hidden, &["output.weight".into()]);
            }
            let mut in_layers = |part: &str, row| {
                check(part, row, &(0..layers).map(|i| format!("blk.{i}.{part}.weight")).collect::<Vec<_>>());
            };
            attention.iter().for_each(|part| in_layers(part, hidden));
            if model.architecture != "phi3" {
                in_layers(&format!("ffn_gate{of_inner}"), hidden);
            }
            in_layers(&format!("ffn_up{of_inner}"), hidden);
            in_layers(&format!("ffn_down{of_inner}"), inner);
            if model.architecture == "qwen2moe" {
                [("ffn_gate_shexp", hidden), ("ffn_up_shexp", hidden), ("ffn_down_shexp", inner)]
                    .iter()
                    .for_each(|(part, row)| in_layers(part, *row));
            }
        }
    }
    assert!(compared > 20_000, "{compared}");
}

/// The types of a file's matrices in the order of layers, by the middle of their names.
fn types(file: &Gguf) -> BTreeMap<String, Vec<&'static str>> {
    let mut order: Vec<(i32, &String, &Info)> = Vec::new();
    for (name, info) in file.tensors().iter().filter(|(_, info)| info.kind != crate::F32) {
        let layer = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse().ok());
        order.push((layer.unwrap_or(-1), name, info));
    }
    order.sort_by_key(|(layer, ..)| *layer);
    let mut parts: BTreeMap<String, Vec<_>> = BTreeMap::new();
    for (_, name, info) in order {
        let part = name.strip_suffix(".weight").unwrap().rsplit('.').next().unwrap();
        parts.entry(part.to_owned()).or_default().push(info.kind.name());
    }
    parts
}

fn digest(file: &Gguf) -> String {
    sha(&file.tensors().values().flat_map(|info| file.bytes(info)).copied().collect::<Vec<u8>>())
}

/// Values of tensor number `tensor`, as `drawn` in tests/golden/export/mixes.py.
fn drawn(tensor: u32, count: usize) -> Vec<f32> {
    let value = |i: u32| {
        let h = i.wrapping_mul(2_654_435_761).wrapping_add(tensor * 40_503);
        let h = (h ^ h >> 15).wrapping_mul(2_246_822_519);
        ((h ^ h >> 13) >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count as u32).map(value).collect()
}

/// The folder `wide`: a model with rows of 256 and 512, as `wide` in tests/golden/export/mixes.py, and `nothing`, an
/// adapter without effect.
fn wide(b: &Bench) {
    b.model_with("wide", "config.json", |c| {
        for (key, value) in
            [("hidden_size", 256), ("intermediate_size", 512), ("head_dim", 64), ("num_key_value_heads", 1)]
        {
            c[key] = json!(value);
        }
        c["tie_word_embeddings"] = json!(false);
    });
    let mut shapes = vec![("model.embed_tokens".to_owned(), vec![2048, 256])];
    shapes.extend([("model.norm".into(), vec![256]), ("lm_head".into(), vec![2048, 256])]);
    for i in 0..4 {
        let of_layer = [
            ("input_layernorm", vec![256]),
            ("post_attention_layernorm", vec![256]),
            ("self_attn.q_proj", vec![256, 256]),
            ("self_attn.k_proj", vec![64, 256]),
            ("self_attn.v_proj", vec![64, 256]),
            ("self_attn.o_proj", vec![256, 256]),
            ("mlp.gate_proj", vec![512, 256]),
            ("mlp.up_proj", vec![512, 256]),
            ("mlp.down_proj", vec![256, 512]),
        ];
        shapes.extend(of_layer.map(|(name, shape)| (format!("model.layers.{i}.{name}"), shape)));
    }
    let tensors: Vec<(Spec, Vec<u8>)> = (0..)
        .zip(shapes)
        .map(|(i, (name, shape))| {
            let bytes = Dtype::F32.narrow(&drawn(i, shape.iter().product()));
            (Spec { name: format!("{name}.weight"), dtype: Dtype::F32, shape }, bytes)
        })
        .collect();
    let all: Vec<(Spec, &[u8])> = tensors.iter().map(|(spec, bytes)| (spec.clone(), &bytes[..])).collect();
    safetensors::write(&b.path("wide/model.safetensors"), &all).unwrap();
    b.ok("./wide --data rows.jsonl --max-steps 1 --learning-rate 0 --target-modules v_proj -q -o nothing");
}

#[test]
fn mixed_gguf_has_the_bytes_of_llama_quantize() {
    let b = Bench::new();
    adapter_without_effect(&b, "narrow");
    wide(&b);
    let all = read_json(&golden("export/mixes.json"));
    for (model, adapter) in [("demo", "narrow --model demo"), ("wide", "nothing")] {
        for (mix, theirs) in all["models"][model].as_object().unwrap() {
            b.ok(&format!("export {adapter} --to merged-gguf --outtype {mix} --overwrite -o m.gguf"));
            let ours = Gguf::open(&b.path("m.gguf")).unwrap();
            for (part, kinds) in types(&ours) {
                assert_eq!(kinds, listed(theirs, &part, kinds.len()), "{model} {mix} {part}");
            }
            assert_eq!(digest(&ours), theirs["sha256"].as_str().unwrap(), "{model} {mix}");
            let number = Mix::ALL.iter().find(|m| m.name() == mix).map_or(7, |m| m.file_type());
            let own = ours.get("general.file_type").and_then(|n| n.as_f64());
            assert_eq!(own, Some(f64::from(number)), "{model} {mix}");
        }
    }
}

#[test]
fn every_base_gives_the_same_mix() {
    let b = Bench::new();
    wide(&b);
    b.ok("export nothing --to merged-gguf --outtype Q4_K_M -o direct.gguf");
    let direct = Gguf::open(&b.path("direct.gguf")).unwrap();
    b.ok("export nothing --to merged-gguf --outtype f32 -o plain.gguf");
    b.ok("export nothing --model ./plain.gguf --to merged-gguf --outtype q4_k -o m.gguf");
    assert_eq!(digest(&Gguf::open(&b.path("m.gguf")).unwrap()), digest(&direct));
    // A quantised base is quantised again, except for blocks that have their type already and no adapter.
    b.ok("export nothing --to merged-gguf --outtype q6_k -o base.gguf");
    let imatrix = |all: &mut Metadata| {
        all.set("quantize.imatrix.file", Meta::Text("calibration".into()));
    };
    written_again(&b.path("base.gguf"), &b.path("six.gguf"), imatrix, 0).unwrap();
    b.ok("export nothing --model ./six.gguf --to merged-gguf --outtype q4_k_m --overwrite -o m.gguf");
    let (base, mixed) = (Gguf::open(&b.path("six.gguf")).unwrap(), Gguf::open(&b.path("m.gguf")).unwrap());
    assert_eq!(types(&mixed), types(&direct));
    for kept in ["output.weight", "blk.3.ffn_down.weight"] {
        assert_eq!(mixed.tensors()[kept].kind.name(), "Q6_K");
        assert!(mixed.bytes(&mixed.tensors()[kept]) == base.bytes(&base.tensors()[kept]), "{kept}");
    }
    assert_eq!(
        (mixed.get("quantize.imatrix.file"), mixed.get("general.file_type").and_then(|n| n.as_f64())),
        (None, Some(15.0))
    );
}

/// The loss of a command's JSON line.
fn loss(b: &Bench, args: &str) -> f64 {
    let said: Value = serde_json::from_str(&b.ok(args)).unwrap();
    said["loss"].as_f64().unwrap_or_else(|| panic!("{said}"))
}

#[test]
fn loss_of_a_mixed_file_is_near_that_of_the_adapter() {
    let b = Bench::new();
    b.ok("demo --data rows.jsonl --max-steps 40 --learning-rate 5e-3 --rank 8 -q -o out");
    let tuned = loss(&b, "eval --adapter out --data rows.jsonl --dtype f32 --json");
    let base = loss(&b, "eval demo --data rows.jsonl --dtype f32 --json");
    let mut sizes = Vec::new();
    for (mix, most) in [("q2_k", 0.01), ("q3_k_m", 0.01), ("q4_k_m", 1e-3), ("q5_k_m", 1e-3), ("q6_k", 1e-3)]
    {
        b.ok(&format!("export out --to merged-gguf --outtype {mix} --overwrite -o m.gguf"));
        let mixed = loss(&b, "eval ./m.gguf --data rows.jsonl --dtype f32 --json");
        println!("{mix}: {mixed} (adapter {tuned}, base {base})");
        assert!((mixed - tuned).abs() <= most * (base - tuned), "{mix}: {mixed}, the adapter has {tuned}");
        sizes.push(std::fs::metadata(b.path("m.gguf")).unwrap().len());
    }
    assert!(sizes.is_sorted(), "{sizes:?}");
}

/// Errors are parts of the largest value among 256.
#[test]
fn values_read_back_within_the_error_of_their_type() {
    let b = Bench::new();
    wide(&b);
    b.ok("export nothing --to merged-gguf --outtype f32 -o plain.gguf");
    let plain = Gguf::open(&b.path("plain.gguf")).unwrap();
    let mut largest: BTreeMap<&str, f32> = BTreeMap::new();
    for mix in Mix::ALL {
        b.ok(&format!("export nothing --to merged-gguf --outtype {} --overwrite -o m.gguf", mix.name()));
        let mixed = Gguf::open(&b.path("m.gguf")).unwrap();
        for (name, info) in
            mixed.tensors().iter().filter(|(_, info)| matches!(info.kind, Encoding::Blocks(_)))
        {
            let own = decode(info.kind, mixed.bytes(info));
            let exact = decode(crate::F32, plain.bytes(&plain.tensors()[name]));
            for (own, exact) in own.chunks(256).zip(exact.chunks(256)) {
                let size = exact.iter().fold(0f32, |m, x| m.max(x.abs()));
                let off = own.iter().zip(exact).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
                let most = largest.entry(info.kind.name()).or_default();
                *most = most.max(off / size);
            }
        }
    }
    println!("{largest:?}");
    // These values are uniform: Q4_0 reaches one step at the end of its range, the others half a step, and K types what
    // their rounded scales add.
    let bounds = [
        ("Q2_K", 0.5),
        ("Q3_K", 0.3),
        ("Q4_0", 0.13),
        ("Q4_1", 0.07),
        ("Q4_K", 0.12),
        ("Q5_0", 0.065),
        ("Q5_1", 0.035),
        ("Q5_K", 0.07),
        ("Q6_K", 0.025),
    ];
    let kinds = largest.keys().copied();
    assert!(kinds.eq(bounds.iter().map(|(kind, _)| *kind)), "{largest:?}");
    for (kind, bound) in bounds {
        assert!(largest[kind] <= bound, "{kind}: {largest:?}");
    }
}
