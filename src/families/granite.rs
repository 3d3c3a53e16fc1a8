//! Granite 3 (dense): factors of the embedding, the scores, the residual branches and the logits.

use super::{Classifier, EmbeddingScale, Family, Gguf, LLAMA, ScoreScale};

/// Granite.
pub const GRANITE: Family = Family {
    name: "Granite",
    classifier: Classifier::Missing,
    labels_tokens: false,
    releases: &["Granite 3"],
    model_type: "granite",
    gguf: Gguf { architecture: "granite", adjacent_pairs: true, all_sizes: true, complete: true },
    score_scale: ScoreScale::Factor("attention_multiplier"),
    embedding_scale: EmbeddingScale::Key("embedding_multiplier"),
    residual_scale: Some("residual_multiplier"),
    logits_scale: Some("logits_scaling"),
    ..LLAMA
};
