//! OLMo 2: norms after both halves only, norms on whole q and k.

use super::{Bias, Biases, Family, Gguf, HeadNorms, LLAMA, Norms};

/// OLMo 2.
pub const OLMO2: Family = Family {
    name: "Olmo2",
    releases: &["OLMo 2"],
    model_type: "olmo2",
    gguf: Gguf { architecture: "olmo2", adjacent_pairs: false, all_sizes: false, complete: true },
    attention_norms: Norms { before: None, after: Some("post_attention_layernorm") },
    mlp_norms: Norms { before: None, after: Some("post_feedforward_layernorm") },
    eps: 1e-5,
    head_norms: HeadNorms::Whole,
    labels_tokens: false,
    biases: Biases { qkv: Bias::Key("attention_bias"), o: Bias::Key("attention_bias"), mlp: Bias::Never },
    ..LLAMA
};
