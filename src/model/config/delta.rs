//! Layers with a gated delta rule in the place of attention.

use super::read::Fields;
use super::{ConfigError, DeltaHeads, key};

/// Name of such a layer in `layer_types`.
pub(super) const KIND: &str = "linear_attention";

/// Most heads: what one dimension of a launch on a CUDA device holds.
const MOST_HEADS: usize = 65_535;

/// The delta rules of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeltaRules {
    /// Heads of keys and values.
    pub heads: DeltaHeads,
    /// Taps of each channel of the convolution before the rule.
    pub taps: usize,
    /// Whether each layer has a delta rule; the others have attention.
    pub layers: Vec<bool>,
}

/// Reads the keys of Qwen3.5, with its defaults.
pub(super) fn read(fields: &Fields, layers: usize) -> Result<DeltaRules, ConfigError> {
    // transformers has a default that does not follow from other keys.
    fields.size("head_dim", 1..=4096)?;
    let size = |name: &str, most: usize, default: usize| {
        Ok::<_, ConfigError>(fields.optional_size(name, 1..=most)?.unwrap_or(default))
    };
    let heads = DeltaHeads {
        values: size("linear_num_value_heads", MOST_HEADS, 32)?,
        keys: size("linear_num_key_heads", MOST_HEADS, 16)?,
        value_size: size("linear_value_head_dim", 1 << 12, 128)?,
        key_size: size("linear_key_head_dim", MOST_KEY, 128)?,
    };
    if !heads.values.is_multiple_of(heads.keys) {
        let what = format!("is {}, which does not divide {} value heads", heads.keys, heads.values);
        return Err(key("linear_num_key_heads", what));
    }
    let kinds = fields.strings("layer_types")?;
    let every = size("full_attention_interval", 1 << 31, 4)?;
    let is_rule = |layer: usize| match kinds.get(layer) {
        Some(kind) => *kind == KIND,
        None => !(layer + 1).is_multiple_of(every),
    };
    let taps = fields.optional_size("linear_conv_kernel_dim", 2..=64)?.unwrap_or(4);
    Ok(DeltaRules { heads, taps, layers: (0..layers).map(is_rule).collect() })
}

/// The largest key head of which backends keep a state.
const MOST_KEY: usize = 512;

impl DeltaRules {
    /// Frozen values of a layer outside its matrices.
    pub fn values(&self) -> usize {
        let DeltaHeads { values, keys, value_size, key_size } = self.heads;
        let channels = 2 * keys * key_size + values * value_size;
        // Taps, rates and biases of the decays, the gain of the output's norm and those of q and k.
        self.taps * channels + 2 * values + value_size + 2 * key_size
    }
}
