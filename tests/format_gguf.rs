//! GGUF against the Python `gguf` package and llama.cpp's own conversion, and the errors of damaged files.

#[path = "gguf/build.rs"]
mod build;

use build::{File, Meta, llama};
use finetune::format::{self, FormatError, ModelFiles, gguf::Gguf, gguf::Value as Stored, rounded::Bf16};
use finetune::model::config::{Rope, RopeScaling};
use finetune::numeric::dtype::Dtype;
use finetune::numeric::rng;
use finetune::numeric::tensor::Tensors;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tokenizers::{PreTokenizedString, PreTokenizer, Tokenizer};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/gguf").join(name)
}

#[test]
fn random_blocks_of_every_kind_have_the_reference_bits() {
    let file = Gguf::open(&golden("blocks.gguf")).unwrap();
    let expected = std::fs::read(golden("blocks.f32")).unwrap();
    assert_eq!(file.tensors().len(), 14);
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

/// Published files, with the hashes that `tests/gguf/real_blocks.py` computes: SmolLM2's, and any others that are
/// there.
#[test]
fn real_blocks_have_the_bits_of_the_package() {
    let of = |key: &str| std::env::var_os(key).map(PathBuf::from);
    let (smollm2, other) = (of("FINETUNE_SMOLLM2_GGUF"), of("FINETUNE_REAL_BLOCKS"));
    if smollm2.is_none() && other.is_none() {
        return eprintln!(
            "skipped: no FINETUNE_SMOLLM2_GGUF and no FINETUNE_REAL_BLOCKS (a .gguf with its .sums)"
        );
    }
    if let Some(path) = smollm2 {
        real_blocks(&path, &golden("SmolLM2-135M-Instruct.Q4_1.sums"));
    }
    if let Some(path) = other {
        real_blocks(&path, &path.with_extension("sums"));
    }
}

fn real_blocks(path: &Path, sums: &Path) {
    let (file, mut kinds) = (Gguf::open(path).unwrap(), BTreeMap::new());
    let sums = std::fs::read_to_string(sums).unwrap();
    assert_eq!(sums.lines().count(), file.tensors().len());
    for line in sums.lines() {
        let [kind, sum, name] = line.splitn(3, ' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        assert_eq!(file.tensors()[name].kind.name(), kind, "{name}");
        let bytes = Dtype::F32.narrow(&file.values(name).unwrap());
        let ours: String = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(ours, sum, "{name}");
        *kinds.entry(kind).or_insert(0) += 1;
    }
    println!("{}: {kinds:?} have the package's bits", path.display());
}

/// `a` and `b` have the same tensors with the same values.
fn same_weights(a: &dyn Tensors, b: &dyn Tensors) {
    assert_eq!(a.names(), b.names());
    for name in a.names() {
        let (x, y) = (a.tensor(&name).unwrap().unwrap(), b.tensor(&name).unwrap().unwrap());
        assert_eq!(x.shape, y.shape, "{name}");
        assert!(x.dtype.widen(&x.bytes) == y.dtype.widen(&y.bytes), "{name} differs");
    }
}

#[test]
fn small_llama_is_read_under_hugging_face_names() {
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
    let tokenizer: Tokenizer = model.tokenizer.tokenizer_json.parse().unwrap();
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

fn open(file: &File) -> Result<ModelFiles, FormatError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, file.bytes()).unwrap();
    format::open(&path)
}

fn tokenizer_of(file: &File) -> Tokenizer {
    open(file).unwrap().tokenizer.tokenizer_json.parse().unwrap()
}

fn golden_tokenizers() -> Value {
    serde_json::from_slice(&std::fs::read(golden("tokenizers.json")).unwrap()).unwrap()
}

fn strings(v: &Value) -> Vec<String> {
    serde_json::from_value(v.clone()).unwrap()
}

fn words(all: &[&str]) -> Vec<String> {
    all.iter().map(|s| (*s).to_owned()).collect()
}

#[test]
fn every_pre_tokenizer_splits_as_published() {
    let expected = golden_tokenizers();
    let texts = strings(&expected["texts"]);
    for (pre, pieces) in expected["pre"].as_object().unwrap() {
        let file = llama(&words(&["a", "b"])).set("tokenizer.ggml.pre", Meta::Text(pre.clone()));
        let tokenizer = tokenizer_of(&file);
        for (text, pieces) in texts.iter().zip(pieces.as_array().unwrap()) {
            let mut cut: PreTokenizedString = match tokenizer.get_normalizer() {
                Some(n) => {
                    let mut text = tokenizers::NormalizedString::from(text.as_str());
                    tokenizers::Normalizer::normalize(n, &mut text).unwrap();
                    text.into()
                }
                None => text.as_str().into(),
            };
            tokenizer.get_pre_tokenizer().unwrap().pre_tokenize(&mut cut).unwrap();
            let splits =
                cut.get_splits(tokenizers::OffsetReferential::Original, tokenizers::OffsetType::Byte);
            let splits: Vec<String> = splits.into_iter().map(|s| s.0.to_owned()).collect();
            assert_eq!(splits, strings(pieces), "{pre}: {text:?}");
        }
    }
}

fn sentencepiece(golden: &Value) -> File {
    let g = &golden["sentencepiece"];
    let scores: Vec<f32> = serde_json::from_value(g["scores"].clone()).unwrap();
    let types: Vec<i32> = serde_json::from_value(g["types"].clone()).unwrap();
    llama(&strings(&g["tokens"]))
        .set("tokenizer.ggml.model", Meta::Text("llama".into()))
        .set("tokenizer.ggml.pre", Meta::Text("default".into()))
        .set("tokenizer.ggml.scores", Meta::Floats(scores))
        .set("tokenizer.ggml.token_type", Meta::Ints(types))
        .set("tokenizer.ggml.unknown_token_id", Meta::U32(0))
        .set("tokenizer.ggml.bos_token_id", Meta::U32(1))
        .set("tokenizer.ggml.eos_token_id", Meta::U32(2))
}

#[test]
fn sentencepiece_merges_and_ids_match_transformers() {
    let golden = golden_tokenizers();
    let file = sentencepiece(&golden);
    let json: Value = serde_json::from_str(&open(&file).unwrap().tokenizer.tokenizer_json).unwrap();
    assert_eq!(json["model"]["merges"], golden["sentencepiece"]["merges"]);
    let tokenizer = tokenizer_of(&file);
    let texts = strings(&golden["texts"]);
    for (text, ids) in texts.iter().zip(golden["sentencepiece"]["ids"].as_array().unwrap()) {
        let ids: Vec<u32> = serde_json::from_value(ids.clone()).unwrap();
        assert_eq!(tokenizer.encode(text.as_str(), false).unwrap().get_ids(), ids, "{text:?}");
        // BOS is added by default, and decoding removes the space that encoding puts in front.
        let with = tokenizer.encode(text.as_str(), true).unwrap();
        assert_eq!(with.get_ids()[0], 1);
        assert_eq!(&tokenizer.decode(&ids, false).unwrap(), text);
    }
    let bare = tokenizer_of(&file.set("tokenizer.ggml.add_bos_token", Meta::Bool(false)));
    assert_eq!(bare.encode("a", true).unwrap().get_ids(), bare.encode("a", false).unwrap().get_ids());
}

#[test]
fn special_tokens_are_added_where_the_file_says() {
    let file = llama(&words(&["a", "<s>", "</s>"]))
        .set("tokenizer.ggml.token_type", Meta::Ints(vec![1, 3, 3]))
        .set("tokenizer.ggml.bos_token_id", Meta::U32(1))
        .set("tokenizer.ggml.eos_token_id", Meta::U32(2));
    let ids = |file: &File| tokenizer_of(file).encode("a", true).unwrap().get_ids().to_vec();
    assert_eq!(ids(&file), [0]);
    let llama3 = file.clone().set("tokenizer.ggml.pre", Meta::Text("llama-bpe".into()));
    assert_eq!(ids(&llama3), [1, 0]);
    let both = file.set("tokenizer.ggml.add_bos_token", Meta::Bool(true));
    assert_eq!(ids(&both.set("tokenizer.ggml.add_eos_token", Meta::Bool(true))), [1, 0, 2]);
}

/// Checks the error of a file: one line with its name, and whether it is a configuration error or damage.
fn check(file: File, configuration: bool, said: &str) {
    let error = open(&file).map(drop).unwrap_err();
    let text = error.to_string();
    assert!(text.contains(said) && text.contains("m.gguf"), "{text:?} lacks {said:?}");
    assert_eq!((text.lines().count(), error.is_configuration()), (1, configuration), "{text}");
}

#[test]
fn unsupported_files_are_refused_by_name() {
    let base = || llama(&words(&["a", "b"]));
    let text = |s: &str| Meta::Text(s.into());
    open(&base()).unwrap();
    check(base().set("general.architecture", text("gemma2")), true, "architecture 'gemma2'");
    check(base().set("split.count", Meta::U32(3)), true, "a split GGUF; join its parts");
    check(base().set("general.type", text("adapter")), true, "a GGUF of type 'adapter'");
    check(base().set("llama.expert_count", Meta::U32(8)), true, "mixture of experts");
    check(base().set("llama.rope.scaling.type", text("longrope")), true, "rope scaling 'longrope'");
    let yarn = base().set("llama.rope.scaling.type", text("yarn"));
    check(yarn.clone(), false, "metadata llama.rope.scaling.original_context_length is missing");
    let yarn = yarn.set("llama.rope.scaling.original_context_length", Meta::U32(64));
    open(&yarn).unwrap();
    let other = yarn.set("llama.rope.scaling.yarn_ext_factor", Meta::F32(0.5));
    check(other, true, "YaRN with 'rope.scaling.yarn_ext_factor'");
    check(base().set("llama.rope.dimension_count", Meta::U32(2)), true, "a part of the head");
    check(base().set("tokenizer.ggml.pre", text("mystery")), true, "pre-tokenizer 'mystery'");
    check(base().without("tokenizer.ggml.pre"), true, "pre-tokenizer '(none)'");
    check(base().set("tokenizer.ggml.model", text("bert")), true, "tokenizer model 'bert'");
    check(base().without("tokenizer.ggml.tokens"), true, "without a tokenizer");
    let mut mamba = base().tensor("blk.0.ssm_in.weight", &[4, 4], 0, 32);
    mamba.data = 96;
    check(mamba, true, "tensor 'blk.0.ssm_in.weight' is not one of a plain decoder");
    check(base().tensor("x", &[256], 23, 0), true, "tensor 'x' is stored as IQ4_XS");
    check(base().tensor("x", &[256], 99, 0), true, "stored as type 99");
    for version in [1, 4, 3u32.swap_bytes()] {
        check(File { version, ..base() }, true, "GGUF");
    }
    let mut factors = base().tensor("rope_freqs.weight", &[2], 0, 32);
    factors.data = 64;
    check(factors, true, "rope_freqs.weight");
}

/// The metadata of a file of another architecture than `llama`.
fn of_architecture(name: &str) -> File {
    let base = llama(&words(&["a", "b"]));
    let metadata =
        base.metadata.into_iter().map(|(key, value)| (key.replacen("llama.", &format!("{name}."), 1), value));
    File { metadata: metadata.collect(), ..base }.set("general.architecture", Meta::Text(name.into()))
}

#[test]
fn keys_of_newer_families_are_read() {
    let gemma = || of_architecture("gemma3").set("gemma3.attention.sliding_window", Meta::U32(512));
    let config =
        |file: &File| finetune::model::config::Config::from_json(&open(file).unwrap().config).unwrap();
    let read =
        config(&gemma().set("gemma3.block_count", Meta::U32(7)).set("gemma3.rope.freq_base", Meta::F32(1e6)));
    let slides: Vec<bool> = read.windows.iter().map(Option::is_some).collect();
    assert_eq!(slides, [true, true, true, true, true, false, true]);
    assert_eq!((read.rope_of(0).theta, read.rope_of(5).theta), (1e4, 1e6));
    // Heads of 4; of the one with 62 layers hidden / heads, which is 4 too.
    assert_eq!((read.score_scale, read.embedding_scale, read.tied), (0.5, 2.0, true));
    let order = gemma().set("gemma3.attention.sliding_window_pattern", Meta::U32(3));
    check(order, true, "an order of sliding layers of its own");
    let granite = [
        ("attention.scale", 0.015625),
        ("embedding_scale", 12.0),
        ("residual_scale", 0.22),
        ("logit_scale", 8.0),
    ];
    let granite = granite
        .into_iter()
        .fold(of_architecture("granite"), |file, (key, x)| file.set(&format!("granite.{key}"), Meta::F32(x)));
    let read = config(&granite);
    let scales = [read.score_scale, read.embedding_scale, read.residual_scale, read.logits_scale];
    assert_eq!(scales, [0.015625, 12.0, 0.22, 8.0]);
    let granite_4 = granite.set("granite.rope.scaling.finetuned", Meta::Bool(false));
    let each = granite_4.clone().set("granite.attention.head_count_kv", Meta::Ints(vec![1]));
    for file in [granite_4.clone(), each] {
        let read = config(&file);
        assert_eq!(
            (read.family.name, &read.rotated[..], read.heads.kv),
            ("GraniteMoeHybrid", &[false][..], 1)
        );
    }
    let unlike = granite_4.set("granite.attention.head_count_kv", Meta::Ints(vec![1, 2]));
    check(unlike, false, "granite.attention.head_count_kv is missing or unusable");
    let hybrid = of_architecture("granitehybrid").set("granitehybrid.ssm.inner_size", Meta::U32(8));
    check(hybrid, true, "architecture 'granitehybrid' (state space layers) is not supported");
    let experts = of_architecture("granitemoe").set("granitemoe.expert_count", Meta::U32(32));
    check(experts, true, "architecture 'granitemoe' (a mixture of experts) is not supported");
    let smollm3 = of_architecture("smollm3").set("smollm3.block_count", Meta::U32(4));
    assert_eq!(config(&smollm3).rotated, [true, true, true, false]);
    let olmo3 = of_architecture("olmo2").set("olmo2.attention.sliding_window", Meta::U32(8));
    assert_eq!(config(&olmo3).windows, [Some(8)]);
    let period = olmo3.set("olmo2.attention.sliding_window_pattern", Meta::U32(3));
    check(period, true, "an order of sliding layers of its own");
}

#[test]
fn keys_of_scaled_rotations_are_read() {
    let config =
        |file: &File| finetune::model::config::Config::from_json(&open(file).unwrap().config).unwrap();
    let yarn = |name: &str| {
        let key = |last: &str| format!("{name}.rope.scaling.{last}");
        of_architecture(name)
            .set(&key("type"), Meta::Text("yarn".into()))
            .set(&key("factor"), Meta::F32(8.0))
            .set(&key("original_context_length"), Meta::U32(64))
    };
    // An array of booleans: its type, its length, its values.
    let listed = |slides: u8| Meta::Raw(9, [&[7, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0][..], &[slides]].concat());
    let olmo3 = yarn("olmo2").set("olmo2.attention.sliding_window", Meta::U32(8));
    let factor = |x: f32| olmo3.clone().set("olmo2.rope.scaling.yarn_attn_factor", Meta::F32(x));
    for (slides, window) in [(1, Some(8)), (0, None)] {
        let own = factor(1.207_944_2).set("olmo2.attention.sliding_window_pattern", listed(slides));
        let read = config(&own.set("olmo2.rope.freq_base_swa", Meta::F32(5e5)));
        assert_eq!((read.family.name, &read.windows[..]), ("Olmo3", &[window][..]));
        assert!(matches!(read.rope.scaling, RopeScaling::Yarn { amplitude, .. } if amplitude > 1.2));
        assert_eq!(read.local_rope, Some(Rope { theta: 5e5, scaling: RopeScaling::Default }));
    }
    check(factor(1.3), true, "YaRN with 'rope.scaling.yarn_attn_factor'");
    // Mistral Small 3 of a newer converter.
    let small = of_architecture("mistral3");
    let small = config(&small.set("mistral3.rope.freq_base", Meta::F32(1e9)));
    assert_eq!((small.family.name, small.rope.theta), ("Llama", 1e9));
    let scaled = yarn("mistral3").set("mistral3.rope.scaling.yarn_log_multiplier", Meta::F32(1.0));
    check(scaled, true, "YaRN with 'rope.scaling.yarn_log_multiplier'");
    let ministral = yarn("mistral3").set("mistral3.attention.temperature_scale", Meta::F32(0.1));
    let plain = of_architecture("mistral3").set("mistral3.attention.temperature_scale", Meta::F32(0.1));
    check(plain, true, "architecture 'mistral3' without rope scaling by YaRN");
    let unscaled = 1.0 + 0.1 * 8f64.ln();
    for (multiplier, of_both) in [(None, unscaled), (Some(0.0), unscaled), (Some(1.0), 1.0)] {
        let key = "mistral3.rope.scaling.yarn_log_multiplier";
        let file = multiplier.iter().fold(ministral.clone(), |file, x| file.set(key, Meta::F32(*x)));
        match config(&file).rope.scaling {
            RopeScaling::Yarn { amplitude, growth, original, .. } => {
                assert_eq!((growth, original), (0.1, 64));
                assert!((amplitude - of_both).abs() < 1e-12, "{amplitude}");
            }
            other => panic!("{other:?}"),
        }
    }
    let one = of_architecture("phi3").tensor("rope_factors_long.weight", &[2], 0, 32);
    check(File { data: 64, ..one.clone() }, true, "rope scaling by LongRoPE (architecture 'phi3')");
    let both = File { data: 128, ..one.tensor("rope_factors_short.weight", &[2], 0, 64) };
    check(both.clone(), false, "phi3.rope.scaling.original_context_length is missing");
    let twice = both.set("phi3.rope.scaling.type", Meta::Text("linear".into()));
    check(twice, true, "rope scaling by LongRoPE (architecture 'phi3')");
    let llama = llama(&words(&["a", "b"])).tensor("rope_factors_long.weight", &[2], 0, 32);
    check(File { data: 64, ..llama }, true, "rope scaling by LongRoPE (architecture 'llama')");
}

/// Gate and up of Granite 4 are one matrix in Hugging Face. Types are ggml's numbers of F32, BF16, Q8_0 and Q4_0.
#[test]
fn two_tensors_are_the_halves_of_one_matrix() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let name = "model.layers.0.shared_mlp.input_linear.weight";
    for (gate, up, joined) in [(0, 0, "F32"), (30, 30, "BF16"), (0, 30, "F32"), (8, 8, "Q8_0"), (8, 2, "F32")]
    {
        let mut file = of_architecture("granite")
            .set("granite.rope.scaling.finetuned", Meta::Bool(true))
            .tensor("blk.0.ffn_up.weight", &[32, 2], up, 32)
            .tensor("blk.0.ffn_gate.weight", &[32, 2], gate, 288);
        file.data = 800;
        let mut bytes = file.bytes();
        let first = bytes.len() - file.data;
        bytes[first..].iter_mut().zip(0u32..).for_each(|(byte, i)| *byte = (i * 37 % 60) as u8);
        std::fs::write(&path, bytes).unwrap();
        let (model, stored) = (format::open(&path).unwrap(), Gguf::open(&path).unwrap());
        let halves = ["blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"];
        let tensor = model.tensors.tensor(name).unwrap().unwrap();
        let want = halves.map(|half| stored.values(half).unwrap()).concat();
        assert!(tensor.dtype.widen(&tensor.bytes) == want, "{gate} {up}");
        let about = model.tensors.about(name).unwrap().unwrap();
        assert_eq!((about.shape, tensor.shape, about.encoding.name()), (vec![4, 32], vec![4, 32], joined));
        let blocks = model.tensors.blocks(name).unwrap().map(|blocks| blocks.bytes.to_vec());
        let packed = halves.map(|half| stored.bytes(&stored.tensors()[half]).to_vec()).concat();
        assert_eq!(blocks, (joined == "Q8_0").then_some(packed));
        let parts = [(); 2].map(|()| model.tensors.block_parts(name).unwrap());
        assert_eq!(parts[0].as_ref().map(Vec::len), (joined == "Q8_0").then_some(2));
        for ((one, other), half) in parts[0].iter().flatten().zip(parts[1].iter().flatten()).zip(halves) {
            assert!((one.rows, &*one.bytes) == (2, stored.bytes(&stored.tensors()[half])), "{half}");
            assert_eq!(one.bytes.as_ptr(), other.bytes.as_ptr(), "{half} is copied");
        }
        file.tensors.last_mut().unwrap().1[0] = 64;
        let error = open(&file).map(drop).unwrap_err().to_string();
        assert!(error.contains("the other part of its matrix"), "{error}");
    }
}

/// Layers behind those of the model predict further tokens: neither they nor their `nextn` tensors are weights.
#[test]
fn layers_that_predict_further_tokens_are_not_read() {
    let sizes =
        [("conv_kernel", 4), ("state_size", 2), ("group_count", 1), ("time_step_rank", 2), ("inner_size", 4)];
    let set = |file: File, (key, n): (&str, u32)| file.set(&format!("qwen35.{key}"), Meta::U32(n));
    let of_rules = sizes
        .into_iter()
        .fold(of_architecture("qwen35"), |file, (key, n)| set(file, (&format!("ssm.{key}"), n)));
    let file = [("attention.key_length", 4), ("block_count", 5)].into_iter().fold(of_rules, set);
    let mut file = file
        .tensor("blk.3.attn_norm.weight", &[4], 0, 32)
        .tensor("blk.4.attn_norm.weight", &[4], 0, 64)
        .tensor("blk.4.nextn.eh_proj.weight", &[4, 4], 0, 96);
    file.data = 160;
    for (further, layers, last) in [(1, 4, "model.layers.3."), (0, 5, "model.layers.4.")] {
        let files = open(&set(file.clone(), ("nextn_predict_layers", further))).unwrap();
        let config = finetune::model::config::Config::from_json(&files.config).unwrap();
        assert_eq!(
            (config.layers, files.config["num_hidden_layers"].as_u64()),
            (layers, Some(layers as u64))
        );
        let names = files.tensors.names();
        let of_layers: Vec<&String> = names.iter().filter(|name| name.contains("layers.")).collect();
        assert!(
            of_layers.len() == layers - 3 && of_layers.iter().any(|name| name.starts_with(last)),
            "{names:?}"
        );
    }
    check(set(file.clone(), ("nextn_predict_layers", 5)), false, "qwen35.nextn_predict_layers");
    check(set(file, ("ssm.group_count", u32::MAX)), false, "qwen35.ssm.");
}

#[test]
fn layers_without_key_value_heads_have_a_convolution() {
    let kv = "lfm2.attention.head_count_kv";
    let lfm2 = of_architecture("lfm2")
        .set("lfm2.block_count", Meta::U32(3))
        .set("lfm2.shortconv.l_cache", Meta::U32(4))
        .set(kv, Meta::Ints(vec![0, 1, 0]));
    let config = finetune::model::config::Config::from_json(&open(&lfm2).unwrap().config).unwrap();
    let taps: Vec<Option<usize>> = (0..3).map(|layer| config.taps(layer)).collect();
    assert_eq!((taps, config.heads.kv, config.tied), (vec![Some(4), None, Some(4)], 1, true));
    let missing = lfm2.clone().without("lfm2.shortconv.l_cache");
    check(missing, false, "lfm2.shortconv.l_cache is missing or unusable");
    for bad in [Meta::Ints(vec![0, 1]), Meta::U32(1)] {
        check(lfm2.clone().set(kv, bad), false, "lfm2.attention.head_count_kv is missing or unusable");
    }
    let unlike = lfm2.set(kv, Meta::Ints(vec![1, 2, 0]));
    check(unlike, true, "layers with unlike numbers of key/value heads");
}

#[test]
fn damaged_files_are_named() {
    let base = || llama(&words(&["a", "b"]));
    let text = |s: &str| Meta::Text(s.into());
    check(File { pairs: Some(u64::MAX), ..base() }, false, "announces 18446744073709551615 metadata entries");
    check(File { count: Some(1 << 60), ..base() }, false, "tensors where");
    let huge = [4u32.to_le_bytes().to_vec(), u64::MAX.to_le_bytes().to_vec()].concat();
    check(base().set("x", Meta::Raw(9, huge)), false, "array elements");
    check(base().set("x", Meta::Raw(8, (1u64 << 40).to_le_bytes().to_vec())), false, "cut short");
    check(base().set("x", Meta::Raw(77, vec![0; 8])), false, "unknown type 77");
    let nested = [9u32.to_le_bytes().to_vec(), 1u64.to_le_bytes().to_vec()].concat().repeat(100);
    check(base().set("x", Meta::Raw(9, nested)), false, "nested");
    let not_utf8 = [1u64.to_le_bytes().to_vec(), vec![0xff]].concat();
    check(base().set("x", Meta::Raw(8, not_utf8)), false, "not UTF-8");
    check(base().set("general.alignment", Meta::U32(0)), false, "general.alignment");
    check(base().set("general.alignment", Meta::U32(33)), false, "general.alignment");
    let mut twice = base();
    twice.metadata.push(("llama.block_count".into(), Meta::U32(1)));
    check(twice, false, "'llama.block_count' appears twice");
    check(base().tensor("token_embd.weight", &[4, 2], 0, 0), false, "'token_embd.weight': appears twice");
    check(base().tensor("x", &[4], 0, 0), false, "overlaps");
    check(base().tensor("x", &[4], 0, 16), false, "begins at 16");
    check(base().tensor("x", &[4], 0, 1 << 40), false, "outside the file");
    check(base().tensor("x", &[4], 0, u64::MAX - 31), false, "outside the file");
    check(base().tensor("x", &[1 << 40, 1 << 40], 0, 0), false, "outside the file");
    check(base().tensor("x", &[4; 5], 0, 0), false, "5 dimensions");
    check(base().tensor("x", &[33], 8, 0), false, "whole blocks of Q8_0");
    // Shapes without numbers, but with dimensions that code could iterate over or divide by.
    for dims in [&[][..], &[0], &[0, 1 << 62], &[32, 0]] {
        check(base().tensor("blk.0.attn_q.weight", dims, 8, 64), false, "'blk.0.attn_q.weight': has shape [");
    }
    let unknown = [99u32.to_le_bytes().to_vec(), 1u64.to_le_bytes().to_vec(), vec![0; 8]].concat();
    check(base().set("x", Meta::Raw(9, unknown)), false, "an array of unknown type 99");
    check(base().without("llama.block_count"), false, "llama.block_count is missing");
    check(base().set("llama.attention.head_count", Meta::U32(0)), false, "head_count");
    check(base().set("llama.attention.layer_norm_rms_epsilon", Meta::F32(f32::NAN)), false, "epsilon");
    check(base().set("tokenizer.ggml.eos_token_id", Meta::U32(9)), false, "eos_token_id is 9");
    check(base().set("tokenizer.ggml.token_type", Meta::Ints(vec![1])), false, "1 token types for 2");
    check(base().set("tokenizer.ggml.merges", Meta::Texts(words(&["a c"]))), false, "merge 'a c'");
    check(llama(&words(&["a", "a"])), false, "tokens 0 and 1 are both 'a'");
    check(base().set("tokenizer.ggml.model", text("llama")), false, "scores");
    let mut bare = base();
    bare.tensors.clear();
    check(bare, false, "'token_embd.weight': is missing");
}

/// Unused arrays keep their packed form: an array of bytes must not become thirty times as large in memory.
#[test]
fn unused_arrays_stay_packed() {
    let array = |kind: u32, n: u64, bytes: &[u8]| {
        Meta::Raw(9, [&kind.to_le_bytes()[..], &n.to_le_bytes(), bytes].concat())
    };
    let inner = [0u32.to_le_bytes().to_vec(), 2u64.to_le_bytes().to_vec(), vec![5, 6]].concat();
    let file =
        llama(&words(&["a", "b"])).set("bytes", array(0, 3, &[1, 2, 3])).set("wide", array(10, 1, &[7; 8]));
    let file = file.set("nested", array(9, 2, &inner.repeat(2))).set("last", Meta::U32(9));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, file.bytes()).unwrap();
    let read = Gguf::open(&path).unwrap();
    for (key, kind, packed) in
        [("bytes", 0, vec![1, 2, 3]), ("wide", 10, vec![7; 8]), ("nested", 9, inner.repeat(2))]
    {
        assert_eq!(read.get(key), Some(&Stored::Others { kind, packed }), "{key}");
    }
    assert_eq!(read.get("last").and_then(Stored::as_u64), Some(9));
}

/// Truncated anywhere and with any byte changed: an error or a model, never a panic and no large allocation.
#[test]
fn damaged_files_give_an_error_or_a_model() {
    let whole = std::fs::read(golden("tiny.gguf")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    for n in (0..whole.len()).step_by(61) {
        std::fs::write(&path, &whole[..n]).unwrap();
        assert!(format::open(&path).is_err(), "{n} of {}", whole.len());
    }
    let mut stream = rng::Stream::new(&[41]);
    let mut opened = 0;
    for _ in 0..600 {
        let mut bytes = whole.clone();
        // Nearly everything that can fail is in the first third, before the data.
        let at = stream.below(whole.len() as u32 / 3) as usize;
        bytes[at] = stream.bits() as u8;
        std::fs::write(&path, &bytes).unwrap();
        if let Ok(model) = format::open(&path) {
            opened += 1;
            model.tensors.names().iter().for_each(|name| drop(model.tensors.tensor(name)));
        }
    }
    assert!(opened > 0, "some bytes do not matter");
}
