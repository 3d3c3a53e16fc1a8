//! gpt-oss: mixtures of experts with biases and a clamped SwiGLU, attention with sinks, every second layer slides.

use super::{Activation, Bias, Biases, Family, Gguf, JoinedExperts, LLAMA, Windows};

/// gpt-oss.
pub const GPT_OSS: Family = Family {
    name: "GptOss",
    releases: &["gpt-oss"],
    model_type: "gpt_oss",
    gguf: Gguf { architecture: "gpt-oss", adjacent_pairs: false, all_sizes: false, complete: true },
    eps: 1e-5,
    experts: true,
    joined_experts: Some(JoinedExperts::Alternating),
    biased_experts: true,
    gguf_mlp_norm: "post_attention_norm",
    needs_rope_section: true,
    whole_ramp: false,
    sinks: true,
    activation: Activation::ClampedSwiGlu,
    biases: Biases {
        qkv: Bias::KeyOrTrue("attention_bias"),
        o: Bias::KeyOrTrue("attention_bias"),
        mlp: Bias::Never,
    },
    windows: Windows::Pattern(2, 128),
    rope_theta: 150_000.0,
    refused: &["output_router_logits"],
    ..LLAMA
};
