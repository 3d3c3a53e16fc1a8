//! Floor 0: the model families, one description each. A description says what Hugging Face and llama.cpp call a family
//! and in what its blocks differ from a Llama's. Configuration, GGUF in and out, the decoder's blocks, and every text
//! that lists families read it; nothing else knows a family by its name. How one is added:
//! docs/develop/add-a-model-family.md.

mod llama;
mod mistral;
mod qwen2;
mod qwen3;
pub mod tensors;

pub use llama::LLAMA;
pub use mistral::MISTRAL;
pub use qwen2::QWEN2;
pub use qwen3::QWEN3;

/// Every family, in the order in which texts list them. Of two with the same GGUF architecture the first is the default.
pub const ALL: &[&Family] = &[&LLAMA, &MISTRAL, &QWEN2, &QWEN3];

/// A model family.
#[derive(Debug, PartialEq)]
pub struct Family {
    /// The stem of its classes: `Llama` of `LlamaForCausalLM`.
    pub name: &'static str,
    /// The releases that these classes load, as texts list them.
    pub releases: &'static [&'static str],
    /// `model_type` of config.json.
    pub model_type: &'static str,
    /// How llama.cpp stores it.
    pub gguf: Gguf,
    /// The norms around attention.
    pub attention_norms: Norms,
    /// The norms around the feed-forward.
    pub mlp_norms: Norms,
    /// What is added to every stored gain: 1 where x * (1 + w) is meant.
    pub gain_offset: f32,
    /// Whether each head of q and k has a norm (`self_attn.q_norm`, `self_attn.k_norm`).
    pub head_norms: bool,
    /// The feed-forward's activation.
    pub activation: Activation,
    /// Which projections have biases.
    pub biases: Biases,
    /// Which layers have sliding attention.
    pub windows: Windows,
    /// The key of config.json that has the base of the rotary frequencies of sliding layers, where it is not that of
    /// the others.
    pub local_rope_theta: Option<&'static str>,
    /// What scores are multiplied by.
    pub score_scale: ScoreScale,
    /// The key of config.json that has the soft cap of the scores.
    pub soft_cap: Option<&'static str>,
}

/// A family in llama.cpp's files. Names of tensors: [`Family::layer_tensors`].
#[derive(Debug, PartialEq)]
pub struct Gguf {
    /// `general.architecture`.
    pub architecture: &'static str,
    /// Whether the two halves of a rotary pair are adjacent rows of q and k. Hugging Face has them half a head apart.
    pub adjacent_pairs: bool,
    /// Whether the converter writes `vocab_size` and `rope.dimension_count`.
    pub all_sizes: bool,
}

/// The norms of one half of a block, by the name of their tensors below the layer. Without a norm before it, a half
/// reads the residual stream itself; without one after it, its output is added as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Norms {
    /// Of what the half reads.
    pub before: Option<&'static str>,
    /// Of what the half adds to the residual stream.
    pub after: Option<&'static str>,
}

/// How gate and up become the input of the down projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// silu(gate) * up.
    SwiGlu,
}

impl Activation {
    /// The values of `hidden_act` that mean it.
    pub fn names(self) -> &'static [&'static str] {
        match self {
            Activation::SwiGlu => &["silu", "swish"],
        }
    }
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
    /// Where this key of config.json is true.
    Key(&'static str),
}

/// Which layers see only `sliding_window` tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Windows {
    /// Those that `layer_types` calls sliding.
    Typed,
    /// Those that `layer_types` calls sliding, without it all; a missing `sliding_window` is 4096, null switches them off.
    All,
    /// Where `use_sliding_window` is true: those that `layer_types` calls sliding, without it those from
    /// `max_window_layers` (28) on; a missing `sliding_window` is 4096.
    Switched,
}

/// What scores are multiplied by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScoreScale {
    /// 1 / sqrt(head size).
    HeadSize,
    /// 1 / sqrt(the value of this key of config.json).
    Key(&'static str),
}

impl Family {
    /// What a GGUF file of this family would have to say and is neither read nor written yet.
    pub fn not_in_gguf(&self) -> Option<&'static str> {
        let missing = [
            (self.gain_offset != 0.0, "an offset of its gains"),
            (self.local_rope_theta.is_some(), "a rotary embedding of sliding layers"),
            (self.score_scale != ScoreScale::HeadSize, "a scale of its scores"),
            (self.soft_cap.is_some(), "a soft cap of its scores"),
        ];
        missing.into_iter().find(|(has, _)| *has).map(|(_, what)| what)
    }
}

/// What the metadata of a GGUF file say of its layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layers {
    /// They have a sliding window.
    Slide,
    /// There is no window.
    SeeAll,
}

/// The family of a GGUF architecture. Where several have one, a file with a window is of the family whose layers all
/// slide.
pub fn of_gguf(architecture: &str, layers: Layers) -> Option<&'static Family> {
    let mut of = ALL.iter().copied().filter(|f| f.gguf.architecture == architecture);
    let first = of.next()?;
    Some(of.find(|f| layers == Layers::Slide && f.windows == Windows::All).unwrap_or(first))
}

/// `Llama, Mistral, Qwen2 or Qwen3`, where `last` is the word before the last.
pub fn names(last: &str) -> String {
    listed(&ALL.iter().map(|f| f.name).collect::<Vec<_>>(), last)
}

/// As [`names`], but of all releases.
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
    fn a_window_tells_a_mistral_from_a_llama() {
        let of = |architecture, layers| of_gguf(architecture, layers).map(|f| f.name);
        assert_eq!(of("llama", Layers::SeeAll), Some("Llama"));
        assert_eq!(of("llama", Layers::Slide), Some("Mistral"));
        assert_eq!(of("qwen2", Layers::Slide), Some("Qwen2"));
        assert_eq!(of("qwen3", Layers::SeeAll), Some("Qwen3"));
        assert_eq!(of("gemma3", Layers::SeeAll), None);
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
        assert_eq!(names("or"), "Llama, Mistral, Qwen2 or Qwen3");
        assert_eq!(releases("and"), "Llama, Mistral, Qwen2, Qwen2.5 and Qwen3");
        let readme = include_str!("../../README.md");
        let row = readme.lines().find(|line| line.starts_with("| models |")).unwrap_or_default();
        for release in ALL.iter().flat_map(|f| f.releases) {
            assert!(row.contains(release), "README.md, row of models: {release}");
        }
    }
}
