//! Adapters: possible targets, initial values, the required contents of an adapter's file; a merged model computes the
//! same as base and adapter; damaged bases are refused by the name of the tensor.

#[path = "parity/case.rs"]
mod case;
#[path = "stage_lora/choices.rs"]
mod choices;

use case::Case;
use finetune::backend::{Backend, Cpu};
use finetune::model::config::Config;
use finetune::model::decoder::{Build, Keep, initial_parameters};
use finetune::model::layout::{self, SCORE};
use finetune::model::lora::{self, LoraError, LoraSpec, MODULES, Named};
use finetune::model::memory::{self, Basis, Fit, Home, Load, Offload};
use finetune::model::merge::Merged;
use finetune::model::stage::{Output, Want};
use finetune::model::targets::Choice;
use finetune::model::weights::{ModelError, Weights};
use finetune::numeric::block::{Block, Encoding};
use finetune::numeric::dtype::Dtype;
use finetune::numeric::line::Line;
use finetune::numeric::tensor::{About, Tensor, Tensors};
use stages::Loads;
use std::borrow::Cow;

fn cases() -> Vec<Case> {
    case::golden().iter().map(|dir| Case::open(dir)).collect()
}

fn text(list: &[&str]) -> Vec<String> {
    list.iter().map(|s| (*s).to_owned()).collect()
}

#[test]
fn targets_are_suffixes_lists_or_all() {
    let config = &cases()[0].config;
    let resolve_on = |config: &Config, list: &[&str]| {
        let choice = Choice { targets: text(list), ..Choice::default() };
        let spec = choice.resolve(config, LoraSpec::none())?;
        assert_eq!(spec.exceptions, []);
        Ok::<_, LoraError>(spec.targets)
    };
    let resolve = |list: &[&str]| resolve_on(config, list);
    assert_eq!(resolve(&["all-linear"]), Ok(text(&MODULES)));
    assert_eq!(resolve(&["v_proj, q_proj"]), Ok(text(&["q_proj", "v_proj"])));
    assert_eq!(resolve(&["mlp.up_proj", "up_proj"]), Ok(text(&["up_proj"])));
    let fused = |name: &str| cases().into_iter().find(|case| case.dir.ends_with(name)).unwrap().config;
    let resolve_for = |name: &str, list: &[&str]| resolve_on(&fused(name), list);
    let four = text(&["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]);
    assert_eq!(resolve_for("phi3", &["all-linear"]), Ok(four));
    assert_eq!(resolve_for("glm4", &["gate_up_proj,k_proj"]), Ok(text(&["k_proj", "gate_up_proj"])));
    assert!(resolve_for("glm4", &["up_proj"]).unwrap_err().to_string().contains("gate_up_proj"));
    let six = text(&["q_proj", "k_proj", "v_proj", "o_proj", "input_linear", "output_linear"]);
    assert_eq!(resolve_for("granite4", &["all-linear"]), Ok(six));
    let of_all_tokens = resolve_for("qwen35moe", &["down_proj,in_proj_qkv,q_proj"]);
    assert_eq!(of_all_tokens, Ok(text(&["q_proj", "down_proj", "in_proj_qkv"])));
    let attention = text(&["q_proj", "k_proj", "v_proj", "o_proj"]);
    assert_eq!(resolve_for("qwen3moe", &["all-linear"]), Ok(attention));
    for of_experts in ["down_proj", "mlp.experts.0.gate_proj"] {
        let error = resolve_for("qwen3moe", &["q_proj", of_experts]).unwrap_err();
        assert!(matches!(&error, LoraError::Experts { name, .. } if name == of_experts));
        assert!(
            error.to_string().contains("stays frozen") && error.to_string().contains("o_proj"),
            "{error}"
        );
    }
    let error = resolve(&["q_proj,c_attn"]).unwrap_err();
    assert!(matches!(&error, LoraError::Target { name, .. } if name == "c_attn"));
    assert!(error.to_string().contains("down_proj"), "{error}");
    let ends = Choice { targets: text(&["lm_head"]), ..Choice::default() };
    let ends = ends.resolve(config, LoraSpec::none()).unwrap();
    assert_eq!((&ends.targets[..], ends.modules()), (&[][..], vec!["lm_head"]));
    assert!(matches!(resolve(&[" "]), Err(LoraError::NoTargets { .. })));
    let spec = LoraSpec { targets: text(&MODULES), ..LoraSpec::none() };
    for bad in [
        LoraSpec { rank: 0, ..spec.clone() },
        LoraSpec { alpha: f32::NAN, ..spec.clone() },
        LoraSpec { dropout: 1.0, ..spec.clone() },
        LoraSpec { dropout: f32::NAN, ..spec },
    ] {
        assert!(bad.check().unwrap_err().to_string().contains("use a"), "{bad:?}");
    }
}

#[test]
fn initial_values_follow_peft_for_any_split() {
    for case in cases() {
        let lora = LoraSpec { seed: 17, ..case.lora.clone() };
        let flat = initial_parameters(&case.layout, &lora, &case.tensors).unwrap();
        assert_eq!(flat, initial_parameters(&case.layout, &lora, &case.tensors).unwrap());
        let other = lora::init(&case.layout, &LoraSpec { seed: 18, ..lora.clone() });
        let mut parts = Vec::new();
        for layers in [0..1, 1..case.config.layers] {
            parts.extend(
                initial_parameters(&layout::of(&case.config, &lora, layers), &lora, &case.tensors).unwrap(),
            );
        }
        assert_eq!(parts, flat);
        for entry in case.layout.entries() {
            let (own, other) = (&flat[entry.range()], &other[entry.range()]);
            if entry.name == SCORE {
                let base = case.tensors.tensor("score.weight").unwrap().unwrap();
                assert_eq!(own, base.dtype.widen(&base.bytes));
            } else if let Some(path) = entry.name.strip_suffix(".token_adapter.trainable_tokens_delta") {
                let path = path.strip_prefix("base_model.model.").unwrap();
                let base = case.tensors.tensor(&format!("{path}.weight")).unwrap().unwrap();
                let base = base.dtype.widen(&base.bytes);
                let rows = &case.lora.rows;
                let tokens = if path == "lm_head" { &rows.head } else { &rows.embedding };
                for (token, own) in tokens.iter().zip(own.chunks(entry.cols)) {
                    assert_eq!(own, &base[*token as usize * entry.cols..][..entry.cols]);
                }
            } else if entry.name.ends_with("lora_embedding_B") {
                let n = own.len() as f64;
                let square = own.iter().map(|&b| f64::from(b).powi(2)).sum::<f64>() / n;
                // The mean square of N(0, 1) is 1 with a variance of 2.
                assert!((square - 1.0).abs() < 5.0 * (2.0 / n).sqrt(), "{square}");
            } else if ["lora_B.weight", "lora_embedding_A"].iter().any(|end| entry.name.ends_with(end)) {
                assert!(own.iter().all(|&b| b == 0.0));
            } else {
                let bound = 1.0 / (entry.cols as f32).sqrt();
                assert!(own.iter().all(|a| a.abs() <= bound), "{}", entry.name);
                assert_ne!(own, other);
                let n = own.len() as f64;
                let square =
                    own.iter().map(|&a| f64::from(a).powi(2)).sum::<f64>() / n / f64::from(bound).powi(2);
                // The mean square of U(-1, 1) is 1/3 with a variance of 4/45.
                assert!(
                    (square - 1.0 / 3.0).abs() < 5.0 * (4.0 / 45.0 / n).sqrt(),
                    "{}: {square}",
                    entry.name
                );
            }
        }
    }
}

#[test]
fn adapter_has_exactly_the_tensors_of_the_layout() {
    let case = &cases()[0];
    let flat = case.adapter("adapter_final");
    let named = || -> Vec<Named> {
        let of = |e: &finetune::model::layout::Entry| (e.rows, e.cols, e.range());
        let entries = case.layout.entries().iter().map(|e| (e.name.as_str(), of(e)));
        entries.map(|(name, (rows, cols, r))| Named { name, rows, cols, values: &flat[r] }).rev().collect()
    };
    assert_eq!(lora::from_adapter(&case.layout, &named()), Ok(flat.clone()));
    let mut missing = named();
    let gone = missing.pop().unwrap().name.to_owned();
    assert_eq!(lora::from_adapter(&case.layout, &missing), Err(LoraError::Missing { name: gone }));
    let mut extra = named();
    extra.push(Named { name: "base_model.model.model.layers.9.mlp.up_proj.lora_A.weight", ..extra[0] });
    assert!(matches!(lora::from_adapter(&case.layout, &extra), Err(LoraError::Extra { .. })));
    let mut shape = named();
    shape[0].cols += 1;
    assert!(matches!(lora::from_adapter(&case.layout, &shape), Err(LoraError::Shape { .. })));
    let mut poisoned = named();
    let nan = vec![f32::NAN; poisoned[0].values.len()];
    poisoned[0].values = &nan;
    assert!(matches!(lora::from_adapter(&case.layout, &poisoned), Err(LoraError::NonFinite { .. })));
}

fn logits(case: &Case, tensors: &dyn Tensors, lora: &LoraSpec, flat: &[f32]) -> Vec<f32> {
    let build = Build::whole(&case.config);
    let mut stage = Cpu::new(2).stage((&case.config, tensors, lora), build).unwrap();
    stage.set_parameters(flat).unwrap();
    match stage.forward(&case.microbatch(0, 6), None, Want::Logits).unwrap() {
        Output::Logits(logits) => logits,
        other => panic!("logits were asked for, not {other:?}"),
    }
}

fn root_mean_square(values: impl ExactSizeIterator<Item = f32>) -> f32 {
    let n = values.len() as f32;
    (values.map(|x| x * x).sum::<f32>() / n).sqrt()
}

/// In f32 only the order of summation differs; in the base's bf16 every weight is rounded to 8 bits.
#[test]
fn merged_model_matches_base_and_adapter() {
    // One matrix cannot have the change of the embedding alone.
    let whole = |case: &Case| !case.config.tied || case.lora.ends.is_empty() || case.config.labels.is_some();
    for case in cases().into_iter().filter(whole) {
        let flat = case.adapter("adapter_final");
        let want = logits(&case, &case.tensors, &case.lora, &flat);
        let size = root_mean_square(want.iter().copied());
        // Beside delta rules, which enlarge what rounding changes, other experts may be chosen.
        let rounded =
            if case.config.delta_rules.is_some() && case.config.experts.is_some() { 0.3 } else { 3e-2 };
        for (dtype, bound) in [(Some(Dtype::F32), 1e-5), (None, rounded)] {
            let merged = Merged {
                base: &case.tensors,
                config: &case.config,
                lora: &case.lora,
                layout: &case.layout,
                flat: &flat,
                magnitudes: &[],
                dtype,
            };
            let bare = LoraSpec::none();
            let score = layout::of(&case.config, &bare, 0..case.config.layers);
            let head = initial_parameters(&score, &bare, &merged).unwrap();
            let got = logits(&case, &merged, &bare, &head);
            let off = root_mean_square(got.iter().zip(&want).map(|(a, b)| a - b));
            assert!(off <= bound * size, "{:?} {dtype:?}: off by {off} of {size}", case.dir);
            for name in merged.names() {
                let tensor = merged.tensor(&name).unwrap().unwrap();
                // Blocks are widened.
                let in_blocks = case.tensors.blocks(&name).unwrap().is_some();
                let own = if in_blocks { Dtype::F32 } else { Dtype::Bf16 };
                assert_eq!(tensor.dtype, dtype.unwrap_or(own), "{name}");
            }
        }
        let base = logits(&case, &case.tensors, &case.lora, &lora::init(&case.layout, &case.lora));
        assert!(base.iter().zip(&want).any(|(a, b)| (a - b).abs() > 1e-2 * size), "the adapter matters");
    }
}

/// A base with one tensor changed.
struct Damaged<'a> {
    base: &'a dyn Tensors,
    name: &'a str,
    change: fn(&mut Tensor) -> bool,
}

impl Tensors for Damaged<'_> {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        let mut tensor = self.base.tensor(name)?;
        let keep = name != self.name || tensor.as_mut().is_none_or(|t| (self.change)(t));
        Ok(tensor.filter(|_| keep))
    }

    fn names(&self) -> Vec<String> {
        self.base.names()
    }
}

#[test]
fn damaged_bases_are_refused_by_the_name_of_the_tensor() {
    // A model with biases and a head of its own.
    let case = &cases().into_iter().find(|case| case.dir.ends_with("linear")).unwrap();
    let missing: fn(&mut Tensor) -> bool = |_| false;
    let shape: fn(&mut Tensor) -> bool = |t| {
        t.shape[0] += 1;
        true
    };
    let nan: fn(&mut Tensor) -> bool = |t| {
        let mut bytes = t.bytes.to_vec();
        bytes[6..8].copy_from_slice(&[0xc0, 0x7f]);
        t.bytes = Cow::Owned(bytes);
        true
    };
    for name in [
        "model.layers.1.self_attn.q_proj.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.mlp.down_proj.bias",
    ] {
        for (change, kind) in [(missing, "no tensor"), (shape, "implies"), (nan, "at element 3")] {
            let damaged = Damaged { base: &case.tensors, name, change };
            let error =
                Cpu::new(1).stage((&case.config, &damaged, &case.lora), Build::whole(&case.config)).err();
            let error = error.unwrap_or_else(|| panic!("{name}: {kind} was not seen"));
            assert!(!error.is_configuration());
            assert!(error.to_string().contains(name) && error.to_string().contains(kind), "{error}");
        }
    }
}

/// Matrices that have a shape and no values.
struct Shapes<'a>(&'a Config, Encoding);

impl Tensors for Shapes<'_> {
    fn tensor(&self, _: &str) -> Result<Option<Tensor<'_>>, String> {
        Ok(None)
    }

    fn about(&self, name: &str) -> Result<Option<About>, String> {
        let module = name.split('.').rev().nth(1).unwrap();
        let (rows, cols) = self.0.projection(0, module).unwrap_or((self.0.vocab, self.0.hidden));
        Ok(Some(About { shape: vec![rows, cols], encoding: self.1 }))
    }

    fn names(&self) -> Vec<String> {
        Vec::new()
    }
}

fn smollm2() -> Config {
    let json = r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "tie_word_embeddings": true}"#;
    Config::from_json(&serde_json::from_str(json).unwrap()).unwrap()
}

fn estimate(load: Load, keep: Keep) -> memory::Estimate {
    memory::estimate(load, keep).unwrap()
}

#[test]
fn memory_is_estimated_from_shapes() {
    let config = smollm2();
    let lora = LoraSpec { rank: 16, targets: text(&MODULES), ..LoraSpec::none() };
    let (tokens, weights) = (1024, 2 * 134_515_008);
    let load = Load::of(&config, &lora, tokens, weights);
    let all = estimate(load, Keep::Everything);
    assert_eq!(all.weights, 2 * 134_515_008, "SmolLM2's number of parameters");
    for (encoding, bytes) in [
        // Its 61 norms are f32.
        (Encoding::Plain(Dtype::Bf16), 2 * 134_515_008 + 2 * 61 * 576),
        (Encoding::Blocks(Block::Q8_0), (134_515_008 - 61 * 576) / 32 * 34 + 4 * 61 * 576),
    ] {
        let packed = Weights::new(&Shapes(&config, encoding))
            .unwrap()
            .packed(&|encoding, numbers| Cpu::new(1).matrix_bytes(encoding, numbers), &config);
        assert_eq!(packed.map(|packed| packed.total), Ok(bytes), "{encoding:?}");
    }
    assert_eq!(layout::of(&config, &lora, 0..30).len(), 4_884_480, "PEFT prints this number");
    assert_eq!(all.adapter, 28 * 4_884_480);
    // A card holds neither moments nor sums; a driver on the machine's memory holds all of them, and copies for
    // transfers.
    for (home, bytes) in [(Home::HostInTeam, 48), (Home::Own, 16), (Home::Shared, 66)] {
        let there = estimate(Load { home, ..load }, Keep::Everything);
        assert_eq!((there.adapter, there.kept), (bytes * 4_884_480, all.kept), "{home:?}");
    }
    // x, mid, q, attended, k, v, gate, up, the small ones, and a quarter more for buffers that wait for reuse. A buffer is
    // whole cache lines.
    let values = 1024 * 30 * (2 * 576 + 2 * 576 + 2 * 192 + 2 * 1536 + 9 + 2 + 7 * 16);
    assert_eq!(all.kept, 5 * values);
    let frugal = estimate(load, Keep::Inputs);
    assert!(frugal.kept * 5 < all.kept);
    let choose = |limit| memory::choose(load, limit).map(|c| c.0);
    assert_eq!(choose(all.total()), Ok(Keep::Everything));
    assert_eq!(choose(all.total() - 1), Ok(Keep::Parts([29, 1, 0])));
    for parts in [[7, 23, 0], [0, 30, 0], [0, 12, 18], [0, 0, 7]].map(Keep::Parts) {
        assert_eq!(choose(estimate(load, parts).total()), Ok(parts));
    }
    // Without a typed limit: one gigabyte is always kept; beyond that, values that are cheap to recompute are dropped.
    let free = |tokens| memory::Limit::Free(1 << 40).choose(Load { tokens, ..load }).unwrap();
    assert_eq!(free(1024).0, Keep::Everything);
    let (keep, long) = free(4096);
    assert!(matches!(keep, Keep::Parts([0, _, _])), "{keep:?}");
    assert!(long.kept * 5 < estimate(Load { tokens: 4096, ..load }, Keep::Everything).kept * 2);
    assert!(matches!(free(8 * 4096).0, Keep::Parts([0, 0, 30])), "attention is never computed again unasked");
    // The first block that is computed again has room for its own values: keeping them may take no more.
    let (keep, least) = memory::least(load).unwrap();
    assert!(matches!(keep, Keep::Inputs | Keep::Parts([0, 0, 1])), "{keep:?}");
    assert!(least.total() <= frugal.total());
    let found = choose(least.total()).unwrap();
    assert!(estimate(load, found).total() <= least.total(), "{found:?}");
    let error = choose(least.total() - 1).unwrap_err();
    assert!(error.to_string().contains("--micro-batch-tokens") && error.is_configuration(), "{error}");
    let hopeless = choose(100 << 20).unwrap_err();
    assert!(
        matches!(hopeless, ModelError::Memory { way_out, .. } if way_out.contains("the weights alone do not fit"))
    );
}

#[test]
fn sixteen_bit_activations_count_two_bytes() {
    let config = smollm2();
    let lora = LoraSpec { rank: 16, targets: text(&MODULES), ..LoraSpec::none() };
    let (tokens, weights) = (1024, 2 * 134_515_008);
    let load = Load::of(&config, &lora, tokens, weights);
    let kept = |keep, device| estimate(Load { device, ..load }, keep).kept;
    let [f32, bf16] = [Cpu::new(1), Cpu::bf16(1)].map(|cpu| cpu.target());
    // Gate, up and the inputs and outputs of attention, and a quarter more for waiting buffers, as each policy keeps
    // them. A buffer that is reused is filled by at least three quarters.
    let (narrow, attended) = (2 * 576 + 2 * 192, 576);
    for (keep, numbers) in [
        (Keep::Everything, 2 * 1536 + narrow),
        (Keep::Parts([0, 30, 0]), narrow),
        (Keep::Parts([0, 0, 30]), attended),
        (Keep::Inputs, 0),
    ] {
        let least = kept(keep, f32) - 1024 * 30 * numbers * 2 * 5 / 4;
        let found = kept(keep, bf16);
        assert!(least <= found && found <= least * 4 / 3, "{keep:?}: {found} bytes, {least} without reuse");
    }
}

#[test]
fn measured_memory_sharpens_the_figures_and_decides_nothing() {
    let config = smollm2();
    let lora = LoraSpec { rank: 16, targets: text(&MODULES), ..LoraSpec::none() };
    let (tokens, weights) = (1024, 2 * 134_515_008);
    let load = Load::of(&config, &lora, tokens, weights);
    let (all, frugal) = (estimate(load, Keep::Everything), estimate(load, Keep::Inputs));
    let line = |factor: f64| Line {
        fixed: 8.0 * 4_884_480.0,
        each: factor * (all.in_use - 8 * 4_884_480) as f64 / 1024.0,
    };
    let with = |factor| Load { measured: Some(Fit { line: line(factor), blocks: 90, tokens: 1024 }), ..load };
    let close = |a: u64, b: f64| assert!((a as f64 / b - 1.0).abs() < 1e-6, "{a} {b}");
    for factor in [0.5, 2.0, 100.0] {
        let seen = estimate(with(factor), Keep::Everything);
        assert_eq!(seen.basis, Basis::Measured(line(factor)));
        close(seen.in_use, factor * (all.in_use - 8 * 4_884_480) as f64 + 8.0 * 4_884_480.0);
        // For another policy, or far from the measured sizes, the dry run is all that is known.
        assert_eq!(estimate(with(factor), Keep::Inputs), frugal);
        for tokens in [128, 8192] {
            let shapes = estimate(Load { tokens, ..load }, Keep::Everything);
            assert_eq!(estimate(Load { tokens, ..with(factor) }, Keep::Everything), shapes);
        }
        let chosen = |limit| memory::choose(with(factor), limit).map(|(keep, _)| keep);
        assert_eq!(chosen(all.total()), Ok(Keep::Everything), "{factor}");
        assert_eq!(chosen(all.total() - 1), Ok(Keep::Parts([29, 1, 0])), "{factor}");
        assert!(chosen(frugal.total()).is_ok() && chosen(frugal.total() - 1).is_err(), "{factor}");
    }
}

/// Small microbatches go through streamed layers together: as many as fit, and no more of the free memory than is
/// comfortable. Measurements decide nothing here either.
#[test]
fn groups_of_small_microbatches_fit() {
    let config = smollm2();
    let lora = LoraSpec { rank: 16, targets: text(&MODULES), ..LoraSpec::none() };
    let (layer, weights) = (4 * 3_540_096, 4 * 134_515_008);
    let of = |tokens, offload| Load {
        offload,
        layer: (layer, layer),
        microbatches: 16,
        ..Load::of(&config, &lora, tokens, weights)
    };
    let group = |load, limit: memory::Limit| {
        let (_, takes) = limit.choose(load).unwrap();
        assert!(takes.total() <= limit.bytes(), "{} of {}", takes.total(), limit.bytes());
        (takes.streamed, takes.group)
    };
    let plenty = memory::Limit::Typed(1 << 40);
    for (tokens, most) in [(1, 8), (128, 8), (200, 4), (256, 4), (512, 2), (513, 1), (4096, 1)] {
        assert_eq!(group(of(tokens, Offload::Layers(20)), plenty), (20, most), "{tokens}");
    }
    assert_eq!(group(of(128, Offload::Layers(0)), plenty), (0, 1));
    assert_eq!(group(of(128, Offload::Auto), plenty), (0, 1));
    for (microbatches, most) in [(1, 1), (2, 2), (3, 2), (9, 8)] {
        let load = Load { microbatches, ..of(128, Offload::Layers(20)) };
        assert_eq!(group(load, plenty), (20, most), "{microbatches} in a step");
    }
    // Little memory: streamed layers make room for a group.
    let all_streamed = estimate(of(128, Offload::Layers(30)), Keep::Inputs).total();
    let limits = (0..60).map(|i| memory::Limit::Typed(all_streamed + i * layer / 2));
    let found: Vec<_> = limits.map(|limit| group(of(128, Offload::Auto), limit)).collect();
    assert!(found.iter().any(|(streamed, group)| *streamed > 0 && *group > 1), "{found:?}");
    let line = Line { fixed: 1.0, each: 1.0 };
    let measured = Some(Fit { line, blocks: 90, tokens: 128 });
    for offload in [Offload::Layers(20), Offload::Auto] {
        for limit in [400_000_000, 500_000_000, 800_000_000].map(memory::Limit::Typed) {
            let how = |load| limit.choose(load).map(|(keep, takes)| (keep, takes.streamed, takes.group));
            assert_eq!(how(Load { measured, ..of(128, offload) }), how(of(128, offload)));
        }
    }
}

/// A search asks for many dry runs: a model of 80 layers, with the longest refusal.
#[test]
fn choosing_a_policy_of_80_layers_takes_little_time() {
    let config = Config { layers: 80, hidden: 8192, feed_forward: 28_672, ..smollm2() };
    let lora = LoraSpec { rank: 16, targets: text(&MODULES), ..LoraSpec::none() };
    let load = Load::of(&config, &lora, 4096, 140_000_000_000);
    let time = |what: &str, limit: memory::Limit| {
        let begin = std::time::Instant::now();
        let fits = limit.choose(load).is_ok();
        println!("{what}: {:.1} ms", begin.elapsed().as_secs_f64() * 1e3);
        (fits, begin.elapsed().as_secs_f64())
    };
    let middle = estimate(load, Keep::Parts([0, 40, 40])).total();
    for (what, limit, fits) in [
        ("typed", memory::Limit::Typed(middle), true),
        ("free", memory::Limit::Free(1 << 50), true),
        ("refused", memory::Limit::Typed(145_000_000_000), false),
    ] {
        let (fitted, seconds) = time(what, limit);
        assert_eq!(fitted, fits, "{what}");
        // Much more than is needed, because other processes may run.
        assert!(seconds < 2.0, "{what}: {seconds} s");
    }
}
