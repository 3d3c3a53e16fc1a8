//! GLM-4 and GLM-Z1 of 2025-04: norms around both halves, gate and up in one matrix, half of each head rotated in adjacent
//! pairs.

use super::{Bias, Biases, Family, Fused, Gguf, LLAMA, Norms};

/// GLM-4.
pub const GLM4: Family = Family {
    name: "Glm4",
    releases: &["GLM-4", "GLM-Z1"],
    model_type: "glm4",
    gguf: Gguf { architecture: "glm4", adjacent_pairs: false, all_sizes: false, complete: true },
    attention_norms: Norms { before: Some("input_layernorm"), after: Some("post_self_attn_layernorm") },
    mlp_norms: Norms { before: Some("post_attention_layernorm"), after: Some("post_mlp_layernorm") },
    eps: 1.5625e-7,
    fused: Fused::GateUp,
    biases: Biases { qkv: Bias::KeyOrTrue("attention_bias"), o: Bias::Never, mlp: Bias::Never },
    partial_rotary: Some(0.5),
    adjacent_pairs: true,
    ..LLAMA
};
