//! A model of each family with random weights, and the demonstration's tokenizer.

#[path = "../families/own_keys.rs"]
mod own_keys;

use crate::cli_fixture::Bench;
use finetune::families::{Family, JoinedExperts};
use finetune::format::Joined;
use finetune::format::safetensors::{self, Spec};
use finetune::model::config::Config;
use finetune::model::layout::{LayerMatrix, matrices};
use finetune::numeric::block::{Block, quantise};
use finetune::numeric::dtype::Dtype;
use finetune::numeric::rng::Stream;
use finetune::numeric::tensor::{Tensor, Tensors};
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// The demonstration's tokenizer with six layers of the family; rows are longer than its windows.
fn configure(family: &Family, hidden: usize, config: &mut Value) {
    for (key, value) in [
        ("architectures", json!([format!("{}ForCausalLM", family.name)])),
        ("model_type", json!(family.model_type)),
        ("num_hidden_layers", json!(6)),
        ("hidden_size", json!(hidden)),
        ("intermediate_size", json!(2 * hidden)),
        ("head_dim", json!(16)),
        ("tie_word_embeddings", json!(family.tied)),
        ("hidden_act", Value::Null),
        ("rope_parameters", Value::Null),
    ] {
        config[key] = value;
    }
    own_keys::set(family, 8, config);
}

/// Writes the folder `base`.
pub fn write(b: &Bench, family: &Family) {
    sized(b, family, 64);
}

/// The same with hidden states of that many numbers.
pub fn sized(b: &Bench, family: &Family, hidden: usize) {
    with_experts(b, family, hidden, family.joined_experts);
}

/// The same with experts in joined tensors, or with a tensor for each.
pub fn with_experts(b: &Bench, family: &Family, hidden: usize, joined_experts: Option<JoinedExperts>) {
    b.model_with("base", "config.json", |config| configure(family, hidden, config));
    let config = Config::from_json(&serde_json::from_slice(&b.read("base/config.json")).unwrap()).unwrap();
    let c = config.hidden;
    let mut shapes = vec![("model.embed_tokens".to_owned(), vec![config.vocab, c])];
    shapes.push((format!("model.{}", family.last_norm), vec![c]));
    shapes.extend((!config.tied).then(|| ("lm_head".into(), vec![config.vocab, c])));
    let norms = [family.attention_norms, family.mlp_norms].map(|n| [n.before, n.after]);
    for layer in 0..config.layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        shapes.extend(norms.as_flattened().iter().flatten().map(|norm| (name(norm), vec![c])));
        let sizes = config.head_norms(layer).into_iter().flatten();
        shapes.extend(family.head_norm_names.iter().zip(sizes).map(|(n, d)| (name(n), vec![d])));
        shapes.extend(config.taps(layer).map(|taps| (name("conv.conv"), vec![c, 1, taps])));
        for LayerMatrix { path, shape: (n, k), .. } in matrices(&config, layer) {
            shapes.push((format!("model.{path}"), vec![n, k]));
        }
    }
    let of_rules: Vec<_> = (0..config.layers).flat_map(|l| own_keys::of_delta_rule(&config, l)).collect();
    let mut tensors: Vec<(Spec, Vec<u8>)> = Vec::new();
    let mut add = |name: String, shape: Vec<usize>| {
        let (mut draws, n) = (Stream::new(&[tensors.len() as u64]), shape.iter().product::<usize>());
        // Norms are around 1, as stored; what they stand for is 1 + w in some families.
        let (mean, size) = match name.contains("norm") {
            true if name.contains("linear_attn") => (1.0, 0.2),
            true => (1.0 - family.gain_offset, 0.2),
            false => (0.0, 0.3),
        };
        let values: Vec<f32> = (0..n).map(|_| mean + size * (draws.unit() - 0.5)).collect();
        tensors.push((Spec { name, dtype: Dtype::Bf16, shape }, Dtype::Bf16.narrow(&values)));
    };
    for (name, shape) in shapes {
        let biased = config.qkv_bias && ["q_proj", "k_proj", "v_proj"].iter().any(|m| name.ends_with(m));
        if biased || config.o_bias && name.ends_with("o_proj") {
            add(format!("{name}.bias"), shape[..1].to_vec());
        }
        add(format!("{name}.weight"), shape);
    }
    of_rules.into_iter().for_each(|(name, shape)| add(name, shape));
    (0..config.layers).flat_map(|l| own_keys::of_joined_experts(&config, l)).for_each(|(n, s)| add(n, s));
    (0..config.layers).filter_map(|l| own_keys::of_shared_expert(&config, l)).for_each(|(n, s)| add(n, s));
    if let Some(how) = joined_experts {
        tensors = joined(tensors, how);
    }
    let all: Vec<(Spec, &[u8])> = tensors.iter().map(|(spec, bytes)| (spec.clone(), &bytes[..])).collect();
    safetensors::write(&b.path("base/model.safetensors"), &all).unwrap();
}

/// The tensors as the files of a family with joined experts have them.
fn joined(tensors: Vec<(Spec, Vec<u8>)>, how: JoinedExperts) -> Vec<(Spec, Vec<u8>)> {
    let apart =
        InMemory(tensors.into_iter().map(|(spec, bytes)| (spec.name.clone(), (spec, bytes))).collect());
    let joined = Joined { apart: &apart, how };
    let of = |name: String| {
        let tensor = joined.tensor(&name).unwrap().unwrap();
        (Spec { name, dtype: tensor.dtype, shape: tensor.shape }, tensor.bytes.into_owned())
    };
    joined.names().into_iter().map(of).collect()
}

struct InMemory(BTreeMap<String, (Spec, Vec<u8>)>);

impl Tensors for InMemory {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        Ok(self.0.get(name).map(|(spec, bytes)| Tensor {
            shape: spec.shape.clone(),
            dtype: spec.dtype,
            bytes: Cow::Borrowed(bytes),
        }))
    }

    fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }
}

/// Puts the experts of a base of joined ones into MXFP4, as OpenAI's files have them.
pub fn in_mxfp4(b: &Bench) {
    let base = safetensors::open(&b.path("base/model.safetensors")).unwrap();
    let mut tensors: Vec<Raw> = Vec::new();
    for name in base.names() {
        let tensor = base.get(&name).unwrap();
        let &[experts, inputs, outputs] = &tensor.shape[..] else {
            tensors.push((name, "BF16", tensor.shape, tensor.bytes.into_owned()));
            continue;
        };
        let stored = tensor.dtype.widen(&tensor.bytes);
        let at = |e: usize, n: usize, k: usize| stored[(e * inputs + k) * outputs + n];
        let rows = (0..experts * outputs).flat_map(|row| (0..inputs).map(move |k| (row, k)));
        let values: Vec<f32> = rows.map(|(row, k)| at(row / outputs, row % outputs, k)).collect();
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for block in quantise(Block::MXFP4, &values).unwrap().chunks_exact(17) {
            let code = |i: usize| block[1 + i % 16] >> (i / 16 * 4) & 15;
            scales.push(block[0]);
            codes.extend((0..16).map(|i| code(2 * i) | code(2 * i + 1) << 4));
        }
        let shape = [experts, outputs, inputs / 32];
        tensors.push((format!("{name}_blocks"), "U8", [&shape[..], &[16]].concat(), codes));
        tensors.push((format!("{name}_scales"), "U8", shape.to_vec(), scales));
    }
    store(b, tensors, json!({"quant_method": "mxfp4"}));
}

/// Name, type, shape and bytes of a tensor.
pub type Raw = (String, &'static str, Vec<usize>, Vec<u8>);

/// Replaces the base's tensors by these, the widest types first, and says how they are quantised.
pub fn store(b: &Bench, mut tensors: Vec<Raw>, method: Value) {
    let rank = |kind: &str| ["F32", "BF16", "U8"].iter().position(|other| *other == kind);
    tensors.sort_by(|a, b| (rank(a.1), &a.0).cmp(&(rank(b.1), &b.0)));
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        data.extend(bytes);
    }
    let header = Value::Object(header).to_string().into_bytes();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    std::fs::write(b.path("base/model.safetensors"), file).unwrap();
    let mut config: Value = serde_json::from_slice(&b.read("base/config.json")).unwrap();
    config["quantization_config"] = method;
    b.file("base/config.json", &config.to_string());
}
