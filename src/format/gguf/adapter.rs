//! LoRA adapters as GGUF, in the format of llama.cpp's `convert_lora_to_gguf.py`: A and B under the tensor names of the
//! base; rows of B, and columns of A, are in the order of the matrix in the file. A matrix that is several tensors in the file has
//! an adapter for each: the same A, and a part of B. The scale is always alpha / rank, and alpha 0 is
//! read as a scale of 1. Therefore a writer must include any other scale in alpha and must not write 0.

use super::encode::{F16, decode, encode};
use super::order::Orders;
use super::reader::Gguf;
use super::value::Value;
use super::weights::hugging_face_name;
use super::write::{Meta, Metadata, Planned, write};
use super::write_config::stored_names;
use crate::families::Family;
use crate::format::error::FormatError;
use crate::numeric::block::Encoding;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;

const PEFT: &str = "base_model.model.";

/// Metadata of an adapter file.
#[derive(Debug, Clone)]
pub struct About {
    /// Family of the base: gives the architecture and the names.
    pub family: &'static Family,
    /// The orders of the base's tensors.
    pub orders: Orders,
    /// Name of the adapter.
    pub name: String,
    /// Hub id of the base.
    pub base_id: Option<String>,
    /// Scale times rank.
    pub alpha: f32,
}

/// One tensor with its PEFT name.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraMatrix {
    /// Name: `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.
    pub name: String,
    /// R for A, number of outputs for B.
    pub rows: usize,
    /// Number of inputs for A, R for B.
    pub cols: usize,
    /// The rows * cols values.
    pub values: Vec<f32>,
}

/// The contents of a GGUF adapter.
#[derive(Debug)]
pub struct Adapter {
    /// Architecture of the base.
    pub architecture: String,
    /// Scale times rank.
    pub alpha: f32,
    /// Tensors, sorted by name.
    pub parts: Vec<LoraMatrix>,
}

/// The encoding of a tensor: F16 if its rows are not whole blocks, as in llama.cpp's converter.
pub fn kind_of(kind: Encoding, cols: usize) -> Encoding {
    if cols.is_multiple_of(kind.elements()) { kind } else { F16 }
}

/// The GGUF names of a PEFT tensor: `blk.0.attn_q.weight.lora_a`.
fn adapter_names(peft: &str, of_layer: &[(&str, &str)]) -> Option<Vec<String>> {
    let inner = peft.strip_prefix(PEFT)?;
    let (stem, suffix) = match inner.strip_suffix(".lora_A.weight") {
        Some(stem) => (stem, "lora_a"),
        None => (inner.strip_suffix(".lora_B.weight")?, "lora_b"),
    };
    let stored = stored_names(&format!("{stem}.weight"), of_layer)?;
    Some(stored.into_iter().map(|name| format!("{name}.{suffix}")).collect())
}

fn peft_name(stored: &str, of_layer: &[(&str, &str)]) -> Option<String> {
    let (base, letter) = match stored.strip_suffix(".lora_a") {
        Some(base) => (base, "A"),
        None => (stored.strip_suffix(".lora_b")?, "B"),
    };
    let name = hugging_face_name(base, of_layer)?;
    Some(format!("{PEFT}{}.lora_{letter}.weight", name.strip_suffix(".weight")?))
}

/// Writes an adapter to `path`.
pub fn save(path: &Path, about: &About, parts: &[LoraMatrix], kind: Encoding) -> Result<(), FormatError> {
    let mut all = Metadata::default();
    let text = |s: &str| Meta::Text(s.to_owned());
    all.set("general.architecture", text(about.family.gguf.architecture));
    all.set("general.type", text("adapter"));
    all.set("adapter.type", text("lora"));
    all.set("general.name", text(&about.name));
    if let Some(id) = &about.base_id {
        all.set("general.base_model.count", Meta::U32(1));
        all.set("general.base_model.0.name", text(id.rsplit('/').next().unwrap_or(id)));
        all.set("general.base_model.0.repo_url", text(&format!("https://huggingface.co/{id}")));
    }
    all.set("adapter.lora.alpha", Meta::F32(about.alpha));
    all.set("general.quantization_version", Meta::U32(2));
    let of_layer = about.family.layer_tensors();
    let (mut planned, mut values) = (Vec::with_capacity(parts.len()), Vec::with_capacity(parts.len()));
    for part in parts {
        let names = adapter_names(&part.name, &of_layer).ok_or_else(|| {
            FormatError::tensor(path, &part.name, "has no name in llama.cpp, so it cannot be exported")
        })?;
        let rows = if is_a(&part.name) { part.rows } else { part.rows / names.len() };
        for (i, name) in names.into_iter().enumerate() {
            let first = if is_a(&part.name) { 0 } else { i * rows };
            planned.push(Planned { name, shape: vec![rows, part.cols], kind: kind_of(kind, part.cols) });
            values.push((&part.name, &part.values[first * part.cols..(first + rows) * part.cols], rows));
        }
    }
    let mut rest = values.into_iter();
    write(path, &all, &planned, |plan| {
        let next = rest.next();
        let (name, values, rows) =
            next.ok_or_else(|| FormatError::tensor(path, &plan.name, "has no values"))?;
        let encoded = encode(plan.kind, &about.orders.of_adapter(name).stored(values, rows));
        encoded.map_err(|what| FormatError::tensor(path, &plan.name, what))
    })
}

fn is_a(name: &str) -> bool {
    name.ends_with(".lora_A.weight")
}

/// Reads an adapter; `family` and `orders` as in [`About`].
pub fn load(path: &Path, family: &Family, orders: Orders) -> Result<Adapter, FormatError> {
    let file = Gguf::open(path)?;
    let text = |key: &str| file.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    if text("general.type") != "adapter" || text("adapter.type") != "lora" {
        let way = "give a file that llama.cpp's converter or `finetune export --to gguf-lora` made";
        return Err(FormatError::unsupported(path, "not a LoRA adapter", way));
    }
    let alpha = file.get("adapter.lora.alpha").and_then(Value::as_f64);
    let alpha = alpha.ok_or_else(|| FormatError::malformed(path, "adapter.lora.alpha is missing"))? as f32;
    let (mut parts, of_layer) = (BTreeMap::new(), family.layer_tensors());
    for (stored, info) in file.tensors() {
        let name = peft_name(stored, &of_layer)
            .ok_or_else(|| FormatError::tensor(path, stored, "is not one of a LoRA of a plain decoder"))?;
        let [rows, cols] = info.shape[..] else {
            return Err(FormatError::tensor(path, stored, format!("has shape {:?}", info.shape)));
        };
        let values = decode(info.kind, file.bytes(info));
        let order = orders.of_adapter(&name);
        if let Some(what) = order.refuses(&info.shape) {
            return Err(FormatError::tensor(path, stored, what));
        }
        let values = order.restored(&values, rows);
        let part = LoraMatrix { name: name.clone(), rows, cols, values };
        match parts.entry(name) {
            Entry::Vacant(place) => drop(place.insert(part)),
            Entry::Occupied(whole) if is_a(whole.key()) && *whole.get() == part => {}
            Entry::Occupied(mut whole) if !is_a(whole.key()) && whole.get().cols == cols => {
                whole.get_mut().rows += rows;
                whole.get_mut().values.extend(part.values);
            }
            Entry::Occupied(_) => {
                let what = "differs from the same adapter's other part";
                return Err(FormatError::tensor(path, stored, what));
            }
        }
    }
    Ok(Adapter { architecture: text("general.architecture"), alpha, parts: parts.into_values().collect() })
}
