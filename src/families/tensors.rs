//! Names of tensors as (GGUF, Hugging Face) outside the layers, and inside `blk.N` and `model.layers.N`.

use super::{Family, Fused, Norms};
use std::ops::Range;

/// Tensors outside the layers.
pub const TOP: [(&str, &str); 3] =
    [("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];

/// The projections of a layer, in model order.
const PROJECTIONS: [(&str, &str); 7] = [
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// The matrices of several projections.
const QKV: (&str, &str) = ("attn_qkv", "self_attn.qkv_proj");
const GATE_UP: (&str, &str) = ("ffn_up", "mlp.gate_up_proj");

/// The router of a mixture of experts, and the matrices of all experts of a layer. In Hugging Face each expert has its
/// own, below `mlp.experts.N`.
pub const ROUTER: (&str, &str) = ("ffn_gate_inp", "mlp.gate");
/// See [`ROUTER`].
pub const EXPERTS: [(&str, &str); 3] =
    [("ffn_gate_exps", "gate_proj"), ("ffn_up_exps", "up_proj"), ("ffn_down_exps", "down_proj")];

/// Norms of the heads of q and k.
const HEAD_NORMS: [(&str, &str); 2] =
    [("attn_q_norm", "self_attn.q_norm"), ("attn_k_norm", "self_attn.k_norm")];

/// A matrix of a layer in the files: a projection, or several whose rows follow each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Matrix {
    /// (GGUF, Hugging Face).
    pub names: (&'static str, &'static str),
    /// The projections, as indices in model order.
    pub projections: Range<usize>,
}

impl Matrix {
    /// The last part of its Hugging Face name, such as `q_proj`.
    pub fn module(&self) -> &'static str {
        self.names.1.rsplit('.').next().unwrap_or(self.names.1)
    }

    /// Whether it belongs to attention, not to the feed-forward.
    pub fn is_of_attention(&self) -> bool {
        self.projections.start < 4
    }
}

/// An expert's matrix by its Hugging Face name: its layer, its number, and its name in [`EXPERTS`] as (GGUF, Hugging
/// Face).
pub fn of_expert(name: &str) -> Option<(u32, usize, (&'static str, &'static str))> {
    let path = name.strip_prefix("model.").unwrap_or(name).strip_suffix(".weight")?;
    let (layer, expert) = path.strip_prefix("layers.")?.split_once(".mlp.experts.")?;
    let (expert, module) = expert.split_once('.')?;
    let names = EXPERTS.into_iter().find(|(_, own)| *own == module)?;
    Some((layer.parse().ok()?, expert.parse().ok()?, names))
}

/// Whether some family has a matrix of this name, such as `q_proj`.
pub fn is_module(name: &str) -> bool {
    let all = PROJECTIONS.into_iter().chain([QKV, GATE_UP]);
    all.map(|names| Matrix { names, projections: 0..0 }).any(|matrix| matrix.module() == name)
}

impl Family {
    /// The matrices of a layer, in model order.
    pub fn matrices(&self) -> Vec<Matrix> {
        let joined: &[((&str, &str), Range<usize>)] = match self.fused {
            Fused::None => &[],
            Fused::GateUp => &[(GATE_UP, 4..6)],
            Fused::All => &[(QKV, 0..3), (GATE_UP, 4..6)],
        };
        let mut all = Vec::new();
        for (i, own) in PROJECTIONS.into_iter().enumerate() {
            match joined.iter().find(|(_, some)| some.contains(&i)) {
                None => all.push(Matrix { names: own, projections: i..i + 1 }),
                Some((names, some)) if some.start == i => {
                    all.push(Matrix { names: *names, projections: some.clone() });
                }
                Some(_) => {}
            }
        }
        all
    }

    /// The last parts of the names of [`Family::matrices`] that can have an adapter. A family with experts has
    /// adapters on attention only: recent transformers keep all experts of a layer in two tensors, which PEFT's LoRA does not adapt.
    pub fn modules(&self) -> Vec<&'static str> {
        let adapted = |matrix: &&Matrix| !self.experts || matrix.is_of_attention();
        self.matrices().iter().filter(adapted).map(Matrix::module).collect()
    }

    /// The tensors that a layer of the family may have.
    pub fn layer_tensors(&self) -> Vec<(&'static str, &'static str)> {
        let norms = |stored: [&'static str; 2], Norms { before, after }: Norms| {
            stored.into_iter().zip([before, after]).filter_map(|(stored, name)| Some((stored, name?)))
        };
        let mut all: Vec<_> = self.matrices().iter().map(|matrix| matrix.names).collect();
        all.extend(HEAD_NORMS);
        all.extend(self.experts.then_some(ROUTER));
        all.extend(norms(["attn_norm", "post_attention_norm"], self.attention_norms));
        all.extend(norms(["ffn_norm", "post_ffw_norm"], self.mlp_norms));
        all
    }
}
