//! Writes files: first the header, from the known shapes, then the bytes of one tensor after the other, so that a model
//! is never in memory as a whole.

use crate::format::atomic::{self, WriteFault};
use crate::format::error::FormatError;
use crate::numeric::dtype::Dtype;
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::path::Path;

/// The metadata key that marks a file as written by this program. Other programs drop the key when they load and save a
/// model, so a file with the key may be replaced.
pub const MARK: &str = "written_by_finetune";

/// A tensor to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Name in the file.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
}

impl Spec {
    /// Size in the file, in bytes.
    pub fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }
}

/// Writes one file atomically, with metadata `{"format":"pt"}` and [`MARK`], and tensors in the given order. `bytes(i)`
/// returns the bytes of `specs[i]`, little endian; it is called once per tensor, in order.
pub fn write_streamed<'a>(
    path: &Path,
    specs: &[Spec],
    mut bytes: impl FnMut(usize) -> Result<Cow<'a, [u8]>, FormatError>,
) -> Result<(), FormatError> {
    atomic::write_with(path, |out| -> Result<(), WriteFault> {
        let header = header(specs);
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for (i, spec) in specs.iter().enumerate() {
            let data = bytes(i)?;
            if data.len() != spec.bytes() {
                let what = format!("{} bytes given for shape {:?}", data.len(), spec.shape);
                return Err(FormatError::tensor(path, &spec.name, what).into());
            }
            out.write_all(&data)?;
        }
        Ok(())
    })
}

/// Writes a small file of tensors in memory with [`write_streamed`], sorted by name.
pub fn write(path: &Path, tensors: &[(Spec, &[u8])]) -> Result<(), FormatError> {
    let mut order: Vec<&(Spec, &[u8])> = tensors.iter().collect();
    order.sort_by(|a, b| a.0.name.cmp(&b.0.name));
    let specs: Vec<Spec> = order.iter().map(|t| t.0.clone()).collect();
    write_streamed(path, &specs, |i| Ok(Cow::Borrowed(order[i].1)))
}

/// Writes a model's weights into the folder `dir`: `model.safetensors`, or, if that file would be larger than `most`
/// bytes, shards of at most `most` bytes and `model.safetensors.index.json`. (A tensor larger than `most` has its own
/// shard.)
pub fn write_sharded<'a>(
    dir: &Path,
    specs: &[Spec],
    most: usize,
    mut bytes: impl FnMut(usize) -> Result<Cow<'a, [u8]>, FormatError>,
) -> Result<(), FormatError> {
    let shards = split(specs, most);
    if let [_] = shards[..] {
        return write_streamed(&dir.join("model.safetensors"), specs, bytes);
    }
    let mut map = Map::new();
    for (i, range) in shards.iter().enumerate() {
        let file = format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len());
        write_streamed(&dir.join(&file), &specs[range.clone()], |k| bytes(range.start + k))?;
        specs[range.clone()].iter().for_each(|s| drop(map.insert(s.name.clone(), json!(file))));
    }
    map.sort_keys();
    let total: usize = specs.iter().map(Spec::bytes).sum();
    let index = json!({"metadata": {"total_size": total}, "weight_map": map});
    atomic::write_file(&dir.join("model.safetensors.index.json"), format!("{index:#}\n").as_bytes())
}

fn split(specs: &[Spec], most: usize) -> Vec<std::ops::Range<usize>> {
    let mut shards = Vec::new();
    let (mut first, mut size) = (0, 0);
    for (i, spec) in specs.iter().enumerate() {
        if i > first && size + spec.bytes() > most {
            shards.push(first..i);
            (first, size) = (i, 0);
        }
        size += spec.bytes();
    }
    shards.push(first..specs.len());
    shards
}

fn header(specs: &[Spec]) -> Vec<u8> {
    let mut map = Map::new();
    map.insert("__metadata__".into(), json!({"format": "pt", MARK: "yes"}));
    let mut at = 0;
    for spec in specs {
        let dtype = match spec.dtype {
            Dtype::F32 => "F32",
            Dtype::F16 => "F16",
            Dtype::Bf16 => "BF16",
        };
        let end = at + spec.bytes();
        map.insert(
            spec.name.clone(),
            json!({"dtype": dtype, "shape": spec.shape, "data_offsets": [at, end]}),
        );
        at = end;
    }
    let mut text = Value::Object(map).to_string().into_bytes();
    // The data begin at a multiple of 8.
    text.resize(text.len().next_multiple_of(8), b' ');
    text
}
