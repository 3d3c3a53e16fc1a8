//! `--stages`: how the layers of the model are divided among the workers of a line.

use super::prepare::Prepared;
use crate::cluster::coordinator::{Division, LinePlan};
use crate::config::Settings;
use crate::config::groups::{Options, Stages};
use crate::config::refusal::Refusal;
use crate::forecast::counts::Counts;
use crate::model::layout;

/// Most workers of a line whose number is not given.
pub const MOST: usize = 8;

/// How the model is divided among the workers of a line; `None` where each worker holds the whole model.
pub fn plan(
    settings: &Settings,
    options: &Options,
    (prepared, counts): (&Prepared, &Counts),
) -> Result<Option<LinePlan>, Refusal> {
    let Some(stages) = &options.cluster.stages else { return Ok(None) };
    let (config, _, lora) = prepared.model();
    let all = config.layers;
    let division = match stages {
        Stages::Count(count) if *count > all => {
            return Err(
                settings.refuse("stages", format!("{count} workers for {all} layers: use at most {all}"))
            );
        }
        Stages::Count(count) => Division::Seats(*count),
        Stages::Auto => Division::Auto(all.min(MOST)),
        Stages::Layers(counts) if counts.iter().sum::<usize>() != all => {
            let sum: usize = counts.iter().sum();
            return Err(settings.refuse("stages", format!("these are {sum} layers, the model has {all}")));
        }
        Stages::Layers(counts) => Division::Layers(counts.clone()),
    };
    let ends = (0..all).scan(0, |end, layer| {
        *end += layout::of(config, lora, layer..layer + 1).len();
        Some(*end)
    });
    let (values, wire) = (std::iter::once(0).chain(ends).collect(), options.cluster.wire);
    let microbatches =
        counts.microbatches.div_ceil((counts.steps + 1).saturating_sub(counts.first).max(1)) as usize;
    Ok(Some(LinePlan { division, values, hidden: config.hidden, wire, tokens: counts.longest, microbatches }))
}
