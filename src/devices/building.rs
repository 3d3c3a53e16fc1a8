//! A whole model on any backend: its memory from shapes alone, and its construction.

use super::speed::{self, Speed};
use crate::backend::{Backend, Fault, Fused, Target};
use crate::cluster::worker::Blueprint;
use crate::model::config::Config;
use crate::model::decoder::{Build, Decoder, Keep};
use crate::model::lora::LoraSpec;
use crate::model::memory::{Estimate, Fit, Load, Offload};
use crate::model::quantised::{Quantised, Recipe};
use crate::model::stage::Model;
use crate::model::weights::{ModelError, Weights};
use crate::numeric::block::Encoding;
use crate::numeric::tensor::Tensors;
use crate::support::stderr::say;
use std::cell::Cell;

/// How a model is built within the memory of its device.
#[derive(Debug, Clone, Copy)]
pub struct How {
    /// Policy for kept values.
    pub keep: Keep,
    /// Number of streamed layers.
    pub streamed: usize,
    /// Most microbatches that go through streamed layers together.
    pub group: usize,
}

impl How {
    /// All layers resident.
    pub fn resident(keep: Keep) -> Self {
        How { keep, streamed: 0, group: 1 }
    }

    /// The name under which measurements of such a run are stored. Speeds with and without streamed layers differ, and
    /// those of groups of different sizes too.
    pub fn measured_on(self, hardware: String) -> String {
        match (self.streamed, self.group) {
            (0, _) => hardware,
            (layers, ..=1) => format!("{hardware}, {layers} layers streamed"),
            (layers, group) => format!("{hardware}, {layers} layers streamed for {group} microbatches"),
        }
    }
}

impl From<(Keep, Estimate)> for How {
    fn from((keep, takes): (Keep, Estimate)) -> Self {
        How { keep, streamed: takes.streamed, group: takes.group }
    }
}

/// Description of a model to build.
#[derive(Clone, Copy)]
pub struct Whole<'a> {
    /// Its shape.
    pub config: &'a Config,
    /// Its weights.
    pub tensors: &'a dyn Tensors,
    /// The trained adapter.
    pub lora: &'a LoraSpec,
    /// The class weights of a classifier.
    pub class_weights: Option<&'a [f32]>,
    /// Tokens of the longest microbatch.
    pub tokens: usize,
    /// Measured memory of the device for such a model, where available.
    pub measured: Option<Fit>,
    /// Which layers may be streamed.
    pub offload: Offload,
}

impl<'a> Whole<'a> {
    /// The model of a run.
    pub fn of(blueprint: &'a Blueprint) -> Self {
        let shape = &blueprint.shape;
        Whole {
            config: &blueprint.config,
            tensors: &blueprint.tensors,
            lora: &shape.lora,
            class_weights: shape.class_weights.as_deref(),
            tokens: shape.tokens,
            measured: None,
            offload: Offload::Never,
        }
    }

    /// Whether the weights are in files; those of the self-test are not.
    pub fn has_files(&self) -> bool {
        self.tensors.shared().is_some() && self.tensors.file_of("model.embed_tokens.weight").is_some()
    }

    /// The whole model, built like this.
    pub fn build(&self, how: How) -> Build {
        let How { keep, streamed, group } = how;
        Build { keep, streamed, group, ..Build::whole(self.config) }
    }

    /// Input of the memory estimate on `backend`.
    pub fn load(&self, backend: &impl Backend) -> Result<Load<'a>, ModelError> {
        self.load_on(backend.target())
    }

    /// Input of the memory estimate on such a device.
    pub fn load_on(&self, device: Target) -> Result<Load<'a>, ModelError> {
        let packing = |encoding, numbers| device.matrix_bytes(encoding, numbers);
        let Whole { config, tensors, lora, tokens, measured, .. } = *self;
        let quantised = Cell::new(false);
        let seen = |encoding, numbers| {
            quantised.set(quantised.get() || matches!(encoding, Encoding::Blocks(_)));
            packing(encoding, numbers)
        };
        let packed = Weights::new(tensors)?.packed(&seen, config)?;
        let in_nf4 = |base: Quantised| Weights::new(&base)?.packed(&packing, config);
        let nf4 = Quantised::new(tensors, Recipe::Nf4).ok().and_then(|base| in_nf4(base).ok());
        let quantised = quantised.get();
        let offload = if self.has_files() { self.offload } else { Offload::Never };
        let load = Load::of(config, lora, tokens, packed.total);
        Ok(Load { device, measured, quantised, nf4, offload, layer: packed.layer, ..load })
    }
}

/// Says how many layers are streamed, if any.
pub fn note_streaming(streamed: usize, layers: usize) {
    if streamed > 0 {
        let each = "each pass reads them again from the model's files";
        say!("streams  {streamed} of {layers} layers: {each} (--offload)");
    }
}

/// An opened device, whatever its backend.
pub trait Opened {
    /// Numeric class.
    fn class(&self) -> String;

    /// Measured speed.
    fn speed(self: Box<Self>) -> Result<Speed, Fault>;

    /// Reads and packs the weights and builds the model, or a part of it.
    fn build(self: Box<Self>, whole: &Whole, build: Build) -> Result<Box<dyn Model>, ModelError>;
}

impl<B> Opened for B
where
    B: Fused + Send + 'static,
    Decoder<B>: Model,
{
    fn class(&self) -> String {
        Backend::class(self)
    }

    fn speed(self: Box<Self>) -> Result<Speed, Fault> {
        speed::of(*self)
    }

    fn build(self: Box<Self>, whole: &Whole, build: Build) -> Result<Box<dyn Model>, ModelError> {
        let class_weights = whole.class_weights.map(<[f32]>::to_vec);
        let build = Build { class_weights, ..build };
        Ok(Box::new(Decoder::load(*self, whole.config, whole.tensors, whole.lora, build)?))
    }
}
