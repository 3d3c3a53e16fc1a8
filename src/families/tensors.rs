//! Names of tensors as (GGUF, Hugging Face) outside the layers, and inside `blk.N` and `model.layers.N`.

use super::{Family, Norms};

/// Tensors outside the layers.
pub const TOP: [(&str, &str); 3] =
    [("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];

/// The projections of a layer, in model order.
pub const PROJECTIONS: [(&str, &str); 7] = [
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// Norms of the heads of q and k.
const HEAD_NORMS: [(&str, &str); 2] =
    [("attn_q_norm", "self_attn.q_norm"), ("attn_k_norm", "self_attn.k_norm")];

impl Family {
    /// The tensors that a layer of the family may have.
    pub fn layer_tensors(&self) -> Vec<(&'static str, &'static str)> {
        let norms = |stored: [&'static str; 2], Norms { before, after }: Norms| {
            stored.into_iter().zip([before, after]).filter_map(|(stored, name)| Some((stored, name?)))
        };
        let mut all = PROJECTIONS.to_vec();
        all.extend(HEAD_NORMS);
        all.extend(norms(["attn_norm", "post_attention_norm"], self.attention_norms));
        all.extend(norms(["ffn_norm", "post_ffw_norm"], self.mlp_norms));
        all
    }
}
