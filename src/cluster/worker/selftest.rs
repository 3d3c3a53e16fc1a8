//! The self-test of a device before its first lease: forward and backward of a microbatch on a small seeded model,
//! compared with the CPU reference. After a device error another backend is tried; a device with wrong numbers is
//! refused by name.

use super::blueprint::{Blueprint, Opener, Shape};
use crate::cluster::inject::Inject;
use crate::model::config::Config;
use crate::model::layout;
use crate::model::lora::{LoraSpec, MODULES};
use crate::model::stage::{Microbatch, Targets};
use crate::model::weights::ModelError;
use crate::numeric::dtype::Dtype;
use crate::numeric::rng::Stream;
use crate::numeric::tensor::{Tensor, Tensors};
use serde_json::json;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Seed of every draw.
const SEED: u64 = 0x5e1f;
/// Row bounds of the microbatch.
const BOUNDS: [u32; 4] = [0, 37, 90, 96];
/// Largest relative deviation of loss and gradient (L2) in f32: orders of summation differ.
const F32: f64 = 1e-3;
/// The same for narrower types.
const NARROW: f64 = 5e-2;

/// The reference result, with its model.
pub struct Reference {
    blueprint: Blueprint,
    parameters: Vec<f32>,
    answer: Answer,
}

struct Answer {
    loss: f64,
    gradient: Vec<f32>,
}

impl Reference {
    /// Computes the reference on `opener`.
    pub fn new(opener: &dyn Opener) -> Result<Self, ModelError> {
        let blueprint = blueprint()?;
        let parameters = draws(1, layout::of(&blueprint.config, &blueprint.shape.lora, 0..2).len(), 0.05);
        let (answer, _) = compute(opener, &blueprint, &parameters)?;
        Ok(Reference { blueprint, parameters, answer })
    }

    /// The same reference; devices are tested in the numeric type of the run's user.
    pub fn typed(mut self, dtype: Option<String>) -> Self {
        self.blueprint.shape.dtype = dtype;
        self
    }

    /// Compares `opener` with the reference. The outer error is a wrong result, the inner one an error of the
    /// device.
    pub fn check(&self, opener: &dyn Opener, inject: &Inject) -> Result<Result<(), ModelError>, String> {
        match self.measure(opener, inject) {
            Ok(deviation) => deviation.verdict().map(Ok),
            Err(e) => Ok(Err(e)),
        }
    }

    /// Deviation of `opener` from the reference.
    pub fn measure(&self, opener: &dyn Opener, inject: &Inject) -> Result<Deviation, ModelError> {
        let (got, class) = compute(opener, &self.blueprint, &self.parameters)?;
        let want = &self.answer;
        let damage = if inject.fails_selftest() { 2.0 } else { 1.0 };
        let loss = (damage * got.loss - want.loss).abs() / want.loss.abs();
        let difference =
            norm(got.gradient.iter().zip(&want.gradient).map(|(g, w)| f64::from(*g) - f64::from(*w)));
        let gradient = difference / norm(want.gradient.iter().map(|w| f64::from(*w)));
        let bound = if class.split('-').any(|word| word == "f32") { F32 } else { NARROW };
        Ok(Deviation { class, loss, gradient, bound })
    }
}

/// Result of a self-test.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Deviation {
    /// The tested numeric class.
    pub class: String,
    /// Deviation of the loss, relative to the reference.
    pub loss: f64,
    /// Deviation of the gradient in L2, relative to the reference.
    pub gradient: f64,
    /// Largest allowed deviation of either.
    pub bound: f64,
}

impl Deviation {
    /// Whether the device may take part; the error is one line.
    pub fn verdict(&self) -> Result<(), String> {
        let Deviation { class, loss, gradient, bound } = self;
        // This form refuses NaN too.
        match loss <= bound && gradient <= bound {
            true => Ok(()),
            false => Err(format!(
                "computes wrong numbers ({class}): in the self-test its loss is off by {loss:.1e}, its gradient by \
                 {gradient:.1e}, where {bound:.0e} is allowed; it takes no part: check its driver"
            )),
        }
    }
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|v| v * v).sum::<f64>().sqrt()
}

fn compute(
    opener: &dyn Opener,
    blueprint: &Blueprint,
    parameters: &[f32],
) -> Result<(Answer, String), ModelError> {
    let mut model = opener.open(blueprint)?;
    let batch = microbatch(blueprint.config.vocab as u32);
    model.set_parameters(parameters)?;
    let mut gradient = vec![f32::NAN; parameters.len()];
    let sums = model.gradient(&batch, &mut gradient)?;
    Ok((Answer { loss: sums.loss, gradient }, model.class()))
}

fn microbatch(vocab: u32) -> Microbatch {
    let mut stream = Stream::new(&[SEED, 2]);
    let mut token = || (0..BOUNDS[3]).map(|_| stream.below(vocab)).collect::<Vec<u32>>();
    let (ids, targets) = (token(), Targets::Tokens(token()));
    Microbatch { step: 1, rows: vec![0, 1, 2], ids, bounds: BOUNDS.to_vec(), targets }
}

/// A decoder of two layers, large enough that every kernel has a full tile and a remainder.
fn blueprint() -> Result<Blueprint, ModelError> {
    let config = Config::from_json(&json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 520, "hidden_size": 144,
        "intermediate_size": 304, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 36, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "tie_word_embeddings": false, "hidden_act": "silu",
    }))?;
    let targets = MODULES.map(String::from).to_vec();
    let lora = LoraSpec { rank: 8, alpha: 16.0, targets, seed: SEED, ..LoraSpec::none() };
    let tensors = Arc::new(Drawn::new(&config));
    let shape = Shape::plain(lora, 96);
    Ok(Blueprint { config, tensors, shape })
}

/// Uniform values in -scale .. scale.
fn draws(key: u64, len: usize, scale: f32) -> Vec<f32> {
    let mut stream = Stream::new(&[SEED, key]);
    (0..len).map(|_| (2.0 * stream.unit() - 1.0) * scale).collect()
}

/// Weights drawn from the seed.
struct Drawn(BTreeMap<String, (Vec<usize>, Vec<u8>)>);

impl Drawn {
    fn new(config: &Config) -> Self {
        let mut drawn = Drawn(BTreeMap::new());
        let c = config.hidden;
        drawn.matrix("model.embed_tokens.weight".into(), (config.vocab, c), 1.0);
        drawn.matrix("lm_head.weight".into(), (config.vocab, c), 0.2);
        drawn.gain("model.norm.weight".into(), c);
        for layer in 0..config.layers {
            drawn.gain(format!("model.layers.{layer}.input_layernorm.weight"), c);
            drawn.gain(format!("model.layers.{layer}.post_attention_layernorm.weight"), c);
            for matrix in layout::matrices(config, layer) {
                drawn.matrix(format!("model.{}.weight", matrix.path), matrix.shape, 0.1);
            }
        }
        drawn
    }

    fn put(&mut self, name: String, shape: Vec<usize>, values: &[f32]) {
        self.0.insert(name, (shape, values.iter().flat_map(|v| v.to_le_bytes()).collect()));
    }

    fn matrix(&mut self, name: String, (rows, cols): (usize, usize), scale: f32) {
        let values = draws(16 + self.0.len() as u64, rows * cols, scale);
        self.put(name, vec![rows, cols], &values);
    }

    fn gain(&mut self, name: String, len: usize) {
        let values: Vec<f32> = draws(16 + self.0.len() as u64, len, 0.2).iter().map(|v| 1.0 + v).collect();
        self.put(name, vec![len], &values);
    }
}

impl Tensors for Drawn {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        Ok(self.0.get(name).map(|(shape, bytes)| Tensor {
            shape: shape.clone(),
            dtype: Dtype::F32,
            bytes: Cow::Borrowed(bytes),
        }))
    }

    fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::stage::Model;
    use std::sync::Mutex;

    /// An opener that records the requested type and opens no model.
    struct Asked(Mutex<Vec<Option<String>>>);

    impl Opener for Asked {
        fn backend(&self) -> &str {
            "asked"
        }
        fn open(&self, blueprint: &Blueprint) -> Result<Box<dyn Model>, ModelError> {
            self.0.lock().unwrap().push(blueprint.shape.dtype.clone());
            Err(ModelError::Source("nothing is here".into()))
        }
    }

    #[test]
    fn self_test_uses_the_dtype_of_the_run() {
        let blueprint = blueprint().unwrap();
        let answer = Answer { loss: 1.0, gradient: Vec::new() };
        let reference = Reference { blueprint, parameters: Vec::new(), answer };
        let asked = Asked(Mutex::default());
        assert!(reference.check(&asked, &Inject::default()).unwrap().is_err());
        assert!(reference.typed(Some("f32".into())).check(&asked, &Inject::default()).unwrap().is_err());
        assert_eq!(asked.0.into_inner().unwrap(), [None, Some("f32".to_string())]);
    }
}
