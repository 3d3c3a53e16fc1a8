//! A whole model on any backend: what it takes, from shapes alone, and then the thing itself.

use crate::backend::{Backend, Fused};
use crate::cluster::worker::Blueprint;
use crate::model::config::Config;
use crate::model::decoder::{Build, Decoder, Keep};
use crate::model::lora::LoraSpec;
use crate::model::memory::{Fit, Load};
use crate::model::quantised::{Quantised, Recipe};
use crate::model::stage::Model;
use crate::model::weights::{ModelError, Weights};
use crate::numeric::block::Encoding;
use crate::numeric::tensor::Tensors;
use std::cell::Cell;

/// What is to be built.
#[derive(Clone, Copy)]
pub struct Whole<'a> {
    /// Its shape.
    pub config: &'a Config,
    /// Its weights.
    pub tensors: &'a dyn Tensors,
    /// What is trained on it.
    pub lora: &'a LoraSpec,
    /// A classifier's.
    pub class_weights: Option<&'a [f32]>,
    /// Longest microbatch.
    pub tokens: usize,
    /// What the device was measured to take for such a model, where somebody did.
    pub measured: Option<Fit>,
}

impl<'a> Whole<'a> {
    /// As a run says.
    pub fn of(blueprint: &'a Blueprint) -> Self {
        let shape = &blueprint.shape;
        Whole {
            config: &blueprint.config,
            tensors: &*blueprint.tensors,
            lora: &shape.lora,
            class_weights: shape.class_weights.as_deref(),
            tokens: shape.tokens,
            measured: None,
        }
    }

    /// What it takes on `backend`.
    pub fn load(&self, backend: &impl Backend) -> Result<Load<'a>, ModelError> {
        let load = self.load_as(&|encoding, numbers| backend.matrix_bytes(encoding, numbers))?;
        Ok(Load { short: backend.short_bytes() as u64, ..load })
    }

    /// What it takes where `packing` says how many bytes a matrix of that many numbers does.
    pub fn load_as(&self, packing: &dyn Fn(Encoding, usize) -> usize) -> Result<Load<'a>, ModelError> {
        let Whole { config, tensors, lora, tokens, measured, .. } = *self;
        let quantised = Cell::new(false);
        let seen = |encoding, numbers| {
            quantised.set(quantised.get() || matches!(encoding, Encoding::Blocks(_)));
            packing(encoding, numbers)
        };
        let weights = Weights::new(tensors)?.packed(&seen, config)?;
        let in_nf4 = |base: Quantised| Weights::new(&base)?.packed(packing, config);
        let nf4 = Quantised::new(Box::new(tensors), Recipe::Nf4).ok().and_then(|base| in_nf4(base).ok());
        Ok(Load { measured, quantised: quantised.get(), nf4, ..Load::of(config, lora, tokens, weights) })
    }
}

/// Reads and packs its weights.
pub fn built<B>(backend: B, whole: &Whole, keep: Keep) -> Result<Box<dyn Model>, ModelError>
where
    B: Fused + Send + 'static,
    Decoder<B>: Model,
{
    let class_weights = whole.class_weights.map(<[f32]>::to_vec);
    let build = Build { keep, class_weights, ..Build::whole(whole.config) };
    Ok(Box::new(Decoder::load(backend, whole.config, whole.tensors, whole.lora, build)?))
}
