//! Gemma 3 (text): norms around both halves with gains 1 + w, norms on the heads of q and k, GeGLU, a scaled embedding;
//! five sliding layers with a rotary base of their own to each full one.

use super::{
    Activation, Bias, Biases, Classifier, EmbeddingScale, Family, Gguf, HeadNorms, LLAMA, Norms, ScoreScale,
    Windows,
};

/// Gemma 3.
pub const GEMMA3: Family = Family {
    name: "Gemma3",
    classifier: Classifier::Named("Gemma3Text"),
    labels_tokens: false,
    releases: &["Gemma 3"],
    model_type: "gemma3_text",
    gguf: Gguf { architecture: "gemma3", adjacent_pairs: false, all_sizes: false, complete: true },
    attention_norms: Norms { before: Some("input_layernorm"), after: Some("post_attention_layernorm") },
    mlp_norms: Norms { before: Some("pre_feedforward_layernorm"), after: Some("post_feedforward_layernorm") },
    gain_offset: 1.0,
    head_norms: HeadNorms::Each,
    activation: Activation::GeGlu,
    activation_key: "hidden_activation",
    biases: Biases { qkv: Bias::Key("attention_bias"), o: Bias::Key("attention_bias"), mlp: Bias::Never },
    windows: Windows::Pattern(6, 4096),
    rope_theta: 1_000_000.0,
    local_rope_theta: Some("rope_local_base_freq"),
    score_scale: ScoreScale::Key("query_pre_attn_scalar"),
    soft_cap: Some("attn_logit_softcapping"),
    embedding_scale: EmbeddingScale::RootOfHidden,
    tied: true,
    refused: &["final_logit_softcapping", "use_bidirectional_attention"],
    ..LLAMA
};
