//! LoRA adapters as GGUF, in the format of llama.cpp's `convert_lora_to_gguf.py`: A and B under the tensor names of the
//! base; rows of B, and columns of A, are in the order of the matrix in the file. The scale is always alpha / rank, and alpha 0 is
//! read as a scale of 1. Therefore a writer must include any other scale in alpha and must not write 0.

use super::encode::{F16, decode, encode};
use super::order::Orders;
use super::reader::Gguf;
use super::value::Value;
use super::weights::hugging_face_name;
use super::write::{Meta, Metadata, Planned, write};
use super::write_config::stored_name;
use crate::families::{LLAMA, Layers, of_gguf};
use crate::format::error::FormatError;
use crate::numeric::block::Encoding;
use std::path::Path;

const PEFT: &str = "base_model.model.";

/// Metadata of an adapter file.
#[derive(Debug, Clone)]
pub struct About {
    /// Architecture of the base: `llama`, `qwen2`, `qwen3`.
    pub architecture: String,
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

/// The matrices of a layer as (GGUF, Hugging Face). Families of one architecture have the same ones.
fn matrices(architecture: &str) -> Vec<(&'static str, &'static str)> {
    let family = of_gguf(architecture, Layers::SeeAll).unwrap_or(&LLAMA);
    family.all_matrices().map(|matrix| matrix.names).collect()
}

/// The GGUF name of a PEFT tensor: `blk.0.attn_q.weight.lora_a`.
fn adapter_name(peft: &str, matrices: &[(&str, &str)]) -> Option<String> {
    let inner = peft.strip_prefix(PEFT)?;
    let (stem, suffix) = match inner.strip_suffix(".lora_A.weight") {
        Some(stem) => (stem, "lora_a"),
        None => (inner.strip_suffix(".lora_B.weight")?, "lora_b"),
    };
    Some(format!("{}.{suffix}", stored_name(&format!("{stem}.weight"), matrices)?))
}

fn peft_name(stored: &str, matrices: &[(&str, &str)]) -> Option<String> {
    let (base, letter) = match stored.strip_suffix(".lora_a") {
        Some(base) => (base, "A"),
        None => (stored.strip_suffix(".lora_b")?, "B"),
    };
    let name = hugging_face_name(base, matrices)?;
    Some(format!("{PEFT}{}.lora_{letter}.weight", name.strip_suffix(".weight")?))
}

/// Writes an adapter to `path`.
pub fn save(path: &Path, about: &About, parts: &[LoraMatrix], kind: Encoding) -> Result<(), FormatError> {
    let mut all = Metadata::default();
    let text = |s: &str| Meta::Text(s.to_owned());
    all.set("general.architecture", text(&about.architecture));
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
    let matrices = matrices(&about.architecture);
    let mut planned = Vec::with_capacity(parts.len());
    for part in parts {
        let name = adapter_name(&part.name, &matrices).ok_or_else(|| {
            FormatError::tensor(path, &part.name, "has no name in llama.cpp, so it cannot be exported")
        })?;
        planned.push(Planned { name, shape: vec![part.rows, part.cols], kind: kind_of(kind, part.cols) });
    }
    let mut next = parts.iter();
    write(path, &all, &planned, |plan| {
        let part = next.next().ok_or_else(|| FormatError::tensor(path, &plan.name, "has no values"))?;
        let order = about.orders.of_adapter(&part.name);
        let encoded = encode(plan.kind, &order.stored(&part.values, part.rows));
        encoded.map_err(|what| FormatError::tensor(path, &plan.name, what))
    })
}

/// Reads an adapter; `orders` as in [`About`].
pub fn load(path: &Path, orders: Orders) -> Result<Adapter, FormatError> {
    let file = Gguf::open(path)?;
    let text = |key: &str| file.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    if text("general.type") != "adapter" || text("adapter.type") != "lora" {
        let way = "give a file that llama.cpp's converter or `finetune export --to gguf-lora` made";
        return Err(FormatError::unsupported(path, "not a LoRA adapter", way));
    }
    let alpha = file.get("adapter.lora.alpha").and_then(Value::as_f64);
    let alpha = alpha.ok_or_else(|| FormatError::malformed(path, "adapter.lora.alpha is missing"))? as f32;
    let (mut parts, matrices) = (Vec::new(), matrices(&text("general.architecture")));
    for (stored, info) in file.tensors() {
        let name = peft_name(stored, &matrices)
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
        parts.push(LoraMatrix { name, rows, cols, values });
    }
    parts.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(Adapter { architecture: text("general.architecture"), alpha, parts })
}
