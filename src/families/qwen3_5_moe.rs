//! Qwen3.5 and Qwen3.6 with experts: a Qwen3.5 whose feed-forwards are mixtures of experts, beside an expert that computes
//! every token. transformers adds a loss of the router where `output_router_logits` is true.

use super::{Classifier, Family, FeedForward, Gguf, JoinedExperts, LLAMA, QWEN3_5};

const fn projections() -> [&'static str; 7] {
    let [q, k, v, o, ..] = LLAMA.projections;
    [q, k, v, o, "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"]
}

/// Qwen3.5 with experts.
pub const QWEN3_5_MOE: Family = Family {
    name: "Qwen3_5Moe",
    classifier: Classifier::Missing,
    releases: &["Qwen3.5-MoE"],
    model_type: "qwen3_5_moe_text",
    gguf: Gguf { architecture: "qwen35moe", adjacent_pairs: false, all_sizes: false, complete: true },
    projections: projections(),
    feed_forward: FeedForward::Key("shared_expert_intermediate_size"),
    experts: true,
    joined_experts: Some(JoinedExperts::InTurn),
    shared_expert: true,
    refused: &["attention_bias", "output_router_logits"],
    ..QWEN3_5
};
