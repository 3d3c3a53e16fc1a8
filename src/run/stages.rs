//! `--stages`: how the layers of the model are divided among the workers of a line.

use super::prepare::Prepared;
use crate::cluster::coordinator::LinePlan;
use crate::config::Settings;
use crate::config::groups::{Options, Stages};
use crate::config::refusal::Refusal;
use crate::devices;
use crate::model::layout;
use std::ops::Range;

/// The layers and values of each worker of a line; `None` where each worker holds the whole model.
pub fn plan(
    settings: &Settings,
    options: &Options,
    (prepared, tokens): (&Prepared, usize),
) -> Result<Option<LinePlan>, Refusal> {
    let Some(stages) = &options.cluster.stages else { return Ok(None) };
    let (config, _, lora) = prepared.model();
    let output = &options.output;
    if !output.sample_prompts.is_empty() || output.sample_rows > 0 {
        let why = "workers that hold the model together answer no prompts: leave --sample-prompt and --sample-rows out";
        return Err(settings.refuse("stages", why));
    }
    let all = config.layers;
    let layers: Vec<Range<usize>> = match stages {
        Stages::Count(count) if *count > all => {
            return Err(
                settings.refuse("stages", format!("{count} workers for {all} layers: use at most {all}"))
            );
        }
        Stages::Count(count) => {
            devices::even_split(prepared.model(), tokens, *count).map_err(Refusal::from)?
        }
        Stages::Layers(counts) if counts.iter().sum::<usize>() != all => {
            let sum: usize = counts.iter().sum();
            return Err(settings.refuse("stages", format!("these are {sum} layers, the model has {all}")));
        }
        Stages::Layers(counts) => {
            let start = counts.iter().scan(0, |end, count| Some(std::mem::replace(end, *end + count)));
            start.zip(counts).map(|(start, count)| start..start + count).collect()
        }
    };
    let mut end = 0;
    let values = layers.iter().map(|layers| {
        let start = end;
        end += layout::of(config, lora, layers.clone()).len();
        start..end
    });
    Ok(Some(LinePlan { values: values.collect(), layers }))
}
