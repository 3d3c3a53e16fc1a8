//! `--to merged`: base and adapter as one Hugging Face directory.

use super::{Exported, logits};
use crate::config::refusal::Refusal;
use crate::format::safetensors::{self, Spec};
use crate::format::{Checkpoint, FormatError, Joined, atomic, peft};
use crate::model::layout;
use crate::model::merge::Merged;
use crate::numeric::block::Encoding;
use crate::numeric::dtype::Dtype;
use crate::numeric::tensor::Tensors;
use crate::run::adapter::Loaded;
use crate::run::base_model::{self, BaseModel};
use crate::support::waiting::WRITING;
use serde_json::{Value, json};
use std::path::Path;

/// Maximum bytes of one weights file, the same as in transformers.
const SHARD: usize = 5_000_000_000;

/// Writes the folder and compares it with the merged model in memory.
pub fn write(from: &Exported, out: &Path, dtype: Option<Dtype>) -> Result<Value, Refusal> {
    let (base, loaded) = (&from.base, &from.loaded);
    let layout = layout::of(&loaded.config, &loaded.spec, 0..loaded.config.layers);
    let merged = |dtype| Merged {
        base: &*base.files.tensors,
        config: &loaded.config,
        lora: &loaded.spec,
        layout: &layout,
        flat: &loaded.flat,
        magnitudes: &loaded.magnitudes,
        dtype,
    };
    let text = merged(dtype);
    logits::fits(from, Some(&text))?;
    let all = base.files.whole.as_deref().map(|whole| Checkpoint { text: &text, whole });
    let apart: &dyn Tensors = all.as_ref().map_or(&text, |all| all);
    let joined = loaded.config.family.joined_experts.map(|how| Joined { apart, how });
    let source: &dyn Tensors = joined.as_ref().map_or(apart, |joined| joined);
    atomic::write_dir(out, |dir| {
        files(dir, base, loaded, source)?;
        same_bytes(dir, source)?;
        let again = base_model::open(&dir.display().to_string())?;
        logits::compare(from, &merged(Some(Dtype::F32)), &again, (out, "merged"))
    })
}

fn files(dir: &Path, base: &BaseModel, loaded: &Loaded, source: &dyn Tensors) -> Result<(), Refusal> {
    let mut specs = Vec::new();
    for name in source.names() {
        let Some(about) = source.about(&name).map_err(Refusal::failure)? else { continue };
        // Blocks are written as dequantized numbers.
        let dtype = match about.encoding {
            Encoding::Plain(dtype) => dtype,
            Encoding::Blocks(_) => Dtype::F32,
        };
        specs.push(Spec { name, dtype, shape: about.shape });
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
    WRITING.begin(2 * specs.len() as u64);
    safetensors::write_sharded(dir, &specs, SHARD, |i| {
        WRITING.add(1);
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

/// The base's config.json with the changes of the merge: the architecture, a classifier's labels, the dtype.
fn config(base: &BaseModel, loaded: &Loaded, specs: &[Spec]) -> Value {
    let mut config = base.files.config.clone();
    // Merged weights are plain numbers, even for a quantised base.
    config.as_object_mut().map(|c| c.shift_remove("quantization_config"));
    config["architectures"] = json!([loaded.config.architecture()]);
    if let Some(labels) = &loaded.config.labels {
        let by_id = labels.iter().enumerate().map(|(i, l)| (i.to_string(), json!(l)));
        let by_label = labels.iter().enumerate().map(|(i, l)| (l.clone(), json!(i)));
        config["id2label"] = by_id.collect::<serde_json::Map<_, _>>().into();
        config["label2id"] = by_label.collect::<serde_json::Map<_, _>>().into();
        if loaded.config.numbers {
            config["problem_type"] = json!(peft::REGRESSION);
        }
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

/// Checks that the files equal the merged tensors, byte for byte.
fn same_bytes(dir: &Path, source: &dyn Tensors) -> Result<(), Refusal> {
    let written = safetensors::Sharded::open(dir)?;
    for name in source.names() {
        WRITING.add(1);
        let one = source.tensor(&name).map_err(Refusal::failure)?.map(|t| t.bytes);
        let two = written.tensor(&name).map_err(Refusal::failure)?.map(|t| t.bytes);
        if one != two {
            return Err(Refusal::failure(format!("{}: tensor {name} reads back otherwise", dir.display())));
        }
    }
    Ok(())
}
