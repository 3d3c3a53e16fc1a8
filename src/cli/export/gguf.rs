//! `--to merged-gguf`: base and adapter as one GGUF. For a GGUF base the metadata is copied byte for byte, tensors
//! without an adapter keep their blocks where their type is unchanged, and only the rest is written again; for a
//! Hugging Face base everything is written as llama.cpp's converter writes it.

mod read_back;

use super::{Exported, Outtype, logits};
use crate::config::refusal::Refusal;
use crate::families::Windows;
use crate::families::tensors::of_expert;
use crate::format::gguf::mix::Model;
use crate::format::gguf::order::{self, Order, Orders};
use crate::format::gguf::{
    self, F32, Gguf, Info, Meta, Metadata, Planned, Rules, Scaling, Shape, encode, is_share, is_taps,
    stored_names,
};
use crate::format::{FormatError, atomic};
use crate::model::config::{Config, RopeScaling};
use crate::model::layout;
use crate::model::merge::Merged;
use crate::numeric::block::{Block, Encoding};
use crate::numeric::dtype::Dtype;
use crate::numeric::tensor::{Tensor, Tensors};
use crate::run::base_model::{self, BaseModel};
use crate::support::waiting::WRITING;
use read_back::{Rounded, same, same_ids};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// The metadata key that marks a file as an export, so that a later export may replace it.
pub const MARK: &str = "finetune.export";
/// Above this value the scale of a block, or a half-precision number, is infinite.
const LARGEST: f32 = 65504.0;
/// The largest value that does not round to infinity in bf16.
const LARGEST_BF16: f32 = f32::from_bits(0x7f7f_7fff);

/// A tensor of the file.
struct Plan {
    table: Planned,
    from: From,
}

/// Source of a tensor's bytes.
enum From {
    /// The base's file, unchanged.
    Stored,
    /// The merged tensors with these names, one after the other, in this order and with the numbers of the file; of each
    /// only a share of its rows.
    Merged(Vec<String>, Order, Share),
    /// The base's file, except for the rows that the merged tensor of this name replaces.
    Rows(String),
    /// Computed values.
    Values(Vec<f32>),
}

/// Which of how many equal shares of a tensor's rows.
#[derive(Debug, Clone, Copy)]
struct Share {
    at: usize,
    of: usize,
}

/// Writes the file and compares it with the merged model in memory.
pub fn write(source: &Exported, out: &Path, outtype: Outtype) -> Result<Value, Refusal> {
    let (base, loaded) = (&source.base, &source.loaded);
    let layout = layout::of(&loaded.config, &loaded.spec, 0..loaded.config.layers);
    let merged = Merged {
        base: &*base.files.tensors,
        config: &loaded.config,
        lora: &loaded.spec,
        layout: &layout,
        flat: &loaded.flat,
        magnitudes: &loaded.magnitudes,
        dtype: Some(Dtype::F32),
    };
    logits::fits(source, Some(&merged))?;
    refuse_scaling(base)?;
    let stored = match base.path.is_dir() {
        true => None,
        false => Some(Gguf::open(&base.path)?),
    };
    let plans = plans(base, stored.as_ref(), &merged, outtype)?;
    let metadata = metadata(base, stored.as_ref(), &plans, outtype)?;
    let orders = shape(base)?.orders();
    let rounded = Rounded { merged: &merged, kinds: kinds(&plans), rows: kinds_of_rows(&plans), orders };
    atomic::write_checked(out, |path| {
        let table: Vec<Planned> = plans.iter().map(|p| p.table.clone()).collect();
        let (mut each, mut last) = (plans.iter(), None);
        WRITING.begin((plans.len() + merged.names().len()) as u64);
        gguf::write(path, &metadata, &table, |t| match each.next() {
            Some(plan) => {
                WRITING.add(1);
                bytes(plan, stored.as_ref(), &merged, &mut last).map_err(|what| fault(out, t, what))
            }
            None => Err(fault(out, t, "was not planned".into())),
        })?;
        let again = base_model::open(&path.display().to_string())?;
        same_model(base, &again.config)?;
        same(&again, &rounded, out)?;
        same_ids(source, again, out)?;
        let again = base_model::open(&path.display().to_string())?;
        logits::compare(source, &merged, &again, (out, "merged-gguf"))
    })
}

fn fault(out: &Path, tensor: &Planned, what: String) -> FormatError {
    FormatError::Tensor { path: out.to_owned(), tensor: tensor.name.clone(), what }
}

/// A base's shape in llama.cpp's form.
pub fn shape(base: &BaseModel) -> Result<Shape, Refusal> {
    let c = &base.config;
    if let Some(missing) = c.family.not_in_gguf() {
        return Err(unwritten(base, &format!("{missing} ({})", c.architecture())));
    }
    if let Some(of) = &c.experts {
        let unknown = [
            (!of.normalised, "weights of experts that are not divided by their sum"),
            (of.sparse.contains(&false), "a layer without experts"),
        ];
        // llama.cpp takes both for granted.
        unknown.iter().find(|(has, _)| *has).map_or(Ok(()), |(_, what)| Err(unwritten(base, what)))?;
    }
    let grows = matches!(c.rope.scaling, RopeScaling::Yarn { growth, .. } if growth > 0.0);
    if c.family.query_growth.is_some() && !grows {
        return Err(unwritten(base, "queries that do not grow with their position"));
    }
    let id = base.files.base_id.as_deref().and_then(|id| id.rsplit('/').next());
    let folder = || base.path.file_stem().map(|s| s.to_string_lossy().into_owned());
    Ok(Shape {
        family: c.family,
        name: id.map(str::to_owned).or_else(folder).unwrap_or_else(|| "model".into()),
        vocab: c.vocab,
        context: c.max_positions,
        hidden: c.hidden,
        feed_forward: c.feed_forward,
        experts: c.experts.as_ref().map(|of| [of.count, of.chosen, of.feed_forward]),
        convolutions: c.convolutions.as_ref().map(|of| (of.taps, of.layers.clone())),
        delta_rules: c.delta_rules.as_ref().map(|of| Rules {
            taps: of.taps,
            keys: (of.heads.keys, of.heads.key_size),
            values: (of.heads.values, of.heads.value_size),
            every: of.layers.iter().position(|rule| !rule).map_or(c.layers + 1, |first| first + 1),
        }),
        layers: c.layers,
        heads: (c.heads.query, c.heads.kv, c.heads.size),
        rotary: c.rotary,
        rotates: c.rotated.contains(&true),
        eps: c.eps,
        theta: c.rope.theta,
        scaling: scaling(&c.rope.scaling),
        window: c.window(),
        slides: c.windows.iter().map(Option::is_some).collect(),
        scales: [c.score_scale, c.embedding_scale, c.residual_scale, c.logits_scale],
    })
}

fn scaling(of: &RopeScaling) -> Scaling {
    match *of {
        RopeScaling::Default | RopeScaling::Off => Scaling::Plain,
        RopeScaling::Linear { factor } => Scaling::Linear(factor),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } => {
            Scaling::Llama3(factor, low_freq_factor, high_freq_factor, original as f64)
        }
        RopeScaling::Yarn { factor, original, fast, slow, amplitude, growth, .. } => {
            Scaling::Yarn { factor, original, turns: [fast, slow], amplitude, growth }
        }
        RopeScaling::Long { ref short, ref long, original, amplitude } => {
            Scaling::Long { original, amplitude, factors: [long.clone(), short.clone()] }
        }
    }
}

fn unwritten(base: &BaseModel, what: &str) -> Refusal {
    let path = base.path.display();
    Refusal::configuration(format!("{path}: {what} is not written to GGUF: use --to merged"))
}

/// The numbers that a family multiplies by, and the epsilon of its norms.
fn factors(c: &Config) -> [f32; 4] {
    [c.embedding_scale, c.residual_scale, c.logits_scale, c.eps]
}

/// Whether the sliding layers are those that llama.cpp assumes.
fn usual_windows(c: &Config) -> bool {
    let slides = |layer: usize| match c.family.windows {
        Windows::Pattern(every, _) => !(layer + 1).is_multiple_of(every),
        _ => c.windows[layer].is_some(),
    };
    !c.family.gguf_lists_windows || (0..c.layers).all(|layer| c.windows[layer].is_some() == slides(layer))
}

/// Refuses a model whose file reads back as another one, because llama.cpp takes for granted what no metadata says.
fn same_model(base: &BaseModel, again: &Config) -> Result<(), Refusal> {
    let c = &base.config;
    let differs = [
        (c.windows != again.windows || !usual_windows(c), "this order of sliding layers"),
        ((&c.rope, &c.local_rope) != (&again.rope, &again.local_rope), "this rotary embedding"),
        (c.rotary != again.rotary, "this part of each head that is rotated"),
        (c.rotated != again.rotated, "this order of unrotated layers"),
        (c.experts != again.experts, "this choice of experts"),
        (c.convolutions != again.convolutions, "this order of convolutions"),
        (c.delta_rules != again.delta_rules, "this order of delta rules"),
        (c.score_scale != again.score_scale, "this scale of the scores"),
        (factors(c) != factors(again), "these factors"),
    ];
    let first = differs.into_iter().find(|(differs, _)| *differs);
    first.map_or(Ok(()), |(_, what)| Err(unwritten(base, what)))
}

/// llama.cpp would load the file, but it stores only the divisors of the frequencies, so we could not read it back.
fn refuse_scaling(base: &BaseModel) -> Result<(), Refusal> {
    let RopeScaling::Llama3 { low_freq_factor: low, high_freq_factor: high, original, .. } =
        base.config.rope.scaling
    else {
        return Ok(());
    };
    if (low, high, original as f64) == (1.0, 4.0, 8192.0) {
        return Ok(());
    }
    let what =
        format!("Llama 3's rope scaling by {low}, {high} and {original} positions instead of 1, 4 and 8192");
    let way = "use --to merged and llama.cpp's convert_hf_to_gguf.py";
    Err(Refusal::configuration(format!("{}: {what} is not written to GGUF: {way}", base.path.display())))
}

/// Metadata of the model and its tokens.
fn metadata(
    base: &BaseModel,
    stored: Option<&Gguf>,
    plans: &[Plan],
    outtype: Outtype,
) -> Result<Metadata, Refusal> {
    let files = &base.files.tokenizer;
    let mark = Meta::Text("merged".into());
    let Some(stored) = stored else {
        let mut all = shape(base)?.metadata(file_type(plans, outtype));
        all.set(MARK, mark);
        gguf::add_tokenizer(&mut all, files, &base.files.config, base.config.vocab).map_err(|why| {
            let way = "use --to merged and llama.cpp's convert_hf_to_gguf.py";
            Refusal::configuration(format!("{}: {why}: {way}", base.path.display()))
        })?;
        return Ok(all);
    };
    let mut all = Metadata::default();
    for (key, raw) in stored.raw_metadata() {
        all.set(key, Meta::Raw(raw.to_vec()));
    }
    // Tensors are placed again, at the default alignment.
    all.remove(|key| key == "general.alignment" || key.starts_with("split."));
    // Where types are unchanged the file type stays too: the mix of types (`Q4_K_S`) cannot be derived from tensors.
    if outtype != Outtype::Base {
        all.set("general.file_type", Meta::U32(file_type(plans, outtype)));
        all.set("general.quantization_version", Meta::U32(2));
    }
    let requantized =
        |p: &Plan| matches!((&p.from, p.table.kind), (From::Merged(..) | From::Rows(_), Encoding::Blocks(_)));
    if plans.iter().any(requantized) {
        // The base's blocks were made with an importance matrix, these are not.
        all.remove(|key| key.starts_with("quantize.imatrix."));
    }
    all.set(MARK, mark);
    if !base.added.is_empty() {
        gguf::extend_tokenizer(&mut all, stored, files, base.config.vocab)
            .map_err(|why| Refusal::configuration(format!("{}: {why}", base.path.display())))?;
    }
    if let Some(template) = &files.chat_template {
        all.set("tokenizer.chat_template", Meta::Text(template.clone()));
    }
    Ok(all)
}

/// The merged tensors of a tensor of the file.
struct Parts {
    /// By expert where it has all experts of a layer.
    names: BTreeMap<usize, String>,
    share: Share,
}

impl Parts {
    fn of(share: Share) -> Self {
        Parts { names: BTreeMap::new(), share }
    }
}

/// Map from the file's tensor names to the merged tensors' names.
fn names(base: &BaseModel, merged: &Merged) -> Result<BTreeMap<String, Parts>, Refusal> {
    let mut names: BTreeMap<String, Parts> = BTreeMap::new();
    let of_layer = base.config.family.layer_tensors();
    for name in merged.names() {
        if name.ends_with(".rotary_emb.inv_freq")
            || name.starts_with("mtp.")
            || (base.config.tied && name == "lm_head.weight")
        {
            continue;
        }
        if let Some((layer, expert, (stored, _))) = of_expert(&name) {
            let all = names.entry(format!("blk.{layer}.{stored}.weight"));
            all.or_insert_with(|| Parts::of(Share { at: 0, of: 1 })).names.insert(expert, name);
            continue;
        }
        let Some(as_stored) = stored_names(&name, &of_layer) else {
            let what = format!("{}: tensor {name} has no name in llama.cpp", base.path.display());
            return Err(Refusal::configuration(format!("{what}: use --to merged")));
        };
        let of = as_stored.len();
        for (at, as_stored) in as_stored.into_iter().enumerate() {
            let parts = Parts { names: BTreeMap::from([(0, name.clone())]), share: Share { at, of } };
            names.insert(as_stored, parts);
        }
    }
    Ok(names)
}

/// The model as the rules of mixes see it.
fn mixed<'a>(c: &'a Config, names: &BTreeMap<String, Parts>) -> Model<'a> {
    Model {
        architecture: c.family.gguf.architecture,
        layers: c.layers,
        heads: (c.heads.query, c.heads.kv),
        experts: c.experts.as_ref().map_or(0, |of| of.count),
        convolutions: c.convolutions.as_ref().map_or(&[], |of| &of.layers),
        tied: !names.contains_key("output.weight"),
    }
}

fn plans(
    base: &BaseModel,
    stored: Option<&Gguf>,
    merged: &Merged,
    outtype: Outtype,
) -> Result<Vec<Plan>, Refusal> {
    let (orders, names): (Orders, _) = (shape(base)?.orders(), names(base, merged)?);
    let model = mixed(&base.config, &names);
    let mut plans = Vec::new();
    // Tensors of the base's file that are not weights (`rope_freqs`) are copied unchanged.
    let others = stored.into_iter().flat_map(|file| file.tensors()).filter(|(n, _)| !names.contains_key(*n));
    for (name, info) in others {
        let table = Planned { name: name.clone(), shape: info.shape.clone(), kind: info.kind };
        plans.push(Plan { table, from: From::Stored });
    }
    for (as_stored, parts) in names {
        let Parts { names: parts, share } = parts;
        let (count, experts) = (parts.len(), parts.values().any(|name| of_expert(name).is_some()));
        let Some(name) = parts.values().next().cloned() else { continue };
        let Some(about) = merged.base.about(&name).map_err(Refusal::failure)? else { continue };
        let info = stored.and_then(|file| file.tensors().get(&as_stored));
        let own = own_kind(info, about.encoding);
        let row = about.shape.last().copied().unwrap_or(1);
        let plain =
            ["_norm.weight", ".ffn_gate_inp.weight", ".bias"].iter().any(|end| as_stored.ends_with(end));
        let squeezed = is_taps(&as_stored) || is_share(&as_stored);
        let vector = about.shape.len() < 2 || plain || squeezed;
        let kind = match outtype {
            Outtype::Base if info.is_some() => own,
            _ if vector => F32,
            Outtype::Base => own,
            // As the converter does where rows are not whole blocks.
            Outtype::All(kind) => gguf::adapter::kind_of(kind, row),
            Outtype::Mix(mix) => mix.kind(&model, &as_stored, row),
        };
        let stays = info.is_some() && own == kind;
        let more_rows = lacks_rows(base, &as_stored, info);
        let some_rows = merged.replaced(&name).is_some() || more_rows;
        let from = match some_rows {
            _ if stays && !merged.touches(&name) && !more_rows => From::Stored,
            true if stays => From::Rows(name),
            _ => From::Merged(parts.into_values().collect(), orders.of(&name), share),
        };
        let mut own = about.shape;
        own.iter_mut().take(1).for_each(|rows| *rows /= share.of);
        let own = own.into_iter().filter(|n| *n != 1 || !squeezed);
        let shape = experts.then_some(count).into_iter().chain(own).collect();
        plans.push(Plan { table: Planned { name: as_stored, shape, kind }, from });
    }
    let factors = if stored.is_none() { shape(base)?.rope_factors() } else { Vec::new() };
    for (name, factors) in factors {
        let table = Planned { name: name.into(), shape: vec![factors.len()], kind: F32 };
        plans.push(Plan { table, from: From::Values(factors) });
    }
    Ok(plans)
}

/// The type in which a base has a tensor.
fn own_kind(info: Option<&Info>, encoding: Encoding) -> Encoding {
    match (info, encoding) {
        (Some(info), _) => info.kind,
        // Blocks without a GGUF type are written as dequantized numbers.
        (None, Encoding::Blocks(Block::NF4)) => F32,
        (None, kind) => kind,
    }
}

/// Whether the base's file has no rows of added tokens in this tensor.
fn lacks_rows(base: &BaseModel, as_stored: &str, info: Option<&Info>) -> bool {
    let of_tokens = ["token_embd.weight", "output.weight"].contains(&as_stored);
    of_tokens && info.is_some_and(|info| info.shape[0] < base.config.vocab)
}

/// llama.cpp's number of the file's types.
fn file_type(plans: &[Plan], outtype: Outtype) -> u32 {
    match outtype {
        Outtype::Mix(mix) => mix.file_type(),
        _ => gguf::file_type_of(main_kind(plans)),
    }
}

/// The type of most numbers in matrices.
fn main_kind(plans: &[Plan]) -> Encoding {
    let mut sizes: BTreeMap<Encoding, usize> = BTreeMap::new();
    for table in plans.iter().map(|p| &p.table).filter(|t| t.shape.len() > 1) {
        *sizes.entry(table.kind).or_default() += table.shape.iter().product::<usize>();
    }
    sizes.into_iter().max_by_key(|&(_, n)| n).map_or(F32, |(kind, _)| kind)
}

/// The types of merged tensors by Hugging Face name, one for each share; `None` for a share that is not written again.
fn kinds(plans: &[Plan]) -> BTreeMap<String, Vec<Option<Encoding>>> {
    let mut kinds: BTreeMap<String, Vec<_>> = BTreeMap::new();
    for plan in plans {
        let From::Merged(names, _, Share { at, of }) = &plan.from else { continue };
        for name in names {
            kinds.entry(name.clone()).or_insert_with(|| vec![None; *of])[*at] = Some(plan.table.kind);
        }
    }
    kinds
}

/// The types of tensors of which only some rows are written again.
fn kinds_of_rows(plans: &[Plan]) -> BTreeMap<String, Encoding> {
    let kind = |plan: &Plan| match &plan.from {
        From::Rows(name) => Some((name.clone(), plan.table.kind)),
        _ => None,
    };
    plans.iter().filter_map(kind).collect()
}

/// The bytes of a tensor of the file. `last` is the merged tensor of which a later tensor has the next share, so that it
/// is merged once.
fn bytes<'a>(
    plan: &Plan,
    stored: Option<&Gguf>,
    merged: &'a Merged,
    last: &mut Option<(String, Tensor<'a>)>,
) -> Result<Vec<u8>, String> {
    let table = &plan.table;
    let as_stored = || -> Result<Vec<u8>, String> {
        let file = stored.ok_or("has no file to come from")?;
        let info = file.tensors().get(&table.name).ok_or("is not in the base any more")?;
        Ok(file.bytes(info).to_vec())
    };
    match &plan.from {
        From::Stored => as_stored(),
        From::Rows(name) => {
            let mut all = as_stored()?;
            let own = stored.and_then(|file| file.tensors().get(&table.name)).map(|info| info.shape[0]);
            if own.is_some_and(|own| own < table.shape[0]) {
                all.extend(rows_beyond(merged.base, name, all.len())?);
            }
            let size = all.len() / table.shape[0];
            for (row, values) in merged.replaced(name).into_iter().flatten() {
                let place = all.get_mut(row * size..(row + 1) * size).ok_or("has too few rows")?;
                place.copy_from_slice(&encode(table.kind, &checked(values.to_vec(), table.kind)?)?);
            }
            Ok(all)
        }
        From::Values(values) => encode(table.kind, values),
        From::Merged(names, order, Share { at, of }) => {
            let mut all = Vec::new();
            for name in names {
                let tensor = match last.take_if(|(own, _)| own == name) {
                    Some((_, tensor)) => tensor,
                    None => merged.tensor(name)?.ok_or("is not in the base any more")?,
                };
                let size = tensor.bytes.len() / of;
                let mut values = tensor.dtype.widen(&tensor.bytes[at * size..(at + 1) * size]);
                order::to_file(merged.config.family, name, &mut values);
                let values = order.stored(&checked(values, table.kind)?, tensor.shape[0] / of);
                all.extend(encode(table.kind, &values)?);
                *last = (at + 1 < *of).then(|| (name.clone(), tensor));
            }
            Ok(all)
        }
    }
}

/// The bytes of a matrix of the base after the first `from`: rows of added tokens, which the file does not have.
fn rows_beyond(base: &dyn Tensors, name: &str, from: usize) -> Result<Vec<u8>, String> {
    let rest = match base.blocks(name)? {
        Some(blocks) => blocks.bytes.get(from..).map(<[u8]>::to_vec),
        None => base.tensor(name)?.and_then(|tensor| Some(tensor.bytes.get(from..)?.to_vec())),
    };
    rest.ok_or_else(|| "has fewer rows than its file".into())
}

/// Refuses values that the type cannot represent.
fn checked(values: Vec<f32>, kind: Encoding) -> Result<Vec<f32>, String> {
    let most = match kind {
        Encoding::Plain(Dtype::F32) => f32::MAX,
        Encoding::Plain(Dtype::Bf16) => LARGEST_BF16,
        _ => LARGEST,
    };
    match values.iter().find(|v| v.is_nan() || v.abs() > most) {
        None => Ok(values),
        Some(v) => Err(format!("holds {v:e} after merging, which {} cannot hold", kind.name())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::gguf::decode;

    #[test]
    fn largest_numbers_of_an_encoding_stay_finite() {
        for kind in [F32, Encoding::Plain(Dtype::Bf16), gguf::F16] {
            let most = match kind {
                F32 => f32::MAX,
                Encoding::Plain(Dtype::Bf16) => LARGEST_BF16,
                _ => LARGEST,
            };
            let rounded = |v: f32| decode(kind, &encode(kind, &checked(vec![v], kind).unwrap()).unwrap());
            assert!(rounded(most)[0].is_finite() && rounded(-most)[0].is_finite(), "{}", kind.name());
            assert!(checked(vec![most.next_up()], kind).is_err(), "{}", kind.name());
        }
    }
}
