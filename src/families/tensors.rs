//! Names of tensors as (GGUF, Hugging Face) outside the layers, and inside `blk.N` and `model.layers.N`.

use super::{ALL, Family, Fused, Mixer, Norms};

/// Index of the gate of the output of a layer's first half, where there is one.
pub const OUTPUT_GATE: usize = 7;
/// Index of the projection to the factors of a delta rule's updates.
pub const BETA: usize = 8;
/// Index of the projection to its decays.
pub const DECAY: usize = 9;
/// Number of projections that a layer may have.
pub const COUNT: usize = 10;

/// Tensors outside the layers. Models with convolutions have another last norm ([`Family::last_norm`]).
pub const TOP: [(&str, &str); 4] = [
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("token_embd_norm", "model.embedding_norm"),
    ("output", "lm_head"),
];

/// GGUF's names of the projections of a layer, in model order.
const PROJECTIONS: [&str; 7] =
    ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];
/// Those of an expert that computes every token.
const SHARED: [&str; 3] = ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"];
/// What its output is multiplied by: [1, inputs] in Hugging Face, of one dimension in GGUF files.
pub const SHARE: (&str, &str) = ("ffn_gate_inp_shexp", "mlp.shared_expert_gate");

/// The matrices of several projections.
const QKV: (&str, &str) = ("attn_qkv", "self_attn.qkv_proj");
const GATE_UP: (&str, &str) = ("ffn_up", "mlp.gate_up_proj");

/// The matrices of a layer with a convolution, in the places of q, k and v, and of attention's output. The first third of
/// the rows is the gate before the convolution, the second the gate after it, the last are the values.
const CONVOLUTION: [Joined; 2] =
    [(("shortconv.in_proj", "conv.in_proj"), &[0, 1, 2]), (("shortconv.out_proj", "conv.out_proj"), &[3])];
/// The taps of a convolution: [channels, 1, taps] in Hugging Face, [channels, taps] in GGUF files.
pub const TAPS: (&str, &str) = ("shortconv.conv", "conv.conv");

/// The matrices of a layer with a delta rule, in the places of q, k and v, and of attention's output; those after the
/// feed-forward's.
pub const DELTA_RULE: [Joined; 2] =
    [(("attn_qkv", "linear_attn.in_proj_qkv"), &[0, 1, 2]), (("ssm_out", "linear_attn.out_proj"), &[3])];
/// See [`DELTA_RULE`].
pub const BESIDE_DELTA_RULE: [Joined; 3] = [
    (("attn_gate", "linear_attn.in_proj_z"), &[OUTPUT_GATE]),
    (("ssm_beta", "linear_attn.in_proj_b"), &[BETA]),
    (("ssm_alpha", "linear_attn.in_proj_a"), &[DECAY]),
];
/// The taps of the convolution before a delta rule, shaped as [`TAPS`].
pub const DELTA_TAPS: (&str, &str) = ("ssm_conv1d", "linear_attn.conv1d");
/// The gain of the norm of a delta rule's output.
pub const DELTA_NORM: (&str, &str) = ("ssm_norm", "linear_attn.norm");
/// The logarithm of the rate of a delta rule's decays; in GGUF files the rate itself, negative. A whole name, which no `.weight`
/// follows.
pub const DELTA_RATE: (&str, &str) = ("ssm_a", "linear_attn.A_log");
/// The bias of its decays: a whole name.
pub const DELTA_BIAS: (&str, &str) = ("ssm_dt.bias", "linear_attn.dt_bias");

/// The matrices of all experts of a layer, [experts, outputs, inputs]. In Hugging Face each expert has its own, below
/// `mlp.experts.N`; where they are joined there, they are read under these names too.
pub const EXPERTS: [(&str, &str); 3] =
    [("ffn_gate_exps", "gate_proj"), ("ffn_up_exps", "up_proj"), ("ffn_down_exps", "down_proj")];
/// Most experts of a layer.
pub const MOST_EXPERTS: usize = 1 << 16;
/// The biases of all experts of a layer, [experts, outputs].
pub const EXPERT_BIASES: [(&str, &str); 3] = [
    ("ffn_gate_exps", "mlp.experts.gate_proj"),
    ("ffn_up_exps", "mlp.experts.up_proj"),
    ("ffn_down_exps", "mlp.experts.down_proj"),
];

/// The sinks of the query heads: whole names.
pub const SINKS: (&str, &str) = ("attn_sinks.weight", "self_attn.sinks");

/// GGUF's names of the norms of the heads of q and k.
const HEAD_NORMS: [&str; 2] = ["attn_q_norm", "attn_k_norm"];

/// Names of a matrix, and its projections.
pub type Joined = ((&'static str, &'static str), &'static [usize]);

/// Projections that have a matrix of their own.
const EACH: [[usize; 1]; 7] = [[0], [1], [2], [3], [4], [5], [6]];

/// A matrix of a layer in the files: a projection, or several whose rows follow each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Matrix {
    /// (GGUF, Hugging Face).
    pub names: (&'static str, &'static str),
    /// The projections, as indices in model order.
    pub projections: &'static [usize],
}

impl Matrix {
    /// The last part of its Hugging Face name, such as `q_proj`.
    pub fn module(&self) -> &'static str {
        self.names.1.rsplit('.').next().unwrap_or(self.names.1)
    }

    /// Whether it belongs to attention, not to the feed-forward.
    pub fn is_of_attention(&self) -> bool {
        !(4..7).contains(&self.projections[0])
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
    ALL.iter().any(|family| family.all_matrices().any(|matrix| matrix.module() == name))
}

impl Family {
    /// The matrices of a layer with this mixer, in model order.
    pub fn matrices(&self, mixer: Mixer) -> Vec<Matrix> {
        let gated: Joined = ((PROJECTIONS[0], self.projections[0]), &[0, OUTPUT_GATE]);
        let joined: &[Joined] = match (mixer, self.fused) {
            (Mixer::Convolution, _) => &CONVOLUTION,
            (Mixer::DeltaRule, _) => &DELTA_RULE,
            (_, Fused::None) if self.gated_attention => &[gated],
            (_, Fused::None) => &[],
            (_, Fused::GateUp) => &[(GATE_UP, &[4, 5])],
            (_, Fused::Named(name)) => &[((PROJECTIONS[4], name), &[4, 5])],
            (_, Fused::All) => &[(QKV, &[0, 1, 2]), (GATE_UP, &[4, 5])],
        };
        let mut all = Vec::new();
        let mut stored = PROJECTIONS;
        if self.shared_expert {
            stored[4..].copy_from_slice(&SHARED);
        }
        for (i, own) in stored.into_iter().zip(self.projections).enumerate() {
            match joined.iter().find(|(_, some)| some.contains(&i)) {
                None => all.push(Matrix { names: own, projections: &EACH[i] }),
                Some((names, some)) if some[0] == i => {
                    all.push(Matrix { names: *names, projections: some });
                }
                Some(_) => {}
            }
        }
        if mixer == Mixer::DeltaRule {
            all.extend(BESIDE_DELTA_RULE.map(|(names, projections)| Matrix { names, projections }));
        }
        all
    }

    /// The matrices that layers of the family may have.
    pub fn all_matrices(&self) -> impl Iterator<Item = Matrix> {
        let others = [(self.convolutions, Mixer::Convolution), (self.delta_rule, Mixer::DeltaRule)];
        let others = others.into_iter().filter(|(has, _)| *has).map(|(_, mixer)| self.matrices(mixer));
        let own = self.matrices(Mixer::Attention);
        let more = others.flatten().filter(|matrix| !own.contains(matrix));
        let more: Vec<Matrix> = more.collect();
        own.into_iter().chain(more)
    }

    /// Whether a matrix can have an adapter. A family with experts has adapters on attention and on an expert that computes
    /// every token: recent transformers keep all other experts of a layer in two tensors, which PEFT's LoRA does not adapt.
    pub fn adapts(&self, matrix: &Matrix) -> bool {
        !self.experts || self.shared_expert || matrix.is_of_attention()
    }

    /// The last parts of the names of the matrices that can have an adapter, each once.
    pub fn modules(&self) -> Vec<&'static str> {
        let mut all = Vec::new();
        for matrix in self.all_matrices().filter(|matrix| self.adapts(matrix)) {
            if !all.contains(&matrix.module()) {
                all.push(matrix.module());
            }
        }
        all
    }

    /// The router of a mixture of experts.
    pub fn router(&self) -> (&'static str, &'static str) {
        ("ffn_gate_inp", if self.biased_experts { "mlp.router" } else { "mlp.gate" })
    }

    /// The matrix whose upper and lower half of rows are two tensors in GGUF files.
    pub fn halved_in_gguf(&self) -> Option<&'static str> {
        if let Fused::Named(name) = self.fused { Some(name) } else { None }
    }

    /// The tensors that a layer of the family may have. Of a halved matrix the upper half comes first.
    pub fn layer_tensors(&self) -> Vec<(&'static str, &'static str)> {
        let norms = |stored: [&'static str; 2], Norms { before, after }: Norms| {
            stored.into_iter().zip([before, after]).filter_map(|(stored, name)| Some((stored, name?)))
        };
        let mut all: Vec<_> = self.all_matrices().map(|matrix| matrix.names).collect();
        all.extend(self.halved_in_gguf().map(|name| (PROJECTIONS[5], name)));
        all.extend(HEAD_NORMS.into_iter().zip(self.head_norm_names));
        all.extend(self.convolutions.then_some(TAPS));
        all.extend(self.delta_rule.then_some([DELTA_TAPS, DELTA_NORM]).into_iter().flatten());
        all.extend(self.experts.then_some(self.router()));
        all.extend(self.biased_experts.then_some(EXPERT_BIASES).into_iter().flatten());
        all.extend(self.shared_expert.then_some(SHARE));
        all.extend(self.sinks.then_some(SINKS));
        all.extend(norms(["attn_norm", "post_attention_norm"], self.attention_norms));
        all.extend(norms([self.gguf_mlp_norm, "post_ffw_norm"], self.mlp_norms));
        all
    }
}
