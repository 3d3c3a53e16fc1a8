//! Parses headers. No header is trusted: every number is checked against the file size before use.

use super::Entry;
use crate::format::error::FormatError;
use crate::numeric::dtype::Dtype;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// Limit of the reference implementation: a larger header is rejected without reading it.
pub(super) const MOST_HEADER_BYTES: u64 = 100_000_000;

/// Shape and position of a byte tensor in its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Bytes {
    pub shape: Vec<usize>,
    pub range: Range<usize>,
}

/// The contents of a checked header.
pub(super) struct Header {
    pub entries: BTreeMap<String, Entry>,
    /// Byte tensors, which are not numeric.
    pub raw: BTreeMap<String, Bytes>,
    pub metadata: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Raw {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The entries of the JSON object in order, including duplicates, which a map would drop.
struct RawHeader {
    tensors: Vec<(String, Raw)>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Walk;
        impl<'de> Visitor<'de> for Walk {
            type Value = RawHeader;

            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut header = RawHeader { tensors: Vec::new(), metadata: BTreeMap::new() };
                while let Some(key) = map.next_key::<String>()? {
                    if key == "__metadata__" {
                        header.metadata = map.next_value::<Option<_>>()?.unwrap_or_default();
                    } else {
                        header.tensors.push((key, map.next_value()?));
                    }
                }
                Ok(header)
            }
        }
        d.deserialize_map(Walk)
    }
}

/// Splits a file into header and data and checks both.
pub(super) fn parse(path: &Path, file: &[u8]) -> Result<Header, FormatError> {
    let bad = |what: String| FormatError::malformed(path, what);
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(bad(format!("not a safetensors file: {} bytes; download it again", file.len())));
    };
    let length = u64::from_le_bytes(*length);
    if length > MOST_HEADER_BYTES || length > rest.len() as u64 {
        let n = file.len();
        let what =
            format!("safetensors header of {length} bytes in a file of {n}: not safetensors, or cut short");
        return Err(bad(what));
    }
    let (text, data) = rest.split_at(length as usize);
    let raw: RawHeader =
        serde_json::from_slice(text).map_err(|e| bad(format!("safetensors header is not valid: {e}")))?;
    let start = file.len() - data.len();
    let (entries, bytes) = check(path, raw.tensors, start, data.len())?;
    Ok(Header { entries, raw: bytes, metadata: raw.metadata })
}

/// Bytes per element, and the type if it is supported; None for an unknown name.
fn element(dtype: &str) -> Option<(usize, Option<Dtype>)> {
    Some(match dtype {
        "F32" => (4, Some(Dtype::F32)),
        "F16" => (2, Some(Dtype::F16)),
        "BF16" => (2, Some(Dtype::Bf16)),
        "F64" | "I64" | "U64" | "C64" => (8, None),
        "I32" | "U32" => (4, None),
        "I16" | "U16" => (2, None),
        "I8" | "U8" | "BOOL" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => (1, None),
        _ => return None,
    })
}

/// Numeric tensors, and the positions of byte tensors.
type Checked = (BTreeMap<String, Entry>, BTreeMap<String, Bytes>);

fn check(path: &Path, raw: Vec<(String, Raw)>, start: usize, len: usize) -> Result<Checked, FormatError> {
    let mut spans: Vec<(u64, u64, String)> = Vec::with_capacity(raw.len());
    let (mut entries, mut bytes_of) = (BTreeMap::new(), BTreeMap::new());
    let mut seen = std::collections::HashSet::new();
    for (name, tensor) in raw {
        let bad = |what: String| FormatError::tensor(path, &name, what);
        let (begin, end) = tensor.data_offsets;
        if !seen.insert(name.clone()) {
            return Err(bad("appears twice".into()));
        }
        if begin > end || end > len as u64 {
            let what =
                format!("bytes {begin}..{end} of {len}: the file is cut short or damaged; download it again");
            return Err(bad(what));
        }
        let Some((size, dtype)) = element(&tensor.dtype) else {
            return Err(unsupported(path, &name, &tensor.dtype));
        };
        let bytes = tensor.shape.iter().try_fold(size as u64, |n, &d| n.checked_mul(d));
        if bytes != Some(end - begin) {
            let what =
                format!("shape {:?} of {} does not fill bytes {begin}..{end}", tensor.shape, tensor.dtype);
            return Err(bad(what));
        }
        let range = start + begin as usize..start + end as usize;
        let shape = tensor.shape.iter().map(|&d| d as usize).collect();
        match dtype {
            Some(dtype) => {
                entries.insert(name.clone(), Entry { dtype, shape, range });
            }
            // Counters and position buffers in some checkpoints, which are not used.
            None if matches!(tensor.dtype.as_str(), "I64" | "BOOL") => {}
            None if tensor.dtype == "U8" => drop(bytes_of.insert(name.clone(), Bytes { shape, range })),
            None => return Err(unsupported(path, &name, &tensor.dtype)),
        }
        spans.push((begin, end, name));
    }
    check_spans(path, spans, len as u64)?;
    Ok((entries, bytes_of))
}

/// Checks that every byte belongs to exactly one tensor.
fn check_spans(path: &Path, mut spans: Vec<(u64, u64, String)>, len: u64) -> Result<(), FormatError> {
    spans.sort();
    let mut at = 0;
    let mut before = String::new();
    for (begin, end, name) in spans {
        if begin < at {
            return Err(FormatError::tensor(path, &name, format!("overlaps tensor '{before}'")));
        }
        if begin > at {
            let what = format!("{} bytes before it belong to no tensor", begin - at);
            return Err(FormatError::tensor(path, &name, what));
        }
        (at, before) = (end, name);
    }
    if at != len {
        return Err(FormatError::malformed(
            path,
            format!("{} bytes at its end belong to no tensor", len - at),
        ));
    }
    Ok(())
}

pub(super) fn unsupported(path: &Path, name: &str, dtype: &str) -> FormatError {
    FormatError::unsupported(
        path,
        format!("tensor '{name}' is {dtype}: a quantised checkpoint"),
        "use the model's bf16, f16 or f32 weights, or a .gguf",
    )
}

/// Maps tensor names to shard file names. A shard must be a plain file name, so that an index cannot refer to other
/// folders.
pub(super) fn parse_index(path: &Path, text: &[u8]) -> Result<BTreeMap<String, String>, FormatError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_slice(text)
        .map_err(|e| FormatError::malformed(path, format!("not a weight index: {e}")))?;
    if index.weight_map.is_empty() {
        return Err(FormatError::malformed(path, "its weight_map names no tensor"));
    }
    for (name, shard) in &index.weight_map {
        if shard.contains(['/', '\\']) || !shard.ends_with(".safetensors") {
            return Err(FormatError::tensor(path, name, format!("'{shard}' is not the name of a shard")));
        }
    }
    Ok(index.weight_map)
}
