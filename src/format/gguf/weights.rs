//! Tensors of a GGUF under Hugging Face names. They stay packed in the map; each is widened when it is asked
//! for, on all threads, and what is stored as f32, f16 or bf16 is given as it is.

use super::order::{self, Order, Orders};
use super::reader::{Gguf, Info};
use crate::families::tensors::{
    DELTA_BIAS, DELTA_NORM, DELTA_RATE, DELTA_TAPS, EXPERTS, MOST_EXPERTS, SHARE, SINKS, TAPS, TOP,
};
use crate::families::{self, Family};
use crate::format::error::FormatError;
use crate::format::map;
use crate::numeric::block::{Block, Blocks, Encoding};
use crate::numeric::dtype::Dtype;
use crate::numeric::tensor::{About, Tensor, Tensors, Use};
use rayon::prelude::*;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

/// The divisors of the frequencies in long rows and in short ones, with LongRoPE.
pub(super) const LONG_ROPE: [&str; 2] = ["rope_factors_long.weight", "rope_factors_short.weight"];

/// The weights of a model in a GGUF.
#[derive(Debug)]
pub(super) struct Weights {
    file: Gguf,
    /// Where the tensors are. Experts that are one tensor in the file are parts of it.
    names: BTreeMap<String, Place>,
    family: &'static Family,
}

/// Where a tensor is in the file.
#[derive(Debug)]
struct Place {
    /// One, or several whose rows follow each other: the file's names of gate and up sort in this order.
    parts: Vec<Info>,
    order: Order,
}

impl Weights {
    /// Maps names. Layers from number `layers` on predict further tokens, and are not read.
    pub fn new(
        file: Gguf,
        (family, layers): (&'static Family, usize),
        orders: Orders,
    ) -> Result<Self, FormatError> {
        let (mut names, of_layer) = (BTreeMap::new(), family.layer_tensors());
        for (stored, info) in file.tensors() {
            if is_not_a_weight(stored) || layer_of(stored).is_some_and(|layer| layer >= layers) {
                continue;
            }
            if let Some((layer, module)) = experts(stored).filter(|_| family.experts) {
                let of_expert = |(expert, part)| {
                    let path = format!("model.layers.{layer}.mlp.experts.{expert}");
                    (format!("{path}.{module}.weight"), Place { parts: vec![part], order: Order::Same })
                };
                let parts = parts(info).ok_or_else(|| {
                    let what = format!("has shape {:?}, not [experts, outputs, inputs]", info.shape);
                    FormatError::tensor(file.path(), stored, what)
                })?;
                names.extend(parts.into_iter().enumerate().map(of_expert));
                continue;
            }
            let Some(name) = hugging_face_name(stored, &of_layer) else {
                let what = format!("tensor '{stored}' is not one of a plain decoder");
                let way = format!("use a {} model", families::names("or"));
                return Err(FormatError::unsupported(file.path(), what, way));
            };
            let (order, info) = (orders.of(&name), as_in_hugging_face(stored, info));
            if let Some(what) = order.refuses(&info.shape) {
                return Err(FormatError::tensor(file.path(), stored, what));
            }
            let place = names.entry(name).or_insert_with(|| Place { parts: Vec::new(), order });
            if let Some(first) = place.parts.first().filter(|first| first.shape[1..] != info.shape[1..]) {
                let what =
                    format!("has shape {:?}, the other part of its matrix {:?}", info.shape, first.shape);
                return Err(FormatError::tensor(file.path(), stored, what));
            }
            place.parts.push(info);
        }
        Ok(Weights { file, names, family })
    }

    /// The kind that most bytes of matrices have.
    pub fn main_kind(file: &Gguf) -> Encoding {
        let mut bytes: BTreeMap<Encoding, usize> = BTreeMap::new();
        let matrices = file.tensors().values().filter(|info| info.shape.len() > 1);
        matrices.for_each(|info| *bytes.entry(info.kind).or_default() += info.range.len());
        bytes.into_iter().max_by_key(|&(_, n)| n).map_or(Encoding::Plain(Dtype::F32), |(kind, _)| kind)
    }
}

/// The layer of a tensor; outside the layers it has none.
fn layer_of(stored: &str) -> Option<usize> {
    stored.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

/// The tensor, with the shape that it has in Hugging Face.
fn as_in_hugging_face(stored: &str, info: &Info) -> Info {
    match info.shape[..] {
        [channels, taps] if is_taps(stored) => Info { shape: vec![channels, 1, taps], ..info.clone() },
        [inputs] if is_share(stored) => Info { shape: vec![1, inputs], ..info.clone() },
        _ => info.clone(),
    }
}

/// Whether a tensor has the taps of a convolution.
pub fn is_taps(stored: &str) -> bool {
    [TAPS, DELTA_TAPS].into_iter().any(|(own, _)| stored.ends_with(&format!(".{own}.weight")))
}

/// Whether a tensor is what the output of an expert that computes every token is multiplied by.
pub fn is_share(stored: &str) -> bool {
    stored.ends_with(&format!(".{}.weight", SHARE.0))
}

/// Tables that are recomputed, or read elsewhere (`rope_freqs` and `rope_factors` go into the configuration), and what
/// predicts several tokens.
pub(super) fn is_not_a_weight(stored: &str) -> bool {
    stored.starts_with("rope_freqs")
        || LONG_ROPE.contains(&stored)
        || stored.ends_with(".attn_rot_embd.weight")
        || stored.contains(".nextn.")
}

/// The Hugging Face name of a tensor as far as it does not depend on the family: its layer, or its place outside them.
pub(super) fn place_of(stored: &str) -> String {
    let top = TOP.iter().find_map(|(gguf, name)| Some((name, stored.strip_prefix(gguf)?.strip_prefix('.')?)));
    match (top, stored.strip_prefix("blk.")) {
        (Some((name, suffix)), _) => format!("{name}.{suffix}"),
        (None, Some(of_layer)) => format!("model.layers.{of_layer}"),
        (None, None) => stored.to_owned(),
    }
}

/// `of_layer` are the tensors of a layer as (GGUF, Hugging Face).
pub(super) fn hugging_face_name(stored: &str, of_layer: &[(&str, &str)]) -> Option<String> {
    if let Some((layer, name)) = whole(stored.strip_prefix("blk."), of_layer, |(gguf, name)| (gguf, name)) {
        return Some(format!("model.layers.{layer}.{name}"));
    }
    let (stem, suffix) = stored.rsplit_once('.').filter(|(_, s)| matches!(*s, "weight" | "bias"))?;
    if let Some((_, name)) = TOP.iter().find(|(gguf, _)| *gguf == stem) {
        return Some(format!("{name}.{suffix}"));
    }
    let (layer, what) = stem.strip_prefix("blk.")?.split_once('.')?;
    let layer: u32 = layer.parse().ok()?;
    let (_, name) = of_layer.iter().find(|(gguf, _)| *gguf == what)?;
    Some(format!("model.layers.{layer}.{name}.{suffix}"))
}

/// The layer of `path`, and the other one of its names, which no suffix follows; `way` gives (from, to) of the names.
pub(super) fn whole(
    path: Option<&str>,
    of_layer: &[(&str, &str)],
    way: impl Fn((&'static str, &'static str)) -> (&'static str, &'static str),
) -> Option<(u32, &'static str)> {
    let (layer, what) = path?.split_once('.')?;
    let all = [(DELTA_RATE, DELTA_NORM), (DELTA_BIAS, DELTA_NORM), (SINKS, SINKS)];
    let mut known =
        all.into_iter().filter(|(_, beside)| of_layer.contains(beside)).map(|(names, _)| way(names));
    let (_, to) = known.find(|(from, _)| *from == what)?;
    Some((layer.parse().ok()?, to))
}

/// The layer of a tensor of all its experts, and their module.
fn experts(stored: &str) -> Option<(u32, &'static str)> {
    let (layer, what) = stored.strip_suffix(".weight")?.strip_prefix("blk.")?.split_once('.')?;
    let (_, module) = EXPERTS.into_iter().find(|(own, _)| *own == what)?;
    Some((layer.parse().ok()?, module))
}

/// The matrices of a tensor [experts, outputs, inputs]; `None` for another shape.
fn parts(info: &Info) -> Option<Vec<Info>> {
    let &[count @ 1..=MOST_EXPERTS, rows, cols] = &info.shape[..] else { return None };
    // Rows are whole blocks, so each matrix has as many bytes.
    let size = info.range.len() / count;
    let begins = (0..count).map(|expert| info.range.start + expert * size);
    let matrix = |begin| Info { shape: vec![rows, cols], kind: info.kind, range: begin..begin + size };
    Some(begins.map(matrix).collect())
}

impl Place {
    fn shape(&self) -> Vec<usize> {
        let mut shape = self.parts[0].shape.clone();
        shape[0] = self.parts.iter().map(|info| info.shape[0]).sum();
        shape
    }

    /// How it is given: in f32 where its parts are given in several ways.
    fn encoding(&self) -> Encoding {
        let first = encoding(&self.parts[0], self.order);
        let same = self.parts.iter().all(|info| encoding(info, self.order) == first);
        if same { first } else { Encoding::Plain(Dtype::F32) }
    }
}

impl Weights {
    fn part(&self, name: &str, info: &Info, order: Order) -> Tensor<'_> {
        let (shape, n) = (info.shape.clone(), info.shape[0]);
        if let Encoding::Plain(dtype) = info.kind
            && !order::changes(self.family, name)
        {
            let bytes = self.file.bytes(info);
            let bytes = match order {
                Order::Same => Cow::Borrowed(bytes),
                _ => Cow::Owned(order.put_back(bytes, (n, bytes.len() / n), columns(info))),
            };
            return Tensor { shape, dtype, bytes };
        }
        let mut bytes = widen(self.file.bytes(info), info);
        if order != Order::Same || order::changes(self.family, name) {
            let mut values = order.restored(&Dtype::F32.widen(&bytes), n);
            order::from_file(self.family, name, &mut values);
            bytes = Dtype::F32.narrow(&values);
        }
        Tensor { shape, dtype: Dtype::F32, bytes: Cow::Owned(bytes) }
    }

    fn part_in_blocks(&self, info: &Info, block: Block, order: Order) -> Option<Blocks> {
        let &[rows, cols] = &info.shape[..] else { return None };
        let bytes = match order {
            Order::Same => self.file.shared(info),
            _ => order.put_back(self.file.bytes(info), (rows, block.size_of(cols)), cols).into(),
        };
        Blocks::new((rows, cols), block, bytes)
    }
}

impl Tensors for Weights {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        let Some(place) = self.names.get(name) else { return Ok(None) };
        let mut parts = place.parts.iter().map(|info| self.part(name, info, place.order));
        if place.parts.len() == 1 {
            return Ok(parts.next());
        }
        let parts: Vec<_> = parts.collect();
        let same = parts.iter().all(|part| part.dtype == parts[0].dtype);
        let dtype = if same { parts[0].dtype } else { Dtype::F32 };
        let bytes = parts.into_iter().map(|part| match same {
            true => part.bytes,
            false => Cow::Owned(dtype.narrow(&part.dtype.widen(&part.bytes))),
        });
        let bytes = Cow::Owned(bytes.collect::<Vec<_>>().concat());
        Ok(Some(Tensor { shape: place.shape(), dtype, bytes }))
    }

    fn blocks(&self, name: &str) -> Result<Option<Blocks>, String> {
        Ok(self.block_parts(name)?.and_then(Blocks::joined))
    }

    fn block_parts(&self, name: &str) -> Result<Option<Vec<Blocks>>, String> {
        let Some(place) = self.names.get(name) else { return Ok(None) };
        let Encoding::Blocks(block) = place.encoding() else { return Ok(None) };
        Ok(place.parts.iter().map(|info| self.part_in_blocks(info, block, place.order)).collect())
    }

    fn about(&self, name: &str) -> Result<Option<About>, String> {
        let about = |place: &Place| About { shape: place.shape(), encoding: place.encoding() };
        Ok(self.names.get(name).map(about))
    }

    fn names(&self) -> Vec<String> {
        self.names.keys().cloned().collect()
    }

    fn advise(&self, name: &str, when: Use) {
        let parts = self.names.get(name).map(|place| &place.parts);
        parts.into_iter().flatten().for_each(|info| map::advise(self.file.bytes(info), when));
    }

    fn file_of(&self, _: &str) -> Option<&Path> {
        Some(self.file.path())
    }
}

/// How a tensor is given: in f32 where heads of columns are no whole blocks.
fn encoding(info: &Info, order: Order) -> Encoding {
    match info.kind {
        Encoding::Blocks(block) if !order.keeps_blocks(block.elements()) => Encoding::Plain(Dtype::F32),
        kind => kind,
    }
}

/// Values of a row.
fn columns(info: &Info) -> usize {
    info.shape[1..].iter().product()
}

impl Gguf {
    /// A tensor by the name that it has in the file, as f32 values, row-major in [`Info::shape`]'s order.
    pub fn values(&self, name: &str) -> Option<Vec<f32>> {
        let info = self.tensors().get(name)?;
        Some(Dtype::F32.widen(&widen(self.bytes(info), info)))
    }
}

/// f32, little endian.
fn widen(packed: &[u8], info: &Info) -> Vec<u8> {
    let elements: usize = info.shape.iter().product();
    let row = info.shape.last().copied().unwrap_or(1).max(1);
    let mut out = vec![0u8; 4 * elements];
    let packed_row = info.kind.size_of(row);
    out.par_chunks_mut(4 * row).enumerate().with_min_len(16).for_each(|(r, out)| {
        widen_row(out, &packed[r * packed_row..(r + 1) * packed_row], info.kind);
    });
    out
}

/// One row of whole blocks to f32, little endian.
fn widen_row(out: &mut [u8], row: &[u8], kind: Encoding) {
    let values = match kind {
        Encoding::Plain(dtype) => dtype.widen(row),
        Encoding::Blocks(block) => {
            let mut values = vec![0.0; out.len() / 4];
            block.widen(&mut values, row);
            values
        }
    };
    out.chunks_exact_mut(4).zip(values).for_each(|(o, v)| o.copy_from_slice(&v.to_le_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// llama.cpp: `w.reshape(heads, 2, d / 2, in).swapaxes(1, 2).reshape(w.shape)`, written out.
    #[test]
    fn row_order_of_llama_cpp_is_reverted() {
        for (heads, d) in [(1, 2), (3, 4), (2, 6), (5, 64)] {
            let n = heads * d;
            let mut stored = vec![usize::MAX; n];
            for h in 0..heads {
                for half in 0..2 {
                    for i in 0..d / 2 {
                        stored[h * d + 2 * i + half] = h * d + half * (d / 2) + i;
                    }
                }
            }
            for r in 0..n {
                assert_eq!(stored[Order::Paired(heads).source_row(r, n)], r, "{heads} heads of {d}");
            }
        }
    }

    #[test]
    fn names_are_mapped_or_refused() {
        let of_layer = families::LLAMA.layer_tensors();
        let check =
            |stored, name: Option<&str>| assert_eq!(hugging_face_name(stored, &of_layer).as_deref(), name);
        check("token_embd.weight", Some("model.embed_tokens.weight"));
        check("blk.12.attn_q.bias", Some("model.layers.12.self_attn.q_proj.bias"));
        check("blk.0.ffn_gate_exps.weight", None);
        check("blk.x.ffn_gate.weight", None);
        check("blk.0.attn_q.scale", None);
        for (stored, place) in [
            ("blk.12.attn_q.bias", "model.layers.12.attn_q.bias"),
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("output.weight", "lm_head.weight"),
            ("output_norm.weight", "model.norm.weight"),
            ("other", "other"),
        ] {
            assert_eq!(place_of(stored), place);
        }
    }
}
