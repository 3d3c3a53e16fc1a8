//! `finetune export OUT --to peft|mlx|gguf-lora|merged|merged-gguf|ollama`, and `merge`. The output is written to a
//! temporary name and renamed, so that an existing output is complete; before the rename it is read back and compared,
//! so that an output with other logits never appears. Known refusals of a runner are reported before anything is
//! written. --overwrite replaces only an earlier export.

mod gguf;
mod go;
mod logits;
mod lora;
mod merged;
mod mlx;
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
use crate::format::gguf::mix::Mix;
use crate::model::quantised::Recipe;
use crate::numeric::block::{Block, Encoding};
use crate::numeric::dtype::Dtype;
use crate::run::adapter::{self, Loaded};
use crate::run::base_model::{self, BaseModel};
use crate::support::stderr::say;
use crate::support::waiting::{WRITING, during};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Form of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum To {
    Peft,
    Mlx,
    GgufLora,
    Merged,
    MergedGguf,
    Ollama,
}

const FORMS: [(&str, To); 6] = [
    ("peft", To::Peft),
    ("mlx", To::Mlx),
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
    /// llama.cpp's choice for each tensor.
    Mix(Mix),
}

const OUTTYPES: [(&str, Outtype); 8] = [
    ("base", Outtype::Base),
    ("f32", Outtype::All(Encoding::Plain(Dtype::F32))),
    ("f16", Outtype::All(Encoding::Plain(Dtype::F16))),
    ("bf16", Outtype::All(Encoding::Plain(Dtype::Bf16))),
    ("q8_0", Outtype::All(Encoding::Blocks(Block::Q8_0))),
    // As in llama-quantize.
    ("q3_k", Outtype::Mix(Mix::Q3_K_M)),
    ("q4_k", Outtype::Mix(Mix::Q4_K_M)),
    ("q5_k", Outtype::Mix(Mix::Q5_K_M)),
];

/// Types of llama-quantize that need an importance matrix.
const WEIGHED: [&str; 9] =
    ["iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "iq3_xxs", "iq3_xs", "q2_k_s"];
/// The other types of llama-quantize that are not written here.
const OTHERS: [&str; 9] =
    ["iq3_s", "iq3_m", "iq4_nl", "iq4_xs", "tq1_0", "tq2_0", "q1_0", "q2_0", "mxfp4_moe"];

/// An adapter and its base, opened and checked for compatibility.
struct Exported {
    base: BaseModel,
    tokenizer: Tokenizer,
    /// The base's chat template; that of `tokenizer` is the adapter's.
    base_template: Option<String>,
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
    for note in runners::notes(to, outtype, &source)? {
        say!("note: {note}");
    }
    if !s.is_given("output") {
        say!("writing {} (--output names another place)", out.display());
    }
    let facts = during("writing and comparing", &WRITING, || match to {
        To::Merged => merged::write(&source, &out, dtype),
        To::Peft => peft::write(&source, &from, &out),
        To::Mlx => mlx::write(&source, &from, &out),
        To::GgufLora => lora::write(&source, &out, outtype),
        To::MergedGguf => gguf::write(&source, &out, outtype),
        To::Ollama => ollama::write(&source, &out, outtype),
    })?;
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
    refuse_unwritten(s)?;
    let mixes = Mix::ALL.iter().map(|mix| (mix.name(), Outtype::Mix(*mix)));
    let outtypes: Vec<_> = OUTTYPES.into_iter().chain(mixes).collect();
    let outtype = chosen(s, "outtype", "base", &outtypes)?;
    if let (To::GgufLora, Outtype::Mix(mix)) = (to, outtype) {
        let name = mix.name();
        let why =
            format!("{name} is a mix for the tensors of a model: an adapter takes f32, f16, bf16 or q8_0");
        return Err(s.refuse("outtype", why));
    }
    if outtype != Outtype::Base && matches!(to, To::Merged | To::Peft | To::Mlx) {
        return Err(s.refuse("outtype", "is for GGUF files: --to merged takes --save-dtype"));
    }
    Ok((dtype, outtype))
}

/// Refuses by name what only llama-quantize makes.
fn refuse_unwritten(s: &Settings) -> Result<(), Refusal> {
    let name = s.text("outtype")?.unwrap_or_default().to_lowercase();
    let (why, way) = match name.as_str() {
        n if WEIGHED.contains(&n) => ("needs an importance matrix, which is not computed here", " --imatrix"),
        n if OTHERS.contains(&n) => ("is not written here", ""),
        _ => return Ok(()),
    };
    let text = format!("{name} {why}: llama.cpp's llama-quantize{way} makes it of a file with --outtype f16");
    Err(s.refuse("outtype", text))
}

fn open(s: &Settings, from: &Path) -> Result<Exported, Refusal> {
    // Comparisons use f32: in bf16 a merged weight and its base round differently.
    let devices = DeviceOptions { dtype: ComputeDtype::F32, ..groups::devices(s)? };
    let mut base = base_model::open(&model_name(s, Some(from))?)?;
    base.add_tokens_of(Some(from))?;
    let template = Some(from.join("chat_template.jinja")).filter(|p| p.exists());
    let base_template = base.files.tokenizer.chat_template.clone();
    let tokenizer = base.tokenizer(template.map(|p| p.display().to_string()).as_deref())?;
    let loaded = adapter::load_to_merge(from, &base)?;
    if let Some(line) = adapter::trained_on_another(from, &base)? {
        say!("warning: {line}");
    }
    let recipe = recipe_of(s, Some(from))?;
    Ok(Exported { base, tokenizer, base_template, loaded, devices, recipe })
}
