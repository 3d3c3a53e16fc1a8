//! safetensors: a file is checked completely when opened, and its tensors are borrowed. After [`open`] no tensor is out
//! of range, overlaps another one, or has a size that differs from its shape.
//!
//! The format: a u64 header length, a JSON object `{name: {dtype, shape, data_offsets}}`, then the data, in which every
//! byte belongs to exactly one tensor. The `safetensors` crate is not used, because its errors name neither file nor
//! tensor, and it accepts duplicate names and keeps the last tensor.

mod header;
mod write;

use header::MOST_HEADER_BYTES;
pub use write::{MARK, Spec, write, write_sharded, write_streamed};

use super::error::FormatError;
use super::map::{self, Map};
use super::positions::{Beginning, Positions};
use crate::numeric::dtype::Dtype;
use crate::numeric::tensor::{Tensor, Tensors, Use};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Type, shape and position of a tensor in its file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    dtype: Dtype,
    shape: Vec<usize>,
    range: Range<usize>,
}

/// A mapped and checked file.
#[derive(Debug)]
pub struct SafeTensors {
    path: PathBuf,
    map: Map,
    entries: BTreeMap<String, Entry>,
    raw: BTreeMap<String, header::Bytes>,
    metadata: BTreeMap<String, String>,
}

/// Maps and checks a file.
pub fn open(path: &Path) -> Result<SafeTensors, FormatError> {
    let file = open_with_bytes(path)?;
    match file.raw.keys().next() {
        Some(name) => Err(header::unsupported(path, name, "U8")),
        None => Ok(file),
    }
}

/// Same as [`open`], for a file that may contain byte tensors.
fn open_with_bytes(path: &Path) -> Result<SafeTensors, FormatError> {
    let map = Map::open(path)?;
    let header::Header { entries, raw, metadata } = header::parse(path, &map)?;
    Ok(SafeTensors { path: path.to_owned(), map, entries, raw, metadata })
}

/// Bytes of the header of the file that begins with these bytes; `None` if that is no header.
pub fn header_len(file: &[u8; 8]) -> Option<u64> {
    let length = u64::from_le_bytes(*file);
    (length <= MOST_HEADER_BYTES).then_some(8 + length)
}

/// Positions of the tensors of a file, of which only the header is read.
pub(super) fn positions(path: &Path, here: u64) -> Result<Beginning, FormatError> {
    let map = Map::open(path)?;
    let header = map.first_chunk().and_then(header_len).filter(|header| *header <= map.len() as u64);
    if let Some(header) = header.filter(|header| *header > here) {
        return Ok(Beginning::Needs(header));
    }
    let header::Header { entries, raw, .. } = header::parse(path, &map)?;
    let numeric = entries.into_iter().map(|(name, entry)| (name, entry.range));
    let raw = raw.into_iter().map(|(name, bytes)| (name, bytes.range));
    Ok(Beginning::All(Positions { tensors: numeric.chain(raw).collect(), shapes: Vec::new() }))
}

impl SafeTensors {
    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The `__metadata__` of the header.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The tensor `name`, borrowed from the map.
    pub fn get(&self, name: &str) -> Option<Tensor<'_>> {
        let entry = self.entries.get(name)?;
        let bytes = Cow::Borrowed(&self.map[entry.range.clone()]);
        Some(Tensor { shape: entry.shape.clone(), dtype: entry.dtype, bytes })
    }

    /// Bytes of data per element type.
    fn bytes_by_dtype(&self) -> [(Dtype, usize); 3] {
        let of = |dtype| self.entries.values().filter(|e| e.dtype == dtype).map(|e| e.range.len()).sum();
        [Dtype::F32, Dtype::F16, Dtype::Bf16].map(|dtype| (dtype, of(dtype)))
    }
}

impl Tensors for SafeTensors {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        Ok(self.get(name))
    }

    fn advise(&self, name: &str, when: Use) {
        let range = self.entries.get(name).map(|entry| &entry.range);
        if let Some(range) = range.or(self.raw.get(name).map(|bytes| &bytes.range)) {
            map::advise(&self.map[range.clone()], when);
        }
    }

    fn names(&self) -> Vec<String> {
        self.entries.keys().cloned().collect()
    }
}

/// The shard names in the text of a `model.safetensors.index.json`; `path` is for errors.
pub(super) fn shard_names(path: &Path, text: &[u8]) -> Result<Vec<String>, FormatError> {
    header::parse_index(path, text).map(|index| unique(&index))
}

fn unique(index: &BTreeMap<String, String>) -> Vec<String> {
    let mut shards: Vec<String> = index.values().cloned().collect();
    shards.sort();
    shards.dedup();
    shards
}

/// The weights of a model in one or more files.
#[derive(Debug)]
pub struct Sharded {
    files: Vec<SafeTensors>,
    index: BTreeMap<String, usize>,
}

impl Sharded {
    /// Opens `model.safetensors` in `dir`, else the shards in `model.safetensors.index.json`.
    pub fn open(dir: &Path) -> Result<Self, FormatError> {
        Self::open_by(dir, open)
    }

    /// Same as [`Sharded::open`], for files that may contain byte tensors.
    pub fn open_with_bytes(dir: &Path) -> Result<Self, FormatError> {
        Self::open_by(dir, open_with_bytes)
    }

    fn open_by(dir: &Path, open: fn(&Path) -> Result<SafeTensors, FormatError>) -> Result<Self, FormatError> {
        let single = dir.join("model.safetensors");
        if single.is_file() {
            return Self::of(vec![open(&single)?]);
        }
        let index_path = dir.join("model.safetensors.index.json");
        let text = std::fs::read(&index_path).map_err(|e| FormatError::io(&index_path, e))?;
        let index = header::parse_index(&index_path, &text)?;
        let mut files = Vec::new();
        for shard in unique(&index) {
            let path = dir.join(&shard);
            if !path.is_file() {
                let what = format!("shard '{shard}' is missing from the folder; download it again");
                return Err(FormatError::malformed(&index_path, what));
            }
            files.push(open(&path)?);
        }
        let all = Self::of(files)?;
        let there = |name: &String| all.index.contains_key(name) || all.raw(name).is_some();
        if let Some(name) = index.keys().find(|name| !there(name) && !all.skipped(name)) {
            let what = format!("named here, but not in {}", index[name]);
            return Err(FormatError::tensor(&index_path, name, what));
        }
        Ok(all)
    }

    fn of(files: Vec<SafeTensors>) -> Result<Self, FormatError> {
        let mut index = BTreeMap::new();
        for (i, file) in files.iter().enumerate() {
            for name in file.entries.keys() {
                if let Some(other) = index.insert(name.clone(), i) {
                    let other: &SafeTensors = &files[other];
                    let what = format!("also in {}", other.path.display());
                    return Err(FormatError::tensor(&file.path, name, what));
                }
            }
        }
        Ok(Sharded { files, index })
    }

    /// The byte tensor `name`.
    pub fn raw(&self, name: &str) -> Option<&[u8]> {
        self.files.iter().find_map(|file| file.raw.get(name).map(|bytes| &file.map[bytes.range.clone()]))
    }

    /// The shape of the byte tensor `name`.
    pub fn raw_shape(&self, name: &str) -> Option<&[usize]> {
        self.files.iter().find_map(|file| file.raw.get(name).map(|bytes| &bytes.shape[..]))
    }

    /// The names of all byte tensors.
    pub fn raw_names(&self) -> impl Iterator<Item = &str> {
        self.files.iter().flat_map(|file| file.raw.keys()).map(String::as_str)
    }

    /// The file with a tensor of any type.
    fn file_with(&self, name: &str) -> Option<&SafeTensors> {
        let numeric = self.index.get(name).map(|&i| &self.files[i]);
        numeric.or(self.files.iter().find(|file| file.raw.contains_key(name)))
    }

    /// The bytes of any tensor.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        let entry = |file: &'_ SafeTensors| file.entries.get(name).map(|entry| entry.range.clone());
        let plain = self.files.iter().find_map(|file| entry(file).map(|range| &file.map[range]));
        self.raw(name).or(plain)
    }

    /// Whether a missing tensor is an integer buffer, which [`header`] leaves out.
    fn skipped(&self, name: &str) -> bool {
        !name.ends_with(".weight") && !name.ends_with(".bias")
    }

    /// The element type of most bytes: `bf16`.
    pub fn dtype_name(&self) -> &'static str {
        let mut total = [0usize; 3];
        for file in &self.files {
            file.bytes_by_dtype().iter().enumerate().for_each(|(i, (_, n))| total[i] += n);
        }
        let names = ["f32", "f16", "bf16"];
        let most = (0..3).max_by_key(|&i| total[i]).unwrap_or(0);
        names[most]
    }
}

impl Tensors for Sharded {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        Ok(self.index.get(name).and_then(|&i| self.files[i].get(name)))
    }

    fn advise(&self, name: &str, when: Use) {
        self.file_with(name).into_iter().for_each(|file| file.advise(name, when));
    }

    fn names(&self) -> Vec<String> {
        self.index.keys().cloned().collect()
    }

    fn file_of(&self, name: &str) -> Option<&Path> {
        let one = self.file_with(name).or(self.files.first().filter(|_| self.files.len() == 1));
        one.map(SafeTensors::path).or(self.files.first().and_then(|file| file.path.parent()))
    }
}

#[cfg(test)]
mod tests;
