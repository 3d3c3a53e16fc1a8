//! `--to mlx`: the adapter alone, in the form that mlx-lm loads (`load_adapters` in mlx_lm/tuner/utils.py of
//! ml-explore/mlx-lm at d78bf58e). mlx-lm first gives each module of adapter_config.json, in the last `num_layers` layers,
//! an adapter of one rank and one scale without effect, and then reads the values of those in the file. So layers may
//! differ in their modules, but not in rank or scale.

use super::Exported;
use crate::config::refusal::Refusal;
use crate::families::Family;
use crate::families::wrapped::PATH;
use crate::format::safetensors::{self, Spec};
use crate::format::{FormatError, atomic, peft};
use crate::model::config::Config;
use crate::model::layout::{self, Entry, Layout};
use crate::model::lora::LoraSpec;
use crate::numeric::dtype::Dtype;
use crate::run::adapter;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

/// Name of the weights file.
pub const WEIGHTS: &str = "adapters.safetensors";

/// The layers that mlx-lm gives an adapter.
#[derive(Debug, PartialEq)]
struct Adapted {
    /// How many, counted from the last one.
    layers: usize,
    /// Rank of every module.
    rank: usize,
    /// Their modules, such as `self_attn.q_proj`.
    keys: BTreeSet<String>,
}

/// Writes the folder and compares it with the adapter in memory. The base's name is the one in the adapter at `from`.
pub fn write(source: &Exported, from: &Path, out: &Path) -> Result<Value, Refusal> {
    let (loaded, flat) = (&source.loaded, &source.loaded.flat);
    let layout = layout::of(&loaded.config, &loaded.spec, 0..loaded.config.layers);
    let scale = scale(&loaded.spec, &loaded.config);
    let held = adapted(&layout, loaded.config.family, loaded.config.layers)
        .and_then(|adapted| Ok((adapted, scale?)));
    let (adapted, scale) = held.map_err(|what| {
        let way = match loaded.config.family.biased_experts {
            true => "use --to peft",
            false => "use --to peft, or --to merged, which mlx-lm loads as a model",
        };
        Refusal::configuration(format!("{}: mlx-lm does not hold {what}: {way}", from.display()))
    })?;
    let named = peft::config(from)?.base_model_name_or_path;
    let config = json!({
        "fine_tune_type": "lora",
        "model": named.or_else(|| source.base.files.base_id.clone()),
        "num_layers": adapted.layers,
        "lora_parameters": {
            "rank": adapted.rank, "scale": scale, "dropout": 0.0, "keys": adapted.keys,
        },
    });
    atomic::write_dir(out, |dir| {
        let path = dir.join(WEIGHTS);
        let tensor = |e: &Entry| {
            let values = transposed(&flat[e.range()], e.rows);
            (
                Spec { name: name(&e.name), dtype: Dtype::F32, shape: vec![e.cols, e.rows] },
                Dtype::F32.narrow(&values),
            )
        };
        let tensors: Vec<_> = layout.entries().iter().map(tensor).collect();
        let all: Vec<(Spec, &[u8])> =
            tensors.iter().map(|(spec, bytes)| (spec.clone(), &bytes[..])).collect();
        safetensors::write(&path, &all)?;
        atomic::write_file(&dir.join(peft::CONFIG), format!("{config:#}\n").as_bytes())?;
        adapter::same_values(flat, &read(&path, &layout)?, out)?;
        let compared = "read back: the same values, bit for bit";
        Ok(json!({ "kind": "mlx", "compared": compared, "largest_difference": 0.0 }))
    })
}

/// The values of a file, in the order of the layout.
fn read(path: &Path, layout: &Layout) -> Result<Vec<f32>, FormatError> {
    let file = safetensors::open(path)?;
    let mut flat = Vec::with_capacity(layout.len());
    for entry in layout.entries() {
        let name = name(&entry.name);
        let missing =
            || FormatError::Tensor { path: path.to_owned(), tensor: name.clone(), what: "is missing".into() };
        let tensor = file.get(&name).ok_or_else(missing)?;
        flat.extend(transposed(&tensor.dtype.widen(&tensor.bytes), entry.cols));
    }
    Ok(flat)
}

/// The transpose of a matrix with `rows` rows.
fn transposed(values: &[f32], rows: usize) -> Vec<f32> {
    let cols = values.len() / rows.max(1);
    (0..values.len()).map(|i| values[i % rows * cols + i / rows]).collect()
}

/// mlx-lm's name of a tensor of PEFT: `model.layers.0.self_attn.q_proj.lora_a`.
fn name(of_peft: &str) -> String {
    let path = of_peft.strip_prefix("base_model.model.").unwrap_or(of_peft);
    // mlx-lm has a text model beside a tower as a whole below `language_model`.
    let path = match path.strip_prefix("model.").and_then(|rest| rest.strip_prefix(PATH)) {
        Some(rest) => format!("{PATH}model.{rest}"),
        None => path.to_owned(),
    };
    path.replace(".lora_A.weight", ".lora_a").replace(".lora_B.weight", ".lora_b")
}

/// The scale of all adapters; the error is that there are several.
fn scale(spec: &LoraSpec, config: &Config) -> Result<f32, String> {
    let all = (0..config.layers).flat_map(|layer| layout::adapted(config, layer).map(move |m| (layer, m)));
    let mut scales = all.filter_map(|(layer, m)| Some(spec.scale_of(spec.adapter(layer, m.module())?)));
    let one = scales.next().unwrap_or_else(|| spec.scale());
    if scales.all(|scale| scale == one) { Ok(one) } else { Err("adapters of several scales".into()) }
}

/// What mlx-lm has to adapt; the error is what it cannot hold.
fn adapted(layout: &Layout, family: &Family, layers: usize) -> Result<Adapted, String> {
    let (mut first, mut ranks, mut keys) = (layers, BTreeSet::new(), BTreeSet::new());
    if layout.ending(".trainable_tokens_delta").is_some() {
        return Err("trained rows of tokens".into());
    }
    if layout.ending(".lora_embedding_A").is_some() {
        return Err("an adapter on the embedding".into());
    }
    for entry in layout.entries() {
        let Some(path) = entry.name.strip_suffix(".lora_A.weight") else { continue };
        let place = path.split_once(".layers.").and_then(|(_, rest)| rest.split_once('.'));
        let numbered = place.and_then(|(layer, key)| Some((layer.parse().ok()?, key.to_owned())));
        let (layer, key) = numbered.ok_or_else(|| format!("an adapter on {path}"))?;
        first = first.min(layer);
        keys.insert(key);
        ranks.insert(entry.rows);
    }
    // mlx-lm has the halves of such a matrix alone, and other names in the whole feed-forward.
    let renamed = family.halved_in_gguf().and_then(|name| name.split_once('.'));
    if let Some(key) = keys.iter().find(|key| renamed.is_some_and(|(own, _)| key.starts_with(own))) {
        return Err(format!("an adapter on {key}"));
    }
    match ranks.iter().copied().collect::<Vec<_>>()[..] {
        [rank] => Ok(Adapted { layers: layers - first, rank, keys }),
        _ => Err(format!("several ranks ({ranks:?})")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::families::{GRANITE_MOE_HYBRID, LLAMA};

    fn layout(adapters: &[(&str, usize)]) -> Layout {
        let mut layout = Layout::default();
        for (path, rank) in adapters {
            layout.push(format!("base_model.model.model.{path}.lora_A.weight"), *rank, 8);
            layout.push(format!("base_model.model.model.{path}.lora_B.weight"), 8, *rank);
        }
        layout
    }

    #[test]
    fn last_layers_of_one_rank_are_adapted() {
        let of = |adapters: &[_]| adapted(&layout(adapters), &LLAMA, 6);
        let two = [("layers.4.mlp.up_proj", 4), ("layers.5.self_attn.q_proj", 4)];
        let keys = BTreeSet::from(["mlp.up_proj".into(), "self_attn.q_proj".into()]);
        assert_eq!(of(&two), Ok(Adapted { layers: 2, rank: 4, keys }));
        assert_eq!(of(&[two[0], ("layers.5.self_attn.q_proj", 8)]), Err("several ranks ({4, 8})".into()));
        let embedding = of(&[("embed_tokens", 4)]).unwrap_err();
        assert_eq!(embedding, "an adapter on base_model.model.model.embed_tokens");
        let renamed = layout(&[two[1], ("layers.5.shared_mlp.output_linear", 4)]);
        let renamed = adapted(&renamed, &GRANITE_MOE_HYBRID, 6);
        assert_eq!(renamed, Err("an adapter on shared_mlp.output_linear".into()));
    }

    #[test]
    fn names_are_those_of_mlx_lm() {
        for (of_peft, of_mlx) in [
            ("model.layers.0.self_attn.q_proj.lora_A.weight", "model.layers.0.self_attn.q_proj.lora_a"),
            (
                "model.language_model.layers.1.mlp.up_proj.lora_B.weight",
                "language_model.model.layers.1.mlp.up_proj.lora_b",
            ),
        ] {
            assert_eq!(name(&format!("base_model.model.{of_peft}")), of_mlx);
        }
    }

    #[test]
    fn matrices_are_transposed() {
        let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        assert_eq!(transposed(&values, 2), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        assert_eq!(transposed(&transposed(&values, 2), 3), values);
    }
}
