//! Qwen2 and Qwen2.5: biases on q, k and v.

use super::{Bias, Biases, Family, Gguf, LLAMA, Windows};

/// Qwen2.
pub const QWEN2: Family = Family {
    name: "Qwen2",
    releases: &["Qwen2", "Qwen2.5"],
    model_type: "qwen2",
    gguf: Gguf { architecture: "qwen2", adjacent_pairs: false, all_sizes: false, complete: false },
    biases: Biases { qkv: Bias::Always, o: Bias::Never, mlp: Bias::Never },
    windows: Windows::Switched,
    ..LLAMA
};
