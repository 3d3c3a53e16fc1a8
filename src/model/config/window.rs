//! Sliding windows. Which layers slide, and whether the window is on at all, differs by family; only an active
//! window counts, and it matters only for rows that are longer than it.

use super::read::Fields;
use super::{ConfigError, Family, unsupported};

/// The window of the layers that slide, None where none does.
pub(super) fn read(fields: &Fields, family: Family, layers: usize) -> Result<Option<usize>, ConfigError> {
    let kinds = fields.strings("layer_types")?;
    if let Some(other) = kinds.iter().find(|k| !matches!(**k, "full_attention" | "sliding_attention")) {
        return Err(unsupported(
            format!("layer type `{other}`"),
            "choose a model whose layers all have full (or sliding) attention",
        ));
    }
    let size = fields.optional_size("sliding_window", 1..=1 << 40)?;
    let slides = kinds.contains(&"sliding_attention");
    Ok(match family {
        Family::Llama => size.filter(|_| slides),
        // A Mistral slides in every layer; only a null switches it off, and 4096 is the class's default.
        Family::Mistral if !fields.mentions("sliding_window") => Some(4096),
        Family::Mistral => size.filter(|_| kinds.is_empty() || slides),
        Family::Qwen2 | Family::Qwen3 => {
            let on = fields.flag("use_sliding_window")?.unwrap_or(false);
            let first = fields.optional_size("max_window_layers", 0..=1 << 31)?.unwrap_or(28);
            let some = if kinds.is_empty() { first < layers } else { slides };
            let size = if fields.mentions("sliding_window") { size } else { Some(4096) };
            size.filter(|_| on && some)
        }
    })
}
