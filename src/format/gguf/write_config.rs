//! A model's shape as GGUF metadata and tensor names, in the format of llama.cpp's `convert_hf_to_gguf.py`: the reverse
//! of [`super::config`] and [`super::weights`]. Keys that the converter does not write are not written here either, so
//! that a runner sees the same file.

use super::config::{LOG_MULTIPLIER, SHARED_SIZE};
use super::order::{Orders, Shared};
use super::weights::{LONG_ROPE, whole};
use super::write::{Meta, Metadata};
use crate::families::tensors::TOP;
use crate::families::{Family, ROTATES, Rotated, SLIDING_LAYERS, TEMPERATURE, WINDOW, Windows};
use crate::numeric::block::{Block, Encoding};
use crate::numeric::dtype::Dtype;
use std::f64::consts::PI;
use std::sync::Arc;

/// A decoder in llama.cpp's terms.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// Gives the architecture's name, and the order in which rows of q and k are stored.
    pub family: &'static Family,
    /// Name of the model.
    pub name: String,
    /// Rows of the embedding.
    pub vocab: usize,
    /// Maximum number of tokens in a row.
    pub context: usize,
    /// Hidden size.
    pub hidden: usize,
    /// Inner size of the MLP.
    pub feed_forward: usize,
    /// Experts of a layer, those that compute a token, and their inner size.
    pub experts: Option<[usize; 3]>,
    /// Taps of convolutions, and whether each layer has one in the place of attention.
    pub convolutions: Option<(usize, Vec<bool>)>,
    /// Delta rules.
    pub delta_rules: Option<Rules>,
    /// Number of decoder blocks.
    pub layers: usize,
    /// Query heads, key/value heads, size of a head.
    pub heads: (usize, usize, usize),
    /// Number of values of a head that are rotated.
    pub rotary: usize,
    /// Whether any layer is rotated.
    pub rotates: bool,
    /// Epsilon of all norms, added under the square root.
    pub eps: f32,
    /// Base of the rotary frequencies.
    pub theta: f64,
    /// Scaling of the rotary frequencies.
    pub scaling: Scaling,
    /// Size of the sliding window in tokens.
    pub window: Option<usize>,
    /// Whether each layer slides.
    pub slides: Vec<bool>,
    /// Factors of scores, embedding and residual branches, and the divisor of the logits; written where the family reads
    /// them from its configuration.
    pub scales: [f32; 4],
}

/// Delta rules in llama.cpp's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// Taps of the convolution.
    pub taps: usize,
    /// Key heads, and their size.
    pub keys: (usize, usize),
    /// Value heads, and their size.
    pub values: (usize, usize),
    /// Every layer with a number that this divides, counted from 1, has attention.
    pub every: usize,
}

/// Scaling of rotary frequencies.
#[derive(Debug, Clone, PartialEq)]
pub enum Scaling {
    /// No scaling.
    Plain,
    /// Division by a factor.
    Linear(f64),
    /// Llama 3's scaling: (factor, low and high frequency factor, original length).
    Llama3(f64, f64, f64, f64),
    /// YaRN.
    Yarn {
        /// Divisor of low frequencies.
        factor: f64,
        /// Sequence length before scaling.
        original: usize,
        /// The turns between which frequencies are in part divided, most first.
        turns: [f64; 2],
        /// Factor of cosines and sines.
        amplitude: f64,
        /// How fast queries grow with their position.
        growth: f64,
    },
    /// LongRoPE.
    Long {
        /// Sequence length before scaling.
        original: usize,
        /// Factor of cosines and sines.
        amplitude: f64,
        /// Divisors of the frequencies in long rows and in short ones.
        factors: [Arc<[f32]>; 2],
    },
}

impl Shape {
    /// The orders of the tensors.
    pub fn orders(&self) -> Orders {
        let paired = self.family.gguf.adjacent_pairs.then_some((self.heads.0, self.heads.1));
        let shared =
            self.delta_rules.map(|Rules { keys: (keys, key_size), values: (values, size), .. }| Shared {
                keys,
                values: values / keys,
                before: 2 * keys * key_size,
                size,
            });
        Orders { paired, shared: shared.filter(|of| of.values > 1) }
    }

    /// All metadata except that of the tokenizer; `file_type` is llama.cpp's number of the file's types.
    pub fn metadata(&self, file_type: u32) -> Metadata {
        let (mut all, gguf) = (Metadata::default(), &self.family.gguf);
        all.set("general.architecture", Meta::Text(gguf.architecture.into()));
        all.set("general.type", Meta::Text("model".into()));
        all.set("general.name", Meta::Text(self.name.clone()));
        let mut set = |key: &str, value| all.set(&format!("{}.{key}", gguf.architecture), value);
        let number = |n: usize| Meta::U32(u32::try_from(n).unwrap_or(u32::MAX));
        let (heads, kv_heads, size) = self.heads;
        set("block_count", number(self.layers));
        set("context_length", number(self.context));
        set("embedding_length", number(self.hidden));
        let inner = if self.family.shared_expert { SHARED_SIZE } else { "feed_forward_length" };
        set(inner, number(self.feed_forward));
        set("attention.head_count", number(heads));
        match &self.convolutions {
            None => set("attention.head_count_kv", number(kv_heads)),
            Some((taps, layers)) => {
                let each = layers.iter().map(|convolution| if *convolution { 0 } else { kv_heads as i32 });
                set("attention.head_count_kv", Meta::Ints(each.collect()));
                set("shortconv.l_cache", number(*taps));
            }
        }
        set("rope.freq_base", Meta::F32(self.theta as f32));
        self.scaling().into_iter().for_each(|(key, value)| set(key, value));
        set("attention.layer_norm_rms_epsilon", Meta::F32(self.eps));
        set("attention.key_length", number(size));
        set("attention.value_length", number(size));
        let keys = ["expert_count", "expert_used_count", "expert_feed_forward_length"];
        for (key, size) in keys.into_iter().zip(self.experts.into_iter().flatten()) {
            set(key, number(size));
        }
        if let Some(Rules { taps, keys, values, every }) = self.delta_rules {
            let sizes = [taps, keys.1, keys.0, values.0, values.0 * values.1];
            let keys = ["conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size"];
            keys.into_iter().zip(sizes).for_each(|(key, size)| set(&format!("ssm.{key}"), number(size)));
            set("full_attention_interval", number(every));
            // Parts of the rotated pairs for positions in an image, of which texts have one kind.
            set("rope.dimension_sections", Meta::Ints(vec![11, 11, 10, 0]));
        }
        if gguf.all_sizes || self.convolutions.is_some() {
            set("vocab_size", number(self.vocab));
        }
        if gguf.all_sizes || self.family.partial_rotary.is_some() {
            set("rope.dimension_count", number(self.rotary));
        }
        self.rotation().into_iter().for_each(|(key, value)| set(key, value));
        self.windows().into_iter().for_each(|(key, value)| set(key, value));
        for (key, scale) in self.family.scales_in_gguf().into_iter().zip(self.scales) {
            key.into_iter().for_each(|(key, _)| set(key, Meta::F32(scale)));
        }
        all.set("general.file_type", Meta::U32(file_type));
        all.set("general.quantization_version", Meta::U32(2));
        all
    }

    /// The window, and the layers that slide.
    fn windows(&self) -> Vec<(&'static str, Meta)> {
        let number = |n: usize| Meta::U32(u32::try_from(n).unwrap_or(u32::MAX));
        // Phi-3's converter writes 0 where there is no window.
        let none = (self.family.windows == Windows::Given).then_some(0);
        let mut all: Vec<_> =
            self.window.or(none).map(|window| (WINDOW, number(window))).into_iter().collect();
        if self.family.gguf_lists_windows {
            all.push((SLIDING_LAYERS, Meta::Bools(self.slides.clone())));
            all.push(("rope.freq_base_swa", Meta::F32(self.theta as f32)));
        }
        all
    }

    /// The keys of linear scaling, YaRN and LongRoPE.
    fn scaling(&self) -> Vec<(&'static str, Meta)> {
        let number = |x: f64| Meta::F32(x as f32);
        let of = |kind: &str, factor: f64| {
            vec![("rope.scaling.type", Meta::Text(kind.into())), ("rope.scaling.factor", number(factor))]
        };
        let original = |length: usize| {
            let length = Meta::U32(u32::try_from(length).unwrap_or(u32::MAX));
            ("rope.scaling.original_context_length", length)
        };
        match self.scaling {
            Scaling::Plain | Scaling::Llama3(..) => Vec::new(),
            Scaling::Linear(factor) => of("linear", factor),
            // The converter writes no type.
            Scaling::Long { original: length, amplitude, .. } => {
                vec![original(length), ("rope.scaling.attn_factor", number(amplitude))]
            }
            Scaling::Yarn { factor, original: length, turns, amplitude, growth } => {
                let mut all = of("yarn", factor);
                all.push(original(length));
                let keys = ["rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"];
                all.extend(keys.into_iter().zip(turns.map(number)));
                if self.family.query_growth.is_some() {
                    // The amplitude is (1 + 0.1 ln factor) / (1 + 0.1 multiplier ln factor).
                    let log = 0.1 * libm::log(factor);
                    let multiplier = (((1.0 + log) / amplitude - 1.0) / log) as f32;
                    all.extend((multiplier > 0.0).then_some((LOG_MULTIPLIER, Meta::F32(multiplier))));
                    all.push((TEMPERATURE, number(growth)));
                }
                all
            }
        }
    }

    /// Whether layers are rotated, of a family that has a key for it.
    fn rotation(&self) -> Option<(&'static str, Meta)> {
        matches!(self.family.rotated, Rotated::Key(_)).then_some((ROTATES, Meta::Bool(self.rotates)))
    }

    /// Tensors of the file that are not weights: what each rotary frequency is divided by, with Llama 3's scaling and with
    /// LongRoPE.
    pub fn rope_factors(&self) -> Vec<(&'static str, Vec<f32>)> {
        let (factor, low, high, original) = match &self.scaling {
            Scaling::Llama3(factor, low, high, original) => (factor, low, high, original),
            Scaling::Long { factors, .. } => {
                return LONG_ROPE.into_iter().zip(factors.iter().map(|all| all.to_vec())).collect();
            }
            _ => return Vec::new(),
        };
        let size = self.heads.2;
        let factor_of = |i: usize| {
            let wavelength = 2.0 * PI * self.theta.powf((2 * i) as f64 / size as f64);
            if wavelength < original / high {
                1.0
            } else if wavelength > original / low {
                *factor
            } else {
                let smooth = (original / wavelength - low) / (high - low);
                1.0 / ((1.0 - smooth) / factor + smooth)
            }
        };
        vec![("rope_freqs.weight", (0..size / 2).map(|i| factor_of(i) as f32).collect())]
    }
}

/// llama.cpp's number of a file whose matrices are mostly of this kind (the medium mix for a K type).
pub fn file_type_of(kind: Encoding) -> u32 {
    match kind {
        Encoding::Plain(Dtype::F32) => 0,
        Encoding::Plain(Dtype::F16) => 1,
        Encoding::Plain(Dtype::Bf16) => 32,
        Encoding::Blocks(block) => match block {
            Block::Q4_0 => 2,
            Block::Q4_1 => 3,
            Block::Q8_0 => 7,
            Block::Q5_0 => 8,
            Block::Q5_1 => 9,
            Block::Q2_K => 10,
            Block::Q3_K => 12,
            Block::Q4_K => 15,
            Block::Q5_K => 17,
            Block::Q6_K => 18,
            Block::MXFP4 => 38,
            // llama.cpp has no number for NF4; 1024 means "guessed from the tensors".
            Block::NF4 => 1024,
        },
    }
}

/// llama.cpp's names of a Hugging Face weight (`model.layers.0.mlp.up_proj.weight`): several where the file has its rows in
/// as many tensors. `of_layer` are the tensors of a layer as (GGUF, Hugging Face).
pub fn stored_names(name: &str, of_layer: &[(&str, &str)]) -> Option<Vec<String>> {
    let below = name.strip_prefix("model.").unwrap_or(name);
    if let Some((layer, stored)) = whole(below.strip_prefix("layers."), of_layer, |(gguf, name)| (name, gguf))
    {
        return Some(vec![format!("blk.{layer}.{stored}")]);
    }
    let (stem, suffix) = name.rsplit_once('.').filter(|(_, s)| matches!(*s, "weight" | "bias"))?;
    // A base without a head (`LlamaModel`) has names without the prefix `model.`.
    let inner = stem.strip_prefix("model.").unwrap_or(stem);
    if let Some((stored, _)) = TOP.iter().find(|(_, n)| n.strip_prefix("model.").unwrap_or(n) == inner) {
        return Some(vec![format!("{stored}.{suffix}")]);
    }
    let (layer, what) = inner.strip_prefix("layers.")?.split_once('.')?;
    let layer: u32 = layer.parse().ok()?;
    let own = of_layer.iter().filter(|(_, name)| *name == what);
    let all: Vec<_> = own.map(|(stored, _)| format!("blk.{layer}.{stored}.{suffix}")).collect();
    (!all.is_empty()).then_some(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::families::{self, LLAMA, Norms};
    use crate::format::gguf::order::Order;
    use crate::format::gguf::weights::hugging_face_name;

    #[test]
    fn names_are_converted_and_converted_back() {
        let of_layer = families::QWEN3.layer_tensors();
        for name in [
            "model.embed_tokens.weight",
            "model.norm.weight",
            "lm_head.weight",
            "model.layers.11.self_attn.q_proj.bias",
            "model.layers.0.self_attn.k_norm.weight",
            "model.layers.3.mlp.down_proj.weight",
        ] {
            let stored = stored_names(name, &of_layer).unwrap();
            assert_eq!(stored.len(), 1, "{name}");
            assert_eq!(hugging_face_name(&stored[0], &of_layer).as_deref(), Some(name));
        }
        let stored = |name, of_layer: &[_]| stored_names(name, of_layer).unwrap_or_default().join(" ");
        assert_eq!(stored("layers.0.mlp.up_proj.weight", &of_layer), "blk.0.ffn_up.weight");
        let name = "layers.0.post_attention_layernorm.weight";
        assert_eq!(stored(name, &of_layer), "blk.0.ffn_norm.weight");
        let halved = families::GRANITE_MOE_HYBRID.layer_tensors();
        let input = "model.layers.2.shared_mlp.input_linear.weight";
        assert_eq!(stored(input, &halved), "blk.2.ffn_gate.weight blk.2.ffn_up.weight");
        let after = Norms { before: None, after: Some("post_attention_layernorm") };
        let other =
            families::Family { attention_norms: after, mlp_norms: Norms { after: None, ..after }, ..LLAMA };
        assert_eq!(stored(name, &other.layer_tensors()), "blk.0.post_attention_norm.weight");
        for other in ["score.weight", "model.layers.0.mlp.experts.0.up_proj.weight", "model.layers.0"] {
            assert_eq!(stored_names(other, &of_layer), None, "{other}");
        }
    }

    /// The permutation of llama.cpp: `w.reshape(heads, 2, d / 2, in).swapaxes(1, 2).reshape(w.shape)`.
    #[test]
    fn rows_are_permuted_as_in_llama_cpp() {
        let (heads, d, size) = (3, 8, 2);
        let values: Vec<f32> = (0..heads * d * size).map(|i| i as f32).collect();
        let paired = Order::Paired(heads).stored(&values, heads * d);
        for h in 0..heads {
            for (half, i) in [(0, 0), (0, 3), (1, 0), (1, 2)] {
                let (to, from) = (h * d + 2 * i + half, h * d + half * (d / 2) + i);
                assert_eq!(paired[to * size..][..size], values[from * size..][..size]);
            }
        }
        assert_eq!(Order::Paired(heads).restored(&paired, heads * d), values);
        assert_ne!(paired, values);
    }
}
