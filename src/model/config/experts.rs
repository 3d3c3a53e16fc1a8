//! Mixtures of experts: which layers are sparse, and how a router chooses.

use super::read::Fields;
use super::{ConfigError, key, unsupported};
use crate::families::Family;
use crate::families::tensors::MOST_EXPERTS;
use crate::numeric::activation::{CLAMPED_LIMIT, CLAMPED_SLOPE};
use serde_json::Value;

/// The experts of the sparse layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Experts {
    /// E, experts of a layer.
    pub count: usize,
    /// Experts that compute a token.
    pub chosen: usize,
    /// Inner size of an expert.
    pub feed_forward: usize,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub normalised: bool,
    /// Whether each layer is sparse; the others have one feed-forward.
    pub sparse: Vec<bool>,
}

/// Reads the keys of Qwen3-MoE, of Qwen3.5 with experts, or of gpt-oss. transformers 5 writes `num_local_experts` for `num_experts`.
pub(super) fn read(fields: &Fields, family: &Family, layers: usize) -> Result<Experts, ConfigError> {
    let local = family.biased_experts || fields.mentions("num_local_experts");
    let local = local && !fields.mentions("num_experts");
    let name = if local { "num_local_experts" } else { "num_experts" };
    let count = fields.size(name, 1..=MOST_EXPERTS)?;
    if family.biased_experts {
        for (name, only) in [("swiglu_alpha", CLAMPED_SLOPE), ("swiglu_limit", CLAMPED_LIMIT)] {
            if let Some(other) = fields.number(name)?.filter(|x| *x as f32 != only) {
                return Err(unsupported(format!("`{name}` {other}"), format!("only {only} is computed")));
            }
        }
    }
    if family.joined_experts.is_some() {
        let inner = if family.biased_experts { "intermediate_size" } else { "moe_intermediate_size" };
        return Ok(Experts {
            count,
            chosen: fields.size("num_experts_per_tok", 1..=count)?,
            feed_forward: fields.size(inner, 1..=1 << 22)?,
            normalised: true,
            sparse: vec![true; layers],
        });
    }
    let every = fields.optional_size("decoder_sparse_step", 1..=1 << 16)?.unwrap_or(1);
    let number =
        |v: &Value| v.as_u64().ok_or_else(|| key("mlp_only_layers", format!("has {v}, which is no layer")));
    let dense = fields.list("mlp_only_layers")?.into_iter().flatten().map(number);
    let dense = dense.collect::<Result<Vec<u64>, _>>()?;
    let is_sparse = |layer: usize| (layer + 1).is_multiple_of(every) && !dense.contains(&(layer as u64));
    Ok(Experts {
        count,
        chosen: fields.size("num_experts_per_tok", 1..=count)?,
        feed_forward: fields.size("moe_intermediate_size", 1..=1 << 22)?,
        normalised: fields.flag("norm_topk_prob")?.unwrap_or(false),
        sparse: (0..layers).map(is_sparse).collect(),
    })
}
