//! Qwen3: norms on the heads of q and k.

use super::{Bias, Biases, Family, Gguf, HeadNorms, LLAMA, Windows};

/// Qwen3.
pub const QWEN3: Family = Family {
    name: "Qwen3",
    releases: &["Qwen3"],
    model_type: "qwen3",
    gguf: Gguf { architecture: "qwen3", adjacent_pairs: false, all_sizes: false, complete: false },
    head_norms: HeadNorms::Each,
    biases: Biases { qkv: Bias::Key("attention_bias"), o: Bias::Key("attention_bias"), mlp: Bias::Never },
    windows: Windows::Switched,
    ..LLAMA
};
