//! Layers with a causal short convolution in the place of attention.

use super::read::Fields;
use super::{ConfigError, key};

/// Name of such a layer in `layer_types`.
pub(super) const KIND: &str = "conv";

/// The convolutions of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Convolutions {
    /// Taps of each channel: the values of that many tokens are added.
    pub taps: usize,
    /// Whether each layer has a convolution; the others have attention.
    pub layers: Vec<bool>,
}

/// Reads `conv_L_cache`, and `layer_types` or `full_attn_idxs`.
pub(super) fn read(fields: &Fields, layers: usize) -> Result<Convolutions, ConfigError> {
    let kinds = fields.strings("layer_types")?;
    let attention = match fields.list("full_attn_idxs")? {
        Some(list) if kinds.is_empty() => Some(list),
        _ => None,
    };
    let number = |v: &serde_json::Value| match v.as_u64() {
        Some(layer) if (layer as usize) < layers => Ok(layer as usize),
        _ => Err(key("full_attn_idxs", format!("has {v}, which is no layer"))),
    };
    let attention =
        attention.map(|list| list.iter().map(number).collect::<Result<Vec<_>, _>>()).transpose()?;
    let is_convolution = |layer: usize| match &attention {
        Some(attention) => !attention.contains(&layer),
        None => kinds.get(layer) == Some(&KIND),
    };
    Ok(Convolutions {
        taps: fields.optional_size("conv_L_cache", 2..=64)?.unwrap_or(3),
        layers: (0..layers).map(is_convolution).collect(),
    })
}

/// The size of the feed-forward by LFM2's rule.
pub(super) fn adjusted(fields: &Fields) -> Result<usize, ConfigError> {
    let sizes = 1..=1 << 22;
    let size = match fields.optional_size("block_ff_dim", sizes.clone())? {
        Some(size) => size,
        None => fields.size("intermediate_size", sizes.clone())?,
    };
    if !fields.flag("block_auto_adjust_ff_dim")?.unwrap_or(true) {
        return Ok(size);
    }
    let size = 2 * size / 3;
    let named = "block_ffn_dim_multiplier";
    let factor = fields.number(named)?.or((!fields.mentions(named)).then_some(1.0));
    let multiple = fields.optional_size("block_multiple_of", sizes.clone())?.unwrap_or(256);
    let scaled = factor.map_or(size as f64, |factor| factor * size as f64);
    let whole = scaled.min(*sizes.end() as f64) as usize;
    let adjusted = if factor.is_some() { whole.next_multiple_of(multiple) } else { whole };
    match sizes.contains(&adjusted) {
        true => Ok(adjusted),
        false => Err(key(named, format!("gives a feed-forward of size {scaled}"))),
    }
}
