//! The tokens of --train-tokens, and those that are added: their ids, and where their rows are trained.

use crate::config::Settings;
use crate::config::groups::{Gpus, Options, Wanted};
use crate::config::refusal::Refusal;
use crate::data::tokenizer::Tokenizer;
use crate::model::config::Config;
use crate::model::lora::{TRAIN_TOKENS, TrainedRows};

/// The rows of the embedding, and of a head over tokens that is not the embedding.
pub fn of(
    settings: &Settings,
    options: &Options,
    (config, tokenizer): (&Config, &Tokenizer),
) -> Result<TrainedRows, Refusal> {
    let id = |text: &String| {
        tokenizer.token_to_id(text).ok_or_else(|| {
            let why = format!(
                "the tokenizer has no token {text:?}: give --add-tokens {text:?}, which adds it and trains its row"
            );
            settings.refuse(TRAIN_TOKENS, why)
        })
    };
    let lora = &options.lora;
    let new = lora.new_tokens.iter().map(|token| &token.text).filter(|text| !lora.tokens.contains(text));
    let all = lora.tokens.iter().chain(new);
    let embedding: Vec<u32> = all.map(id).collect::<Result<_, _>>()?;
    let own_head = !config.tied && config.labels.is_none() && !options.data.task.has_head();
    let rows = TrainedRows { head: if own_head { embedding.clone() } else { Vec::new() }, embedding };
    Ok(rows)
}

/// The first given option that names trained rows.
pub fn option(settings: &Settings) -> Option<&'static str> {
    [TRAIN_TOKENS, "add-tokens", "add-special-tokens"].into_iter().find(|name| settings.is_given(name))
}

/// Refuses a division of the layers that has a tied embedding in one place and the head in another.
pub fn has_both(
    settings: &Settings,
    options: &Options,
    (config, rows): (&Config, &TrainedRows),
) -> Result<(), Refusal> {
    let in_line = |gpus: &Gpus| match gpus {
        Gpus::Named(all) => all.iter().any(|device| matches!(device, Wanted::Line(_))),
        _ => false,
    };
    let option = if options.cluster.stages.is_some() { "stages" } else { "gpus" };
    let divided = option == "stages" || in_line(&options.devices.gpus);
    if !divided || !rows.shared(config) || options.data.task.has_head() {
        return Ok(());
    }
    let rows = self::option(settings).unwrap_or(TRAIN_TOKENS);
    let why = format!(
        "does not go with --{rows} on this model: its head is its embedding, and the rows would be in two places"
    );
    Err(settings.refuse(option, why))
}
