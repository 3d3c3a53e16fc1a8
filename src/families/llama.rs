//! Llama 1 to 3, SmolLM2, TinyLlama: the base of the other families' descriptions.

use super::{Activation, Bias, Biases, Family, Gguf, Norms, ScoreScale, Windows};

/// Llama.
pub const LLAMA: Family = Family {
    name: "Llama",
    releases: &["Llama"],
    model_type: "llama",
    gguf: Gguf { architecture: "llama", adjacent_pairs: true, all_sizes: true },
    attention_norms: Norms { before: Some("input_layernorm"), after: None },
    mlp_norms: Norms { before: Some("post_attention_layernorm"), after: None },
    gain_offset: 0.0,
    head_norms: false,
    activation: Activation::SwiGlu,
    biases: Biases {
        qkv: Bias::Key("attention_bias"),
        o: Bias::Key("attention_bias"),
        mlp: Bias::Key("mlp_bias"),
    },
    windows: Windows::Typed,
    local_rope_theta: None,
    score_scale: ScoreScale::HeadSize,
    soft_cap: None,
};
