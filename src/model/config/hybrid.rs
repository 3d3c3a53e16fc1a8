//! Models of a class that also has Mamba-2 layers and experts: those without both are read.

use super::read::Fields;
use super::{ConfigError, unsupported, window};
use crate::families::Family;

const WAY_OUT: &str =
    "choose a model with attention and one feed-forward in each layer, such as granite-4.0-micro";

/// Refuses Mamba-2 layers and experts, which transformers has also where config.json lacks the keys.
pub(super) fn refuse(fields: &Fields, family: &Family) -> Result<(), ConfigError> {
    if !family.hybrid {
        return Ok(());
    }
    let refuse = |what: String| Err(unsupported(what, WAY_OUT));
    let (name, kinds) = ("layer_types", fields.strings("layer_types")?);
    match kinds.iter().find(|kind| !["full_attention", window::ATTENTION].contains(kind)) {
        _ if kinds.is_empty() => refuse(format!("a model with Mamba-2 layers (no `{name}`)"))?,
        Some(&kind @ ("mamba" | "linear_attention")) => {
            refuse(format!("a model with Mamba-2 layers (`{name}`: {kind})"))?;
        }
        Some(kind) => refuse(format!("a model with layers of type `{kind}`"))?,
        None => {}
    }
    let name = "num_local_experts";
    match fields.optional_size(name, 0..=1 << 20)? {
        Some(0) => Ok(()),
        Some(count) => refuse(format!("a mixture of experts (`{name}`: {count})")),
        None => refuse(format!("a mixture of experts (no `{name}`, which stands for 8)")),
    }
}
