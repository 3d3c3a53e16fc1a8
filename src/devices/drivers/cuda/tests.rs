//! Memory of a model in blocks on an NVIDIA card, without the card.

use super::*;
use crate::cluster::worker::{Blueprint, Opener, Shape};
use crate::devices::seat::Seat;
use crate::model::config::Config;
use crate::model::decoder::Keep;
use crate::model::lora::LoraSpec;
use crate::model::memory::{self, Fit, Limit};
use crate::numeric::block::{Block, Encoding};
use crate::numeric::line::Line;
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
            _ => self.0.projection(name.rsplit('.').nth(1).unwrap_or_default()),
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
    let lora = LoraSpec { rank: 4, alpha: 8.0, rslora: false, dropout: 0.0, targets, seed: 1 };
    let shape = Shape { labels: None, class_weights: None, quantize: None, lora, tokens: 64, dtype: None };
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
fn the_slab_is_counted_once() {
    let blueprint = blueprint();
    let line = Line { fixed: 1e8, each: 1e5 };
    let fit = Fit { line, blocks: Keep::Inputs.blocks(blueprint.config.layers), tokens: 64 };
    let (with, without): (&[&str], &[&str]) = (&["compute 8.0", "bf16"], &["compute 7.0"]);
    for (features, dtype, number) in [
        (with, ComputeDtype::F32, 4),
        (with, ComputeDtype::Bf16, 2),
        // Without a typed value, the card's fastest type.
        (with, ComputeDtype::Auto, 2),
        (without, ComputeDtype::Auto, 4),
    ] {
        let (found, short) = (card(features), number == 2);
        let load = |measured| found.load(&Whole { measured, ..Whole::of(&blueprint) }, dtype).unwrap();
        let slab = cuda::slab_bytes(blueprint.config.vocab, number) as u64;
        assert_eq!(load(None).weights, load(Some(fit)).weights + slab, "what was measured has it in it");
        let beside = load(None).beside;
        let [with, token, none] = [beside, Beside { logits: 0, ..beside }, Beside::default()]
            .map(|beside| memory::estimate(Load { beside, ..load(None) }, Keep::Inputs).in_use);
        assert_eq!(token > none, short, "copies of the bf16 class, for each token");
        // The vocabulary is far wider than everything else: the head determines the peak.
        let gradient = if short { 64 * 70_000 * 2 } else { 0 };
        assert_eq!(with - token, gradient, "and of the gradient of logits");

        // A model with measured memory fits in a budget of exactly that size.
        let limit = Limit::Typed(memory::estimate(load(Some(fit)), Keep::Inputs).total());
        let seat = Seat { device: found, share: Share { dtype, threads: 1, limit } };
        assert!(seat.stands(&blueprint, fit).unwrap(), "{dtype:?}");
    }
}
