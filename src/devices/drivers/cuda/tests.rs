//! Memory of a model in blocks on an NVIDIA card, without the card.

use super::*;
use crate::cluster::worker::{Blueprint, Shape};
use crate::model::config::Config;
use crate::model::decoder::Keep;
use crate::model::lora::LoraSpec;
use crate::model::memory;
use crate::numeric::block::{Block, Encoding};
use crate::numeric::tensor::{About, Tensor, Tensors};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Matrices whose storage type is their only used property.
struct InBlocks(Config);

impl Tensors for InBlocks {
    fn tensor(&self, _: &str) -> Result<Option<Tensor<'_>>, String> {
        Ok(None)
    }

    fn about(&self, name: &str) -> Result<Option<About>, String> {
        let Some(name) = name.strip_prefix("model.") else { return Ok(None) };
        let shape = match name {
            "embed_tokens.weight" => Some((self.0.vocab, self.0.hidden)),
            _ => self.0.projection(0, name.rsplit('.').nth(1).unwrap_or_default()),
        };
        let encoding = Encoding::Blocks(Block::Q4_K);
        Ok(shape.map(|(rows, cols)| About { shape: vec![rows, cols], encoding }))
    }

    fn names(&self) -> Vec<String> {
        Vec::new()
    }
}

fn blueprint() -> Blueprint {
    let config = Config::from_json(&serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 70_000, "hidden_size": 256,
        "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "tie_word_embeddings": true, "hidden_act": "silu",
    }))
    .unwrap();
    let targets = vec!["q_proj".to_string()];
    let lora = LoraSpec { rank: 4, alpha: 8.0, targets, seed: 1, ..LoraSpec::none() };
    let shape = Shape::plain(lora, 64);
    Blueprint { tensors: Arc::new(InBlocks(config.clone())), config, shape }
}

fn card(features: &[&str]) -> &'static dyn Device {
    let device = cuda::Device {
        ordinal: 0,
        name: "a card".into(),
        pci: "0000:01:00.0".into(),
        memory: 8 << 30,
        capability: (8, 0),
        integrated: false,
    };
    let facts = Facts {
        name: "a card".into(),
        kind: Kind::Discrete,
        api: "cuda".into(),
        driver: "a driver".into(),
        pci: "0000:01:00.0".into(),
        card: "01:00.0".into(),
        features: features.iter().map(|f| f.to_string()).collect(),
        limits: BTreeMap::new(),
    };
    Box::leak(Box::new(Card { device, facts }))
}

#[test]
fn copies_and_the_slab_are_counted_inside_ops() {
    let blueprint = blueprint();
    let (with, without): (&[&str], &[&str]) = (&["compute 8.0", "bf16"], &["compute 7.0"]);
    for (features, dtype, number) in [
        (with, ComputeDtype::F32, 4),
        (with, ComputeDtype::Bf16, 2),
        // Without a typed value, the card's fastest type.
        (with, ComputeDtype::Auto, 2),
        (without, ComputeDtype::Auto, 4),
    ] {
        let load = card(features).load(&Whole::of(&blueprint), dtype).unwrap();
        let in_use = |load| memory::estimate(load, Keep::Inputs).unwrap().in_use;
        // The vocabulary is far wider than everything else: the head's gradient determines the peak. Its slab is a strip
        // as wide as a tile.
        let slab = in_use(load) - in_use(Load { quantised: false, ..load });
        let numbers = 128 * 70_000;
        let copy = if number == 2 { 64 * 70_000 * 2 } else { 0 };
        let logits = 64 * 70_000 * 4;
        assert!(slab.abs_diff(numbers * number) < numbers * number / 4, "{dtype:?}: {slab}");
        assert!(in_use(load) > slab + logits + copy, "{dtype:?}: {}", in_use(load));
        assert!(in_use(load) < (slab + logits + copy) * 5 / 4 + 3_000_000, "{dtype:?}: {}", in_use(load));
    }
}
