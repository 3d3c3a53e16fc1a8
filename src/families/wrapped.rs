//! Checkpoints that hold a text model beside a vision tower (`...ForConditionalGeneration`): which ones are read, where
//! the text model's tensors are, and what transformers fills in where `text_config` says nothing.

use super::{Family, GEMMA3, MINISTRAL3, MISTRAL, QWEN3, QWEN3_5, QWEN3_5_MOE};

/// Place of the text model below `model.`; names of an adapter's tensors contain it.
pub const PATH: &str = "language_model.";

/// A class with a text model of a known family.
#[derive(Debug, PartialEq)]
pub struct Wrapper {
    /// Its name in `architectures`.
    pub class: &'static str,
    /// `model_type` of `text_config`.
    pub text_type: &'static str,
    /// The text model.
    pub family: &'static Family,
    /// Sizes that `text_config` may leave out, as in transformers' configuration class.
    pub defaults: &'static [(&'static str, u32)],
    /// Whether the head is the embedding where config.json does not say it.
    pub tied: bool,
}

/// The classes that are read.
pub const ALL: [Wrapper; 6] = [
    Wrapper {
        class: "Gemma3ForConditionalGeneration",
        text_type: "gemma3_text",
        family: &GEMMA3,
        defaults: &[
            ("vocab_size", 262_208),
            ("hidden_size", 2304),
            ("intermediate_size", 9216),
            ("num_hidden_layers", 26),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("head_dim", 256),
            ("max_position_embeddings", 131_072),
            ("query_pre_attn_scalar", 256),
            ("sliding_window", 4096),
        ],
        tied: true,
    },
    Wrapper {
        class: "Mistral3ForConditionalGeneration",
        text_type: "ministral3",
        family: &MINISTRAL3,
        defaults: &[],
        tied: true,
    },
    Wrapper {
        class: "Mistral3ForConditionalGeneration",
        text_type: "mistral",
        family: &MISTRAL,
        defaults: &[],
        tied: true,
    },
    Wrapper {
        class: "Qwen3VLForConditionalGeneration",
        text_type: "qwen3_vl_text",
        family: &QWEN3,
        defaults: &[],
        tied: false,
    },
    Wrapper {
        class: "Qwen3_5ForConditionalGeneration",
        text_type: "qwen3_5_text",
        family: &QWEN3_5,
        defaults: &[
            ("vocab_size", 248_320),
            ("hidden_size", 4096),
            ("intermediate_size", 12_288),
            ("num_hidden_layers", 32),
            ("num_attention_heads", 16),
            ("num_key_value_heads", 4),
            ("head_dim", 256),
            ("max_position_embeddings", 32_768),
        ],
        tied: false,
    },
    Wrapper {
        class: "Qwen3_5MoeForConditionalGeneration",
        text_type: "qwen3_5_moe_text",
        family: &QWEN3_5_MOE,
        defaults: &[
            ("vocab_size", 248_320),
            ("hidden_size", 2048),
            ("num_hidden_layers", 40),
            ("num_attention_heads", 16),
            ("num_key_value_heads", 2),
            ("head_dim", 256),
            ("max_position_embeddings", 32_768),
            ("moe_intermediate_size", 512),
            ("shared_expert_intermediate_size", 512),
            ("num_experts_per_tok", 8),
            ("num_experts", 256),
        ],
        tied: false,
    },
];

/// Sets the number of rows of the text model's embedding in a config.json.
pub fn set_vocabulary(config: &mut serde_json::Value, rows: usize) {
    match config.get_mut("text_config").filter(|text| text.is_object()) {
        Some(text) => text["vocab_size"] = rows.into(),
        None => config["vocab_size"] = rows.into(),
    }
}

/// The text model's name (`model.layers.0.mlp.up_proj.weight`) of a tensor of the whole checkpoint, in the spelling of
/// transformers 5 (`model.language_model.layers...`, `lm_head.weight`) or of files (`language_model.model.layers...`,
/// `language_model.lm_head.weight`); `None` for tensors of other parts.
pub fn text_name(stored: &str) -> Option<String> {
    if stored.starts_with("lm_head.") {
        return Some(stored.to_owned());
    }
    if let Some(head) = stored.strip_prefix(PATH).filter(|rest| rest.starts_with("lm_head.")) {
        return Some(head.to_owned());
    }
    let below =
        stored.strip_prefix("model.language_model.").or(stored.strip_prefix("language_model.model."))?;
    Some(format!("model.{below}"))
}
