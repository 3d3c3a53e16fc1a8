//! Llama 1 to 3, SmolLM2, TinyLlama: the base of the other families' descriptions.

use super::{
    Activation, Bias, Biases, Classifier, EmbeddingScale, Family, Fused, Gguf, HeadNorms, Norms, ScoreScale,
    Windows,
};

/// Llama.
pub const LLAMA: Family = Family {
    name: "Llama",
    classifier: Classifier::OfName,
    releases: &["Llama"],
    model_type: "llama",
    gguf: Gguf { architecture: "llama", adjacent_pairs: true, all_sizes: true, complete: false },
    attention_norms: Norms { before: Some("input_layernorm"), after: None },
    mlp_norms: Norms { before: Some("post_attention_layernorm"), after: None },
    eps: 1e-6,
    gain_offset: 0.0,
    head_norms: HeadNorms::None,
    fused: Fused::None,
    experts: false,
    activation: Activation::SwiGlu,
    activation_key: "hidden_act",
    biases: Biases {
        qkv: Bias::Key("attention_bias"),
        o: Bias::Key("attention_bias"),
        mlp: Bias::Key("mlp_bias"),
    },
    windows: Windows::Typed,
    rope_theta: 10_000.0,
    local_rope_theta: None,
    partial_rotary: None,
    adjacent_pairs: false,
    long_rope: false,
    unrotated_layers: false,
    query_growth: None,
    score_scale: ScoreScale::HeadSize,
    soft_cap: None,
    embedding_scale: EmbeddingScale::One,
    residual_scale: None,
    logits_scale: None,
    tied: false,
    refused: &[],
};
