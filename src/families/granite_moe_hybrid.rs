//! Granite 4 (dense): a Granite 3 whose gate and up are one matrix of a feed-forward with names of its own, and whose layers
//! may be without rotation. Models of this class with Mamba-2 layers or experts are refused.

use super::{Bias, Biases, Family, FeedForward, Fused, GRANITE, Rotated};

/// The matrix of gate and up.
const INPUT: &str = "shared_mlp.input_linear";

/// Granite 4.
pub const GRANITE_MOE_HYBRID: Family = Family {
    name: "GraniteMoeHybrid",
    releases: &["Granite 4"],
    model_type: "granitemoehybrid",
    // llama.cpp's converter writes this key for this class, and none for Granite 3.
    gguf_mark: Some(super::ROTATES),
    projections: [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        INPUT,
        INPUT,
        "shared_mlp.output_linear",
    ],
    feed_forward: FeedForward::Key("shared_intermediate_size"),
    fused: Fused::Named(INPUT),
    biases: Biases { qkv: Bias::Key("attention_bias"), o: Bias::Key("attention_bias"), mlp: Bias::Never },
    rotated: Rotated::Key("position_embedding_type"),
    hybrid: true,
    // transformers adds a loss of the router.
    refused: &["output_router_logits"],
    ..GRANITE
};
