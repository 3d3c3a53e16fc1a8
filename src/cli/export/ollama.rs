//! `--to ollama`: a folder with a Modelfile. For a GGUF base the adapter stays separate (FROM the base's file,
//! ADAPTER); for a Hugging Face base, or with --outtype, both are merged into one GGUF. A TEMPLATE is written only
//! where the file that Ollama reads does not contain the chat template of the training.

use super::{Exported, Outtype, gguf, go, lora};
use crate::config::refusal::Refusal;
use crate::format::atomic;
use crate::format::gguf::{Gguf, Value as Meta};
use crate::run::base_model::BaseModel;
use crate::support::stderr::say;
use serde_json::{Value, json};
use std::path::Path;

/// Ollama's default context length in tokens.
const CONTEXT: usize = 4096;

/// The first line, which identifies an earlier export.
pub const FIRST_LINE: &str = "# ollama create NAME -f Modelfile";

/// Writes the folder and compares its content with the model in memory.
pub fn write(source: &Exported, out: &Path, outtype: Outtype) -> Result<Value, Refusal> {
    let base = &source.base;
    let adapter = keeps_adapter(base, outtype);
    let from = match adapter {
        true => {
            base.path.canonicalize().map_err(crate::config::refusal::at(&base.path))?.display().to_string()
        }
        false => "./model.gguf".into(),
    };
    let carried = match adapter {
        true => {
            Gguf::open(&base.path)?.get("tokenizer.chat_template").and_then(Meta::as_str).map(str::to_owned)
        }
        false => base.files.tokenizer.chat_template.clone(),
    };
    let modelfile = modelfile(source, &from, adapter.then_some("./adapter.gguf"), carried.as_deref());
    atomic::write_dir(out, |dir| {
        let mut facts = match adapter {
            true => lora::write(source, &dir.join("adapter.gguf"), outtype)?,
            false => gguf::write(source, &dir.join("model.gguf"), outtype)?,
        };
        atomic::write_file(&dir.join("Modelfile"), modelfile.as_bytes())?;
        facts["kind"] = json!("ollama");
        facts["from"] = json!(from);
        Ok(facts)
    })
}

/// Whether the adapter stays a file of its own, beside a GGUF base as it is.
pub fn keeps_adapter(base: &BaseModel, outtype: Outtype) -> bool {
    !base.path.is_dir() && outtype == Outtype::Base
}

fn modelfile(source: &Exported, from: &str, adapter: Option<&str>, carried: Option<&str>) -> String {
    let mut lines = vec![FIRST_LINE.to_owned(), format!("FROM {from}")];
    lines.extend(adapter.map(|path| format!("ADAPTER {path}")));
    let tokenizer = &source.tokenizer;
    for id in source.base.stop_ids(tokenizer) {
        // End tokens of a turn; a token without text is left to the file's own metadata.
        let text = tokenizer.decode(&[id], crate::data::tokenizer::Skip::Nothing).unwrap_or_default();
        if !text.is_empty() && !text.contains(['"', '\n']) {
            lines.push(format!("PARAMETER stop \"{text}\""));
        }
    }
    if source.base.config.max_positions < CONTEXT {
        lines.push(format!("PARAMETER num_ctx {}", source.base.config.max_positions));
    }
    match tokenizer.template() {
        None => say!("note: the model has no chat template, so Ollama gives it prompts as they are"),
        Some(template) if carried == Some(template.source()) => {}
        Some(template) => match go::family_of(template, tokenizer.bos_token()) {
            Some(found) => {
                lines.push(format!("# turns as {} writes them", found.family.name));
                lines.push(format!("TEMPLATE \"\"\"{}\"\"\"", found.family.template));
                lines.extend(found.system.map(|s| format!("SYSTEM \"\"\"{s}\"\"\"")));
            }
            None => say!(
                "warning: the chat template that was trained with is in no family that is written for Ollama \
                 (ChatML, Llama 3, Mistral), and the base's file does not carry it: chats will look otherwise \
                 than in training; --outtype f16 writes a merged model that carries it"
            ),
        },
    }
    lines.join("\n") + "\n"
}
