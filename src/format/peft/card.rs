//! The model card: README.md with the Hub's front matter. The card contains only facts from the configuration and the
//! run.

use super::Extras;
use super::config::{AdapterConfig, TaskType};
use crate::support::stderr::inline;
use serde_json::json;
use std::fmt::Write;

/// The smallest allowed value of vLLM's `--max-lora-rank` for rank `r`; None if the rank is too large.
pub fn max_lora_rank(r: usize) -> Option<usize> {
    [1, 8, 16, 32, 64, 128, 256, 320, 512].into_iter().find(|&most| r <= most)
}

/// The text of the card. `base_kind` is `kind` of [`crate::format::ModelFiles`]; `training` is names and values of the
/// training run, empty if the run is unknown.
pub fn card(config: &AdapterConfig, base_kind: &str, extras: &Extras, training: &[(&str, String)]) -> String {
    let mut text = front_matter(config);
    let base = config.base_model_name_or_path.as_deref();
    let name = base.unwrap_or("a base model that has no Hub id");
    let scaling = if config.use_rslora { "alpha / sqrt(r), rsLoRA" } else { "alpha / r" };
    let _ = write!(
        text,
        "# LoRA adapter for {name}\n\n\
         - base: {name}{}, trained on its weights as {base_kind}\n\
         - rank {}, alpha {} (scale {scaling}), dropout {}\n\
         - modules: {}\n",
        config.revision.as_ref().map(|r| format!(" at revision {r}")).unwrap_or_default(),
        config.r,
        config.lora_alpha,
        config.lora_dropout,
        config.target_modules.join(", "),
    );
    let item =
        |what: &str, all: &str| if all.is_empty() { String::new() } else { format!("- {what}: {all}\n") };
    text += &item("layers", &config.layers.iter().map(usize::to_string).collect::<Vec<_>>().join(", "));
    text += &item("other ranks (rank_pattern)", &pairs(&config.rank_pattern));
    text += &item("other alphas (alpha_pattern)", &pairs(&config.alpha_pattern));
    for (name, tokens) in &config.token_rows {
        let _ = writeln!(text, "- trained rows of {name} (trainable_token_indices): {}", tokens.len());
    }
    match &extras.labels {
        Some(outputs) if extras.numbers => {
            let _ = writeln!(text, "- outputs: {}, each a number", outputs.len());
        }
        Some(labels) => {
            let _ = writeln!(text, "- classes: {} (label_map.json)", labels.join(", "));
        }
        None => {}
    }
    if base.is_none() {
        text.push_str(
            "\nadapter_config.json names no base (`base_model_name_or_path` is null), because the base was a local \
             file without a Hub id. Replace BASE below with the path or id of the same model. \
             `AutoPeftModelForCausalLM` and its relatives need that path or id in adapter_config.json.\n",
        );
    }
    if !training.is_empty() {
        text.push_str("\n## Training\n\n| | |\n|---|---|\n");
        for (name, value) in training {
            let _ = writeln!(text, "| {name} | {} |", inline(value).replace('|', "\\|"));
        }
    }
    text.push_str(&transformers(config, base.unwrap_or("BASE"), extras.enlarged));
    text.push_str(&vllm(config, base.unwrap_or("BASE")));
    text
}

fn pairs<T: std::fmt::Display>(all: &[(String, T)]) -> String {
    all.iter().map(|(name, value)| format!("`{name}` {value}")).collect::<Vec<_>>().join(", ")
}

fn front_matter(config: &AdapterConfig) -> String {
    let mut text = String::from("---\n");
    let base = config.base_model_name_or_path.as_deref();
    if let Some(id) = base {
        let _ = writeln!(text, "base_model: {}", scalar(id));
    }
    text.push_str("library_name: peft\n");
    let pipeline = match config.task {
        TaskType::CausalLm => "text-generation",
        TaskType::SeqCls => "text-classification",
        TaskType::TokenCls => "token-classification",
    };
    let _ = writeln!(text, "pipeline_tag: {pipeline}\ntags:");
    if let Some(id) = base {
        let _ = writeln!(text, "- {}", scalar(&format!("base_model:adapter:{id}")));
    }
    text.push_str("- lora\n- transformers\n---\n\n");
    text
}

/// A YAML scalar that is parsed as this text, because --base-id may contain any character.
fn scalar(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_./-:".contains(c);
    let word =
        text.starts_with(|c: char| c.is_ascii_alphabetic()) && text.contains('/') && !text.ends_with(':');
    if word && text.chars().all(plain) { text.into() } else { json!(text).to_string() }
}

fn transformers(config: &AdapterConfig, base: &str, enlarged: Option<usize>) -> String {
    let (class, more) = match config.task {
        TaskType::CausalLm if !config.path.is_empty() => ("AutoModelForImageTextToText", ""),
        TaskType::CausalLm => ("AutoModelForCausalLM", ""),
        TaskType::SeqCls => ("AutoModelForSequenceClassification", ", num_labels=len(labels)"),
        TaskType::TokenCls => ("AutoModelForTokenClassification", ", num_labels=len(labels)"),
    };
    let labels = match config.task {
        TaskType::CausalLm => "",
        TaskType::SeqCls | TaskType::TokenCls => {
            "import json\nlabels = json.load(open(\"ADAPTER/label_map.json\"))[\"id2label\"]\n"
        }
    };
    let enlarge = enlarged.map(|rows| format!("model.resize_token_embeddings({rows})\n")).unwrap_or_default();
    let revision = config.revision.as_ref().map(|r| format!(", revision=\"{r}\"")).unwrap_or_default();
    format!(
        "\n## With transformers and PEFT\n\n```python\n\
         from peft import PeftModel\nfrom transformers import AutoTokenizer, {class}\n\n{labels}\
         model = {class}.from_pretrained(\"{base}\"{revision}{more})\n{enlarge}\
         model = PeftModel.from_pretrained(model, \"ADAPTER\")\n\
         tokenizer = AutoTokenizer.from_pretrained(\"ADAPTER\")\n```\n"
    )
}

fn vllm(config: &AdapterConfig, base: &str) -> String {
    let head = "\n## With vLLM\n\n";
    match (config.task, max_lora_rank(config.r)) {
        (TaskType::SeqCls | TaskType::TokenCls, _) => {
            format!("{head}vLLM takes no adapter with a head of its own: merge it into the base first.\n")
        }
        _ if !config.token_rows.is_empty() => {
            format!("{head}vLLM reads no trained rows of tokens: merge the adapter into the base first.\n")
        }
        _ if !(config.rank_pattern.is_empty() && config.alpha_pattern.is_empty()) => {
            format!("{head}vLLM reads one rank and one alpha: merge the adapter into the base first.\n")
        }
        (_, None) => {
            format!("{head}Rank {} is above vLLM's largest (512): merge it into the base first.\n", config.r)
        }
        (_, Some(most)) => format!(
            "{head}```sh\nvllm serve {base} --enable-lora --max-lora-rank {most} --lora-modules adapter=ADAPTER\n```\n"
        ),
    }
}
