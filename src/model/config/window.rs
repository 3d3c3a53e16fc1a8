//! Sliding windows. Which layers slide, and whether the window is on at all, differs by family; only an active
//! window counts, and it matters only for rows that are longer than it.

use super::read::Fields;
use super::{ConfigError, unsupported};
use crate::families::Windows;

/// What `layer_types` calls a layer that slides.
const SLIDES: &str = "sliding_attention";
/// The window of a class whose config.json names none.
const DEFAULT: usize = 4096;

/// The window of each layer, `None` where it does not slide.
pub(super) fn read(fields: &Fields, rule: Windows, layers: usize) -> Result<Vec<Option<usize>>, ConfigError> {
    let kinds = fields.strings("layer_types")?;
    if let Some(other) = kinds.iter().find(|k| !["full_attention", SLIDES].contains(*k)) {
        return Err(unsupported(
            format!("layer type `{other}`"),
            "choose a model whose layers all have full (or sliding) attention",
        ));
    }
    let size = fields.optional_size("sliding_window", 1..=1 << 40)?;
    let or_default = if fields.mentions("sliding_window") { size } else { Some(DEFAULT) };
    // A list of another length says which kinds there are, not where.
    let typed = |layer: usize| match kinds.len() == layers {
        true => kinds[layer] == SLIDES,
        false => kinds.contains(&SLIDES),
    };
    let window = |slides: &dyn Fn(usize) -> bool, size: Option<usize>| {
        (0..layers).map(|layer| size.filter(|_| slides(layer))).collect()
    };
    Ok(match rule {
        Windows::Typed => window(&typed, size),
        // transformers gives the class its default before it looks at the layers' types.
        Windows::All if !fields.mentions("sliding_window") => window(&|_| true, or_default),
        Windows::All => window(&|layer| kinds.is_empty() || typed(layer), size),
        Windows::Switched => {
            let on = fields.flag("use_sliding_window")?.unwrap_or(false);
            let first = fields.optional_size("max_window_layers", 0..=1 << 31)?.unwrap_or(28);
            let slides = |layer: usize| if kinds.is_empty() { first <= layer } else { typed(layer) };
            window(&slides, or_default.filter(|_| on))
        }
    })
}
