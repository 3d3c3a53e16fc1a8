//! Exports against other implementations: the Python `gguf` package, ggml's reference quantisers, llama.cpp's
//! converters (their results are in `tests/golden/export`; `tests/runners.sh` runs the real ones), and the rules of
//! vLLM's `peft_helper`. Also the command itself: every form, and the messages for bad input.

mod cli_fixture;
#[path = "export/families.rs"]
mod families;
#[path = "export/mixes.rs"]
mod mixes;
#[path = "export/mlx.rs"]
mod mlx;
#[path = "export/random_base.rs"]
mod random_base;
#[path = "export/refused.rs"]
mod refused;
#[path = "export/tower.rs"]
mod tower;

use cli_fixture::{Bench, stderr};
use finetune::families::{LLAMA, QWEN2};
use finetune::format::FormatError;
use finetune::format::gguf::adapter::{self, About, LoraMatrix};
use finetune::format::gguf::order::Orders;
use finetune::format::gguf::{self, Gguf, Meta, Metadata, Planned, Value as Stored, encode};
use finetune::format::peft::{self, AdapterConfig, Extras, TaskType, TensorRef};
use finetune::numeric::block::{Block, Encoding};
use finetune::numeric::dtype::Dtype;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

const F32: Encoding = Encoding::Plain(Dtype::F32);

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn quantised_blocks_have_the_bits_of_gguf_and_ggml() {
    let numbers = Dtype::F32.widen(&std::fs::read(golden("export/numbers.f32")).unwrap());
    let file = Gguf::open(&golden("export/quantised.gguf")).unwrap();
    let mut seen = 0;
    for &block in Block::ALL.iter().filter(|b| **b != Block::NF4) {
        let info = &file.tensors()[block.name()];
        assert_eq!(info.kind, Encoding::Blocks(block));
        let (ours, theirs) = (encode(info.kind, &numbers).unwrap(), file.bytes(info));
        let size = block.bytes();
        for (i, (a, b)) in ours.chunks(size).zip(theirs.chunks(size)).enumerate() {
            assert_eq!(a, b, "{} block {i}", block.name());
        }
        assert_eq!(ours.len(), theirs.len());
        seen += 1;
    }
    assert_eq!(seen, 11);
    assert!(encode(Encoding::Blocks(Block::Q8_0), &numbers[..31]).is_err());
}

/// Writes a GGUF file again, with changed metadata and without the first `less` bytes of every tensor.
fn written_again(
    from: &Path,
    to: &Path,
    change: impl Fn(&mut Metadata),
    less: usize,
) -> Result<(), FormatError> {
    let from = Gguf::open(from).unwrap();
    let mut metadata = Metadata::default();
    from.raw_metadata().for_each(|(key, raw)| metadata.set(key, Meta::Raw(raw.to_vec())));
    change(&mut metadata);
    let mut order: Vec<_> = from.tensors().iter().collect();
    order.sort_by_key(|(_, info)| from.bytes(info).as_ptr());
    let plan = |(name, info): &(&String, &gguf::Info)| Planned {
        name: (*name).clone(),
        shape: info.shape.clone(),
        kind: info.kind,
    };
    let plans: Vec<_> = order.iter().map(plan).collect();
    gguf::write(to, &metadata, &plans, |t| Ok(from.bytes(&from.tensors()[&t.name])[less..].to_vec()))
}

/// A file of the `gguf` package that is read and written again has the same bytes.
#[test]
fn container_layout_matches_the_gguf_package() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["export/quantised.gguf", "gguf/blocks.gguf", "gguf/tiny.gguf", "export/llama/lora.gguf"] {
        let (from, to) = (golden(name), dir.path().join("again.gguf"));
        written_again(&from, &to, |_| (), 0).unwrap();
        assert!(std::fs::read(&to).unwrap() == std::fs::read(&from).unwrap(), "{name}");
        let short = written_again(&from, &to, |_| (), 1);
        assert!(short.unwrap_err().to_string().contains("were announced"), "{name}");
    }
}

/// PEFT's tensors written by us equal the converter's file, and the converter's file read by us gives PEFT's tensors.
#[test]
fn adapter_matches_the_llama_cpp_converter() {
    let dir = tempfile::tempdir().unwrap();
    for (name, family, paired) in [("llama", &LLAMA, Some((4, 2))), ("qwen2", &QWEN2, None)] {
        let orders = Orders { paired, ..Orders::default() };
        let from = golden("export").join(name);
        let peft = peft::read(&from).unwrap();
        let mut parts: Vec<LoraMatrix> = peft
            .tensors
            .into_iter()
            .map(|t| LoraMatrix { name: t.name, rows: t.rows, cols: t.cols, values: t.values })
            .collect();
        let about = About {
            family,
            orders,
            name: "Llama".into(),
            base_id: Some("owner/base".into()),
            alpha: peft.config.lora_alpha as f32,
        };
        let to = dir.path().join("ours.gguf");
        adapter::save(&to, &about, &parts, F32).unwrap();
        let (ours, theirs) = (Gguf::open(&to).unwrap(), Gguf::open(&from.join("lora.gguf")).unwrap());
        assert_eq!(ours.tensors().len(), 16);
        assert!(ours.tensors().keys().eq(theirs.tensors().keys()));
        for (tensor, info) in theirs.tensors() {
            let own = &ours.tensors()[tensor];
            assert_eq!((&own.shape, own.kind), (&info.shape, info.kind), "{name} {tensor}");
            assert!(ours.bytes(own) == theirs.bytes(info), "{name} {tensor}");
        }
        for key in ["general.architecture", "general.type", "adapter.type", "adapter.lora.alpha"] {
            assert_eq!(ours.get(key), theirs.get(key), "{name} {key}");
        }
        let read = adapter::load(&from.join("lora.gguf"), family, orders).unwrap();
        parts.sort_by(|a, b| a.name.cmp(&b.name));
        assert!(read.parts == parts && read.alpha == 8.0 && read.architecture == name, "{name}");
    }
    let model = adapter::load(&golden("gguf/tiny.gguf"), &LLAMA, Orders::default()).unwrap_err().to_string();
    assert!(model.contains("not a LoRA adapter"), "{model}");
    let heads = adapter::load(
        &golden("export/llama/lora.gguf"),
        &LLAMA,
        Orders { paired: Some((5, 2)), ..Orders::default() },
    )
    .unwrap_err()
    .to_string();
    assert!(heads.contains("32 rows do not divide into 5 heads"), "{heads}");
}

/// Creates an adapter that changes nothing, for a base.
fn adapter_without_effect(b: &Bench, name: &str) {
    let config = AdapterConfig {
        task: TaskType::CausalLm,
        base_model_name_or_path: None,
        revision: None,
        r: 1,
        lora_alpha: 1.0,
        lora_dropout: 0.0,
        target_modules: vec!["q_proj".into()],
        layers: Vec::new(),
        rank_pattern: Vec::new(),
        alpha_pattern: Vec::new(),
        token_rows: vec![],
        path: "",
        use_rslora: false,
        use_dora: false,
    };
    let zeros = vec![0f32; 128];
    let names: Vec<String> = (0..4)
        .flat_map(|i| {
            ["A", "B"]
                .map(|ab| format!("base_model.model.model.layers.{i}.self_attn.q_proj.lora_{ab}.weight"))
        })
        .collect();
    let tensor = |name| TensorRef { name, rows: 1, cols: 128, values: &zeros };
    let tensors: Vec<TensorRef> = names
        .iter()
        .map(|name| {
            if name.contains("lora_A") {
                tensor(name)
            } else {
                TensorRef { rows: 128, cols: 1, ..tensor(name) }
            }
        })
        .collect();
    peft::write(&b.path(name), &config, &tensors, &Extras::default()).unwrap();
}

/// A long list or text in the form in which `make.py` writes it.
fn fact(value: &Stored) -> Value {
    let plain = match value {
        Stored::Int(i) => json!(*i as i64),
        Stored::Float(f) => json!(f),
        Stored::Bool(b) => json!(b),
        Stored::Text(s) => json!(s),
        Stored::Texts(all) => json!(all),
        Stored::Ints(all) => json!(all),
        other => panic!("{other:?}"),
    };
    let length = plain.as_array().map(Vec::len).filter(|&n| n > 16);
    match length.or(plain.as_str().map(|s| s.chars().count()).filter(|&n| n > 200)) {
        Some(length) => json!({ "length": length, "sha256": sha(plain.to_string().as_bytes()) }),
        None => plain,
    }
}

fn sha(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn merged_gguf_matches_the_llama_cpp_converter() {
    let b = Bench::new();
    adapter_without_effect(&b, "nothing");
    b.ok("export nothing --model demo --to merged-gguf --outtype f16 -o demo.gguf");
    let ours = Gguf::open(&b.path("demo.gguf")).unwrap();
    let theirs = read_json(&golden("export/demo.json"));
    for (key, value) in theirs["metadata"].as_object().unwrap() {
        // The model's name and the label of its size are not compared.
        if !["general.name", "general.size_label"].contains(&key.as_str()) {
            let own = fact(ours.get(key).unwrap_or_else(|| panic!("{key}")));
            // Parsing a decimal may be off in the last bit.
            let near = |a: f64, b: f64| (a - b).abs() <= 1e-12 * b.abs();
            let same = own.as_f64().zip(value.as_f64()).is_some_and(|(a, b)| near(a, b));
            assert!(same || &own == value, "{key}: {own} {value}");
        }
    }
    // Keys that only our file has: whether special tokens are added around a text, and the origin of the file.
    for key in ours.metadata().keys().filter(|k| theirs["metadata"].get(k.as_str()).is_none()) {
        assert!(
            ["tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token", "finetune.export"]
                .contains(&key.as_str()),
            "{key}"
        );
    }
    let tensors = theirs["tensors"].as_object().unwrap();
    assert!(ours.tensors().keys().eq(tensors.keys()));
    for (name, info) in ours.tensors() {
        let shape: Vec<usize> = info.shape.iter().rev().copied().collect();
        assert_eq!(json!([info.kind.name(), shape, sha(ours.bytes(info))]), tensors[name], "{name}");
    }
}

#[test]
fn every_export_generates_the_text_of_the_adapter() {
    let b = Bench::new();
    b.ok("demo --data rows.jsonl --max-steps 40 --learning-rate 5e-3 --rank 8 --alpha 6 --rslora -q -o out");
    let prompt = "--prompt 'Show the branch ' --max-new-tokens 16";
    let tuned = b.ok(&format!("generate --adapter out {prompt}"));
    assert!(tuned.starts_with("git branch"), "{tuned:?}");
    for outtype in ["base", "f32", "f16", "q8_0"] {
        let said = b.ok(&format!("export out --to merged-gguf --outtype {outtype} --overwrite -o m.gguf"));
        assert!(said.contains("read back: logits within"), "{said}");
        let text = b.ok(&format!("generate ./m.gguf {prompt}"));
        assert!(text == tuned || outtype == "q8_0" && text.starts_with("git branch"), "{outtype}: {text:?}");
    }
    // rsLoRA's scale is folded in: alpha / sqrt(8) = alpha' / 8
    let said = b.ok("export out --to gguf-lora -o a.gguf");
    assert!(said.contains("read back: logits within"), "{said}");
    let (file, config) =
        (Gguf::open(&b.path("a.gguf")).unwrap(), read_json(&b.path("out/adapter_config.json")));
    let alpha = config["lora_alpha"].as_f64().unwrap() * 8f64.sqrt();
    assert!((file.get("adapter.lora.alpha").unwrap().as_f64().unwrap() - alpha).abs() < 1e-4);
    let smaller = b.ok("export out --to gguf-lora --outtype q8_0 -o a8.gguf --json");
    assert_eq!(serde_json::from_str::<Value>(&smaller).unwrap()["weights"], "Q8_0");
    let kinds = Gguf::open(&b.path("a8.gguf")).unwrap();
    // rows of 128 are whole blocks, rows of 8 are none
    assert_eq!(kinds.tensors()["blk.0.attn_q.weight.lora_a"].kind, Encoding::Blocks(Block::Q8_0));
    assert_eq!(kinds.tensors()["blk.0.attn_q.weight.lora_b"].kind, Encoding::Plain(Dtype::F16));
}

/// On a GGUF base: untouched blocks stay, metadata is copied, Ollama gets the adapter.
#[test]
fn gguf_base_keeps_untouched_blocks_and_metadata() {
    let b = Bench::new();
    adapter_without_effect(&b, "nothing");
    b.ok("export nothing --model demo --to merged-gguf --outtype q8_0 -o ours.gguf");
    // As other programs write it: a mix whose name no tensor states, and blocks made with an importance matrix.
    let others = |all: &mut Metadata| {
        all.set("general.file_type", Meta::U32(14));
        all.set("quantize.imatrix.file", Meta::Text("calibration".into()));
        all.remove(|key| key == "finetune.export");
    };
    written_again(&b.path("ours.gguf"), &b.path("base.gguf"), others, 0).unwrap();
    b.ok("./base.gguf --data rows.jsonl --max-steps 2 --target-modules v_proj -q -o out");
    b.ok("export out --to merged-gguf -o m.gguf");
    let (base, merged) = (Gguf::open(&b.path("base.gguf")).unwrap(), Gguf::open(&b.path("m.gguf")).unwrap());
    let without = |file: &Gguf, key: &str| {
        let mut all = file.metadata().clone();
        assert!(all.remove(key).is_some(), "{key}");
        all
    };
    assert!(without(&base, "quantize.imatrix.file") == without(&merged, "finetune.export"));
    for (name, info) in base.tensors() {
        let now = &merged.tensors()[name];
        assert_eq!((now.kind, &now.shape), (info.kind, &info.shape), "{name}");
        assert_eq!(base.bytes(info) != merged.bytes(now), name.contains("attn_v.weight"), "{name}");
    }
    b.ok("export out --to ollama -o ollama");
    let modelfile = String::from_utf8(b.read("ollama/Modelfile")).unwrap();
    let from = format!("FROM {}", b.path("base.gguf").canonicalize().unwrap().display());
    for line in
        [from.as_str(), "ADAPTER ./adapter.gguf", "PARAMETER stop \"<|im_end|>\"", "PARAMETER num_ctx 512"]
    {
        assert!(modelfile.lines().any(|l| l == line), "{line}: {modelfile}");
    }
    assert!(!modelfile.contains("TEMPLATE"), "the base carries its own: {modelfile}");
    assert_eq!(Gguf::open(&b.path("ollama/adapter.gguf")).unwrap().tensors().len(), 8);
    // another template than the base's: written for Ollama if it belongs to a known family
    b.file(
        "llama3.jinja",
        "{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] + \
         '<|eot_id|>' }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
    );
    for (template, part) in
        [("llama3.jinja", "TEMPLATE \"\"\"{{- range .Messages }}<|start_header_id|>"), ("odd.jinja", "")]
    {
        b.file("odd.jinja", "{% for m in messages %}{{ m['content'] }}{% endfor %}");
        std::fs::copy(b.path(template), b.path("out/chat_template.jinja")).unwrap();
        let out = b.run("export out --to ollama --overwrite -o ollama");
        let modelfile = String::from_utf8(b.read("ollama/Modelfile")).unwrap();
        assert!(out.status.success() && modelfile.contains(part), "{modelfile}");
        assert_eq!(stderr(&out).contains("in no family"), part.is_empty(), "{}", stderr(&out));
        assert_eq!(modelfile.contains("TEMPLATE"), !part.is_empty(), "{modelfile}");
    }
    b.ok("export out --to ollama --outtype f16 -o whole");
    assert!(String::from_utf8(b.read("whole/Modelfile")).unwrap().contains("FROM ./model.gguf\n"));
    b.ok("export out --to ollama --outtype q4_k_m --overwrite -o whole");
    let kind = Gguf::open(&b.path("whole/model.gguf")).unwrap().tensors()["token_embd.weight"].kind;
    assert_eq!(kind, Encoding::Blocks(Block::Q8_0), "rows of 128 are no whole blocks of Q6_K");
    assert!(b.path("whole/model.gguf").exists() && !b.path("whole/adapter.gguf").exists());
}
