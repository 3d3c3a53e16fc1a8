//! `finetune export OUT --to merged|peft`, and `merge`. Written beside the final name and renamed, so that a
//! folder that is there is whole; read back and compared before the rename, so that one that gives other
//! logits is never there. --overwrite replaces an earlier export and nothing else.

use super::adapter::{self, Loaded, Writer};
use super::devices::{self, Need};
use super::generate::model_name;
use super::opened::{self, Opened};
use super::options::groups::{self, DeviceOptions, Precision};
use super::refusal::{Refusal, at};
use super::verb::Invocation;
use crate::format::safetensors::{self, Spec};
use crate::format::{FormatError, atomic, peft};
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
    // What is compared is compared in f32: in bf16 a merged weight and its base round apart.
    let devices = DeviceOptions { dtype: Precision::F32, ..groups::devices(s)? };
    let mut base = opened::open(&model_name(s, Some(&from))?)?;
    replaceable(&out, &[(&from, "is the exported"), (&base.path, "is the base's")])?;
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

/// The names that an export gives its files, besides shards.
const WRITTEN: [&str; 12] = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    peft::CONFIG,
    peft::WEIGHTS,
    peft::LABELS,
    "README.md",
];

/// Refuses to replace what the export is made from, what holds it, and whatever no export wrote: the folder
/// goes as a whole, with everything in it.
fn replaceable(out: &Path, sources: &[(&Path, &str)]) -> Result<(), Refusal> {
    let Ok(place) = out.canonicalize() else { return Ok(()) };
    let refuse = |why: String| {
        Err(Refusal::configuration(format!("{}: {why}: choose another --output", out.display())))
    };
    for (source, what) in sources {
        let source = source.canonicalize().map_err(at(source))?;
        if source == place {
            return refuse(format!("{what} folder itself, which --overwrite does not replace"));
        }
        if source.starts_with(&place) {
            return refuse(format!("holds {}, which {what} folder", source.display()));
        }
    }
    if !place.is_dir() {
        return refuse("is no folder".into());
    }
    let mut exports = 0;
    for entry in std::fs::read_dir(&place).map_err(at(out))? {
        let entry = entry.map_err(at(out))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let shard = name.starts_with("model-") && name.ends_with(".safetensors");
        if !(shard || WRITTEN.contains(&name.as_str())) || entry.path().is_dir() {
            return refuse(format!(
                "holds {name}, which no export wrote, so --overwrite does not replace it"
            ));
        }
        exports += usize::from(["config.json", peft::CONFIG].contains(&name.as_str()));
    }
    let empty = std::fs::read_dir(&place).map_err(at(out))?.next().is_none();
    if exports == 0 && !empty {
        return refuse("holds no export, so --overwrite does not replace it".into());
    }
    Ok(())
}

fn merged(
    base: &Opened,
    loaded: &Loaded,
    (out, dtype): (&Path, Option<Dtype>),
    devices: &DeviceOptions,
) -> Result<Value, Refusal> {
    let layout = layout::of(&loaded.config, &loaded.spec, 0..loaded.config.layers);
    let merged = |dtype| Merged {
        base: &*base.files.tensors,
        config: &loaded.config,
        lora: &loaded.spec,
        layout: &layout,
        flat: &loaded.flat,
        dtype,
    };
    let source = merged(dtype);
    atomic::write_dir(out, |dir| {
        write(dir, base, loaded, &source)?;
        same_bytes(dir, &source)?;
        let again = opened::open(&dir.display().to_string())?;
        let probe = probe(&loaded.config);
        let weights = (&loaded.config, &*base.files.tensors, &loaded.spec);
        let compared = Compared {
            adapted: logits(devices, weights, Some(&loaded.flat), &probe)?,
            unrounded: plain_logits(devices, (&loaded.config, &merged(Some(Dtype::F32))), &probe)?,
            source: plain_logits(devices, (&loaded.config, &source), &probe)?,
            read: plain_logits(devices, (&again.config, &*again.files.tensors), &probe)?,
        };
        let text = compared
            .verdict()
            .map_err(|why| Refusal::failure(format!("{}: not written: {why}; report this", out.display())))?;
        let moved = apart(&compared.adapted, &compared.read);
        let kind = &again.files.kind;
        Ok(json!({ "kind": "merged", "weights": kind, "largest_difference": moved, "compared": text }))
    })
}

/// The probe's logits by four ways.
struct Compared {
    /// Base and adapter side by side.
    adapted: Vec<f32>,
    /// The merged weights in f32.
    unrounded: Vec<f32>,
    /// The merged weights as rounded to what is written, in memory.
    source: Vec<f32>,
    /// The files.
    read: Vec<f32>,
}

impl Compared {
    /// How far rounding the weights to bf16 or f16 moves logits has no useful bound: it depends on the model.
    /// So it is left out of what is bounded: merging is compared in f32, the files with the rounded weights.
    fn verdict(&self) -> Result<String, String> {
        let scale = self.adapted.iter().fold(0f32, |m, v| m.max(v.abs()));
        let bound = 1e-4 * scale.max(1.0);
        for (what, one, two) in [
            ("merged in f32 give logits", &self.adapted, &self.unrounded),
            ("as read back give logits", &self.source, &self.read),
        ] {
            let apart = apart(one, two);
            // NaN is never within
            if one.len() != two.len() || apart.is_nan() || apart > bound {
                return Err(format!("the weights {what} that are {apart:e} off (bound {bound:e})"));
            }
        }
        let rounding = match apart(&self.unrounded, &self.source) {
            0.0 => String::new(),
            moved => format!("; rounding the weights moved them by {moved:.1e}"),
        };
        let apart = apart(&self.adapted, &self.unrounded);
        Ok(format!("read back: logits within {apart:.1e} of base + adapter (largest {scale:.1}){rounding}"))
    }
}

/// The largest difference; NaN where any is.
fn apart(one: &[f32], two: &[f32]) -> f32 {
    let larger = |m: f32, d: f32| if m.is_nan() || d.is_nan() { f32::NAN } else { m.max(d) };
    one.iter().zip(two).fold(0.0, |m, (a, b)| larger(m, (a - b).abs()))
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

/// Of weights without an adapter. A merged classifier carries its head as a base of its own does.
fn plain_logits(
    devices: &DeviceOptions,
    (config, tensors): (&Config, &dyn Tensors),
    probe: &Microbatch,
) -> Result<Vec<f32>, Refusal> {
    let none = LoraSpec::none();
    let head = match &config.labels {
        Some(_) => {
            let layout = layout::of(config, &none, 0..config.layers);
            Some(crate::model::decoder::initial_parameters(&layout, &none, tensors)?)
        }
        None => None,
    };
    logits(devices, (config, tensors, &none), head.as_deref(), probe)
}

fn logits(
    devices: &DeviceOptions,
    weights: (&Config, &dyn Tensors, &LoraSpec),
    flat: Option<&[f32]>,
    probe: &Microbatch,
) -> Result<Vec<f32>, Refusal> {
    let mut model = devices::open(&devices::choose(devices)?, weights, None, Need { tokens: 0 })?;
    if let Some(flat) = flat {
        model.set_parameters(flat)?;
    }
    match model.forward(probe, None, Want::Logits)? {
        Output::Logits(logits) => Ok(logits),
        _ => Err(Refusal::failure("the model gave no logits")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each of the four ways, off by what is no rounding, and not a number.
    #[test]
    fn a_merge_that_is_off_is_told() {
        let good = || Compared {
            adapted: vec![20.0, -3.0],
            unrounded: vec![20.001, -3.0],
            source: vec![20.3, -3.1],
            read: vec![20.3, -3.1],
        };
        let said = good().verdict().unwrap();
        assert!(said.contains("within 1.0e-3") && said.contains("moved them by 3.0e-1"), "{said}");
        for bad in [20.01, f32::NAN, f32::INFINITY] {
            let mut c = good();
            c.unrounded[0] = bad;
            assert!(c.verdict().unwrap_err().contains("merged in f32"));
            let mut c = good();
            c.read[1] = bad;
            assert!(c.verdict().unwrap_err().contains("as read back"));
        }
        assert!(Compared { read: vec![20.3], ..good() }.verdict().is_err());
        assert!(
            Compared { adapted: vec![f32::NAN; 2], unrounded: vec![f32::NAN; 2], ..good() }
                .verdict()
                .is_err()
        );
    }
}
