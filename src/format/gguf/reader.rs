//! The container: header, metadata, tensor table. The contents of the file are not trusted: a count is compared with
//! the remaining bytes before anything is allocated for it, and after [`Gguf::open`] no tensor extends beyond the file.
//!
//! Format: ggml's `gguf.md`, versions 2 and 3, little endian.

use super::quant;
use super::value::Value;
use crate::format::error::FormatError;
use crate::format::map::Map;
use crate::numeric::block::Encoding;
use bytes::Bytes;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Maximum number of dimensions of a tensor (ggml's own limit).
const MOST_DIMS: u32 = 4;
/// Maximum depth of nested arrays, so that a malicious file cannot exhaust the stack; real files have none.
const MOST_NESTING: u32 = 4;

/// An entry of the tensor table.
#[derive(Debug, Clone, PartialEq)]
pub struct Info {
    /// Dimensions, innermost last: the reverse of the file's order, so `[out, in]` for a weight.
    pub shape: Vec<usize>,
    /// Encoding.
    pub kind: Encoding,
    /// Position in the file.
    pub(super) range: Range<usize>,
}

/// A mapped file with its parsed metadata and tensor table.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    map: Bytes,
    metadata: BTreeMap<String, Value>,
    /// Every key with the bytes of its type and value, in the file's order.
    raw: Vec<(String, Range<usize>)>,
    tensors: BTreeMap<String, Info>,
}

impl Gguf {
    /// Maps and checks the file `path`.
    pub fn open(path: &Path) -> Result<Self, FormatError> {
        let map = Map::open(path)?;
        let parsed = parse(&map, map.len()).map_err(|fault| fault.of(path, map.len()));
        let (metadata, raw, tensors) = parsed?;
        Ok(Gguf { path: path.to_owned(), map: Bytes::from_owner(map), metadata, raw, tensors })
    }

    /// The tensor table of a file, of which the first `here` bytes are read; or how many it takes to read more.
    pub(super) fn table(path: &Path, here: u64) -> Result<Result<Places, u64>, FormatError> {
        let map = Map::open(path)?;
        let (size, here) = (map.len(), usize::try_from(here).unwrap_or(usize::MAX));
        match parse(&map[..here.min(size)], size) {
            Ok((_, _, tensors)) => {
                Ok(Ok(tensors.into_iter().map(|(name, info)| (name, info.range)).collect()))
            }
            Err(Fault::Cut(at)) if here < size && at <= size as u64 => Ok(Err(at)),
            Err(fault) => Err(fault.of(path, size)),
        }
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All metadata by key.
    pub fn metadata(&self) -> &BTreeMap<String, Value> {
        &self.metadata
    }

    /// The metadata value of `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// Every key with the bytes of its type and value, in the file's order, for a copy into another file.
    pub fn raw_metadata(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.raw.iter().map(|(key, range)| (key.as_str(), &self.map[range.clone()]))
    }

    /// The tensor table.
    pub fn tensors(&self) -> &BTreeMap<String, Info> {
        &self.tensors
    }

    /// The stored bytes of a tensor.
    pub fn bytes(&self, info: &Info) -> &[u8] {
        &self.map[info.range.clone()]
    }

    /// The stored bytes of a tensor as a shared reference: the file stays mapped while it exists.
    pub(super) fn shared(&self, info: &Info) -> Bytes {
        self.map.slice(info.range.clone())
    }
}

/// The bytes of each tensor.
type Places = Vec<(String, Range<usize>)>;

enum Fault {
    /// The file ends before this byte.
    Cut(u64),
    Bad(String),
    Tensor(String, String),
    Unsupported(String, String),
}

impl Fault {
    /// The error of the file `path` of `size` bytes.
    fn of(self, path: &Path, size: usize) -> FormatError {
        match self {
            Fault::Cut(at) => FormatError::malformed(
                path,
                format!("cut short: byte {at} is needed, the file has {size}; download it again"),
            ),
            Fault::Bad(what) => FormatError::malformed(path, what),
            Fault::Tensor(name, what) => FormatError::tensor(path, &name, what),
            Fault::Unsupported(what, way) => FormatError::unsupported(path, what, way),
        }
    }
}

struct Cursor<'a> {
    /// The beginning of the file.
    bytes: &'a [u8],
    at: usize,
    /// Bytes of the file.
    size: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, n: u64) -> Result<&'a [u8], Fault> {
        let left = (self.bytes.len() - self.at) as u64;
        if n > left {
            return Err(Fault::Cut((self.at as u64).saturating_add(n)));
        }
        let start = self.at;
        self.at += n as usize;
        Ok(&self.bytes[start..self.at])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64)?);
        Ok(out)
    }

    fn u32(&mut self) -> Result<u32, Fault> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, Fault> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Reads a count of items of at least `least` bytes each.
    fn count(&mut self, least: u64, what: &str) -> Result<usize, Fault> {
        let n = self.u64()?;
        self.check_count(n, least, what)
    }

    fn check_count(&self, n: u64, least: u64, what: &str) -> Result<usize, Fault> {
        let left = (self.size - self.at) as u64;
        match n.checked_mul(least) {
            Some(bytes) if bytes <= left => Ok(n as usize),
            _ => Err(Fault::Bad(format!(
                "it announces {n} {what} where {left} bytes are left: cut short or damaged; download it again"
            ))),
        }
    }

    fn string(&mut self) -> Result<String, Fault> {
        let n = self.u64()?;
        let at = self.at;
        let bytes = self.take(n)?;
        let text =
            std::str::from_utf8(bytes).map_err(|_| Fault::Bad(format!("text at byte {at} is not UTF-8")))?;
        Ok(text.to_owned())
    }

    fn value(&mut self, kind: u32, depth: u32) -> Result<Value, Fault> {
        Ok(match kind {
            0 => Value::Int(i128::from(self.array::<1>()?[0])),
            1 => Value::Int(i128::from(i8::from_le_bytes(self.array()?))),
            2 => Value::Int(i128::from(u16::from_le_bytes(self.array()?))),
            3 => Value::Int(i128::from(i16::from_le_bytes(self.array()?))),
            4 => Value::Int(i128::from(self.u32()?)),
            5 => Value::Int(i128::from(i32::from_le_bytes(self.array()?))),
            6 => Value::Float(f64::from(f32::from_le_bytes(self.array()?))),
            7 => Value::Bool(self.array::<1>()?[0] != 0),
            8 => Value::Text(self.string()?),
            9 => self.values(depth)?,
            10 => Value::Int(i128::from(self.u64()?)),
            11 => Value::Int(i128::from(i64::from_le_bytes(self.array()?))),
            12 => Value::Float(f64::from_le_bytes(self.array()?)),
            _ => return Err(Fault::Bad(format!("metadata of unknown type {kind} at byte {}", self.at))),
        })
    }

    fn values(&mut self, depth: u32) -> Result<Value, Fault> {
        if depth >= MOST_NESTING {
            return Err(Fault::Bad(format!(
                "arrays nested more than {MOST_NESTING} deep at byte {}",
                self.at
            )));
        }
        let kind = self.u32()?;
        let least = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            9 => 12,
            _ => 8,
        };
        let n = self.count(least, "array elements")?;
        Ok(match kind {
            8 => Value::Texts((0..n).map(|_| self.string()).collect::<Result<_, _>>()?),
            6 => Value::Floats(self.take(4 * n as u64)?.chunks_exact(4).map(f32_of).collect()),
            4 | 5 => Value::Ints(self.take(4 * n as u64)?.chunks_exact(4).map(|b| int_of(b, kind)).collect()),
            9 => {
                let from = self.at;
                // The elements are parsed to find the end of the array.
                (0..n).try_for_each(|_| self.value(kind, depth + 1).map(drop))?;
                Value::Others { kind, packed: self.bytes[from..self.at].into() }
            }
            0..=12 => Value::Others { kind, packed: self.take(least * n as u64)?.into() },
            _ => return Err(Fault::Bad(format!("an array of unknown type {kind} at byte {}", self.at))),
        })
    }
}

fn f32_of(b: &[u8]) -> f32 {
    f32::from_le_bytes([b[0], b[1], b[2], b[3]])
}

fn int_of(b: &[u8], kind: u32) -> i64 {
    let bits = [b[0], b[1], b[2], b[3]];
    if kind == 4 { i64::from(u32::from_le_bytes(bits)) } else { i64::from(i32::from_le_bytes(bits)) }
}

type Parsed = (BTreeMap<String, Value>, Vec<(String, Range<usize>)>, BTreeMap<String, Info>);

/// Parses the header of a file of `size` bytes from its beginning.
fn parse(bytes: &[u8], size: usize) -> Result<Parsed, Fault> {
    let mut c = Cursor { bytes, at: 0, size };
    if c.take(4).ok() != Some(b"GGUF") {
        return Err(Fault::Bad("not a GGUF file (it does not begin with 'GGUF')".into()));
    }
    let version = c.u32()?;
    if !(2..=3).contains(&version) {
        let big_endian = version != 0 && version.swap_bytes() <= 3;
        let what = if big_endian { "a big-endian GGUF".into() } else { format!("GGUF version {version}") };
        let way = "convert it again with a current llama.cpp (version 3, little endian)";
        return Err(Fault::Unsupported(what, way.into()));
    }
    let tensor_count = c.u64()?;
    let pairs = c.count(13, "metadata entries")?;
    c.check_count(tensor_count, 24, "tensors")?;
    let (mut metadata, mut raw) = (BTreeMap::new(), Vec::new());
    for _ in 0..pairs {
        let key = c.string()?;
        let from = c.at;
        let kind = c.u32()?;
        let value = c.value(kind, 0)?;
        if metadata.contains_key(&key) {
            return Err(Fault::Bad(format!("metadata key '{key}' appears twice")));
        }
        raw.push((key.clone(), from..c.at));
        metadata.insert(key, value);
    }
    let alignment = match metadata.get("general.alignment") {
        None => 32,
        Some(v) => match v.as_u64() {
            Some(a) if a.is_power_of_two() && a <= 1 << 20 => a,
            _ => return Err(Fault::Bad("general.alignment is not a power of two".into())),
        },
    };
    let tensors = table(&mut c, tensor_count, alignment)?;
    Ok((metadata, raw, tensors))
}

fn table(c: &mut Cursor, count: u64, alignment: u64) -> Result<BTreeMap<String, Info>, Fault> {
    let mut raw = Vec::new();
    c.check_count(count, 24, "tensors")?;
    for _ in 0..count {
        let name = c.string()?;
        let dims = c.u32()?;
        if dims > MOST_DIMS {
            return Err(Fault::Tensor(name, format!("has {dims} dimensions")));
        }
        let mut shape = (0..dims).map(|_| c.u64()).collect::<Result<Vec<_>, _>>()?;
        shape.reverse();
        raw.push((name, shape, c.u32()?, c.u64()?));
    }
    let start = (c.at as u64).next_multiple_of(alignment);
    let mut tensors = BTreeMap::new();
    let mut spans = Vec::with_capacity(raw.len());
    for (name, shape, kind, offset) in raw {
        let info = place(&name, &shape, kind, (start, offset, alignment, c.size as u64))?;
        spans.push((info.range.clone(), name.clone()));
        if tensors.insert(name.clone(), info).is_some() {
            return Err(Fault::Tensor(name, "appears twice".into()));
        }
    }
    spans.sort_by(|a, b| (a.0.start, a.0.end, &a.1).cmp(&(b.0.start, b.0.end, &b.1)));
    for pair in spans.windows(2) {
        if pair[1].0.start < pair[0].0.end {
            return Err(Fault::Tensor(pair[1].1.clone(), format!("overlaps tensor '{}'", pair[0].1)));
        }
    }
    Ok(tensors)
}

/// Checks one tensor against (start of data, its offset, alignment, file size).
fn place(name: &str, shape: &[u64], kind: u32, at: (u64, u64, u64, u64)) -> Result<Info, Fault> {
    let (start, offset, alignment, file) = at;
    let bad = |what: String| Fault::Tensor(name.to_owned(), what);
    let kind = quant::of(kind).map_err(|unknown| {
        let what = format!("tensor '{name}' is stored as {unknown}, which is not read");
        Fault::Unsupported(
            what,
            "use a file in one of F32, F16, BF16, Q8_0, Q4_0 .. Q5_1, Q2_K .. Q6_K, MXFP4".into(),
        )
    })?;
    if shape.is_empty() || shape.contains(&0) {
        return Err(bad(format!(
            "has shape {shape:?}, which holds no numbers: the file is damaged; download it again"
        )));
    }
    let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
    let row = shape.last().copied().unwrap_or(1);
    if !row.is_multiple_of(kind.elements() as u64) {
        return Err(bad(format!(
            "rows of {row} are not whole blocks of {}: the file is damaged; download it again",
            kind.name()
        )));
    }
    let bytes = elements.and_then(|n| (n / kind.elements() as u64).checked_mul(kind.bytes() as u64));
    if offset % alignment != 0 {
        return Err(bad(format!("begins at {offset}, not a multiple of {alignment}")));
    }
    let begin = start.checked_add(offset);
    let end = begin.zip(bytes).and_then(|(begin, bytes)| begin.checked_add(bytes));
    match (begin, end) {
        (Some(begin), Some(end)) if end <= file => {
            let shape = shape.iter().map(|&d| d as usize).collect();
            Ok(Info { shape, kind, range: begin as usize..end as usize })
        }
        _ => {
            let what = format!(
                "shape {shape:?} at {offset} ends outside the file ({file} bytes): cut short or damaged"
            );
            Err(bad(format!("{what}; download it again")))
        }
    }
}
