//! Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: q, k and v in one matrix, gate and up in another; a part of each head rotated, with a
//! factor for each frequency.

use super::{Bias, Biases, Family, Fused, Gguf, LLAMA, Windows};

/// Phi-3.
pub const PHI3: Family = Family {
    name: "Phi3",
    releases: &["Phi-3", "Phi-3.5", "Phi-4", "Phi-4-mini"],
    model_type: "phi3",
    gguf: Gguf { architecture: "phi3", adjacent_pairs: false, all_sizes: false, complete: true },
    eps: 1e-5,
    fused: Fused::All,
    biases: Biases { qkv: Bias::Never, o: Bias::Never, mlp: Bias::Never },
    windows: Windows::Given,
    partial_rotary: Some(1.0),
    long_rope: true,
    ..LLAMA
};
