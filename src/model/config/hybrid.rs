//! Models of a class that also has Mamba-2 layers and experts: those without both are read.

use super::read::Fields;
use super::{ConfigError, unsupported, window};
use crate::families::Family;

const WAY_OUT: &str =
    "choose a model with attention and one feed-forward in each layer, such as granite-4.0-micro";

/// Refuses Mamba-2 layers and experts, also where keys are missing: transformers' defaults have both.
pub(super) fn refuse(fields: &Fields, family: &Family) -> Result<(), ConfigError> {
    if !family.hybrid {
        return Ok(());
    }
    let refuse = |what: String| Err(unsupported(what, WAY_OUT));
    let (name, kinds) = ("layer_types", fields.strings("layer_types")?);
    if kinds.is_empty() {
        return refuse(format!("a model with Mamba-2 layers (no `{name}`)"));
    }
    let other = kinds.iter().find(|kind| !["full_attention", window::ATTENTION].contains(kind));
    if let Some(&kind @ ("mamba" | "linear_attention")) = other {
        return refuse(format!("a model with Mamba-2 layers (`{name}`: {kind})"));
    }
    if let Some(kind) = other {
        return refuse(format!("a model with layers of type `{kind}`"));
    }
    let name = "num_local_experts";
    match fields.optional_size(name, 0..=1 << 20)? {
        Some(0) => Ok(()),
        Some(count) => refuse(format!("a mixture of experts (`{name}`: {count})")),
        None => refuse(format!("a mixture of experts (no `{name}`, which stands for 8)")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Config, ConfigError, Rows};
    use serde_json::{Value, json};

    /// The keys of a Granite 4 without Mamba-2 layers and experts, with changes; one to "-" is removed.
    fn granite_4(changes: Value) -> Value {
        let mut config = json!({
            "architectures": ["GraniteMoeHybridForCausalLM"], "vocab_size": 100_352, "hidden_size": 576,
            "intermediate_size": 1536, "shared_intermediate_size": 2048, "num_hidden_layers": 2,
            "num_attention_heads": 9, "num_key_value_heads": 3, "num_local_experts": 0,
            "layer_types": ["attention", "attention"], "position_embedding_type": "rope",
        });
        let own = config.as_object_mut().unwrap();
        own.extend(changes.as_object().unwrap().clone());
        own.retain(|_, value| value != "-");
        config
    }

    fn read(config: Value) -> Result<Config, ConfigError> {
        Config::from_json(&config)
    }

    #[test]
    fn granite_4_has_fused_halves_and_layers_of_attention() {
        let rotated = read(granite_4(json!({}))).unwrap();
        assert_eq!((rotated.feed_forward, &rotated.rotated), (2048, &vec![true; 2]));
        assert_eq!(rotated.projection(1, "input_linear"), Some((4096, 576)));
        assert_eq!(rotated.projection(1, "output_linear"), Some((576, 2048)));
        assert_eq!((rotated.rows(0, 4), rotated.rows(0, 5)), (Rows::Range(0..2048), Rows::Range(2048..4096)));
        // As transformers 5.24 writes them; every other value is none.
        let later =
            json!({"layer_types": ["full_attention", "full_attention"], "position_embedding_type": "nope"});
        assert_eq!(read(granite_4(later)).unwrap().rotated, [false; 2]);
        assert_eq!(read(granite_4(json!({"position_embedding_type": "-"}))).unwrap().rotated, [false; 2]);
    }

    #[test]
    fn mamba_layers_and_experts_of_granite_4_are_refused() {
        for (changes, said) in [
            (
                json!({"layer_types": ["attention", "mamba"]}),
                "a model with Mamba-2 layers (`layer_types`: mamba) is not",
            ),
            (
                json!({"layer_types": ["linear_attention", "attention"]}),
                "Mamba-2 layers (`layer_types`: linear_attention)",
            ),
            (json!({"layer_types": "-"}), "a model with Mamba-2 layers (no `layer_types`)"),
            (
                json!({"layer_types": ["attention", "sliding_attention"]}),
                "layers of type `sliding_attention`",
            ),
            (json!({"num_local_experts": 62}), "mixture of experts (`num_local_experts`)"),
            (json!({"num_local_experts": 1}), "a mixture of experts (`num_local_experts`: 1)"),
            (
                json!({"num_local_experts": "-"}),
                "a mixture of experts (no `num_local_experts`, which stands for 8)",
            ),
            (json!({"layer_types": ["attention"]}), "has 1 entries for 2 layers"),
            (json!({"shared_intermediate_size": "-"}), "`shared_intermediate_size` is missing"),
            (json!({"output_router_logits": true}), "`output_router_logits` is not supported"),
        ] {
            let error = read(granite_4(changes.clone())).expect_err(&changes.to_string()).to_string();
            assert!(error.contains(said) && error.lines().count() == 1, "{changes}: {error}");
        }
    }
}
