//! `--to gguf-lora`: the adapter alone, in the form that llama.cpp loads with a GGUF of the base.

use super::gguf::shape;
use super::logits::{apart, bound, fits, logits, probe};
use super::{Exported, Outtype};
use crate::config::refusal::Refusal;
use crate::format::atomic;
use crate::format::gguf::adapter::{self, About, LoraMatrix};
use crate::format::gguf::{F32, decode, encode};
use crate::model::config::Config;
use crate::model::layout::{self, Layout};
use crate::model::lora::{self, Exception, LoraSpec, Named};
use crate::numeric::block::Encoding;
use crate::run::adapter::Loaded;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::path::Path;

/// Writes the file and compares it with the adapter in memory.
pub fn write(source: &Exported, out: &Path, outtype: Outtype) -> Result<Value, Refusal> {
    let (base, loaded) = (&source.base, &source.loaded);
    // A mix is refused before.
    let kind = if let Outtype::All(kind) = outtype { kind } else { F32 };
    let shape = shape(base)?;
    fits(source, None)?;
    // llama.cpp's files hold the text model only.
    let text = Config { wrapper: None, ..loaded.config.clone() };
    let layout = layout::of(&text, &loaded.spec, 0..text.layers);
    let about = About {
        family: shape.family,
        orders: shape.orders(),
        name: out.file_stem().map_or_else(|| "lora".into(), |s| s.to_string_lossy().into_owned()),
        base_id: base.files.base_id.clone(),
        // llama.cpp divides by the rank of each adapter; it does not support rsLoRA's rule.
        alpha: loaded.spec.scale() * loaded.spec.rank as f32,
    };
    // All adapters of a file have one alpha, so another one is in B.
    let flat = in_b(&text, &layout, loaded, about.alpha);
    let parts = parts(&layout, &flat);
    atomic::write_checked(out, |path| {
        adapter::save(path, &about, &parts, kind)?;
        let again = adapter::load(path, about.family, about.orders)?;
        let spec = with_alpha(&loaded.spec, again.alpha);
        let named: Vec<Named> = again.parts.iter().map(named).collect();
        let read = lora::from_adapter(&layout, &named)?;
        let probe = probe(&loaded.config);
        let by = |spec: &LoraSpec, flat: &[f32]| {
            let weights = (&loaded.config, &*base.files.tensors, spec);
            logits(&source.devices, weights, Some(flat), &probe)
        };
        let memory = by(&loaded.spec, &loaded.flat)?;
        let stored = by(&spec, &rounded(&layout, &flat, kind).map_err(Refusal::failure)?)?;
        let read = by(&spec, &read)?;
        let bound = bound(&memory);
        let unrounded = if loaded.spec.is_uniform() { memory.clone() } else { by(&spec, &flat)? };
        for (what, off) in [
            ("the file gives", apart(&stored, &read)),
            ("one alpha for all gives", apart(&memory, &unrounded)),
        ] {
            if off.is_nan() || off > bound {
                let why = format!("{what} logits that are {off:e} off (bound {bound:e})");
                return Err(Refusal::failure(format!("{}: not written: {why}; report this", out.display())));
            }
        }
        let moved = apart(&memory, &read);
        let compared = format!("read back: logits within {moved:.1e} of base + adapter");
        Ok(json!({
            "kind": "gguf-lora", "weights": kind.name(), "alpha": again.alpha,
            "compared": compared, "largest_difference": moved,
        }))
    })
}

/// The values for a file in which every adapter has this alpha, divided by its rank.
fn in_b<'a>(config: &Config, layout: &Layout, loaded: &'a Loaded, alpha: f32) -> Cow<'a, [f32]> {
    let (spec, mut flat) = (&loaded.spec, Cow::from(&loaded.flat));
    for Exception { layer, module, adapter } in &spec.exceptions {
        let Some(numbers) = adapter else { continue };
        let factor = spec.scale_of(*numbers) * numbers.rank as f32 / alpha;
        let Some(matrix) = config.matrix(*layer, module) else { continue };
        let name = format!("{}.lora_B.weight", layout::peft_path(config, *layer, &matrix));
        if let Some(entry) = layout.find(&name).filter(|_| factor != 1.0) {
            flat.to_mut()[entry.range()].iter_mut().for_each(|b| *b *= factor);
        }
    }
    flat
}

/// The adapters as llama.cpp reads them.
fn with_alpha(spec: &LoraSpec, alpha: f32) -> LoraSpec {
    let mut spec = LoraSpec { alpha, rslora: false, ..spec.clone() };
    spec.exceptions.iter_mut().filter_map(|e| e.adapter.as_mut()).for_each(|numbers| numbers.alpha = alpha);
    spec
}

fn named(part: &LoraMatrix) -> Named<'_> {
    Named { name: &part.name, rows: part.rows, cols: part.cols, values: &part.values }
}

fn parts(layout: &Layout, flat: &[f32]) -> Vec<LoraMatrix> {
    let part = |e: &layout::Entry| LoraMatrix {
        name: e.name.clone(),
        rows: e.rows,
        cols: e.cols,
        values: flat[e.range()].to_vec(),
    };
    layout.entries().iter().map(part).collect()
}

/// The values rounded to the file's encoding.
fn rounded(layout: &Layout, flat: &[f32], kind: Encoding) -> Result<Vec<f32>, String> {
    let mut out = flat.to_vec();
    for entry in layout.entries() {
        let kind = adapter::kind_of(kind, entry.cols);
        let packed = encode(kind, &flat[entry.range()])?;
        out[entry.range()].copy_from_slice(&decode(kind, &packed));
    }
    Ok(out)
}
