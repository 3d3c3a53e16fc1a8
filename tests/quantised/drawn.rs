//! A model of one layer with random numbers: its matrices in blocks, each type at least once, the other tensors plain.

#[path = "../families/own_keys.rs"]
mod own_keys;

use finetune::families::Family;
use finetune::model::config::Config;
use finetune::model::layout;
use finetune::model::lora::LoraSpec;
use finetune::model::stage::{IGNORE, Microbatch, Targets};
use finetune::numeric::block::{Block, Blocks, Encoding, quantise};
use finetune::numeric::dtype::Dtype;
use finetune::numeric::rng::Stream;
use finetune::numeric::tensor::{About, Tensor, Tensors};
use serde_json::json;
use std::borrow::Cow;
use std::collections::BTreeMap;

pub struct Drawn {
    pub config: Config,
    shapes: BTreeMap<String, Vec<usize>>,
}

fn draw(key: u64, n: usize, size: f32) -> Vec<f32> {
    let mut stream = Stream::new(&[7, key]);
    (0..n).map(|_| (stream.unit() - 0.5) * size).collect()
}

impl Drawn {
    pub fn new(family: &Family) -> Self {
        let class = format!("{}ForCausalLM", family.name);
        // Rows of whole super blocks.
        let mut config = json!({
            "model_type": family.model_type, "architectures": [class], "vocab_size": 64, "hidden_size": 256,
            "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
            "tie_word_embeddings": false,
        });
        own_keys::set(family, 5, &mut config);
        let config = Config::from_json(&config).unwrap();
        let mut shapes = BTreeMap::new();
        let mut add = |name: &str, shape: &[usize]| drop(shapes.insert(name.to_owned(), shape.to_vec()));
        let (v, c) = (config.vocab, config.hidden);
        add("model.embed_tokens.weight", &[v, c]);
        add("lm_head.weight", &[v, c]);
        add(&format!("model.{}.weight", family.last_norm), &[c]);
        let norms = [family.attention_norms, family.mlp_norms].map(|norms| [norms.before, norms.after]);
        for norm in norms.as_flattened().iter().flatten() {
            add(&format!("model.layers.0.{norm}.weight"), &[c]);
        }
        for layout::LayerMatrix { path, shape: (n, k), .. } in layout::matrices(&config, 0) {
            add(&format!("model.{path}.weight"), &[n, k]);
            let biased = config.qkv_bias && ["q_proj", "k_proj", "v_proj"].iter().any(|m| path.ends_with(m));
            if biased || config.o_bias && path.ends_with("o_proj") {
                add(&format!("model.{path}.bias"), &[n]);
            }
        }
        for (name, d) in family.head_norm_names.iter().zip(config.head_norms(0).into_iter().flatten()) {
            add(&format!("model.layers.0.{name}.weight"), &[d]);
        }
        if let Some(taps) = config.taps(0) {
            add("model.layers.0.conv.conv.weight", &[c, 1, taps]);
        }
        let more = [own_keys::of_delta_rule(&config, 0), own_keys::of_joined_experts(&config, 0)];
        let more = more.into_iter().flatten().chain(own_keys::of_shared_expert(&config, 0));
        more.for_each(|(name, shape)| add(&name, &shape));
        Drawn { config, shapes }
    }

    pub fn lora(&self) -> LoraSpec {
        let targets = self.config.family.modules().into_iter().map(str::to_owned).collect();
        LoraSpec { rank: 3, alpha: 6.0, targets, ..LoraSpec::none() }
    }

    /// Random values without zeros, so that every product has a gradient.
    pub fn parameters(&self, lora: &LoraSpec) -> Vec<f32> {
        draw(1, layout::of(&self.config, lora, 0..1).len(), 0.1)
    }

    pub fn batch(&self) -> Microbatch {
        let ids: Vec<u32> = (0..24).map(|i| (i * 29 + 3) % self.config.vocab as u32).collect();
        let next = ids[1..].iter().copied().chain([IGNORE]).collect();
        Microbatch { step: 1, rows: vec![0], bounds: vec![0, 24], ids, targets: Targets::Tokens(next) }
    }

    /// Whether a tensor of this name is a matrix in blocks, if it has two dimensions.
    fn in_blocks(name: &str) -> bool {
        !name.ends_with(".bias") && !name.contains("shared_expert_gate")
    }

    fn place(&self, name: &str) -> Option<(u64, &[usize])> {
        let at = self.shapes.keys().position(|n| n == name)?;
        Some((at as u64, &self.shapes[name]))
    }
}

impl Tensors for Drawn {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        let Some((at, shape)) = self.place(name) else { return Ok(None) };
        let values = match self.blocks(name)? {
            Some(blocks) => {
                let mut values = vec![0.0; blocks.rows * blocks.cols];
                blocks.block.widen(&mut values, &blocks.bytes);
                values
            }
            // Around 1, as norms are.
            None => draw(at, shape.iter().product(), 0.5).iter().map(|x| 1.0 + x).collect(),
        };
        let bytes = Cow::Owned(Dtype::F32.narrow(&values));
        Ok(Some(Tensor { shape: shape.to_vec(), dtype: Dtype::F32, bytes }))
    }

    fn blocks(&self, name: &str) -> Result<Option<Blocks>, String> {
        let place = self.place(name).filter(|_| Drawn::in_blocks(name));
        let Some((at, &[rows, cols])) = place else { return Ok(None) };
        let block = Block::ALL[at as usize % Block::ALL.len()];
        let bytes = quantise(block, &draw(at, rows * cols, 0.2)).unwrap();
        Ok(Blocks::new((rows, cols), block, bytes.into()))
    }

    fn about(&self, name: &str) -> Result<Option<About>, String> {
        let Some((at, shape)) = self.place(name) else { return Ok(None) };
        let encoding = match shape.len() {
            2 if Drawn::in_blocks(name) => Encoding::Blocks(Block::ALL[at as usize % Block::ALL.len()]),
            _ => Encoding::Plain(Dtype::F32),
        };
        Ok(Some(About { shape: shape.to_vec(), encoding }))
    }

    fn names(&self) -> Vec<String> {
        self.shapes.keys().cloned().collect()
    }
}
