//! `--to merged-gguf`: base and adapter as one GGUF. Beside a GGUF base its metadata is carried over byte for
//! byte, tensors that no adapter touches keep their blocks where their kind stays, and only the rest is made
//! anew; beside a Hugging Face base everything is written as llama.cpp's converter writes it.

use super::super::opened::{self, Opened};
use super::super::refusal::Refusal;
use super::logits::{self, Compared, logits, plain_logits};
use super::{Outtype, Source};
use crate::data::tokenizer::Special;
use crate::format::gguf::{
    self, F32, Gguf, Meta, Metadata, Planned, Scaling, Shape, decode, encode, pair_rows, stored_name,
};
use crate::format::{FormatError, atomic};
use crate::model::config::{Family, RopeScaling};
use crate::model::layout;
use crate::model::merge::Merged;
use crate::numeric::block::Encoding;
use crate::numeric::dtype::Dtype;
use crate::numeric::tensor::{Tensor, Tensors};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

/// The key that says that the file was written here, so that a later export may replace it.
pub const MARK: &str = "finetune.export";
/// Beyond it a block's scale, or a number in half precision, is infinite.
const LARGEST: f32 = 65504.0;
/// Texts that every way of cutting text treats in its own way; the last is how a chat looks.
const TEXTS: [&str; 3] = [
    "Hello  world, it's 3 33 333 1234567 o'clock!!\n\n\t tabs, we'll SEE\r\n",
    " \u{e9}t\u{e9} \u{1f680} \u{6211}\u{60f3} \u{41d}\u{435}\u{449}\u{43e} def f(x):\n    return x+1  # ok\n",
    "<|im_start|>user\nhi<|im_end|>\n<|eot_id|><s>[INST] a [/INST]</s>",
];

/// A tensor of the file.
struct Plan {
    table: Planned,
    from: From,
}

/// Where its bytes come from.
enum From {
    /// The base's file, as they are.
    Stored,
    /// The merged tensor of that name; rows of so many heads are turned.
    Merged(String, Option<usize>),
    /// Computed.
    Values(Vec<f32>),
}

/// Writes the file and compares it with what is in memory.
pub fn write(source: &Source, out: &Path, outtype: Outtype) -> Result<Value, Refusal> {
    let (base, loaded, devices) = (&source.base, &source.loaded, &source.devices);
    let layout = layout::of(&loaded.config, &loaded.spec, 0..loaded.config.layers);
    let merged = Merged {
        base: &*base.files.tensors,
        config: &loaded.config,
        lora: &loaded.spec,
        layout: &layout,
        flat: &loaded.flat,
        dtype: Some(Dtype::F32),
    };
    let stored = match base.path.is_dir() {
        true => None,
        false => Some(Gguf::open(&base.path)?),
    };
    let plans = plans(base, stored.as_ref(), &merged, outtype)?;
    let metadata = metadata(base, stored.as_ref(), &plans, outtype)?;
    let rounded = Rounded { merged: &merged, kinds: kinds(&plans) };
    atomic::write_checked(out, |path| {
        let table: Vec<Planned> = plans.iter().map(|p| p.table.clone()).collect();
        let mut each = plans.iter();
        gguf::write(path, &metadata, &table, |t| match each.next() {
            Some(plan) => bytes(plan, stored.as_ref(), &merged).map_err(|what| fault(out, t, what)),
            None => Err(fault(out, t, "was not planned".into())),
        })?;
        let again = opened::open(&path.display().to_string())?;
        same(&again, &rounded, out)?;
        same_ids(source, again, out)?;
        let again = opened::open(&path.display().to_string())?;
        let probe = logits::probe(&loaded.config);
        let weights = (&loaded.config, &*base.files.tensors, &loaded.spec);
        let compared = Compared {
            adapted: logits(devices, weights, Some(&loaded.flat), &probe)?,
            unrounded: plain_logits(devices, (&loaded.config, &merged), &probe)?,
            source: plain_logits(devices, (&loaded.config, &rounded), &probe)?,
            read: plain_logits(devices, (&again.config, &*again.files.tensors), &probe)?,
        };
        let text = compared
            .verdict()
            .map_err(|why| Refusal::failure(format!("{}: not written: {why}; report this", out.display())))?;
        let moved = logits::apart(&compared.adapted, &compared.read);
        let kind = &again.files.kind;
        Ok(json!({ "kind": "merged-gguf", "weights": kind, "largest_difference": moved, "compared": text }))
    })
}

fn fault(out: &Path, tensor: &Planned, what: String) -> FormatError {
    FormatError::Tensor { path: out.to_owned(), tensor: tensor.name.clone(), what }
}

/// A base as llama.cpp describes one.
pub fn shape(base: &Opened) -> Result<Shape, Refusal> {
    let c = &base.config;
    let architecture = match c.family {
        Family::Llama | Family::Mistral => "llama",
        Family::Qwen2 => "qwen2",
        Family::Qwen3 => "qwen3",
    };
    let scaling = match c.rope.scaling {
        RopeScaling::Default => Scaling::Plain,
        RopeScaling::Linear { factor } => Scaling::Linear(factor),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } => {
            Scaling::Llama3(factor, low_freq_factor, high_freq_factor, original as f64)
        }
    };
    let id = base.files.base_id.as_deref().and_then(|id| id.rsplit('/').next());
    let folder = || base.path.file_stem().map(|s| s.to_string_lossy().into_owned());
    Ok(Shape {
        architecture,
        name: id.map(str::to_owned).or_else(folder).unwrap_or_else(|| "model".into()),
        vocab: c.vocab,
        context: c.max_positions,
        hidden: c.hidden,
        feed_forward: c.feed_forward,
        layers: c.layers,
        heads: (c.heads.query, c.heads.kv, c.heads.size),
        eps: c.eps,
        theta: c.rope.theta,
        scaling,
        window: c.window,
    })
}

/// What is said of the model and its tokens.
fn metadata(
    base: &Opened,
    stored: Option<&Gguf>,
    plans: &[Plan],
    outtype: Outtype,
) -> Result<Metadata, Refusal> {
    let files = &base.files.tokenizer;
    let mark = Meta::Text("merged".into());
    let Some(stored) = stored else {
        let mut all = shape(base)?.metadata(main_kind(plans));
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
    // Tensors are laid out anew, at the default alignment.
    all.remove(|key| key == "general.alignment" || key.starts_with("split."));
    // Kinds that stay are called what they were: which mix of them it is (`Q4_K_S`) no tensor says.
    if outtype != Outtype::Base {
        all.set("general.file_type", Meta::U32(gguf::file_type_of(main_kind(plans))));
        all.set("general.quantization_version", Meta::U32(2));
    }
    let anew = |p: &Plan| matches!((&p.from, p.table.kind), (From::Merged(..), Encoding::Blocks(_)));
    if plans.iter().any(anew) {
        // Its blocks were made with one, ours are not.
        all.remove(|key| key.starts_with("quantize.imatrix."));
    }
    all.set(MARK, mark);
    if let Some(template) = &files.chat_template {
        all.set("tokenizer.chat_template", Meta::Text(template.clone()));
    }
    Ok(all)
}

/// The merged tensors' names by those in the file.
fn names(base: &Opened, merged: &Merged) -> Result<BTreeMap<String, String>, Refusal> {
    let mut names = BTreeMap::new();
    for name in merged.names() {
        if name.ends_with(".rotary_emb.inv_freq") || (base.config.tied && name == "lm_head.weight") {
            continue;
        }
        let Some(as_stored) = stored_name(&name) else {
            let what = format!("{}: tensor {name} has no name in llama.cpp", base.path.display());
            return Err(Refusal::configuration(format!("{what}: use --to merged")));
        };
        names.insert(as_stored, name);
    }
    Ok(names)
}

fn plans(
    base: &Opened,
    stored: Option<&Gguf>,
    merged: &Merged,
    outtype: Outtype,
) -> Result<Vec<Plan>, Refusal> {
    let paired = shape(base)?.paired();
    let heads = |name: &str| match paired {
        Some((heads, _)) if name.contains(".q_proj.") => Some(heads),
        Some((_, heads)) if name.contains(".k_proj.") => Some(heads),
        _ => None,
    };
    let names = names(base, merged)?;
    let mut plans = Vec::new();
    // What the base's file has beside weights (`rope_freqs`) stays as it is.
    let others = stored.into_iter().flat_map(|file| file.tensors()).filter(|(n, _)| !names.contains_key(*n));
    for (name, info) in others {
        let table = Planned { name: name.clone(), shape: info.shape.clone(), kind: info.kind };
        plans.push(Plan { table, from: From::Stored });
    }
    for (as_stored, name) in names {
        let tensor = merged.base.tensor(&name).map_err(Refusal::failure)?;
        let Some(tensor) = tensor else { continue };
        let info = stored.and_then(|file| file.tensors().get(&as_stored));
        let own = info.map_or(Encoding::Plain(tensor.dtype), |info| info.kind);
        let row = tensor.shape.last().copied().unwrap_or(1);
        let vector = tensor.shape.len() < 2 || as_stored.ends_with("_norm.weight");
        let kind = match outtype {
            Outtype::Base if info.is_some() => own,
            _ if vector => F32,
            Outtype::Base => own,
            // As the converter does where rows are no whole blocks.
            Outtype::All(kind) => gguf::adapter::kind_of(kind, row),
        };
        let from = match info.is_some() && own == kind && !merged.touches(&name) {
            true => From::Stored,
            false => {
                let heads = heads(&name);
                From::Merged(name, heads)
            }
        };
        plans.push(Plan { table: Planned { name: as_stored, shape: tensor.shape, kind }, from });
    }
    if stored.is_none()
        && let Some(factors) = shape(base)?.rope_factors()
    {
        let table = Planned { name: "rope_freqs.weight".into(), shape: vec![factors.len()], kind: F32 };
        plans.push(Plan { table, from: From::Values(factors) });
    }
    Ok(plans)
}

/// The kind that most numbers of matrices have.
fn main_kind(plans: &[Plan]) -> Encoding {
    let mut sizes: BTreeMap<Encoding, usize> = BTreeMap::new();
    for table in plans.iter().map(|p| &p.table).filter(|t| t.shape.len() > 1) {
        *sizes.entry(table.kind).or_default() += table.shape.iter().product::<usize>();
    }
    sizes.into_iter().max_by_key(|&(_, n)| n).map_or(F32, |(kind, _)| kind)
}

/// The kinds of merged tensors by their Hugging Face names.
fn kinds(plans: &[Plan]) -> BTreeMap<String, Encoding> {
    let kind = |plan: &Plan| match &plan.from {
        From::Merged(name, _) => Some((name.clone(), plan.table.kind)),
        _ => None,
    };
    plans.iter().filter_map(kind).collect()
}

fn bytes(plan: &Plan, stored: Option<&Gguf>, merged: &Merged) -> Result<Vec<u8>, String> {
    let table = &plan.table;
    match &plan.from {
        From::Stored => {
            let file = stored.ok_or("has no file to come from")?;
            let info = file.tensors().get(&table.name).ok_or("is not in the base any more")?;
            Ok(file.bytes(info).to_vec())
        }
        From::Values(values) => encode(table.kind, values),
        From::Merged(name, heads) => {
            let tensor = merged.tensor(name)?.ok_or("is not in the base any more")?;
            let values = checked(tensor.dtype.widen(&tensor.bytes), table.kind)?;
            match heads {
                // A vector that is turned has rows of one element.
                Some(heads) => encode(table.kind, &pair_rows(&values, tensor.shape[0], *heads)),
                None => encode(table.kind, &values),
            }
        }
    }
}

/// Refuses what the kind cannot hold.
fn checked(values: Vec<f32>, kind: Encoding) -> Result<Vec<f32>, String> {
    let most = if matches!(kind, Encoding::Plain(Dtype::F32 | Dtype::Bf16)) { f32::MAX } else { LARGEST };
    match values.iter().find(|v| v.is_nan() || v.abs() > most) {
        None => Ok(values),
        Some(v) => Err(format!("holds {v:e} after merging, which {} cannot hold", kind.name())),
    }
}

/// The merged model with every number as the file's kinds leave it.
struct Rounded<'a> {
    merged: &'a Merged<'a>,
    kinds: BTreeMap<String, Encoding>,
}

impl Tensors for Rounded<'_> {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        let Some(tensor) = self.merged.tensor(name)? else { return Ok(None) };
        let Some(&kind) = self.kinds.get(name) else { return Ok(Some(tensor)) };
        let packed = encode(kind, &tensor.dtype.widen(&tensor.bytes))?;
        let bytes = Cow::Owned(Dtype::F32.narrow(&decode(kind, &packed)));
        Ok(Some(Tensor { shape: tensor.shape, dtype: Dtype::F32, bytes }))
    }

    fn names(&self) -> Vec<String> {
        self.merged.names()
    }
}

/// Every number of the file is the one in memory.
fn same(again: &Opened, rounded: &Rounded, out: &Path) -> Result<(), Refusal> {
    for name in again.files.tensors.names() {
        let values = |t: &dyn Tensors| -> Result<Option<Vec<f32>>, Refusal> {
            Ok(t.tensor(&name).map_err(Refusal::failure)?.map(|t| t.dtype.widen(&t.bytes)))
        };
        // A base without a head has no `model.` before its names.
        let bare = name.strip_prefix("model.").unwrap_or(&name);
        let one = match values(rounded)? {
            Some(values) => Some(values),
            None => rounded.tensor(bare).map_err(Refusal::failure)?.map(|t| t.dtype.widen(&t.bytes)),
        };
        if one != values(&*again.files.tensors)? {
            return Err(Refusal::failure(format!(
                "{}: not written: {name} reads back otherwise; report this",
                out.display()
            )));
        }
    }
    Ok(())
}

/// The file's tokenizer gives the ids of the one that was trained with.
fn same_ids(source: &Source, mut again: Opened, out: &Path) -> Result<(), Refusal> {
    let other = again.tokenizer(None)?;
    for text in TEXTS {
        for special in [Special::Add, Special::Omit] {
            if source.tokenizer.encode(text, special)? != other.encode(text, special)? {
                let way = "use --to merged and llama.cpp's convert_hf_to_gguf.py";
                return Err(Refusal::configuration(format!(
                    "{}: not written: its tokenizer would give other ids for {text:?}: {way}",
                    out.display()
                )));
            }
        }
    }
    Ok(())
}
