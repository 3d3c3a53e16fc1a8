//! Qwen3.5 and Qwen3.6 (dense): gated delta rules between layers of attention, whose output has a gate; a quarter of each
//! head is rotated, and gains of norms are 1 + w, but that of the delta rule's norm.

use super::{Bias, Biases, Classifier, Family, Gguf, HeadNorms, LLAMA};

/// Qwen3.5.
pub const QWEN3_5: Family = Family {
    name: "Qwen3_5",
    classifier: Classifier::Named("Qwen3_5Text"),
    labels_tokens: false,
    releases: &["Qwen3.5", "Qwen3.6"],
    model_type: "qwen3_5_text",
    gguf: Gguf { architecture: "qwen35", adjacent_pairs: false, all_sizes: false, complete: true },
    delta_rule: true,
    gguf_mlp_norm: "post_attention_norm",
    gated_attention: true,
    gain_offset: 1.0,
    head_norms: HeadNorms::Each,
    biases: Biases { qkv: Bias::Never, o: Bias::Never, mlp: Bias::Never },
    partial_rotary: Some(0.25),
    refused: &["attention_bias"],
    ..LLAMA
};
