//! Mistral 7B: a Llama without biases, with sliding windows in all layers.

use super::{Bias, Biases, Family, LLAMA, Windows};

/// Mistral.
pub const MISTRAL: Family = Family {
    name: "Mistral",
    releases: &["Mistral"],
    model_type: "mistral",
    biases: Biases { qkv: Bias::Never, o: Bias::Never, mlp: Bias::Never },
    gguf_mark: Some(super::WINDOW),
    windows: Windows::All,
    ..LLAMA
};
