//! Adapters on chosen layers and modules, with patterns of rank and alpha, as PEFT chooses them.

use super::{case, text};
use case::Case;
use finetune::format::peft::{self, AdapterConfig, TaskType};
use finetune::format::safetensors;
use finetune::model::config::Config;
use finetune::model::layout;
use finetune::model::lora::{Ends, Exception, LoraError, LoraSpec, Numbers};
use finetune::model::merge::Merged;
use finetune::model::targets::Choice;
use finetune::numeric::dtype::Dtype;
use finetune::numeric::tensor::Tensors;
use std::path::Path;

fn open(name: &str) -> Case {
    Case::open(case::golden().iter().find(|dir| dir.ends_with(name)).unwrap())
}

fn pairs<T: Copy>(all: &[(&str, T)]) -> Vec<(String, T)> {
    all.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
}

/// The typed options of the golden cases, which have tensors where PEFT chose modules.
fn typed(name: &str) -> Choice {
    let targets = text(&["all-linear"]);
    match name {
        "layers" => Choice { targets, layers: vec![1], ..Choice::default() },
        "patterns" => Choice {
            targets,
            exclude: text(&["layers.0.self_attn.v_proj", "layers.2.self_attn.o_proj", "up_proj"]),
            ranks: pairs(&[
                ("q_proj", 2),
                (r"layers\.[12]\.mlp\.down_proj", 6),
                ("layers.0.mlp.down_proj", 3),
            ]),
            alphas: pairs(&[("layers.1.self_attn.q_proj", 3.0), ("o_proj", 5.5)]),
            ..Choice::default()
        },
        _ => Choice {
            targets: text(&[r".*language_model.layers.(0.self_attn|1.*)\.\w+_proj"]),
            ranks: pairs(&[(r".*layers\.1\..*(q|k)_proj", 5)]),
            alphas: pairs(&[("v_proj", 2.0)]),
            ..Choice::default()
        },
    }
}

const CHOSEN: [&str; 3] = ["layers", "patterns", "patternsvl"];

#[test]
fn options_choose_the_modules_and_numbers_of_peft() {
    for name in CHOSEN {
        let Case { config, lora, dir, .. } = open(name);
        assert_ne!(lora.exceptions, [], "{name}");
        let common = LoraSpec { targets: Vec::new(), exceptions: Vec::new(), ..lora.clone() };
        let spec = typed(name).resolve(&config, common).unwrap();
        assert_eq!(spec, lora, "{name}");
        typed(name).without_effect(&spec, &config).unwrap();
        // The file's tensors are those of the layout, with their shapes.
        let layout = layout::of(&config, &spec, 0..config.layers);
        let mut own: Vec<_> = layout.entries().iter().map(|e| (e.name.clone(), e.rows, e.cols)).collect();
        own.sort();
        let file = peft::read(&dir.join("adapter_init")).unwrap().tensors;
        assert_eq!(own, file.into_iter().map(|t| (t.name, t.rows, t.cols)).collect::<Vec<_>>(), "{name}");
    }
}

#[test]
fn each_adapter_has_its_own_scale() {
    let Case { lora, .. } = open("patterns");
    let scale = |layer, module| lora.adapter(layer, module).map(|numbers| lora.scale_of(numbers));
    assert_eq!(scale(1, "q_proj"), Some(3.0 / 2f32.sqrt()));
    assert_eq!(scale(0, "q_proj"), Some(8.0 / 2f32.sqrt()));
    assert_eq!(scale(2, "down_proj"), Some(8.0 / 6f32.sqrt()));
    assert_eq!(scale(1, "o_proj"), Some(5.5 / 2.0));
    assert_eq!((scale(2, "o_proj"), scale(0, "up_proj")), (None, None));
}

/// The configuration as it is written and read again.
fn written(choice: &Choice, (config, spec): (&Config, &LoraSpec)) -> Choice {
    let alphas = choice.alphas.iter().map(|(name, alpha)| (name.clone(), f64::from(*alpha))).collect();
    let about = AdapterConfig {
        task: TaskType::CausalLm,
        base_model_name_or_path: None,
        revision: None,
        r: spec.rank,
        lora_alpha: f64::from(spec.alpha),
        lora_dropout: 0.0,
        target_modules: choice.targets.clone(),
        layers: choice.layers.clone(),
        rank_pattern: choice.ranks.clone(),
        alpha_pattern: alphas,
        token_rows: vec![],
        path: config.path(),
        use_rslora: spec.rslora,
        use_dora: false,
    };
    let read = AdapterConfig::from_json(Path::new("x"), &about.to_json()).unwrap();
    let alphas = read.alpha_pattern.iter().map(|(name, alpha)| (name.clone(), *alpha as f32)).collect();
    // Paths and layers are read from the tensors of a file.
    Choice { ranks: read.rank_pattern, alphas, ..choice.clone() }
}

#[test]
fn written_choices_resolve_to_the_same_adapters() {
    for name in CHOSEN.into_iter().chain(["llama", "phi3", "gemma3vl", "qwen3moe"]) {
        let Case { config, lora, .. } = open(name);
        // Every third projection differs, then every projection of a layer, then one module.
        let mut specs = vec![lora.clone()];
        for which in 0..4usize {
            let mut spec = LoraSpec { exceptions: Vec::new(), ..lora.clone() };
            let mut at = 0;
            for layer in 0..config.layers {
                for (i, module) in spec.targets.clone().into_iter().enumerate() {
                    at += 1;
                    let adapter = match which {
                        0 if at % 3 == 0 => None,
                        0 if at % 3 == 1 => Some(Numbers { rank: 1 + at, alpha: 0.1 * at as f32 }),
                        1 if layer == 1 => Some(Numbers { rank: 7, alpha: lora.alpha }),
                        2 if layer == 0 => None,
                        3 if i == 1 => Some(Numbers { rank: lora.rank, alpha: 1.25 }),
                        _ => continue,
                    };
                    spec.exceptions.push(Exception { layer, module, adapter });
                }
            }
            // What has no adapter in any layer is no target.
            let has = |module: &String| (0..config.layers).any(|layer| spec.adapter(layer, module).is_some());
            let targets: Vec<String> = spec.targets.iter().filter(|module| has(module)).cloned().collect();
            spec.exceptions.retain(|e| targets.contains(&e.module));
            specs.push(LoraSpec { targets, ..spec });
        }
        let all = Numbers { rank: lora.rank, alpha: lora.alpha };
        let of_ends =
            |spec: &LoraSpec, embedding, head| LoraSpec { ends: Ends { embedding, head }, ..spec.clone() };
        let both = |spec: &LoraSpec| {
            let other = Numbers { rank: 9, ..all };
            [of_ends(spec, Some(other), Some(all)), of_ends(spec, None, Some(other))]
        };
        let with_ends: Vec<LoraSpec> = specs.iter().flat_map(both).collect();
        for spec in specs.into_iter().chain(with_ends) {
            let spec = LoraSpec { dropout: 0.0, ..spec };
            let choice = written(&Choice::of(&spec, &config), (&config, &spec));
            let common = LoraSpec { targets: Vec::new(), exceptions: Vec::new(), ..spec.clone() };
            assert_eq!(choice.resolve(&config, common), Ok(spec), "{name}: {choice:?}");
        }
    }
}

#[test]
fn choices_without_effect_are_refused_by_name() {
    let Case { config, .. } = open("llama");
    let all = || Choice { targets: text(&["all-linear"]), ..Choice::default() };
    let check = |choice: Choice, option: &str, word: &str| {
        let common = LoraSpec { rank: 4, alpha: 8.0, ..LoraSpec::none() };
        let spec = choice.resolve(&config, common);
        let error = spec.and_then(|spec| choice.without_effect(&spec, &config)).unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
        let named = if let LoraError::Choice { option, .. } = error { option } else { "target-modules" };
        assert_eq!(named, option, "{error}");
    };
    check(Choice { layers: vec![0, 2], ..all() }, "target-layers", "layers 0 to 1");
    check(Choice { exclude: text(&["k_poj"]), ..all() }, "exclude-modules", "k_poj");
    let twice = pairs(&[("v_proj", 2), (".*v_proj", 3)]);
    check(Choice { ranks: twice, ..all() }, "rank-pattern", "an earlier one");
    check(Choice { exclude: text(&[".*"]), ..all() }, "target-modules", "no target modules");
    check(Choice { targets: text(&["q_proj(", ".*"]), ..all() }, "target-modules", "unclosed group");
    check(
        Choice { targets: text(&["q_proj|k_proj"]), ..all() },
        "target-modules",
        "model.layers.0.self_attn.q_proj",
    );
    check(Choice { targets: text(&["(?!x)q_proj"]), ..all() }, "target-modules", "look");
    check(Choice { ranks: pairs(&[("v_prj", 2)]), ..all() }, "rank-pattern", "v_prj");
    let excluded = Choice { exclude: text(&["v_proj"]), alphas: pairs(&[("v_proj", 2.0)]), ..all() };
    check(excluded, "alpha-pattern", "no module with an adapter");
}

/// An adapter of DoRA, merged by PEFT.
#[test]
fn magnitudes_are_merged_as_peft_does() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/export/dora");
    let adapter = peft::read(&dir).unwrap();
    let case = open("llama");
    let choice = Choice { targets: adapter.config.target_modules.clone(), ..Choice::default() };
    let (rank, alpha) = (adapter.config.r, adapter.config.lora_alpha as f32);
    let spec =
        choice.resolve(&case.config, LoraSpec { rank, alpha, rslora: true, ..LoraSpec::none() }).unwrap();
    let layout = layout::of(&case.config, &spec, 0..case.config.layers);
    assert_eq!(adapter.magnitudes.len() * 2, layout.entries().len());
    let named = |t: &peft::AdapterTensor| -> (String, Vec<f32>) { (t.name.clone(), t.values.clone()) };
    let tensors: Vec<_> = adapter.tensors.iter().map(named).collect();
    let mut flat = vec![0.0; layout.len()];
    for (name, values) in &tensors {
        flat[layout.find(name).unwrap().range()].copy_from_slice(values);
    }
    let merged = Merged {
        base: &case.tensors,
        config: &case.config,
        lora: &spec,
        layout: &layout,
        flat: &flat,
        magnitudes: &adapter.magnitudes,
        dtype: Some(Dtype::F32),
    };
    let expected = safetensors::open(&dir.join("merged.safetensors")).unwrap();
    assert_eq!(expected.names().len(), 8);
    for name in expected.names() {
        let want = expected.get(&name).unwrap();
        let got = merged.tensor(&name).unwrap().unwrap();
        let values = want.dtype.widen(&want.bytes);
        let size = values.iter().fold(0f32, |most, v| most.max(v.abs()));
        for (a, b) in got.dtype.widen(&got.bytes).iter().zip(values.iter()) {
            assert!((a - b).abs() <= 1e-6 * size, "{name}: {a} {b}");
        }
    }
}

#[test]
fn the_first_difference_of_two_adapters_is_named() {
    let Case { lora, .. } = open("patterns");
    let tell = |other: &LoraSpec| lora.difference(other);
    let mut other = lora.clone();
    other.exceptions.retain(|e| !(e.layer == 1 && e.module == "o_proj"));
    let (own, its) = tell(&other);
    assert_eq!(own, "rank 4, alpha 5.5 for o_proj of layer 1");
    assert_eq!(its, "rank 4, alpha 8 for o_proj of layer 1");
    other = lora.clone();
    other.exceptions.retain(|e| !(e.layer == 0 && e.module == "v_proj"));
    assert_eq!(tell(&other).0, "no adapter for v_proj of layer 0");
    let (own, its) = tell(&LoraSpec { rank: 5, ..lora.clone() });
    assert!(own.starts_with("rank 4, ") && its.starts_with("rank 5, "), "{own}, {its}");
}
