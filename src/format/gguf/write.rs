//! Writes the container: header, metadata, tensor table and tensors, each tensor at a multiple of 32 bytes, in the
//! layout of the Python `gguf` package (version 3, little endian). The bytes of one tensor are requested at a time, so
//! that a model larger than memory can be written; a tensor whose length differs from the announced one is an error.
//!
//! The caller passes a temporary path, because only the caller can check the finished file.

use super::quant;
use crate::format::error::FormatError;
use crate::numeric::block::Encoding;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Alignment of tensors; the default of the format, so no metadata key is needed.
const ALIGNMENT: u64 = 32;

/// A metadata value with its type in the file.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // the format's own types
pub enum Meta {
    U32(u32),
    F32(f32),
    Bool(bool),
    Bools(Vec<bool>),
    Text(String),
    Texts(Vec<String>),
    Floats(Vec<f32>),
    Ints(Vec<i32>),
    /// Type and value as bytes of another file ([`super::Gguf::raw_metadata`]).
    Raw(Vec<u8>),
}

/// Keys and values in the order of writing.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metadata(Vec<(String, Meta)>);

impl Metadata {
    /// Sets the value of `key` and replaces an older one.
    pub fn set(&mut self, key: &str, value: Meta) {
        match self.0.iter_mut().find(|(k, _)| k == key) {
            Some((_, old)) => *old = value,
            None => self.0.push((key.to_owned(), value)),
        }
    }

    /// Removes every key for which `drop` is true.
    pub fn remove(&mut self, drop: impl Fn(&str) -> bool) {
        self.0.retain(|(key, _)| !drop(key));
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&Meta> {
        self.0.iter().find(|(k, _)| k == key).map(|(_, value)| value)
    }
}

/// An entry of the tensor table.
#[derive(Debug, Clone, PartialEq)]
pub struct Planned {
    /// Name in llama.cpp.
    pub name: String,
    /// Dimensions, innermost last.
    pub shape: Vec<usize>,
    /// Encoding.
    pub kind: Encoding,
}

impl Planned {
    fn bytes(&self) -> u64 {
        self.kind.size_of(self.shape.iter().product()) as u64
    }
}

/// Writes a file to `path`. `bytes` returns the encoded bytes of each tensor, in the order of `tensors`.
pub fn write(
    path: &Path,
    metadata: &Metadata,
    tensors: &[Planned],
    mut bytes: impl FnMut(&Planned) -> Result<Vec<u8>, FormatError>,
) -> Result<(), FormatError> {
    let fail = |cause| FormatError::io(path, cause);
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path).map_err(fail)?);
    let head = head(metadata, tensors).map_err(|t| {
        FormatError::tensor(path, &t.name, format!("is {}, which GGUF has no number for", t.kind.name()))
    })?;
    out.write_all(&head).map_err(fail)?;
    pad(&mut out, head.len() as u64).map_err(fail)?;
    for tensor in tensors {
        let data = bytes(tensor)?;
        if data.len() as u64 != tensor.bytes() {
            let what = format!("has {} bytes where {} were announced", data.len(), tensor.bytes());
            return Err(FormatError::tensor(path, &tensor.name, what));
        }
        out.write_all(&data).map_err(fail)?;
        pad(&mut out, data.len() as u64).map_err(fail)?;
    }
    out.into_inner().map_err(|e| fail(e.into_error()))?.sync_all().map_err(fail)
}

fn pad(out: &mut impl Write, written: u64) -> std::io::Result<()> {
    let zeros = [0; ALIGNMENT as usize];
    out.write_all(&zeros[..(written.next_multiple_of(ALIGNMENT) - written) as usize])
}

/// The bytes before the tensors; the error is a tensor whose encoding GGUF does not have.
fn head<'t>(metadata: &Metadata, tensors: &'t [Planned]) -> Result<Vec<u8>, &'t Planned> {
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.0.len() as u64).to_le_bytes());
    for (key, value) in &metadata.0 {
        text(&mut out, key);
        value.write(&mut out);
    }
    let mut offset = 0u64;
    for tensor in tensors {
        text(&mut out, &tensor.name);
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        tensor.shape.iter().rev().for_each(|&d| out.extend((d as u64).to_le_bytes()));
        out.extend(quant::id(tensor.kind).ok_or(tensor)?.to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset += tensor.bytes().next_multiple_of(ALIGNMENT);
    }
    Ok(out)
}

fn text(out: &mut Vec<u8>, s: &str) {
    out.extend((s.len() as u64).to_le_bytes());
    out.extend(s.as_bytes());
}

impl Meta {
    fn write(&self, out: &mut Vec<u8>) {
        let mut kind = |id: u32| out.extend(id.to_le_bytes());
        let array = |kind: &mut dyn FnMut(u32), id| {
            kind(9);
            kind(id);
        };
        match self {
            Meta::U32(_) => kind(4),
            Meta::F32(_) => kind(6),
            Meta::Bool(_) => kind(7),
            Meta::Text(_) => kind(8),
            Meta::Bools(_) => array(&mut kind, 7),
            Meta::Texts(_) => array(&mut kind, 8),
            Meta::Floats(_) => array(&mut kind, 6),
            Meta::Ints(_) => array(&mut kind, 5),
            Meta::Raw(_) => {}
        }
        match self {
            Meta::U32(n) => out.extend(n.to_le_bytes()),
            Meta::F32(x) => out.extend(x.to_le_bytes()),
            Meta::Bool(b) => out.push(u8::from(*b)),
            Meta::Bools(all) => {
                out.extend((all.len() as u64).to_le_bytes());
                out.extend(all.iter().map(|b| u8::from(*b)));
            }
            Meta::Text(s) => text(out, s),
            Meta::Texts(all) => {
                out.extend((all.len() as u64).to_le_bytes());
                all.iter().for_each(|s| text(out, s));
            }
            Meta::Floats(all) => {
                out.extend((all.len() as u64).to_le_bytes());
                all.iter().for_each(|x| out.extend(x.to_le_bytes()));
            }
            Meta::Ints(all) => {
                out.extend((all.len() as u64).to_le_bytes());
                all.iter().for_each(|i| out.extend(i.to_le_bytes()));
            }
            Meta::Raw(bytes) => out.extend(bytes),
        }
    }
}
