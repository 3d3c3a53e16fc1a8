//! `finetune export OUT --to merged|peft`, and `merge`. Written beside the final name and renamed, so that a
//! folder that is there is whole; read back before the command says done.

use super::adapter::{self, Loaded, Writer};
use super::devices::{self, Need};
use super::generate::model_name;
use super::opened::{self, Opened};
use super::options::groups::{self, DeviceOptions};
use super::refusal::Refusal;
use super::verb::Invocation;
use crate::format::safetensors::{self, Spec};
use crate::format::{FormatError, atomic};
use crate::model::config::Config;
use crate::model::layout;
use crate::model::lora::LoraSpec;
use crate::model::merge::Merged;
use crate::model::stage::{Microbatch, Output, Targets, Want};
use crate::numeric::dtype::Dtype;
use crate::numeric::tensor::Tensors;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Bytes of one file of weights, as transformers splits them.
const SHARD: usize = 5_000_000_000;
/// Tokens of the forward pass that compares.
const PROBE: u32 = 32;

/// Exports.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let s = &inv.settings;
    let Some(from) = inv.positional.first().map(PathBuf::from) else {
        return Err(Refusal::usage("nothing to export: give the folder OUT of a run, or of an adapter"));
    };
    let to = s.text("to")?.unwrap_or("merged").to_string();
    let dtype = match s.text("save-dtype")?.unwrap_or("base") {
        "base" => None,
        "f32" => Some(Dtype::F32),
        other => return Err(s.refuse("save-dtype", format!("{other:?}: there are base and f32"))),
    };
    if !["merged", "peft"].contains(&to.as_str()) {
        return Err(s.refuse("to", format!("{to:?}: there are merged and peft")));
    }
    let out = match s.text("output")? {
        Some(dir) => PathBuf::from(dir),
        None => PathBuf::from(format!("{}-{to}", from.display().to_string().trim_end_matches('/'))),
    };
    free(&out, s.switch("overwrite")?.then_some(()))?;
    let devices = groups::devices(s)?;
    let mut base = opened::open(&model_name(s, Some(&from))?)?;
    let template = Some(from.join("chat_template.jinja")).filter(|p| p.exists());
    base.tokenizer(template.map(|p| p.display().to_string()).as_deref())?;
    let loaded = adapter::load(&from, &base)?;
    let facts = match to.as_str() {
        "merged" => merged(&base, &loaded, (&out, dtype), &devices)?,
        _ => {
            let writer = Writer::new(&base, &loaded.config, &loaded.spec, None);
            atomic::write_dir(&out, |dir| writer.write(dir, &loaded.flat))?;
            json!({ "kind": "peft" })
        }
    };
    if inv.json {
        let mut line = facts;
        line["output"] = json!(out.display().to_string());
        return inv.say(&line.to_string());
    }
    if let Some(text) = facts["compared"].as_str() {
        inv.say(text)?;
    }
    inv.say(&format!("{to}  {}", out.display()))
}

/// Refuses a folder that holds something, unless that was allowed.
fn free(out: &Path, overwrite: Option<()>) -> Result<(), Refusal> {
    let held = std::fs::read_dir(out).is_ok_and(|mut d| d.next().is_some()) || out.is_file();
    match held && overwrite.is_none() {
        true => Err(Refusal::configuration(format!(
            "{}: is not empty: choose another --output, or replace it with --overwrite",
            out.display()
        ))),
        false => Ok(()),
    }
}

fn merged(
    base: &Opened,
    loaded: &Loaded,
    (out, dtype): (&Path, Option<Dtype>),
    devices: &DeviceOptions,
) -> Result<Value, Refusal> {
    let layout = layout::of(&loaded.config, &loaded.spec, 0..loaded.config.layers);
    let tensors = &*base.files.tensors;
    let source = Merged {
        base: tensors,
        config: &loaded.config,
        lora: &loaded.spec,
        layout: &layout,
        flat: &loaded.flat,
        dtype,
    };
    atomic::write_dir(out, |dir| -> Result<(), Refusal> {
        write(dir, base, loaded, &source)?;
        same_bytes(dir, &source)
    })?;
    let probe = probe(&loaded.config);
    let adapted = logits(devices, (&loaded.config, tensors, &loaded.spec), Some(&loaded.flat), &probe)?;
    let again = opened::open(&out.display().to_string())?;
    let none = LoraSpec::none();
    // A merged classifier carries its head as a base of its own does.
    let head = match &again.config.labels {
        Some(_) => {
            let layout = layout::of(&again.config, &none, 0..again.config.layers);
            Some(crate::model::decoder::initial_parameters(&layout, &none, &*again.files.tensors)?)
        }
        None => None,
    };
    let read = logits(devices, (&again.config, &*again.files.tensors, &none), head.as_deref(), &probe)?;
    let largest = |x: &[f32]| x.iter().fold(0f32, |m, v| m.max(v.abs()));
    let apart: Vec<f32> = adapted.iter().zip(&read).map(|(a, b)| a - b).collect();
    let (apart, scale) = (largest(&apart), largest(&adapted));
    let bound = if exact(&again, dtype) { 1e-4 * scale.max(1.0) } else { 0.1 * scale.max(1.0) };
    if adapted.len() != read.len() || apart.is_nan() || apart > bound {
        return Err(Refusal::failure(format!(
            "{}: its logits are {apart:e} away from those of base and adapter (bound {bound:e}); do not use it, and report this",
            out.display()
        )));
    }
    let text = format!("read back: logits within {apart:.1e} of base + adapter (largest {scale:.1})");
    Ok(
        json!({ "kind": "merged", "weights": again.files.kind, "largest_difference": apart, "compared": text }),
    )
}

/// True where nothing was rounded on the way into the file.
fn exact(again: &Opened, dtype: Option<Dtype>) -> bool {
    dtype == Some(Dtype::F32) || again.files.kind.starts_with("f32")
}

fn write(dir: &Path, base: &Opened, loaded: &Loaded, source: &Merged) -> Result<(), Refusal> {
    let mut specs = Vec::new();
    for name in source.names() {
        let tensor = source.tensor(&name).map_err(Refusal::failure)?;
        if let Some(t) = tensor {
            specs.push(Spec { name, dtype: t.dtype, shape: t.shape });
        }
    }
    let file = |name: &str| dir.join(name);
    let config = config(base, loaded, &specs);
    atomic::write_file(&file("config.json"), format!("{config:#}\n").as_bytes())?;
    if let Some(generation) = &base.files.generation {
        atomic::write_file(&file("generation_config.json"), format!("{generation:#}\n").as_bytes())?;
    }
    for (name, bytes) in base.tokenizer_files() {
        atomic::write_file(&file(&name), &bytes)?;
    }
    safetensors::write_sharded(dir, &specs, SHARD, |i| {
        let spec = &specs[i];
        let fault = |what: String| FormatError::Tensor {
            path: dir.join("model.safetensors"),
            tensor: spec.name.clone(),
            what,
        };
        let tensor = source.tensor(&spec.name).map_err(fault)?;
        tensor.map(|t| t.bytes).ok_or_else(|| fault("is not in the base any more".into()))
    })?;
    Ok(())
}

/// The base's config.json, with what merging changed: the architecture, a classifier's labels, the dtype.
fn config(base: &Opened, loaded: &Loaded, specs: &[Spec]) -> Value {
    let mut config = base.files.config.clone();
    config["architectures"] = json!([loaded.config.architecture()]);
    if let Some(labels) = &loaded.config.labels {
        let by_id = labels.iter().enumerate().map(|(i, l)| (i.to_string(), json!(l)));
        let by_label = labels.iter().enumerate().map(|(i, l)| (l.clone(), json!(i)));
        config["id2label"] = by_id.collect::<serde_json::Map<_, _>>().into();
        config["label2id"] = by_label.collect::<serde_json::Map<_, _>>().into();
    }
    let key = if config.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
    let largest = specs.iter().max_by_key(|s| s.bytes()).map(|s| s.dtype);
    config[key] = json!(match largest {
        Some(Dtype::Bf16) => "bfloat16",
        Some(Dtype::F16) => "float16",
        Some(Dtype::F32) | None => "float32",
    });
    config
}

/// What lies in the files is what was merged, byte for byte.
fn same_bytes(dir: &Path, source: &Merged) -> Result<(), Refusal> {
    let written = safetensors::Sharded::open(dir)?;
    for name in source.names() {
        let one = source.tensor(&name).map_err(Refusal::failure)?.map(|t| t.bytes);
        let two = written.tensor(&name).map_err(Refusal::failure)?.map(|t| t.bytes);
        if one != two {
            return Err(Refusal::failure(format!("{}: tensor {name} reads back otherwise", dir.display())));
        }
    }
    Ok(())
}

fn probe(config: &Config) -> Microbatch {
    let ids: Vec<u32> = (0..PROBE).map(|i| (i * 7919 + 11) % config.vocab as u32).collect();
    let targets = match config.labels {
        Some(_) => Targets::Labels(vec![0]),
        None => Targets::Tokens(vec![crate::model::stage::IGNORE; ids.len()]),
    };
    Microbatch { step: 0, rows: vec![0], bounds: vec![0, PROBE], ids, targets }
}

fn logits(
    devices: &DeviceOptions,
    weights: (&Config, &dyn Tensors, &LoraSpec),
    flat: Option<&[f32]>,
    probe: &Microbatch,
) -> Result<Vec<f32>, Refusal> {
    let mut model = devices::open(devices, weights, None, Need { tokens: 0 })?;
    if let Some(flat) = flat {
        model.set_parameters(flat)?;
    }
    match model.forward(probe, None, Want::Logits)? {
        Output::Logits(logits) => Ok(logits),
        _ => Err(Refusal::failure("the model gave no logits")),
    }
}
