//! LFM2 and LFM2.5 (dense): causal short convolutions between layers of attention, norms on the heads of q and k, names of
//! its own. transformers has no classifier of it.

use super::{Bias, Biases, Classifier, Family, FeedForward, Gguf, HeadNorms, LLAMA, Norms};

/// LFM2.
pub const LFM2: Family = Family {
    name: "Lfm2",
    classifier: Classifier::Missing,
    labels_tokens: false,
    releases: &["LFM2", "LFM2.5"],
    model_type: "lfm2",
    gguf: Gguf { architecture: "lfm2", adjacent_pairs: false, all_sizes: false, complete: true },
    projections: [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.out_proj",
        "feed_forward.w1",
        "feed_forward.w3",
        "feed_forward.w2",
    ],
    convolutions: true,
    last_norm: "embedding_norm",
    attention_norms: Norms { before: Some("operator_norm"), after: None },
    mlp_norms: Norms { before: Some("ffn_norm"), after: None },
    eps_key: "norm_eps",
    eps: 1e-5,
    head_norms: HeadNorms::Each,
    head_norm_names: ["self_attn.q_layernorm", "self_attn.k_layernorm"],
    feed_forward: FeedForward::Adjusted,
    biases: Biases { qkv: Bias::Never, o: Bias::Never, mlp: Bias::Never },
    rope_theta: 1_000_000.0,
    tied_keys: &["tie_embedding", "tie_word_embeddings"],
    tied: true,
    refused: &["conv_bias"],
    ..LLAMA
};
