//! Floor 0: the model families, one description each. A description has a family's names in Hugging Face and llama.cpp
//! and the differences between its blocks and a Llama's. The configuration, GGUF reading and writing, the decoder's
//! blocks, and all texts that list families use it; no other module contains a family's name. How to add a family:
//! docs/develop/add-a-model-family.md.

mod gemma3;
mod glm4;
mod gpt_oss;
mod granite;
mod granite_moe_hybrid;
mod lfm2;
mod llama;
mod ministral3;
mod mistral;
mod olmo2;
mod olmo3;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_5;
mod qwen3_5_moe;
mod qwen3_moe;
mod smollm3;
pub mod tensors;
pub mod wrapped;

use crate::numeric::activation::Activation;
pub use gemma3::GEMMA3;
pub use glm4::GLM4;
pub use gpt_oss::GPT_OSS;
pub use granite::GRANITE;
pub use granite_moe_hybrid::GRANITE_MOE_HYBRID;
pub use lfm2::LFM2;
pub use llama::LLAMA;
pub use ministral3::MINISTRAL3;
pub use mistral::MISTRAL;
pub use olmo2::OLMO2;
pub use olmo3::OLMO3;
pub use phi3::PHI3;
pub use qwen2::QWEN2;
pub use qwen3::QWEN3;
pub use qwen3_5::QWEN3_5;
pub use qwen3_5_moe::QWEN3_5_MOE;
pub use qwen3_moe::QWEN3_MOE;
pub use smollm3::SMOLLM3;

/// Key of GGUF files for whether layers are rotated ([`Rotated::Key`]).
pub const ROTATES: &str = "rope.scaling.finetuned";
/// Key of GGUF files for how fast queries grow with their position ([`Family::query_growth`]).
pub const TEMPERATURE: &str = "attention.temperature_scale";
/// Key of GGUF files for the length of sliding windows.
pub const WINDOW: &str = "attention.sliding_window";
/// Key of GGUF files for which layers slide.
pub const SLIDING_LAYERS: &str = "attention.sliding_window_pattern";

/// Every family, in the order of texts. Of two families with the same GGUF architecture the first is the default.
pub const ALL: &[&Family] = &[
    &LLAMA,
    &MISTRAL,
    &QWEN2,
    &QWEN3,
    &QWEN3_MOE,
    &QWEN3_5,
    &QWEN3_5_MOE,
    &GEMMA3,
    &SMOLLM3,
    &GRANITE,
    &GRANITE_MOE_HYBRID,
    &OLMO2,
    &OLMO3,
    &MINISTRAL3,
    &GLM4,
    &PHI3,
    &LFM2,
    &GPT_OSS,
];

/// A model family.
#[derive(Debug, PartialEq)]
pub struct Family {
    /// Prefix of its class names: `Llama` of `LlamaForCausalLM`.
    pub name: &'static str,
    /// Class of its sequence classifiers.
    pub classifier: Classifier,
    /// The releases that these classes load, as listed in texts.
    pub releases: &'static [&'static str],
    /// `model_type` of config.json.
    pub model_type: &'static str,
    /// Description of its GGUF files.
    pub gguf: Gguf,
    /// Metadata key that identifies this family among those with its architecture.
    pub gguf_mark: Option<&'static str>,
    /// Whether its GGUF files say of each layer whether it slides, and name the rotary base of those that do.
    pub gguf_lists_windows: bool,
    /// The projections of a layer of attention in Hugging Face, in model order.
    pub projections: [&'static str; 7],
    /// Whether layers of type `conv` have a causal short convolution in the place of attention: `conv.in_proj` (two gates
    /// and the values), `conv.conv` (`conv_L_cache` taps for each channel) and `conv.out_proj`.
    pub convolutions: bool,
    /// Whether layers of type `linear_attention` have a gated delta rule in the place of attention: q, k and v in one matrix
    /// and through a causal short convolution, a norm of the output, and its gate.
    pub delta_rule: bool,
    /// Whether the matrix of q has, after the rows of each head, as many of a gate of attention's output.
    pub gated_attention: bool,
    /// The norm before the head, below `model.`.
    pub last_norm: &'static str,
    /// The norms around attention.
    pub attention_norms: Norms,
    /// The norms around the feed-forward.
    pub mlp_norms: Norms,
    /// Key in config.json for the epsilon of the norms.
    pub eps_key: &'static str,
    /// The epsilon where config.json has none.
    pub eps: f32,
    /// Offset of every stored gain: 1 where the norm multiplies by (1 + w).
    pub gain_offset: f32,
    /// Norms of q and k.
    pub head_norms: HeadNorms,
    /// Names of the norms of q and k.
    pub head_norm_names: [&'static str; 2],
    /// Size of the feed-forward.
    pub feed_forward: FeedForward,
    /// Projections that share a matrix.
    pub fused: Fused,
    /// Whether layers have a mixture of experts as their feed-forward: a router and `mlp.experts.N`.
    pub experts: bool,
    /// How all experts of a layer are in the same tensors in Hugging Face; `None` where each has its own.
    pub joined_experts: Option<JoinedExperts>,
    /// Whether the router and the experts have biases, and config.json has the keys of gpt-oss.
    pub biased_experts: bool,
    /// Whether a sparse layer also has an expert that computes every token (`mlp.shared_expert`), whose output is multiplied
    /// by the sigmoid of a product of the token's input with `mlp.shared_expert_gate`.
    pub shared_expert: bool,
    /// GGUF's name of the norm before the feed-forward.
    pub gguf_mlp_norm: &'static str,
    /// Whether config.json must have a rotary section: without one transformers scales the frequencies of this class.
    pub needs_rope_section: bool,
    /// Whether the ends of YaRN's ramp are whole indices of frequencies where a GGUF file has YaRN.
    pub whole_ramp: bool,
    /// Whether each query head has a sink, a learned score that takes a part of its attention and has no value.
    pub sinks: bool,
    /// Whether the class also has models with Mamba-2 layers and with experts beside the feed-forward: `layer_types` has to
    /// name attention for each layer, and `num_local_experts` has to be 0.
    pub hybrid: bool,
    /// The feed-forward's activation.
    pub activation: Activation,
    /// Key in config.json for the activation.
    pub activation_key: &'static str,
    /// Which projections have biases.
    pub biases: Biases,
    /// Layers with sliding attention.
    pub windows: Windows,
    /// Base of the rotary frequencies where config.json has none.
    pub rope_theta: f64,
    /// Key in config.json for the base of the rotary frequencies of sliding layers; `None` where all layers share one
    /// base.
    pub local_rope_theta: Option<&'static str>,
    /// Part of each head that is rotated where config.json has no `partial_rotary_factor`; `None` where whole heads are.
    pub partial_rotary: Option<f64>,
    /// Whether the two values of a rotary pair are adjacent in Hugging Face; otherwise they are half of the rotated part
    /// apart.
    pub adjacent_pairs: bool,
    /// Whether `rope_type` longrope is read (also named su or yarn): factors of the frequencies, one for each.
    pub long_rope: bool,
    /// Which layers are rotated.
    pub rotated: Rotated,
    /// Factor of the scores.
    pub score_scale: ScoreScale,
    /// Key in the rotary section for beta: queries at position p are multiplied by 1 + beta ln(1 + floor(p / the length
    /// before scaling)).
    pub query_growth: Option<&'static str>,
    /// Key in config.json for the soft cap of the scores.
    pub soft_cap: Option<&'static str>,
    /// Factor of the embedding.
    pub embedding_scale: EmbeddingScale,
    /// Key in config.json for the factor of each half's output, before the addition to the residual stream.
    pub residual_scale: Option<&'static str>,
    /// Whether transformers has a class of it whose head labels each token (`LlamaForTokenClassification`).
    pub labels_tokens: bool,
    /// Key in config.json for the divisor of the logits.
    pub logits_scale: Option<&'static str>,
    /// Keys in config.json for whether the head is the embedding; the first that is there counts.
    pub tied_keys: &'static [&'static str],
    /// Whether the head is the embedding where config.json does not say it.
    pub tied: bool,
    /// Keys in config.json for features that are not computed: absent, null or false.
    pub refused: &'static [&'static str],
}

/// How all experts of a layer are in the same tensors of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JoinedExperts {
    /// [experts, inputs, outputs], where the outputs of gate and up alternate.
    Alternating,
    /// [experts, outputs, inputs], first the outputs of gate, then those of up.
    InTurn,
}

/// Class of a family's sequence classifiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Classifier {
    /// `LlamaForSequenceClassification` for a family named `Llama`.
    OfName,
    /// The same for another name.
    Named(&'static str),
    /// transformers has no such class.
    Missing,
}

/// Norms of q and k between their projection and the rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadNorms {
    /// No norms.
    None,
    /// Each head has its own mean; all heads share a gain of the head's size.
    Each,
    /// All heads have one mean, and a gain of the projection's size.
    Whole,
}

/// Projections whose matrices are one matrix in the files, their rows one after the other. An adapter of it has one A.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fused {
    /// Each projection has its own matrix.
    None,
    /// Gate and up are `mlp.gate_up_proj`.
    GateUp,
    /// Also q, k and v are `self_attn.qkv_proj`.
    All,
    /// Gate and up are the matrix of this name; GGUF files have two.
    Named(&'static str),
}

/// Size of the feed-forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeedForward {
    /// The value of this key in config.json.
    Key(&'static str),
    /// `block_ff_dim` or `intermediate_size`; unless `block_auto_adjust_ff_dim` is false two thirds of it, multiplied by
    /// `block_ffn_dim_multiplier` (1) and rounded up to a multiple of `block_multiple_of` (256).
    Adjusted,
}

/// What is between the norms of a layer's first half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mixer {
    /// Attention.
    Attention,
    /// A causal short convolution between two gates.
    Convolution,
    /// A gated delta rule.
    DeltaRule,
}

/// Layers whose q and k are rotated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rotated {
    /// All layers.
    All,
    /// All but those with 0 in `no_rope_layers`, without it all but every `no_rope_layer_interval`th (4).
    Listed,
    /// All layers where this key in config.json is `rope`, otherwise none.
    Key(&'static str),
}

/// Factor of the embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EmbeddingScale {
    /// 1.
    One,
    /// The square root of the hidden size in f32. (transformers rounds it to bf16 where it loads the model in bf16.)
    RootOfHidden,
    /// The value of this key in config.json, 1 where it is missing.
    Key(&'static str),
}

/// A family in GGUF files of llama.cpp. Names of tensors: [`Family::layer_tensors`].
#[derive(Debug, PartialEq)]
pub struct Gguf {
    /// `general.architecture`.
    pub architecture: &'static str,
    /// Whether the two halves of a rotary pair are adjacent rows of q and k; in Hugging Face they are half a head
    /// apart.
    pub adjacent_pairs: bool,
    /// Whether the converter writes `vocab_size` and `rope.dimension_count`.
    pub all_sizes: bool,
    /// Whether reading and writing support features beyond a Llama's.
    pub complete: bool,
}

/// The norms of one half of a block, by the name of their tensors below the layer. Without a norm before it, a half
/// reads the residual stream itself; without a norm after it, its output is added unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Norms {
    /// Norm of the half's input.
    pub before: Option<&'static str>,
    /// Norm of the half's output, before the addition to the residual stream.
    pub after: Option<&'static str>,
}

/// The biases of a block's projections.
#[derive(Debug, PartialEq)]
pub struct Biases {
    /// Of q, k and v.
    pub qkv: Bias,
    /// Of attention's output.
    pub o: Bias,
    /// Of gate, up and down.
    pub mlp: Bias,
}

/// Whether some projections have biases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bias {
    /// No model of the family has them.
    Never,
    /// Every model of the family has them.
    Always,
    /// Where this key in config.json is true.
    Key(&'static str),
    /// Where this key in config.json is true or missing.
    KeyOrTrue(&'static str),
}

/// Layers with a window of `sliding_window` tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Windows {
    /// The layers that `layer_types` marks as sliding.
    Typed,
    /// The layers that `layer_types` marks as sliding, all layers without `layer_types`. A missing `sliding_window`
    /// means 4096, null no window.
    All,
    /// All layers, where `sliding_window` is given.
    Given,
    /// Where `use_sliding_window` is true: the layers that `layer_types` marks as sliding, without `layer_types` those
    /// from `max_window_layers` (28) on. A missing `sliding_window` means 4096.
    Switched,
    /// The layers that `layer_types` marks as sliding; without it all but every `sliding_window_pattern`th, whose default
    /// is the first number. The second number is the window if `sliding_window` is missing.
    Pattern(usize, usize),
}

/// Factor of the scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScoreScale {
    /// 1 / sqrt(head size).
    HeadSize,
    /// 1 / sqrt(the value of this key in config.json).
    Key(&'static str),
    /// The value of this key in config.json, 1 where it is missing.
    Factor(&'static str),
}

impl Family {
    /// The values of `hidden_act` for the family's activation.
    pub fn activation_names(&self) -> &'static [&'static str] {
        match self.activation {
            Activation::SwiGlu | Activation::ClampedSwiGlu => &["silu", "swish"],
            Activation::GeGlu => &["gelu_pytorch_tanh"],
            Activation::Sigmoid => &[],
        }
    }

    /// Returns the first feature of this family that GGUF reading and writing do not support.
    pub fn not_in_gguf(&self) -> Option<&'static str> {
        let missing = [
            (self.gain_offset != 0.0, "an offset of its gains"),
            (self.local_rope_theta.is_some(), "a rotary embedding of sliding layers"),
            (self.score_scale != ScoreScale::HeadSize, "a scale of its scores"),
            (self.soft_cap.is_some(), "a soft cap of its scores"),
            (self.rotated != Rotated::All, "layers without rotation"),
            (self.partial_rotary.is_some(), "a rotary embedding of a part of the head"),
            (self.query_growth.is_some(), "queries that grow with their position"),
            (self.embedding_scale != EmbeddingScale::One, "a scale of its embedding"),
            (self.residual_scale.is_some(), "a scale of its residual branches"),
            (self.head_norms == HeadNorms::Whole, "norms of whole projections"),
            (self.convolutions, "causal short convolutions"),
            (self.delta_rule, "gated delta rules"),
            (self.gated_attention, "gates of attention's output"),
        ];
        missing.into_iter().find(|(has, _)| *has && !self.gguf.complete).map(|(_, what)| what)
    }
}

impl Family {
    /// Keys of the scales of scores, embedding, residual branches and logits as (GGUF, config.json), where config.json
    /// has them.
    pub fn scales_in_gguf(&self) -> [Option<(&'static str, &'static str)>; 4] {
        let score = match self.score_scale {
            ScoreScale::Factor(key) => Some(("attention.scale", key)),
            _ => None,
        };
        let embedding = match self.embedding_scale {
            EmbeddingScale::Key(key) => Some(("embedding_scale", key)),
            _ => None,
        };
        let residual = self.residual_scale.map(|key| ("residual_scale", key));
        [score, embedding, residual, self.logits_scale.map(|key| ("logit_scale", key))]
    }

    /// Offset of a tensor in GGUF files: llama.cpp's converter adds the offset of gains to the stored norms.
    pub fn offset_in_gguf(&self, tensor: &str) -> f32 {
        let of_delta_rule = tensor.ends_with(&format!("{}.weight", tensors::DELTA_NORM.1));
        if tensor.ends_with("norm.weight") && !of_delta_rule { self.gain_offset } else { 0.0 }
    }
}

/// The family of a GGUF architecture; `has` says whether the file has a key. Where several families share the architecture,
/// a file belongs to the one whose mark it has ([`Family::gguf_mark`]).
pub fn of_gguf(architecture: &str, has: impl Fn(&str) -> bool) -> Option<&'static Family> {
    // Newer converters name Mistral Small 3 after Ministral 3, of which it has no mark: llama.cpp computes it as a Llama.
    let architecture = match architecture == MINISTRAL3.gguf.architecture && !has(TEMPERATURE) {
        true => LLAMA.gguf.architecture,
        false => architecture,
    };
    let mut of = ALL.iter().copied().filter(|f| f.gguf.architecture == architecture);
    let first = of.next()?;
    Some(of.find(|f| f.gguf_mark.is_some_and(&has)).unwrap_or(first))
}

/// List of families such as `Llama, Mistral, Qwen2 or Qwen3`, with `last` before the last name.
pub fn names(last: &str) -> String {
    listed(&ALL.iter().map(|f| f.name).collect::<Vec<_>>(), last)
}

/// Like [`names`], for all releases.
pub fn releases(last: &str) -> String {
    listed(&ALL.iter().flat_map(|f| f.releases).copied().collect::<Vec<_>>(), last)
}

fn listed(names: &[&str], last: &str) -> String {
    match names {
        [many @ .., end] if !many.is_empty() => format!("{} {last} {end}", many.join(", ")),
        _ => names.join(""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_tell_families_of_one_architecture_apart() {
        let of = |architecture, own: &str| of_gguf(architecture, |key| key == own).map(|f| f.name);
        assert_eq!(of("llama", ""), Some("Llama"));
        assert_eq!(of("llama", WINDOW), Some("Mistral"));
        assert_eq!(of("qwen2", WINDOW), Some("Qwen2"));
        assert_eq!(of("qwen3", ""), Some("Qwen3"));
        assert_eq!(of("gemma3", WINDOW), Some("Gemma3"));
        assert_eq!(of("gemma2", ""), None);
        assert_eq!(of("granite", WINDOW), Some("Granite"));
        assert_eq!(of("olmo2", ""), Some("Olmo2"));
        assert_eq!(of("olmo2", WINDOW), Some("Olmo3"));
        assert_eq!(of("mistral3", TEMPERATURE), Some("Ministral3"));
        assert_eq!(of("mistral3", ""), Some("Llama"));
        assert_eq!(of("granite", ROTATES), Some("GraniteMoeHybrid"));
        for family in ALL.iter().filter(|family| family.gguf_mark.is_some()) {
            let same = ALL.iter().filter(|other| other.gguf.architecture == family.gguf.architecture);
            assert!(same.count() > 1, "{}: nothing to tell apart", family.name);
        }
    }

    #[test]
    fn present_families_are_in_gguf_under_unique_names() {
        for (i, family) in ALL.iter().enumerate() {
            assert_eq!(family.not_in_gguf(), None, "{}", family.name);
            let same = |f: &&Family| f.name == family.name || f.model_type == family.model_type;
            assert!(!ALL[..i].iter().any(same), "{}", family.name);
        }
    }

    #[test]
    fn texts_list_every_release() {
        assert_eq!(
            names("or"),
            "Llama, Mistral, Qwen2, Qwen3, Qwen3Moe, Qwen3_5, Qwen3_5Moe, Gemma3, SmolLM3, Granite, GraniteMoeHybrid, Olmo2, Olmo3, Ministral3, Glm4, Phi3, Lfm2 or GptOss"
        );
        let all = "Llama, Mistral, Qwen2, Qwen2.5, Qwen3, Qwen3-MoE, Qwen3.5, Qwen3.6, Qwen3.5-MoE, Gemma 3, SmolLM3, Granite 3, Granite 4, OLMo 2, OLMo 3, Ministral 3, \
                   GLM-4, GLM-Z1, Phi-3, Phi-3.5, Phi-4, Phi-4-mini, LFM2, LFM2.5 and gpt-oss";
        assert_eq!(releases("and"), all);
        let readme = include_str!("../../README.md");
        let row = readme.lines().find(|line| line.starts_with("| models |")).unwrap_or_default();
        for release in ALL.iter().flat_map(|f| f.releases) {
            assert!(row.contains(release), "README.md, row of models: {release}");
        }
    }
}
