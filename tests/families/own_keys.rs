//! The keys of `config.json` in which families differ, with values that change the result.

use finetune::families::{Bias, EmbeddingScale, Family, FeedForward, Rotated, ScoreScale, Windows};
use finetune::model::config::Config;
use serde_json::{Value, json};

/// Sets each key that `family` reads beside the common ones; windows are `window` tokens.
pub fn set(family: &Family, window: usize, config: &mut Value) {
    if matches!(family.windows, Windows::All | Windows::Given | Windows::Pattern(..)) {
        config["sliding_window"] = json!(window);
    }
    if let Some(growth) = family.query_growth {
        let original = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16 });
        config["rope_parameters"] = original;
        config["rope_parameters"][growth] = json!(0.1);
    }
    if let Bias::KeyOrTrue(key) = family.biases.qkv {
        config[key] = json!(true);
    }
    if let FeedForward::Key(key) = family.feed_forward {
        config[key] = config["intermediate_size"].clone();
    }
    if let Rotated::Key(key) = family.rotated {
        config[key] = json!("rope");
    }
    if family.hybrid {
        let layers = config["num_hidden_layers"].as_u64().unwrap_or(0);
        config["layer_types"] = (0..layers).map(|_| "attention").collect();
        config["num_local_experts"] = json!(0);
    }
    set_experts(family, config);
    if family.convolutions {
        let layers = config["num_hidden_layers"].as_u64().unwrap_or(0);
        let kinds = (0..layers).map(|layer| if layer % 2 == 0 { "conv" } else { "full_attention" });
        config["layer_types"] = kinds.collect();
        config["block_auto_adjust_ff_dim"] = json!(false);
    }
    if family.delta_rule {
        let layers = config["num_hidden_layers"].as_u64().unwrap_or(0);
        let kinds =
            (0..layers).map(|layer| if layer % 2 == 0 { "linear_attention" } else { "full_attention" });
        config["layer_types"] = kinds.collect();
        let sizes =
            [("num_value_heads", 4), ("num_key_heads", 2), ("value_head_dim", 64), ("key_head_dim", 16)];
        sizes.into_iter().for_each(|(key, size)| config[format!("linear_{key}")] = json!(size));
        config["head_dim"] = json!(config["head_dim"].as_u64().unwrap_or(16));
    }
    if family.partial_rotary.is_some() {
        config["partial_rotary_factor"] = json!(0.75);
    }
    let mut set = |key: Option<&str>, value: f64| key.into_iter().for_each(|key| config[key] = json!(value));
    match family.score_scale {
        ScoreScale::Key(key) => set(Some(key), 16.0),
        ScoreScale::Factor(key) => set(Some(key), 0.125),
        ScoreScale::HeadSize => {}
    }
    if let EmbeddingScale::Key(key) = family.embedding_scale {
        set(Some(key), 12.0);
    }
    set(family.residual_scale, 0.25);
    set(family.logits_scale, 4.0);
}

fn set_experts(family: &Family, config: &mut Value) {
    if family.biased_experts {
        config["rope_parameters"] = json!({
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": false,
        });
    }
    if family.experts {
        config["num_experts"] = json!(5);
        config["num_experts_per_tok"] = json!(2);
        config["moe_intermediate_size"] = json!(config["intermediate_size"].as_u64().unwrap_or(0) / 2);
        config["norm_topk_prob"] = json!(true);
    }
}

/// Names and shapes of what a layer with a delta rule has besides matrices and norms of the stream.
pub fn of_delta_rule(config: &Config, layer: usize) -> Vec<(String, Vec<usize>)> {
    let (Some(heads), Some(of)) = (config.delta_heads(layer), &config.delta_rules) else { return Vec::new() };
    let channels = 2 * heads.keys * heads.key_size + heads.values * heads.value_size;
    let own = [
        ("conv1d.weight", vec![channels, 1, of.taps]),
        ("norm.weight", vec![heads.value_size]),
        ("A_log", vec![heads.values]),
        ("dt_bias", vec![heads.values]),
    ];
    own.map(|(name, shape)| (format!("model.layers.{layer}.linear_attn.{name}"), shape)).into()
}

/// Name and shape of the gate of a layer's expert that computes every token.
pub fn of_shared_expert(config: &Config, layer: usize) -> Option<(String, Vec<usize>)> {
    let name = format!("model.layers.{layer}.mlp.shared_expert_gate.weight");
    config.family.shared_expert.then(|| (name, vec![1, config.hidden]))
}

/// Names and shapes of a layer's sinks, and of the biases of its router and of its experts.
pub fn of_joined_experts(config: &Config, layer: usize) -> Vec<(String, Vec<usize>)> {
    let Some(of) = config.experts_of(layer).filter(|_| config.family.biased_experts) else {
        return Vec::new();
    };
    let (e, f) = (of.count, of.feed_forward);
    let own = [
        ("self_attn.sinks", vec![config.heads.query]),
        ("mlp.router.bias", vec![e]),
        ("mlp.experts.gate_proj.bias", vec![e, f]),
        ("mlp.experts.up_proj.bias", vec![e, f]),
        ("mlp.experts.down_proj.bias", vec![e, config.hidden]),
    ];
    own.map(|(name, shape)| (format!("model.layers.{layer}.{name}"), shape)).into()
}
