//! Both dialects give the same configuration; a configuration with different results is refused by name.

use super::*;
use serde_json::json;

/// SmolLM2's config.json, as a base for variations.
fn smollm2() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100_000.0, "rope_scaling": null,
        "hidden_act": "silu", "tie_word_embeddings": true, "torch_dtype": "bfloat16", "attention_bias": false
    })
}

/// Sets keys of `base`; a key set to the string "-" is removed.
fn with(base: Value, changes: Value) -> Value {
    let (Value::Object(mut map), Value::Object(changes)) = (base, changes) else { panic!("objects") };
    for (key, value) in changes {
        match value.as_str() {
            Some("-") => map.remove(&key),
            _ => map.insert(key, value),
        };
    }
    Value::Object(map)
}

fn read(changes: Value) -> Result<Config, ConfigError> {
    Config::from_json(&with(smollm2(), changes))
}

#[test]
fn both_rope_dialects_give_the_same_config() {
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 8192});
    let linear = json!({"type": "linear", "factor": 2.0});
    for scaling in [Value::Null, json!({"rope_type": "default"}), llama3, linear] {
        let old = read(json!({"rope_theta": 5e5, "rope_scaling": scaling})).unwrap();
        let mut section =
            with(if scaling.is_null() { json!({}) } else { scaling }, json!({"rope_theta": 5e5}));
        if let Some(kind) = section.get("type").cloned() {
            section = with(section, json!({"type": "-", "rope_type": kind}));
        }
        let gone = json!({"rope_theta": "-", "rope_scaling": "-", "torch_dtype": "-", "dtype": "bfloat16"});
        let new =
            Config::from_json(&with(with(smollm2(), gone.clone()), json!({"rope_parameters": section})));
        assert_eq!(new.unwrap(), old);
        let nested = json!({"rope_parameters": {"full_attention": section, "sliding_attention": section}});
        assert_eq!(Config::from_json(&with(with(smollm2(), gone), nested)).unwrap(), old);
    }
}

#[test]
fn families_differ_as_in_transformers() {
    let family = |name: &str, more: Value| read(with(json!({"architectures": [name]}), more)).unwrap();
    let llama = family("LlamaForCausalLM", json!({"attention_bias": true, "mlp_bias": true}));
    assert!(llama.qkv_bias && llama.o_bias && llama.mlp_bias && llama.head_norms(0).is_none());
    let qwen2 = family("Qwen2ForCausalLM", json!({"attention_bias": "-"}));
    assert!(qwen2.qkv_bias && !qwen2.o_bias && !qwen2.mlp_bias && qwen2.head_norms(0).is_none());
    let qwen3 = family("Qwen3ForCausalLM", json!({"head_dim": 128}));
    assert!(!qwen3.qkv_bias && qwen3.head_norms(0) == Some([128; 2]));
    assert_eq!(qwen3.projection(0, "o_proj"), Some((576, 9 * 128)));
    assert_eq!(qwen3.projection(0, "lm_head"), None);
    let id2label = json!({"0": "bad", "1": "fine", "2": "good"});
    let classifier =
        family("MistralForSequenceClassification", json!({"id2label": id2label, "sliding_window": null}));
    assert_eq!(classifier.labels.as_deref(), Some(&["bad", "fine", "good"].map(String::from)[..]));
    assert_eq!(classifier.architecture(), "MistralForSequenceClassification");
    assert_eq!(read(json!({"architectures": "-"})).unwrap().family, &families::LLAMA);
    assert_eq!(
        read(json!({"architectures": ["LlamaForSequenceClassification"]})).unwrap().labels.unwrap().len(),
        2
    );
}

#[test]
fn windows_are_those_of_transformers() {
    let sliding = vec!["sliding_attention"; 30];
    let cases = [
        ("MistralForCausalLM", json!({}), Some(4096)),
        ("MistralForCausalLM", json!({"sliding_window": null}), None),
        ("MistralForCausalLM", json!({"sliding_window": 512}), Some(512)),
        ("Qwen2ForCausalLM", json!({"sliding_window": 512, "use_sliding_window": false}), None),
        ("Qwen2ForCausalLM", json!({"sliding_window": 512}), None),
        ("Qwen2ForCausalLM", json!({"sliding_window": 512, "use_sliding_window": true}), Some(512)),
        (
            "Qwen2ForCausalLM",
            json!({"sliding_window": 512, "use_sliding_window": true, "max_window_layers": 30}),
            None,
        ),
        (
            "Qwen3ForCausalLM",
            json!({"sliding_window": null, "use_sliding_window": true, "layer_types": sliding}),
            None,
        ),
        (
            "Qwen3ForCausalLM",
            json!({"sliding_window": 64, "use_sliding_window": false, "layer_types": sliding}),
            None,
        ),
        (
            "Qwen3ForCausalLM",
            json!({"sliding_window": 64, "use_sliding_window": true, "layer_types": sliding}),
            Some(64),
        ),
        ("LlamaForCausalLM", json!({"layer_types": vec!["full_attention"; 30], "sliding_window": 9}), None),
        ("Gemma3ForCausalLM", json!({"query_pre_attn_scalar": 256, "sliding_window": 512}), Some(512)),
        ("Phi3ForCausalLM", json!({"sliding_window": "-"}), None),
        ("Phi3ForCausalLM", json!({"sliding_window": 2047}), Some(2047)),
        ("Olmo3ForCausalLM", json!({"layer_types": vec!["full_attention"; 30]}), None),
    ];
    for (name, more, window) in cases {
        let config = read(with(json!({"architectures": [name]}), more.clone())).unwrap();
        assert_eq!(config.window(), window, "{name} {more}");
    }
}

/// The keys of a mixture of experts, with changes.
fn experts(changes: Value) -> Value {
    let own = json!({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 96});
    with(own, changes)
}

#[test]
fn experts_and_sparse_layers_are_read() {
    let of = |changes| read(experts(changes)).unwrap().experts.unwrap();
    let plain = of(json!({}));
    assert_eq!((plain.count, plain.chosen, plain.feed_forward, plain.normalised), (8, 2, 96, false));
    assert!(plain.sparse.iter().all(|sparse| *sparse));
    assert!(of(json!({"norm_topk_prob": true, "num_experts": 8})).normalised);
    // transformers 5 writes the number under another key.
    assert_eq!(of(json!({"num_experts": "-", "num_local_experts": 4})).count, 4);
    let some = of(json!({"decoder_sparse_step": 2, "mlp_only_layers": [3]})).sparse;
    assert_eq!(some[..6], [false, true, false, false, false, true]);
}

/// The keys of gpt-oss, with changes.
fn gpt_oss(changes: Value) -> Value {
    let own = json!({"architectures": ["GptOssForCausalLM"], "num_local_experts": 6, "num_experts_per_tok": 2,
        "attention_bias": "-", "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "truncate": false,
        "original_max_position_embeddings": 64}});
    with(with(own, json!({})), changes)
}

#[test]
fn gpt_oss_has_the_defaults_of_transformers() {
    let config = read(gpt_oss(json!({}))).unwrap();
    let experts = config.experts_of(0).unwrap();
    assert_eq!((experts.count, experts.chosen, experts.feed_forward), (6, 2, config.feed_forward));
    assert!(experts.normalised && experts.sparse.iter().all(|sparse| *sparse));
    assert!(config.qkv_bias && config.o_bias && !config.mlp_bias);
    assert_eq!((config.windows[0], config.windows[1]), (Some(128), None));
    assert!(matches!(config.rope.scaling, RopeScaling::Yarn { truncate: false, .. }));
}

/// Checks that each configuration is refused in one line with these words.
fn all_are_refused(cases: &[(Value, &str)]) {
    for (changes, said) in cases {
        let error = read(changes.clone()).expect_err(&changes.to_string()).to_string();
        assert!(error.contains(said), "{changes}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

#[test]
fn unsupported_experts_are_refused_by_name() {
    all_are_refused(&[
        (gpt_oss(json!({"num_local_experts": "-"})), "`num_local_experts` is missing"),
        (gpt_oss(json!({"swiglu_limit": 6.0})), "`swiglu_limit` 6"),
        (gpt_oss(json!({"swiglu_alpha": 1.5})), "`swiglu_alpha` 1.5"),
        (gpt_oss(json!({"rope_parameters": "-"})), "rope_parameters"),
        (json!({"architectures": ["MixtralForCausalLM"]}), "mixture of experts"),
        (json!({"architectures": ["Qwen3MoeForCausalLM"]}), "`num_experts` is missing"),
        (experts(json!({"num_experts_per_tok": 9})), "num_experts_per_tok"),
        (experts(json!({"mlp_only_layers": ["a"]})), "mlp_only_layers"),
        (experts(json!({"use_sliding_window": true})), "use_sliding_window"),
        (experts(json!({"output_router_logits": true})), "output_router_logits"),
        (json!({"num_local_experts": 8}), "num_local_experts"),
        (json!({"num_experts": 64}), "num_experts"),
    ]);
}

#[test]
fn unsupported_features_are_refused_by_name() {
    let cases = [
        (json!({"architectures": ["Gemma2ForCausalLM"]}), "Gemma2ForCausalLM"),
        (json!({"architectures": ["PhiForCausalLM"]}), "choose a Llama, Mistral"),
        (json!({"architectures": "-", "model_type": "gpt2"}), "gpt2"),
        (json!({"architectures": "-", "model_type": "-"}), "architectures"),
        (json!({"rope_scaling": {"rope_type": "yarn"}}), "factor"),
        (json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0.5}}), "beta_fast"),
        (json!({"rope_scaling": {"type": "dynamic", "factor": 4.0}}), "dynamic"),
        (json!({"rope_scaling": {"rope_type": "longrope"}}), "longrope"),
        (json!({"rope_scaling": {"rope_type": "linear"}}), "factor"),
        (json!({"rope_scaling": {"rope_type": "linear", "factor": -1.0}}), "factor"),
        (
            json!({"rope_parameters": {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}}),
            "sliding_attention",
        ),
        (json!({"rope_theta": 0}), "rope_theta"),
        (json!({"hidden_act": "gelu"}), "gelu"),
        (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (json!({"quantization_config": {"quant_method": "gptq"}}), "gptq"),
        (json!({"layer_types": ["linear_attention"]}), "linear_attention"),
        (json!({"hidden_size": "-"}), "hidden_size"),
        (json!({"hidden_size": 0}), "hidden_size"),
        (json!({"hidden_size": 1u64 << 40}), "hidden_size"),
        (json!({"hidden_size": 577}), "hidden_size"),
        (json!({"hidden_size": 27}), "head_dim"),
        (json!({"num_key_value_heads": 4}), "num_key_value_heads"),
        (json!({"num_hidden_layers": -1}), "num_hidden_layers"),
        (json!({"vocab_size": "many"}), "vocab_size"),
        (json!({"rms_norm_eps": -1e-5}), "rms_norm_eps"),
        (json!({"tie_word_embeddings": "yes"}), "tie_word_embeddings"),
        (json!({"architectures": ["LlamaForSequenceClassification"], "id2label": {}}), "id2label"),
        (
            json!({"architectures": ["LlamaForSequenceClassification"], "id2label": {"1": "a", "2": "b"}}),
            "class 0",
        ),
    ];
    all_are_refused(&cases);
    assert!(Config::from_json(&json!([1])).is_err());
    let config = read(json!({})).unwrap();
    assert_eq!(config.check_vocabulary(49152), Ok(()));
    assert!(config.check_vocabulary(49153).unwrap_err().to_string().contains("49153"));
    let three = || ["a", "b", "c"].map(String::from).to_vec();
    let classifier = config.clone().into_classifier(three()).unwrap();
    assert_eq!(classifier.clone().into_classifier(three()), Ok(classifier.clone()));
    assert!(classifier.into_classifier(vec!["a".into()]).unwrap_err().to_string().contains("3 outputs"));
    assert!(config.into_classifier(Vec::new()).is_err());
}

/// Compares with the formulas in f64; the reference rounds each angle to f32, half a unit in the last place. A table of LongRoPE
/// has the positions of longer rows behind those of short ones.
#[test]
fn the_rotation_table_holds_cosines_and_sines() {
    let llama3 =
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original: 128 };
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        // Between the first and the fourth of 9 frequencies: turns within the original 128 positions.
        fast: 128.0 / std::f64::consts::TAU / 5e5f64.powf(2.0 * 1.5 / 18.0),
        slow: 128.0 / std::f64::consts::TAU / 5e5f64.powf(2.0 * 3.5 / 18.0),
        original: 128,
        amplitude: 1.25,
        truncate: true,
        growth: 0.0,
    };
    let factors = |step: f32| (0..9).map(|i| 1.0 + i as f32 * step).collect();
    let long = RopeScaling::Long { short: factors(0.25), long: factors(3.0), original: 128, amplitude: 1.5 };
    for scaling in
        [RopeScaling::Default, RopeScaling::Off, RopeScaling::Linear { factor: 4.0 }, llama3, yarn, long]
    {
        let (d, positions) = (18, 700);
        let table = Rope { theta: 5e5, scaling: scaling.clone() }.table(positions, d);
        assert_eq!(table.len(), positions * d);
        for (i, row) in (0..d / 2).flat_map(|i| [(i, 0), (i, 1), (i, 37), (i, positions - 1)]) {
            let is_long = matches!(scaling, RopeScaling::Long { .. }) && row >= 128;
            let position = if is_long { row - 128 } else { row };
            let base = 5e5f64.powf(-2.0 * i as f64 / d as f64);
            let wave = std::f64::consts::TAU / base;
            let frequency = match &scaling {
                RopeScaling::Default => base,
                RopeScaling::Long { long, .. } if is_long => base / f64::from(long[i]),
                RopeScaling::Long { short, .. } => base / f64::from(short[i]),
                RopeScaling::Off => 0.0,
                RopeScaling::Yarn { factor, .. } => {
                    let divided = ((i as f64 - 1.0) / 3.0).clamp(0.0, 1.0);
                    base / factor * divided + base * (1.0 - divided)
                }
                RopeScaling::Linear { factor } => base / factor,
                RopeScaling::Llama3 { .. } if wave > 128.0 => base / 8.0,
                RopeScaling::Llama3 { .. } if wave < 32.0 => base,
                RopeScaling::Llama3 { .. } => {
                    let s = (128.0 / wave - 1.0) / 3.0;
                    base * ((1.0 - s) / 8.0 + s)
                }
            };
            let (angle, row) = (position as f64 * frequency, &table[row * d..][..d]);
            let bound = 2e-7 + angle * 6e-7;
            let amplitude = match scaling {
                RopeScaling::Yarn { amplitude, .. } | RopeScaling::Long { amplitude, .. } => amplitude,
                _ => 1.0,
            };
            assert!(
                (f64::from(row[i]) - amplitude * angle.cos()).abs() <= bound,
                "cos {scaling:?} {position} {i}"
            );
            assert!(
                (f64::from(row[d / 2 + i]) - amplitude * angle.sin()).abs() <= bound,
                "sin {scaling:?} {position} {i}"
            );
        }
    }
}

#[test]
fn two_rope_sections_must_agree() {
    let cases = [
        (
            json!({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
            "dynamic",
        ),
        (
            json!({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 4.0}}),
            "contradicts rope_parameters",
        ),
    ];
    for (changes, said) in cases {
        let error = read(changes.clone()).expect_err(&changes.to_string()).to_string();
        assert!(error.contains(said), "{changes}: {error}");
    }
}

/// Gemma 3's keys in both dialects: transformers 4 has a pattern and two bases, transformers 5 a list and nested sections.
#[test]
fn gemma3_is_read_in_both_dialects() {
    let base = json!({"architectures": ["Gemma3ForCausalLM"], "hidden_act": "-", "tie_word_embeddings": "-",
                      "hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 7, "head_dim": 64,
                      "query_pre_attn_scalar": 256, "sliding_window": 512});
    let older = json!({"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 3,
                       "rope_scaling": {"rope_type": "linear", "factor": 8.0}});
    let kinds: Vec<_> =
        (1..=7).map(|i| if i % 3 == 0 { "full_attention" } else { "sliding_attention" }).collect();
    let newer = json!({"layer_types": kinds, "rope_theta": "-", "rope_scaling": "-", "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}});
    let config = read(with(base.clone(), older)).unwrap();
    let other = Config::from_json(&with(with(smollm2(), base), newer)).unwrap();
    assert_eq!(config, other);
    let windows: Vec<_> = config.windows.iter().map(Option::is_some).collect();
    assert_eq!(windows, [true, true, false, true, true, false, true]);
    let linear = Rope { theta: 1e6, scaling: RopeScaling::Linear { factor: 8.0 } };
    assert_eq!((config.rope_of(2), config.rope_of(0).theta), (linear, 1e4));
    assert!(config.tied && config.score_scale == 1.0 / 16.0 && config.embedding_scale == 24.0);
}

#[test]
fn scales_of_granite_move_into_the_stream() {
    let granite = json!({"architectures": ["GraniteForCausalLM"], "embedding_multiplier": 12.0,
                         "residual_multiplier": 0.25, "attention_multiplier": 0.015625, "logits_scaling": 8.0});
    let config = read(granite).unwrap();
    assert_eq!((config.stream_scale(), config.stream_eps()), (48.0, 16.0 * 1e-5));
    assert_eq!((config.score_scale, config.logits_scale), (0.015625, 8.0));
    assert!(config.into_classifier(vec!["a".into()]).unwrap_err().to_string().contains("no class"));
}

#[test]
fn layers_without_rotation_are_listed_or_counted() {
    let rotated =
        |more: Value| read(with(json!({"architectures": ["SmolLM3ForCausalLM"]}), more)).unwrap().rotated;
    assert_eq!(rotated(json!({"num_hidden_layers": 5})), [true, true, true, false, true]);
    let listed = json!({"num_hidden_layers": 3, "no_rope_layers": [0, 1, 1]});
    assert_eq!(rotated(listed), [false, true, true]);
    let config = read(json!({"architectures": ["SmolLM3ForCausalLM"]})).unwrap();
    assert!(config.rope_of(3).table(5, 8).chunks(4).step_by(2).all(|cosines| cosines == [1.0; 4]));
}

#[test]
fn missing_traits_are_refused_by_name() {
    let cases = [
        (json!({"architectures": ["Gemma3ForSequenceClassification"]}), "Gemma3ForSequenceClassification"),
        (
            json!({"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0}),
            "final_logit_softcapping",
        ),
        (
            json!({"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "silu"}),
            "only gelu_pytorch_tanh",
        ),
        (json!({"architectures": ["SmolLM3ForCausalLM"], "use_sliding_window": true}), "use_sliding_window"),
        (json!({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]}), "no_rope_layers"),
        (json!({"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0}), "residual_multiplier"),
        (json!({"architectures": ["GraniteMoeForCausalLM"]}), "mixture of experts"),
        (
            json!({"architectures": ["NewForCausalLM"], "sliding_window": 9, "kv_lora_rank": 4, "hidden_act": "relu2"}),
            "shows sliding windows, which other families have, and latent attention, the activation relu2: not computed",
        ),
    ];
    for (changes, said) in cases {
        let error = read(changes.clone()).expect_err(&changes.to_string()).to_string();
        assert!(error.contains(said), "{changes}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

#[test]
fn sizes_that_a_text_config_leaves_out_are_the_class_defaults() {
    // The sizes of Gemma 3 4B, as its config.json gives them.
    let json = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": { "factor": 8.0, "rope_type": "linear" }, "sliding_window": 1024,
        },
        "vision_config": { "hidden_size": 1152, "num_hidden_layers": 27 },
    });
    let config = Config::from_json(&json).unwrap();
    assert_eq!((config.vocab, config.hidden, config.layers), (262_208, 2560, 34));
    assert_eq!((config.heads.query, config.heads.kv, config.heads.size), (8, 4, 256));
    assert_eq!((config.tied, config.max_positions, config.window()), (true, 131_072, Some(1024)));
    assert_eq!(config.rope_of(5).scaling, RopeScaling::Linear { factor: 8.0 });
    assert_eq!((config.rope_of(0).theta, config.rope_of(5).theta), (1e4, 1e6));
    assert_eq!(
        (config.architecture(), config.path()),
        (json["architectures"][0].as_str().unwrap().into(), "language_model.")
    );
}

#[test]
fn a_part_of_each_head_is_rotated_where_the_family_says_so() {
    let glm = |more: Value| read(with(json!({"architectures": ["Glm4ForCausalLM"], "head_dim": 16}), more));
    let config = glm(json!({"attention_bias": null})).unwrap();
    assert!(config.qkv_bias && !config.o_bias && config.rotary == 8 && config.head_norms(0).is_none());
    assert!(!glm(json!({"attention_bias": false})).unwrap().qkv_bias);
    assert_eq!(glm(json!({"partial_rotary_factor": 0.75})).unwrap().rotary, 12);
    let section = json!({"rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1e5}});
    assert_eq!(glm(section).unwrap().rotary, 4);
    for bad in [0.0, 0.2, 1.5, -0.5] {
        let error = glm(json!({"partial_rotary_factor": bad})).unwrap_err().to_string();
        assert!(error.contains("partial_rotary_factor"), "{error}");
    }
    let phi = read(json!({"architectures": ["Phi3ForCausalLM"]})).unwrap();
    assert_eq!((phi.rotary, phi.rows(0, 1)), (64, Rows::Range(576..768)));
    assert_eq!(phi.projection(0, "qkv_proj"), Some((576 + 2 * 192, 576)));
}

/// Pair i of a block is rows i and i + 4 of the head: first those that turn, then the others.
#[test]
fn rows_of_a_head_come_in_pairs_that_are_half_a_head_apart() {
    assert_eq!(rope::order(8, 8, &families::LLAMA), None);
    assert_eq!(rope::order(8, 8, &families::GLM4).unwrap(), [0, 2, 4, 6, 1, 3, 5, 7]);
    assert_eq!(rope::order(8, 4, &families::GLM4).unwrap(), [0, 2, 4, 6, 1, 3, 5, 7]);
    assert_eq!(rope::order(8, 4, &families::LLAMA).unwrap(), [0, 1, 4, 5, 2, 3, 6, 7]);
    assert_eq!(rope::order(8, 6, &families::LLAMA).unwrap(), [0, 1, 2, 6, 3, 4, 5, 7]);
    let glm = json!({"architectures": ["Glm4ForCausalLM"], "head_dim": 4, "num_attention_heads": 2,
                     "num_key_value_heads": 2});
    let glm = read(glm).unwrap();
    assert_eq!(glm.rows(0, 1), Rows::Each(vec![0, 2, 1, 3, 4, 6, 5, 7]));
    assert_eq!(glm.rows(0, 2), Rows::Range(0..8));
    assert_eq!(glm.rows(0, 5), Rows::Range(1536..3072));
}

/// The sizes of LFM2-1.2B, as its first config.json gives them; a tied head and two thirds of the feed-forward.
#[test]
fn convolutions_take_the_place_of_attention() {
    let lfm2 = json!({"architectures": ["Lfm2ForCausalLM"], "hidden_size": 2048, "num_attention_heads": 32,
                      "num_key_value_heads": 8, "num_hidden_layers": 5, "intermediate_size": "-", "block_ff_dim": 12_288,
                      "full_attn_idxs": [2, 4], "conv_L_cache": 3, "conv_bias": false, "norm_eps": 1e-5,
                      "rope_theta": "-", "tie_embedding": true, "tie_word_embeddings": false});
    let changed = |more: Value| read(with(lfm2.clone(), more));
    let config = changed(json!({})).unwrap();
    assert_eq!((config.feed_forward, config.tied, config.eps, config.rope.theta), (8192, true, 1e-5, 1e6));
    let taps = (0..5).map(|layer| config.taps(layer));
    assert_eq!(taps.collect::<Vec<_>>(), [Some(3), Some(3), None, Some(3), None]);
    assert_eq!((config.head_norms(0), config.head_norms(2)), (None, Some([64; 2])));
    assert_eq!(config.projection(0, "in_proj"), Some((6144, 2048)));
    assert_eq!((config.projection(2, "in_proj"), config.projection(0, "q_proj")), (None, None));
    assert_eq!(
        (config.projection(2, "k_proj"), config.rows(0, 1)),
        (Some((512, 2048)), Rows::Range(2048..4096))
    );
    let size = |more: Value| changed(more).unwrap().feed_forward;
    assert_eq!(size(json!({"block_auto_adjust_ff_dim": false})), 12_288);
    assert_eq!(size(json!({"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 100})), 10_700);
    assert_eq!(size(json!({"block_ffn_dim_multiplier": null, "block_ff_dim": 1000})), 666);
    let typed = json!({"layer_types": ["conv", "full_attention", "conv", "conv", "conv"]});
    assert_eq!(changed(typed).unwrap().convolutions.unwrap().layers, [true, false, true, true, true]);
    for (changes, said) in [
        (json!({"conv_bias": true}), "`conv_bias` is not supported"),
        (json!({"full_attn_idxs": [5]}), "`full_attn_idxs` has 5, which is no layer"),
        (json!({"conv_L_cache": 1}), "`conv_L_cache` is 1"),
        (json!({"layer_types": ["conv", "mamba"]}), "layer type `mamba`"),
        (
            json!({"architectures": ["LlamaForCausalLM"], "intermediate_size": 64, "layer_types": ["conv"]}),
            "layer type `conv`",
        ),
    ] {
        let error = changed(changes).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}

/// The sizes of Qwen3.5-0.8B, whose layers of attention are every fourth one.
#[test]
fn delta_rules_take_the_place_of_attention() {
    let qwen = json!({"architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 1024, "num_attention_heads": 8,
                      "num_key_value_heads": 2, "num_hidden_layers": 8, "head_dim": 256, "rope_theta": "-",
                      "linear_num_value_heads": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7,
                      "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25}});
    let changed = |more: Value| read(with(qwen.clone(), more));
    let config = changed(json!({})).unwrap();
    let rules = (0..8).map(|layer| config.delta_heads(layer).is_some());
    assert_eq!(rules.collect::<Vec<_>>(), [true, true, true, false, true, true, true, false]);
    let heads = config.delta_heads(0).unwrap();
    assert_eq!((heads.values, heads.keys, heads.value_size, heads.key_size), (16, 16, 128, 128));
    assert_eq!((config.rotary, config.head_norms(0), config.head_norms(3)), (64, None, Some([256; 2])));
    assert_eq!(config.projection(0, "in_proj_qkv"), Some((6144, 1024)));
    assert_eq!(
        (config.projection(0, "in_proj_a"), config.projection(3, "in_proj_a")),
        (Some((16, 1024)), None)
    );
    assert_eq!(config.projection(3, "q_proj"), Some((4096, 1024)));
    assert_eq!(
        (config.projection(3, "o_proj"), config.rows(0, 2)),
        (Some((1024, 2048)), Rows::Range(4096..6144))
    );
    let (Rows::Each(q), Rows::Each(gate)) = (config.rows(3, 0), config.rows(3, 7)) else {
        panic!("rows of heads")
    };
    assert_eq!((q[0], q[32], q[128], q[256], gate[0], gate[256]), (0, 64, 32, 512, 256, 768));
    for (changes, said) in [
        (json!({"linear_num_key_heads": 5}), "`linear_num_key_heads` is 5"),
        (json!({"head_dim": "-"}), "`head_dim` is missing"),
        (json!({"linear_key_head_dim": 1000}), "`linear_key_head_dim` is 1000"),
        (json!({"attention_bias": true}), "`attention_bias` is not supported"),
        (json!({"layer_types": ["mamba"]}), "layer type `mamba`"),
    ] {
        let error = changed(changes).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}

/// Phi-4-mini's keys in both dialects.
#[test]
fn longrope_has_other_factors_beyond_the_original_length() {
    let base = json!({"architectures": ["Phi3ForCausalLM"], "num_attention_heads": 144, "num_key_value_heads": 144,
                      "original_max_position_embeddings": 4096, "max_position_embeddings": 131_072});
    let older =
        json!({"rope_scaling": {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [9, 9]}});
    let older = with(base.clone(), older);
    let newer = json!({"rope_theta": "-", "rope_scaling": "-", "rope_parameters": {"rope_type": "longrope",
                       "rope_theta": 1e5, "short_factor": [1.0, 2.0], "long_factor": [9.0, 9.0]}});
    let config = read(older.clone()).unwrap();
    assert_eq!(read(with(base, newer)).unwrap(), config);
    assert_eq!((config.max_positions, config.rope.short_rows()), (131_072, Some(4096)));
    assert_eq!([1, 4096, 4097].map(|prompt| config.longest_text(prompt)), [4096, 4096, 131_072]);
    let amplitude = (1.0 + 32f64.ln() / 4096f64.ln()).sqrt() as f32;
    let second = 1.0 / (2.0 * 1e5f32.sqrt());
    assert_eq!(config.rope.frequencies(4), [1.0, second]);
    let table = config.rope.table(2, 4);
    assert_eq!(table[..4], [amplitude, amplitude, 0.0, 0.0]);
    assert!((table[4] - amplitude * 1f32.cos()).abs() < 1e-6);
    let table = config.rope.table(4098, 4);
    assert_eq!(table[4 * 4096..][..4], [amplitude, amplitude, 0.0, 0.0]);
    assert!((table[4 * 4097] - amplitude * (1f32 / 9.0).cos()).abs() < 1e-6);
    for (changes, said) in [
        (
            json!({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [9, 9]}}),
            "short_factor",
        ),
        (json!({"rope_scaling": {"type": "longrope", "short_factor": [1.0, 0.0]}}), "short_factor"),
        (json!({"rope_scaling": {"type": "longrope"}}), "short_factor"),
        (
            json!({"rope_scaling": {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [9.0]}}),
            "long_factor",
        ),
        (json!({"rope_scaling": {"type": "longrope", "short_factor": [1.0, 2.0]}}), "long_factor"),
        (json!({"rope_scaling": {"type": "linear", "factor": 2.0}}), "linear"),
        (json!({"original_max_position_embeddings": "-"}), "original_max_position_embeddings"),
    ] {
        let error = read(with(older.clone(), changes)).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}

#[test]
fn heads_of_tokens_are_read_made_and_refused() {
    let ids = json!({"0": "B-X", "1": "O"});
    let class = |name: &str, more: Value| {
        let own = json!({"architectures": [name], "id2label": ids, "problem_type": "regression"});
        read(with(own, more))
    };
    let tagger = class("LlamaForTokenClassification", json!({})).unwrap();
    assert_eq!(
        (tagger.tags, tagger.numbers, tagger.architecture().as_str()),
        (true, false, "LlamaForTokenClassification")
    );
    let labels = || vec!["B-X".to_owned(), "O".to_owned()];
    assert_eq!(tagger.clone().into_tagger(labels()), Ok(tagger.clone()));
    let said = |refused: Result<Config, ConfigError>| refused.unwrap_err().to_string();
    assert!(said(tagger.into_classifier(labels())).contains("--task token-classification"));
    let of_rows = class("LlamaForSequenceClassification", json!({})).unwrap();
    assert!(said(of_rows.into_tagger(labels())).contains("its head is for whole rows"));
    let without = class("LlamaForTokenClassification", json!({"token_classification_bias": false}));
    assert!(said(without).contains("token_classification_bias"));
    // transformers 5.24 has no such class for these families.
    let without: Vec<&str> = families::ALL.iter().filter(|f| !f.labels_tokens).map(|f| f.name).collect();
    assert_eq!(
        without,
        ["Qwen3_5", "Qwen3_5Moe", "Gemma3", "Granite", "GraniteMoeHybrid", "Olmo2", "Olmo3", "Lfm2"]
    );
    let olmo = read(json!({"architectures": ["Olmo2ForCausalLM"]})).unwrap();
    assert!(said(olmo.into_tagger(labels())).contains("token classification on Olmo2ForCausalLM"));
    assert!(class("Olmo2ForTokenClassification", json!({})).is_err());
}
