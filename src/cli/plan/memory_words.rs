//! The memory of a device in words.

use crate::config::groups::Options;
use crate::model::decoder::Keep;
use crate::model::memory::{Estimate, size};
use crate::support::plural::count;

/// `it has 7.60 GB`
pub fn gives(limit: Option<u64>, options: &Options) -> String {
    let from = if options.devices.memory_limit.is_some() { "--memory-limit gives it" } else { "it has" };
    limit.map_or("its memory is not known".into(), |limit| format!("{from} {}", size(limit)))
}

/// `weights 0.27 GB + adapter ...`
pub fn sum(e: &Estimate) -> String {
    format!(
        "weights {} + LoRA and optimizer {} + activations {} + workspace {}",
        size(e.weights),
        size(e.adapter),
        size(e.kept),
        size(e.scratch)
    )
}

/// `690 kB`
pub fn small(bytes: f64) -> String {
    if bytes < 1e6 { format!("{:.1} kB", bytes / 1e3) } else { format!("{:.2} MB", bytes / 1e6) }
}

pub fn kept(keep: Keep, layers: usize) -> String {
    match keep {
        Keep::Everything => "no activation checkpointing: all activations are kept until backward".into(),
        Keep::Parts([_, narrow, attended]) => {
            let [all, ..] = keep.counts(layers);
            let rest = layers.saturating_sub(all + narrow + attended);
            let counts = [(all, "not"), (narrow, "partly"), (attended, "almost fully"), (rest, "fully")];
            let some = counts.into_iter().filter(|(count, _)| *count > 0);
            let list: Vec<String> = some.map(|(count, how)| format!("{count} {how}")).collect();
            let blocks = if list[0].starts_with("1 ") { " block " } else { " blocks " };
            let list = list.join(", ").replacen(' ', blocks, 1);
            format!("activation checkpointing: {list} (recomputed in backward)")
        }
        Keep::Inputs => {
            let blocks = count(layers as u64, "block");
            format!("activation checkpointing: {blocks} fully (recomputed in backward)")
        }
    }
}

/// Which of these layers are streamed.
pub fn streamed(takes: &Estimate, layers: usize) -> Option<String> {
    let passes = match takes.group {
        1 => "in each pass".to_owned(),
        group => format!("in each pass of up to {group} microbatches"),
    };
    let some = takes.streamed;
    (some > 0).then(|| format!("         {some} of {layers} layers are streamed: read again {passes}"))
}
