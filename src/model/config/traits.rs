//! What config.json says of a model whose family is unknown: which of its traits other families have too, and which
//! nothing here computes.

use super::read::Fields;
use crate::families::ALL;

/// A trait by the key that shows it, and whether some family has it.
const TRAITS: [(&str, &str, Computed); 23] = [
    ("sliding_window", "sliding windows", Computed::Yes),
    ("rope_local_base_freq", "another rotary base of sliding layers", Computed::Yes),
    ("no_rope_layers", "layers without rotation", Computed::Yes),
    ("embedding_multiplier", "a scaled embedding", Computed::Yes),
    ("residual_multiplier", "scaled residual branches", Computed::Yes),
    ("attention_multiplier", "scaled scores", Computed::Yes),
    ("logits_scaling", "scaled logits", Computed::Yes),
    ("query_pre_attn_scalar", "a scale of scores of its own", Computed::Yes),
    ("attention_bias", "biases of attention", Computed::Yes),
    ("mlp_bias", "biases of the feed-forward", Computed::Yes),
    ("attn_logit_softcapping", "a soft cap of scores", Computed::No),
    ("final_logit_softcapping", "a soft cap of logits", Computed::No),
    ("partial_rotary_factor", "a partial rotary embedding", Computed::Yes),
    ("conv_L_cache", "causal short convolutions", Computed::Yes),
    ("linear_num_value_heads", "gated delta rules", Computed::Yes),
    ("num_experts", "a mixture of experts", Computed::Yes),
    ("num_local_experts", "a mixture of experts", Computed::No),
    ("n_routed_experts", "a mixture of experts", Computed::No),
    ("kv_lora_rank", "latent attention", Computed::No),
    ("parallel_attn", "parallel attention and feed-forward", Computed::No),
    ("use_parallel_residual", "parallel attention and feed-forward", Computed::No),
    ("vision_config", "a vision tower", Computed::No),
    ("ssm_state_size", "state space layers", Computed::No),
];

#[derive(Clone, Copy, PartialEq)]
enum Computed {
    Yes,
    No,
}

/// A sentence part such as `its config.json shows sliding windows, and latent attention, which is not computed`; `None`
/// where no known key is set.
pub(super) fn shown(fields: &Fields) -> Option<String> {
    let set = TRAITS.iter().filter(|(key, ..)| fields.is_set(key));
    let of = |which| set.clone().filter(move |t| t.2 == which).map(|t| t.1.to_owned());
    let (known, mut missing): (Vec<_>, Vec<_>) = (of(Computed::Yes).collect(), of(Computed::No).collect());
    let kinds = fields.strings("layer_types").unwrap_or_default();
    let own =
        ["attention", "full_attention", "sliding_attention", super::convolutions::KIND, super::delta::KIND];
    let other = kinds.iter().find(|kind| !own.contains(kind));
    missing.extend(other.map(|kind| format!("layers of type {kind}")));
    let act = fields.text("hidden_act").ok().flatten().or(fields.text("hidden_activation").ok().flatten());
    let computed = |name: &str| ALL.iter().any(|f| f.activation_names().contains(&name));
    missing.extend(act.filter(|name| !computed(name)).map(|name| format!("the activation {name}")));
    missing.dedup();
    let list = |what: &[String]| what.join(", ");
    match (known.is_empty(), missing.is_empty()) {
        (true, true) => None,
        (false, true) => Some(format!("its config.json shows {}, which other families have", list(&known))),
        (true, false) => Some(format!("its config.json shows {}: not computed", list(&missing))),
        (false, false) => Some(format!(
            "its config.json shows {}, which other families have, and {}: not computed",
            list(&known),
            list(&missing)
        )),
    }
}
