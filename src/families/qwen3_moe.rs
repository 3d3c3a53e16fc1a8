//! Qwen3-MoE: a Qwen3 whose feed-forwards are mixtures of experts. transformers adds a loss of the router where
//! `output_router_logits` is true, and gives a window to all layers.

use super::{Family, Gguf, QWEN3, Windows};

/// Qwen3-MoE.
pub const QWEN3_MOE: Family = Family {
    name: "Qwen3Moe",
    releases: &["Qwen3-MoE"],
    model_type: "qwen3_moe",
    gguf: Gguf { architecture: "qwen3moe", adjacent_pairs: false, all_sizes: false, complete: true },
    experts: true,
    windows: Windows::Typed,
    refused: &["use_sliding_window", "output_router_logits"],
    ..QWEN3
};
