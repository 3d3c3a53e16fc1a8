//! Ministral 3 (text): a Mistral without windows, with YaRN, and queries that grow with their position.

use super::{Family, Gguf, LLAMA, MISTRAL, Windows};

/// Ministral 3.
pub const MINISTRAL3: Family = Family {
    name: "Ministral3",
    releases: &["Ministral 3"],
    model_type: "ministral3",
    gguf: Gguf { architecture: "mistral3", complete: true, ..LLAMA.gguf },
    gguf_mark: None,
    windows: Windows::Typed,
    eps: 1e-5,
    rope_theta: 1_000_000.0,
    needs_rope_section: true,
    query_growth: Some("llama_4_scaling_beta"),
    refused: &["sliding_window"],
    ..MISTRAL
};
