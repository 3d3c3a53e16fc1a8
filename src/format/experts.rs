//! Checkpoints whose tensors have all experts of a layer. Inside this program each expert has matrices of its own,
//! `X.N.gate_proj.weight` [F, C] and so on with `X` for `model.layers.L.mlp.experts`. In the files of Qwen3.5 with experts
//! they are `X.gate_up_proj` [E, 2 F, C], the rows of gate before those of up, and `X.down_proj` [E, C, F].
//!
//! Of gpt-oss all experts of a layer have one bias `X.gate_proj.bias` [E, F]. In the files, with gate and up of a neuron
//! next to each other:
//!
//! - `X.gate_up_proj` [E, C, 2 F], `X.down_proj` [E, F, C]: plain numbers, transposed;
//! - or `X.gate_up_proj_blocks` [E, 2 F, C / 32, 16] and `_scales` [E, 2 F, C / 32], `X.down_proj_blocks` and `_scales`:
//!   MXFP4, where byte i of a block has value 2 i in its lower bits and value 2 i + 1 in the upper ones;
//! - `X.gate_up_proj_bias` [E, 2 F], `X.down_proj_bias` [E, C].

use super::safetensors::Sharded;
use crate::families::JoinedExperts;
use crate::families::tensors::MOST_EXPERTS;
use crate::numeric::block::{Block, Blocks, Encoding};
use crate::numeric::dtype::Dtype;
use crate::numeric::tensor::{About, Tensor, Tensors, Use};
use rayon::prelude::*;
use std::borrow::Cow;
use std::path::Path;

const BLOCKS: &str = "_blocks";
const SCALES: &str = "_scales";
/// Values of a block, and bytes of their codes.
const VALUES: usize = 32;
const CODES: usize = 16;

/// The joined tensors, and the modules that each contains.
const JOINED: [(&str, &[&str]); 2] =
    [("gate_up_proj", &["gate_proj", "up_proj"]), ("down_proj", &["down_proj"])];

/// Whether a shape that begins with a number of experts may be one.
fn is_plausible(shape: &[usize]) -> bool {
    !shape.contains(&0) && shape[0] <= MOST_EXPERTS
}

/// A tensor of a layer's experts by its name in this program.
struct Part {
    /// Name of the joined tensor without its suffix.
    joined: String,
    /// The expert of a matrix; `None` for a bias.
    expert: Option<usize>,
    /// Its place among the modules of the joined tensor, and their number.
    of: (usize, usize),
}

impl JoinedExperts {
    /// Experts, inputs and outputs of a joined tensor of plain numbers.
    fn sizes(self, shape: &[usize]) -> [usize; 3] {
        self.shape([shape[0], shape[1], shape[2]])
    }

    /// The shape of a joined tensor, from experts, inputs and outputs.
    fn shape(self, [experts, inputs, outputs]: [usize; 3]) -> [usize; 3] {
        match self {
            JoinedExperts::Alternating => [experts, inputs, outputs],
            JoinedExperts::InTurn => [experts, outputs, inputs],
        }
    }
}

/// The part with this name; `None` for other tensors.
fn part(name: &str) -> Option<Part> {
    let (above, below) = name.split_once(".mlp.experts.")?;
    let (expert, module) = match below.strip_suffix(".bias") {
        Some(module) => (None, module),
        None => {
            let (expert, module) = below.strip_suffix(".weight")?.split_once('.')?;
            (Some(expert.parse().ok()?), module)
        }
    };
    JOINED.iter().find_map(|(joined, modules)| {
        let first = modules.iter().position(|own| *own == module)?;
        let joined = format!("{above}.mlp.experts.{joined}");
        Some(Part { joined, expert, of: (first, modules.len()) })
    })
}

/// The path of the experts, the joined tensor without its suffix, its modules, and the suffix (`_blocks`, `_bias` or
/// nothing) of a tensor in the files.
fn joined(stored: &str) -> Option<(&str, &'static str, &'static [&'static str], &str)> {
    let (path, below) = stored.rsplit_once('.').filter(|(path, _)| path.ends_with(".mlp.experts"))?;
    let (joined, modules) = JOINED.iter().find(|(joined, _)| below.starts_with(joined))?;
    Some((path, joined, modules, &below[joined.len()..]))
}

/// The name of the part of a joined tensor with this module; matrices are of an expert.
fn part_name(path: &str, module: &str, expert: Option<usize>) -> String {
    match expert {
        Some(expert) => format!("{path}.{expert}.{module}.weight"),
        None => format!("{path}.{module}.bias"),
    }
}

/// A checkpoint with joined experts, under this program's names.
pub(super) struct Apart {
    files: Sharded,
    how: JoinedExperts,
}

impl Apart {
    pub fn new(files: Sharded, how: JoinedExperts) -> Self {
        Apart { files, how }
    }

    /// The part with this name, if its joined tensor exists: other files have a tensor for each expert.
    fn part(&self, name: &str) -> Option<Part> {
        let part = part(name)?;
        let suffixes: &[&str] = if part.expert.is_none() { &["_bias"] } else { &["", BLOCKS] };
        let is_there = |stored: String| {
            self.files.raw_shape(&stored).is_some() || matches!(self.files.about(&stored), Ok(Some(_)))
        };
        let mut stored = suffixes.iter().map(|suffix| format!("{}{suffix}", part.joined));
        stored.any(is_there).then_some(part)
    }

    /// The joined tensor with this name and this number of dimensions, none of which is 0.
    fn whole(&self, name: &str, dimensions: usize) -> Result<Option<Tensor<'_>>, String> {
        let Some(tensor) = self.files.tensor(name)? else { return Ok(None) };
        match tensor.shape.len() == dimensions && is_plausible(&tensor.shape) {
            true => Ok(Some(tensor)),
            false => Err(format!("{name} has shape {:?}, which is not that of joined experts", tensor.shape)),
        }
    }

    /// Experts, joined outputs, and inputs of a matrix in MXFP4.
    fn packed_shape(&self, joined: &str) -> Result<Option<[usize; 3]>, String> {
        let name = format!("{joined}{BLOCKS}");
        let Some(shape) = self.files.raw_shape(&name) else { return Ok(None) };
        let scales = self.files.raw_shape(&format!("{joined}{SCALES}"));
        match *shape {
            [experts, outputs, blocks, CODES]
                if scales == Some(&[experts, outputs, blocks][..]) && is_plausible(shape) =>
            {
                Ok(Some([experts, outputs, blocks * VALUES]))
            }
            _ => Err(format!("{name} has shape {shape:?}, its scales have {:?}", scales.unwrap_or_default())),
        }
    }

    /// Shape and encoding of a part, if its joined tensor exists.
    fn about_part(&self, part: &Part) -> Result<Option<About>, String> {
        let (first, step) = part.of;
        let count = |outputs: usize| (outputs.saturating_sub(first)).div_ceil(step);
        let there = |experts: usize| part.expert.is_none_or(|expert| expert < experts);
        if part.expert.is_none() {
            let Some(bias) = self.whole(&format!("{}_bias", part.joined), 2)? else { return Ok(None) };
            let shape = vec![bias.shape[0], count(bias.shape[1])];
            return Ok(Some(About { shape, encoding: Encoding::Plain(bias.dtype) }));
        }
        if let Some([experts, outputs, inputs]) = self.packed_shape(&part.joined)? {
            let encoding = Encoding::Blocks(Block::MXFP4);
            let about = About { shape: vec![count(outputs), inputs], encoding };
            return Ok(there(experts).then_some(about));
        }
        let Some(whole) = self.whole(&part.joined, 3)? else { return Ok(None) };
        let [experts, inputs, outputs] = self.how.sizes(&whole.shape);
        let shape = vec![count(outputs), inputs];
        Ok(there(experts).then_some(About { shape, encoding: Encoding::Plain(whole.dtype) }))
    }

    /// The values of a plain part: the outputs of a bias, or an expert's matrix, transposed where outputs alternate.
    fn plain(&self, part: &Part) -> Result<Option<Tensor<'_>>, String> {
        let Some(About { shape, encoding: Encoding::Plain(dtype) }) = self.about_part(part)? else {
            return Ok(None);
        };
        let (name, dimensions) = match part.expert {
            None => (format!("{}_bias", part.joined), 2),
            Some(_) => (part.joined.clone(), 3),
        };
        let Some(whole) = self.whole(&name, dimensions)? else { return Ok(None) };
        if let (Some(expert), JoinedExperts::InTurn) = (part.expert, self.how) {
            return in_turn(whole, &part.joined, (expert, part.of)).map(Some);
        }
        let (size, (first, step)) = (dtype.size(), part.of);
        let stride = whole.shape[dimensions - 1];
        let mut bytes = vec![0; shape.iter().product::<usize>() * size];
        let row_bytes = (shape[1] * size).max(1);
        let from = part.expert.unwrap_or(0) * shape[1] * stride;
        bytes.par_chunks_mut(row_bytes).enumerate().for_each(|(r, row)| {
            for (c, value) in row.chunks_exact_mut(size).enumerate() {
                let at = match part.expert {
                    None => r * stride + first + c * step,
                    Some(_) => from + c * stride + first + r * step,
                };
                value.copy_from_slice(&whole.bytes[at * size..][..size]);
            }
        });
        Ok(Some(Tensor { shape, dtype, bytes: Cow::Owned(bytes) }))
    }

    /// The blocks of an expert's matrix, as ggml orders them.
    fn packed(&self, part: &Part) -> Result<Option<Blocks>, String> {
        let (Some(expert), Some(about)) = (part.expert, self.about_part(part)?) else { return Ok(None) };
        let Some([_, outputs, inputs]) = self.packed_shape(&part.joined)? else { return Ok(None) };
        let raw = |suffix| self.files.raw(&format!("{}{suffix}", part.joined)).unwrap_or_default();
        let (codes, scales) = (raw(BLOCKS), raw(SCALES));
        let (blocks, size, (first, step)) = (inputs / VALUES, Block::MXFP4.bytes(), part.of);
        let mut bytes = vec![0; about.shape[0] * blocks * size];
        bytes.par_chunks_mut((blocks * size).max(1)).enumerate().for_each(|(r, row)| {
            let at = (expert * outputs + first + r * step) * blocks;
            for (i, out) in row.chunks_exact_mut(size).enumerate() {
                let codes = &codes[(at + i) * CODES..][..CODES];
                let code = |j: usize| codes[j / 2] >> (4 * (j % 2)) & 15;
                out[0] = scales[at + i];
                out[1..].iter_mut().enumerate().for_each(|(j, out)| *out = code(j) | code(j + CODES) << 4);
            }
        });
        Ok(Blocks::new((about.shape[0], inputs), Block::MXFP4, bytes.into()))
    }

    /// The names of the parts of a joined tensor: of matrices with plain numbers or blocks, and of biases.
    fn parts_of(&self, stored: &str) -> Option<Vec<String>> {
        let (path, name, modules, suffix) = joined(stored)?;
        let count = match suffix {
            "_bias" => return Some(modules.iter().map(|module| part_name(path, module, None)).collect()),
            BLOCKS => self.packed_shape(&format!("{path}.{name}")).ok().flatten().map(|shape| shape[0]),
            "" => self.whole(stored, 3).ok().flatten().map(|tensor| tensor.shape[0]),
            _ => None,
        };
        // A tensor of another shape is refused when it is read.
        let count = count.unwrap_or(0);
        let each =
            (0..count).flat_map(|expert| modules.iter().map(move |m| part_name(path, m, Some(expert))));
        Some(each.collect())
    }
}

impl Tensors for Apart {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        let Some(part) = self.part(name) else { return self.files.tensor(name) };
        let Some(blocks) = self.packed(&part)? else { return self.plain(&part) };
        let bytes = Cow::Owned(Dtype::F32.narrow(&blocks.first(blocks.rows)));
        Ok(Some(Tensor { shape: vec![blocks.rows, blocks.cols], dtype: Dtype::F32, bytes }))
    }

    fn blocks(&self, name: &str) -> Result<Option<Blocks>, String> {
        self.part(name).map_or(Ok(None), |part| self.packed(&part))
    }

    fn about(&self, name: &str) -> Result<Option<About>, String> {
        self.part(name).map_or_else(|| self.files.about(name), |part| self.about_part(&part))
    }

    fn names(&self) -> Vec<String> {
        let stored = self.files.names().into_iter().chain(self.files.raw_names().map(str::to_owned));
        let apart = stored.flat_map(|name| self.parts_of(&name).unwrap_or_else(|| vec![name]));
        let mut names: Vec<String> = apart.collect();
        names.sort();
        names.dedup();
        names
    }

    fn file_of(&self, name: &str) -> Option<&Path> {
        let Some(Part { joined, expert, .. }) = self.part(name) else { return self.files.file_of(name) };
        let blocks = format!("{joined}{BLOCKS}");
        match expert {
            None => self.files.file_of(&format!("{joined}_bias")),
            Some(_) if self.files.raw_shape(&blocks).is_some() => self.files.file_of(&blocks),
            Some(_) => self.files.file_of(&joined),
        }
    }

    fn advise(&self, name: &str, when: Use) {
        match self.part(name) {
            None => self.files.advise(name, when),
            // Once for all experts.
            Some(Part { joined, expert: Some(0), of: (0, _) }) => {
                ["", BLOCKS, SCALES]
                    .iter()
                    .for_each(|end| self.files.advise(&format!("{joined}{end}"), when));
            }
            Some(_) => {}
        }
    }
}

/// An expert's rows of a joined tensor [E, outputs, inputs]: those of a module after those of the modules before it.
fn in_turn<'a>(
    whole: Tensor<'a>,
    name: &str,
    (expert, (at, modules)): (usize, (usize, usize)),
) -> Result<Tensor<'a>, String> {
    let [_, outputs, inputs] = whole.shape[..] else {
        return Err(format!("{name} has shape {:?}", whole.shape));
    };
    if !outputs.is_multiple_of(modules) {
        return Err(format!("{name} has {outputs} outputs, which are not those of {modules} matrices"));
    }
    let rows = outputs / modules;
    let size = rows * inputs * whole.dtype.size();
    let range = (expert * modules + at) * size..(expert * modules + at + 1) * size;
    let cut = || format!("{name} has fewer bytes than its shape {:?}", whole.shape);
    let bytes = match &whole.bytes {
        Cow::Borrowed(bytes) => Cow::Borrowed(bytes.get(range).ok_or_else(cut)?),
        Cow::Owned(bytes) => Cow::Owned(bytes.get(range).ok_or_else(cut)?.to_vec()),
    };
    Ok(Tensor { shape: vec![rows, inputs], dtype: whole.dtype, bytes })
}

/// A model under this program's names as a checkpoint with joined experts, in plain numbers.
pub struct Joined<'a> {
    /// The model, with matrices of each expert.
    pub apart: &'a dyn Tensors,
    /// How the files of its family have them.
    pub how: JoinedExperts,
}

impl Joined<'_> {
    /// The names of the parts of a joined tensor: by expert, then by module. One line of biases.
    fn parts(&self, stored: &str) -> Result<Option<Vec<Vec<String>>>, String> {
        let Some((path, _, modules, suffix)) = joined(stored) else { return Ok(None) };
        let of = |expert| modules.iter().map(|m| part_name(path, m, expert)).collect::<Vec<_>>();
        if suffix == "_bias" {
            return Ok(Some(vec![of(None)]));
        }
        let mut all = Vec::new();
        while self.apart.about(&part_name(path, modules[0], Some(all.len())))?.is_some() {
            all.push(of(Some(all.len())));
        }
        Ok(Some(all).filter(|all| !all.is_empty()))
    }

    /// Shape and type of a joined tensor, whose parts are alike.
    fn shape(&self, stored: &str, parts: &[Vec<String>]) -> Result<Option<(Vec<usize>, Dtype)>, String> {
        let Some(About { shape, encoding }) = self.apart.about(&parts[0][0])? else { return Ok(None) };
        let dtype = if let Encoding::Plain(dtype) = encoding { dtype } else { Dtype::F32 };
        let (modules, &[outputs, inputs]) = (parts[0].len(), &shape[..]) else {
            return Err(format!("{stored}: a part of it has shape {shape:?}"));
        };
        Ok(Some(match stored.ends_with("_bias") {
            true => (vec![outputs, modules * inputs], dtype),
            false => {
                let [experts, inputs, outputs] = [parts.len(), inputs, modules * outputs];
                (self.how.shape([experts, inputs, outputs]).to_vec(), dtype)
            }
        }))
    }
}

impl Tensors for Joined<'_> {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        let Some(parts) = self.parts(name)? else { return self.apart.tensor(name) };
        let Some((shape, dtype)) = self.shape(name, &parts)? else { return Ok(None) };
        let (size, modules, is_bias) = (dtype.size(), parts[0].len(), name.ends_with("_bias"));
        let mut bytes = vec![0; shape.iter().product::<usize>() * size];
        let width = shape.last().copied().unwrap_or(0);
        let of_expert = bytes.len() / parts.len();
        for (names, out) in parts.iter().zip(bytes.chunks_exact_mut(of_expert.max(1))) {
            for (first, part) in names.iter().enumerate() {
                let tensor = self.apart.tensor(part)?.ok_or_else(|| format!("{part} is missing"))?;
                let cols = tensor.shape.last().copied().unwrap_or(0);
                if tensor.dtype != dtype {
                    return Err(format!(
                        "{part} and other parts of {name} have different types: --save-dtype f32 makes them alike"
                    ));
                }
                if tensor.bytes.len() * modules != out.len() {
                    return Err(format!("{part} is unlike the other parts of {name}"));
                }
                if self.how == JoinedExperts::InTurn {
                    out[first * tensor.bytes.len()..][..tensor.bytes.len()].copy_from_slice(&tensor.bytes);
                    continue;
                }
                out.par_chunks_mut((width * size).max(1)).enumerate().for_each(|(r, row)| {
                    for c in 0..width / modules {
                        let from = if is_bias { r * cols + c } else { c * cols + r };
                        row[(c * modules + first) * size..][..size]
                            .copy_from_slice(&tensor.bytes[from * size..][..size]);
                    }
                });
            }
        }
        Ok(Some(Tensor { shape, dtype, bytes: Cow::Owned(bytes) }))
    }

    fn about(&self, name: &str) -> Result<Option<About>, String> {
        let Some(parts) = self.parts(name)? else { return self.apart.about(name) };
        let shape = self.shape(name, &parts)?;
        Ok(shape.map(|(shape, dtype)| About { shape, encoding: Encoding::Plain(dtype) }))
    }

    fn names(&self) -> Vec<String> {
        let of = |name: String| match part(&name) {
            Some(Part { joined, expert: None, .. }) => format!("{joined}_bias"),
            Some(Part { joined, .. }) => joined,
            None => name,
        };
        let mut names: Vec<String> = self.apart.names().into_iter().map(of).collect();
        names.sort();
        names.dedup();
        names
    }

    fn file_of(&self, name: &str) -> Option<&Path> {
        self.apart.file_of(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::safetensors::{self, Spec};
    use crate::numeric::rng::Stream;

    const PATH: &str = "model.layers.3.mlp.experts";

    fn spec(name: &str, shape: &[usize]) -> Spec {
        Spec { name: format!("{PATH}.{name}"), dtype: Dtype::F32, shape: shape.to_vec() }
    }

    /// A checkpoint with two experts, three neurons and four channels, and the numbers of its tensors.
    fn checkpoint(dir: &Path) -> Vec<Vec<f32>> {
        let specs = [
            spec("down_proj", &[2, 3, 4]),
            spec("down_proj_bias", &[2, 4]),
            spec("gate_up_proj", &[2, 4, 6]),
            spec("gate_up_proj_bias", &[2, 6]),
        ];
        let mut draws = Stream::new(&[1]);
        let values: Vec<Vec<f32>> = specs
            .iter()
            .map(|spec| (0..spec.shape.iter().product()).map(|_| draws.unit()).collect())
            .collect();
        let bytes: Vec<Vec<u8>> = values.iter().map(|values| Dtype::F32.narrow(values)).collect();
        let all: Vec<(Spec, &[u8])> = specs.into_iter().zip(bytes.iter().map(|bytes| &bytes[..])).collect();
        safetensors::write(&dir.join("model.safetensors"), &all).unwrap();
        values
    }

    fn read(source: &dyn Tensors, name: &str) -> (Vec<usize>, Vec<f32>) {
        let tensor = source.tensor(&format!("{PATH}.{name}")).unwrap().unwrap();
        let about = source.about(&format!("{PATH}.{name}")).unwrap().unwrap();
        assert_eq!(about.shape, tensor.shape);
        (tensor.shape, Dtype::F32.widen(&tensor.bytes))
    }

    #[test]
    fn matrices_of_an_expert_are_parts_of_joined_tensors() {
        let dir = tempfile::tempdir().unwrap();
        let stored = checkpoint(dir.path());
        let [down, down_bias, both, both_bias] = &stored[..] else { unreachable!() };
        let apart = Apart::new(Sharded::open(dir.path()).unwrap(), JoinedExperts::Alternating);
        for expert in 0..2 {
            for (first, module) in ["gate_proj", "up_proj"].into_iter().enumerate() {
                let (shape, values) = read(&apart, &format!("{expert}.{module}.weight"));
                assert_eq!(shape, [3, 4]);
                let at = |f: usize, c: usize| both[expert * 24 + c * 6 + 2 * f + first];
                assert!((0..12).all(|i| values[i] == at(i / 4, i % 4)));
                let (shape, bias) = read(&apart, &format!("{module}.bias"));
                assert_eq!(shape, [2, 3]);
                assert!((0..6).all(|i| bias[i] == both_bias[i / 3 * 6 + 2 * (i % 3) + first]));
            }
            let (shape, values) = read(&apart, &format!("{expert}.down_proj.weight"));
            assert_eq!(shape, [4, 3]);
            assert!((0..12).all(|i| values[i] == down[expert * 12 + i % 3 * 4 + i / 3]));
        }
        assert_eq!(read(&apart, "down_proj.bias"), (vec![2, 4], down_bias.clone()));
        assert!(apart.tensor(&format!("{PATH}.2.up_proj.weight")).unwrap().is_none());
        assert_eq!(apart.names().len(), 2 * 3 + 3);
        // Joined again they are what the file has.
        let joined = Joined { apart: &apart, how: JoinedExperts::Alternating };
        assert_eq!(joined.names(), apart.files.names());
        for (name, values) in apart.files.names().iter().zip(&stored) {
            let name = name.strip_prefix(&format!("{PATH}.")).unwrap();
            assert_eq!(&read(&joined, name).1, values, "{name}");
        }
    }

    /// Rows of gate, then rows of up. The own tensor of an expert is read where its layer has no joined one.
    #[test]
    fn matrices_are_rows_of_joined_tensors() {
        let dir = tempfile::tempdir().unwrap();
        let both: Vec<u8> = (0..2 * 6 * 4).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let (odd, own) = (vec![0; 2 * 5 * 4 * 4], [7.0f32; 12].map(f32::to_le_bytes).concat());
        let all =
            [(spec("9.gate_proj.weight", &[3, 4]), &own[..]), (spec("gate_up_proj", &[2, 6, 4]), &both[..])];
        let file = dir.path().join("model.safetensors");
        safetensors::write(&file, &all).unwrap();
        let open = || Apart::new(Sharded::open(dir.path()).unwrap(), JoinedExperts::InTurn);
        let apart = open();
        for (expert, first, module) in
            [(0, 0.0, "gate_proj"), (0, 12.0, "up_proj"), (1, 24.0, "gate_proj"), (1, 36.0, "up_proj")]
        {
            let (shape, values) = read(&apart, &format!("{expert}.{module}.weight"));
            assert_eq!(shape, [3, 4]);
            assert!(values.iter().enumerate().all(|(i, value)| *value == first + i as f32), "{values:?}");
        }
        for beyond in ["2.up_proj", "9.gate_proj"] {
            assert!(apart.tensor(&format!("{PATH}.{beyond}.weight")).unwrap().is_none());
        }
        assert!(apart.tensor(&format!("{PATH}.0.down_proj.weight")).unwrap().is_none());
        safetensors::write(&file, &all[1..]).unwrap();
        let apart = open();
        let (shape, values) = read(&Joined { apart: &apart, how: JoinedExperts::InTurn }, "gate_up_proj");
        assert_eq!(shape, [2, 6, 4]);
        assert!(values.iter().enumerate().all(|(i, value)| *value == i as f32), "{values:?}");
        safetensors::write(&file, &[(spec("gate_up_proj", &[2, 5, 4]), &odd[..])]).unwrap();
        let error = open().tensor(&format!("{PATH}.0.up_proj.weight")).map(drop).unwrap_err();
        assert!(error.contains("5 outputs, which are not those of 2 matrices"), "{error}");
        safetensors::write(&file, &[(spec("9.gate_proj.weight", &[3, 4]), &own[..])]).unwrap();
        assert_eq!(read(&open(), "9.gate_proj.weight").1, [7.0; 12]);
    }

    #[test]
    fn parts_of_different_types_are_not_joined() {
        let dir = tempfile::tempdir().unwrap();
        let half = Spec { dtype: Dtype::Bf16, ..spec("0.up_proj.weight", &[3, 4]) };
        let all = [(spec("0.gate_proj.weight", &[3, 4]), &[0; 48][..]), (half, &[0; 24][..])];
        safetensors::write(&dir.path().join("model.safetensors"), &all).unwrap();
        let apart = Apart::new(Sharded::open(dir.path()).unwrap(), JoinedExperts::InTurn);
        let joined = Joined { apart: &apart, how: JoinedExperts::InTurn };
        let error = joined.tensor(&format!("{PATH}.gate_up_proj")).map(drop).unwrap_err();
        let part = format!("{PATH}.0.up_proj.weight and other parts");
        assert!(error.starts_with(&part) && error.contains("--save-dtype f32"), "{error}");
    }

    #[test]
    fn joined_tensors_of_other_dimensions_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let all =
            [(spec("gate_up_proj", &[4, 6]), &[0; 96][..]), (spec("down_proj_bias", &[8]), &[0; 32][..])];
        safetensors::write(&dir.path().join("model.safetensors"), &all).unwrap();
        let apart = Apart::new(Sharded::open(dir.path()).unwrap(), JoinedExperts::Alternating);
        for name in ["0.gate_proj.weight", "down_proj.bias"] {
            let error = apart.tensor(&format!("{PATH}.{name}")).map(drop).unwrap_err();
            assert!(error.contains("has shape"), "{error}");
        }
        assert_eq!(apart.names(), [format!("{PATH}.down_proj.bias")]);
        // A file of a few bytes may declare any number of experts with nothing in them.
        let all = [(spec("gate_up_proj", &[1 << 40, 0, 0]), &[][..])];
        safetensors::write(&dir.path().join("model.safetensors"), &all).unwrap();
        let apart = Apart::new(Sharded::open(dir.path()).unwrap(), JoinedExperts::Alternating);
        assert!(apart.names().is_empty());
        assert!(apart.about(&format!("{PATH}.7.gate_proj.weight")).is_err());
    }
}
