//! SmolLM3: every fourth layer is not rotated.

use super::{Family, Gguf, LLAMA, Rotated};

/// SmolLM3.
pub const SMOLLM3: Family = Family {
    name: "SmolLM3",
    releases: &["SmolLM3"],
    model_type: "smollm3",
    gguf: Gguf { architecture: "smollm3", adjacent_pairs: true, all_sizes: true, complete: true },
    rope_theta: 2_000_000.0,
    rotated: Rotated::Listed,
    tied: true,
    // No release slides.
    refused: &["use_sliding_window"],
    ..LLAMA
};
