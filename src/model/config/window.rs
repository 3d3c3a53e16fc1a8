//! Sliding windows. The family determines which layers slide and whether the window is active.

use super::read::Fields;
use super::{ConfigError, convolutions, delta, key, unsupported};
use crate::families::{Family, Windows};

/// Name of a sliding layer in `layer_types`.
const SLIDES: &str = "sliding_attention";
/// Name of a layer without a window, of models that may have Mamba-2 layers.
pub(super) const ATTENTION: &str = "attention";
/// The window of a class whose config.json gives none.
const DEFAULT: usize = 4096;

/// Reads the window of each layer; `None` where the layer does not slide.
pub(super) fn read(
    fields: &Fields,
    family: &Family,
    layers: usize,
) -> Result<Vec<Option<usize>>, ConfigError> {
    let kinds = fields.strings("layer_types")?;
    let others = [
        (family.convolutions, convolutions::KIND),
        (family.delta_rule, delta::KIND),
        (family.hybrid, ATTENTION),
    ];
    let known = |kind: &&str| {
        ["full_attention", SLIDES].contains(kind) || others.iter().any(|(has, own)| *has && own == kind)
    };
    if let Some(other) = kinds.iter().find(|kind| !known(kind)) {
        return Err(unsupported(
            format!("layer type `{other}`"),
            "choose a model whose layers all have full (or sliding) attention",
        ));
    }
    let size = fields.optional_size("sliding_window", 1..=1 << 40)?;
    let or_default = if fields.mentions("sliding_window") { size } else { Some(DEFAULT) };
    if !kinds.is_empty() && kinds.len() != layers {
        return Err(key("layer_types", format!("has {} entries for {layers} layers", kinds.len())));
    }
    let typed = |layer: usize| kinds.get(layer) == Some(&SLIDES);
    let window = |slides: &dyn Fn(usize) -> bool, size: Option<usize>| {
        (0..layers).map(|layer| size.filter(|_| slides(layer))).collect()
    };
    Ok(match family.windows {
        Windows::Typed => window(&typed, size),
        // transformers sets the class's default before it reads the layers' types.
        Windows::All if !fields.mentions("sliding_window") => window(&|_| true, or_default),
        Windows::All => window(&|layer| kinds.is_empty() || typed(layer), size),
        Windows::Given => window(&|_| true, size),
        Windows::Pattern(every, default) => {
            let size = if fields.mentions("sliding_window") { size } else { Some(default) };
            let every = fields.optional_size("sliding_window_pattern", 1..=1 << 31)?.unwrap_or(every);
            let slides = |layer: usize| match kinds.is_empty() {
                true => !(layer + 1).is_multiple_of(every),
                false => typed(layer),
            };
            if size.is_none() && (0..layers).any(slides) {
                return Err(key("sliding_window", "is null, but layers slide"));
            }
            window(&slides, size)
        }
        Windows::Switched => {
            let on = fields.flag("use_sliding_window")?.unwrap_or(false);
            let first = fields.optional_size("max_window_layers", 0..=1 << 31)?.unwrap_or(28);
            let slides = |layer: usize| if kinds.is_empty() { first <= layer } else { typed(layer) };
            window(&slides, or_default.filter(|_| on))
        }
    })
}
