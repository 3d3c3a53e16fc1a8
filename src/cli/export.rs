//! `finetune export OUT --to peft|gguf-lora|merged|merged-gguf|ollama`, and `merge`. The output is written to a
//! temporary name and renamed, so that an existing output is complete; before the rename it is read back and compared,
//! so that an output with other logits never appears. Known refusals of a runner are reported before anything is
//! written. --overwrite replaces only an earlier export.

mod gguf;
mod go;
mod logits;
mod lora;
mod merged;
mod ollama;
mod peft;
mod replace;
mod runners;

use super::invocation::Invocation;
use super::speaker::{model_name, recipe_of};
use crate::config::Settings;
use crate::config::groups::{self, ComputeDtype, DeviceOptions};
use crate::config::refusal::{Refusal, nearest};
use crate::data::tokenizer::Tokenizer;
use crate::model::quantised::Recipe;
use crate::numeric::block::{Block, Encoding};
use crate::numeric::dtype::Dtype;
use crate::run::adapter::{self, Loaded};
use crate::run::base_model::{self, BaseModel};
use crate::support::stderr::say;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Form of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum To {
    Peft,
    GgufLora,
    Merged,
    MergedGguf,
    Ollama,
}

const FORMS: [(&str, To); 5] = [
    ("peft", To::Peft),
    ("gguf-lora", To::GgufLora),
    ("merged", To::Merged),
    ("merged-gguf", To::MergedGguf),
    ("ollama", To::Ollama),
];

/// Number types of a GGUF.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outtype {
    /// The base's types; f32 for an adapter.
    Base,
    /// One type for all matrices.
    All(Encoding),
}

const OUTTYPES: [(&str, Outtype); 5] = [
    ("base", Outtype::Base),
    ("f32", Outtype::All(Encoding::Plain(Dtype::F32))),
    ("f16", Outtype::All(Encoding::Plain(Dtype::F16))),
    ("bf16", Outtype::All(Encoding::Plain(Dtype::Bf16))),
    ("q8_0", Outtype::All(Encoding::Blocks(Block::Q8_0))),
];

/// An adapter and its base, opened and checked for compatibility.
struct Exported {
    base: BaseModel,
    tokenizer: Tokenizer,
    loaded: Loaded,
    devices: DeviceOptions,
    /// Quantisation of the base during training, where its files are not quantised.
    recipe: Option<Recipe>,
}

/// Exports.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let s = &inv.settings;
    let Some(from) = inv.positional.first().map(PathBuf::from) else {
        return Err(Refusal::usage("nothing to export: give the folder OUT of a run, or of an adapter"));
    };
    let to = chosen(s, "to", "merged", &FORMS)?;
    let name = s.text("to")?.unwrap_or("merged").to_string();
    let (dtype, outtype) = encodings(s, to)?;
    let suffix = if matches!(to, To::GgufLora | To::MergedGguf) { ".gguf" } else { "" };
    let out = match s.text("output")? {
        Some(path) => PathBuf::from(path),
        None => PathBuf::from(format!("{}-{name}{suffix}", from.display().to_string().trim_end_matches('/'))),
    };
    replace::free(&out, s.switch("overwrite")?.then_some(()))?;
    let source = open(s, &from)?;
    let sources = [(from.as_path(), "is the exported"), (&source.base.path, "is the base's")];
    if suffix.is_empty() {
        replace::replaceable(&out, &sources)?;
    } else {
        replace::replaceable_file(&out, &source.base.path)?;
    }
    for note in runners::notes(to, &source)? {
        say!("note: {note}");
    }
    if !s.is_given("output") {
        say!("writing {} (--output names another place)", out.display());
    }
    let facts = match to {
        To::Merged => merged::write(&source, &out, dtype)?,
        To::Peft => peft::write(&source, &from, &out)?,
        To::GgufLora => lora::write(&source, &out, outtype)?,
        To::MergedGguf => gguf::write(&source, &out, outtype)?,
        To::Ollama => ollama::write(&source, &out, outtype)?,
    };
    say(inv, facts, &name, &out)
}

fn say(inv: &mut Invocation, mut facts: Value, name: &str, out: &Path) -> Result<(), Refusal> {
    if inv.json {
        facts["output"] = json!(out.display().to_string());
        return inv.say(&facts.to_string());
    }
    if let Some(text) = facts["compared"].as_str() {
        inv.say(text)?;
    }
    inv.say(&format!("{name}  {}", out.display()))
}

/// The row of `table` for the given option.
fn chosen<T: Copy>(
    s: &Settings,
    key: &str,
    default: &str,
    table: &[(&'static str, T)],
) -> Result<T, Refusal> {
    let asked = s.text(key)?.unwrap_or(default).to_lowercase();
    if let Some((_, row)) = table.iter().find(|(name, _)| *name == asked) {
        return Ok(*row);
    }
    let names = || table.iter().map(|(name, _)| *name);
    let all = names().collect::<Vec<_>>().join(", ");
    let hint = nearest(&asked, names()).map_or(String::new(), |n| format!("did you mean {n}? "));
    Err(s.refuse(key, format!("{asked:?}: {hint}expected one of {all}")))
}

/// Values of --save-dtype and --outtype, each refused where it has no effect.
fn encodings(s: &Settings, to: To) -> Result<(Option<Dtype>, Outtype), Refusal> {
    let dtype = chosen(s, "save-dtype", "base", &[("base", None), ("f32", Some(Dtype::F32))])?;
    if dtype.is_some() && to != To::Merged {
        return Err(s.refuse("save-dtype", "is for --to merged: a GGUF takes --outtype"));
    }
    no_mixture(s)?;
    let outtype = chosen(s, "outtype", "base", &OUTTYPES)?;
    if outtype != Outtype::Base && matches!(to, To::Merged | To::Peft) {
        return Err(s.refuse("outtype", "is for GGUF files: --to merged takes --save-dtype"));
    }
    Ok((dtype, outtype))
}

/// Refuses llama.cpp's other quantised types by what makes them: `q4_k_m` is a choice of types for each tensor.
fn no_mixture(s: &Settings) -> Result<(), Refusal> {
    let name = s.text("outtype")?.unwrap_or_default().to_lowercase();
    let digit = |start| {
        name.strip_prefix(start).is_some_and(|rest: &str| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    if name == "q8_0" || !name.contains('_') || !["q", "iq", "tq"].into_iter().any(digit) {
        return Ok(());
    }
    Err(s.refuse(
        "outtype",
        format!(
            "{name}: q8_0 is the only quantised type that is written from other weights; base keeps the types of a \
             GGUF base, and llama.cpp's llama-quantize makes {name} of a file with --outtype f16"
        ),
    ))
}

fn open(s: &Settings, from: &Path) -> Result<Exported, Refusal> {
    // Comparisons use f32: in bf16 a merged weight and its base round differently.
    let devices = DeviceOptions { dtype: ComputeDtype::F32, ..groups::devices(s)? };
    let mut base = base_model::open(&model_name(s, Some(from))?)?;
    let template = Some(from.join("chat_template.jinja")).filter(|p| p.exists());
    let tokenizer = base.tokenizer(template.map(|p| p.display().to_string()).as_deref())?;
    let loaded = adapter::load_to_merge(from, &base)?;
    if let Some(line) = adapter::trained_on_another(from, &base)? {
        say!("warning: {line}");
    }
    let recipe = recipe_of(s, Some(from))?;
    Ok(Exported { base, tokenizer, loaded, devices, recipe })
}
