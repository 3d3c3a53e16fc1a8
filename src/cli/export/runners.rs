//! Known refusals and differences of runners, reported before anything is written. Source: llama.cpp's
//! `convert_lora_to_gguf.py` and `llama-adapter.cpp`, vLLM's `lora/peft_helper.py`, mlx-lm's `utils.py`.

use super::{Exported, Outtype, To, ollama};
use crate::config::refusal::Refusal;
use crate::families::Windows;
use crate::format::peft::max_lora_rank;
use crate::format::{MXFP4, NF4};
use crate::model::lora::LoraSpec;
use crate::run::adapter::Loaded;

/// Returns sentences for the user; an error where no runner would load the file.
pub fn notes(to: To, outtype: Outtype, source: &Exported) -> Result<Vec<String>, Refusal> {
    let spec = &source.loaded.spec;
    let classifier = source.loaded.config.labels.is_some();
    let gguf = !matches!(to, To::Merged | To::Peft | To::Mlx);
    if classifier && (gguf || to == To::Mlx) {
        let program = if gguf { "llama.cpp" } else { "mlx-lm" };
        let way = "use --to merged (transformers, vLLM) or --to peft (PEFT)";
        return Err(Refusal::configuration(format!(
            "the adapter is a classifier, and {program} has no place for its score head: {way}"
        )));
    }
    let apart = match to {
        To::Merged | To::MergedGguf => false,
        To::Peft | To::GgufLora | To::Mlx => true,
        To::Ollama => ollama::keeps_adapter(&source.base, outtype),
    };
    if apart && !source.loaded.magnitudes.is_empty() {
        let way = "use --to merged or --to merged-gguf";
        return Err(Refusal::configuration(format!("the adapter uses DoRA, which is merged only: {way}")));
    }
    match (apart, gguf) {
        (true, true) => only_merged(spec)?,
        (true, false) => {}
        (false, _) => can_merge(&source.loaded)?,
    }
    if gguf && apart && spec.scale() == 0.0 {
        let way = "use --to merged-gguf";
        return Err(Refusal::configuration(format!(
            "the adapter's alpha is 0, which llama.cpp reads as a scale of 1: {way}"
        )));
    }
    let mut notes = Vec::new();
    if let Some(recipe) = source.recipe
        && to != To::Peft
    {
        let base = source.base.path.display();
        notes.push(format!(
            "trained on {base} quantised to {}; the export is for the base as its files are",
            recipe.name()
        ));
    }
    if to == To::Peft {
        notes.extend(for_peft(&source.loaded));
    }
    if to == To::Mlx {
        notes.extend(for_mlx(source));
    }
    let implied = matches!(source.base.config.family.windows, Windows::Pattern(..));
    if gguf
        && !implied
        && let Some(window) = source.base.config.window()
    {
        notes.push(format!(
            "llama.cpp ignores this model's sliding window: rows beyond {window} tokens attend to everything"
        ));
    }
    Ok(notes)
}

/// Refuses what llama.cpp would read in no file of its own.
fn only_merged(spec: &LoraSpec) -> Result<(), Refusal> {
    let what = match (spec.rows.is_empty(), spec.ends.is_empty()) {
        (false, _) => "trained rows of tokens",
        (_, false) => "an adapter on embed_tokens or lm_head",
        _ => return Ok(()),
    };
    let way = "use --to merged-gguf";
    Err(Refusal::configuration(format!(
        "the adapter has {what}, which is written for llama.cpp in a merged model only: {way}"
    )))
}

/// Refuses the change of one half of a matrix that is embedding and head.
fn can_merge(loaded: &Loaded) -> Result<(), Refusal> {
    let (spec, config) = (&loaded.spec, &loaded.config);
    if spec.ends.is_empty() || !config.tied || config.labels.is_some() {
        return Ok(());
    }
    let why = "embedding and head of this model are one matrix, and the adapter changes one of them only";
    let way = "use --to peft, or train with --train-tokens";
    Err(Refusal::configuration(format!("{why}, so it cannot be merged: {way}")))
}

/// What the programs that load PEFT's adapters make of this one.
fn for_peft(loaded: &Loaded) -> Vec<String> {
    let (spec, classifier, mut notes) = (&loaded.spec, loaded.config.labels.is_some(), Vec::new());
    if classifier {
        let way = "load it with PEFT, or use --to merged";
        notes.push(format!("vLLM and llama.cpp's converter refuse an adapter with a score head: {way}"));
    }
    if spec.rslora && !classifier {
        let way = "use --to gguf-lora, which folds the scale into alpha";
        notes.push(format!("llama.cpp's converter ignores use_rslora and would scale by less: {way}"));
    }
    if !spec.rows.is_empty() {
        let way = "load it with PEFT, or use --to merged";
        notes.push(format!("vLLM and llama.cpp's converter refuse trained rows of tokens: {way}"));
    }
    let rank = spec.largest_rank();
    match max_lora_rank(rank) {
        _ if classifier => {}
        Some(16 | 8 | 1) => {}
        Some(most) => notes.push(format!("vLLM needs --max-lora-rank {most} for this rank ({rank})")),
        None => notes.push(format!("vLLM takes ranks up to 512, this adapter has {rank}")),
    }
    if !classifier && !spec.is_uniform() {
        let who =
            if spec.has_other_alpha() { "vLLM and llama.cpp's converter ignore" } else { "vLLM ignores" };
        let way = "load it with PEFT, or use --to merged or gguf-lora";
        notes.push(format!("{who} the patterns of rank and alpha: {way}"));
    }
    notes
}

fn for_mlx(source: &Exported) -> Vec<String> {
    let (base, mut notes) = (&source.base, Vec::new());
    if !base.path.is_dir() || base.files.kind == NF4 {
        let way = "load the adapter with the Hugging Face directory that it was made of";
        notes.push(format!("mlx-lm does not read {}: {way}", base.path.display()));
    }
    if base.config.family.biased_experts && base.files.kind != MXFP4 {
        let way = "load the adapter with the model's MXFP4 files";
        notes.push(format!("mlx-lm reads experts of this family in MXFP4 only: {way}"));
    }
    let own = source.tokenizer.template().map(|t| t.source());
    if own != source.base_template.as_deref() {
        let way = "chats will look otherwise than in training";
        notes.push(format!("mlx-lm uses the chat template of the base, not that of the adapter: {way}"));
    }
    notes
}
