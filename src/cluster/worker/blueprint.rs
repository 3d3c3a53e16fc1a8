//! The model that a device builds, and the chain of backends that it may be built on.

use crate::cluster::message::{Capacity, Manifest, SeatPlan};
use crate::format::{self, FormatError};
use crate::model::config::{Config, ConfigError};
use crate::model::enlarged::{NoRoom, enlarge};
use crate::model::layout::{self, Layout};
use crate::model::lora::LoraSpec;
use crate::model::quantised::{QuantiseError, Quantised, Recipe};
use crate::model::stage::Model;
use crate::model::weights::ModelError;
use crate::numeric::fixed::CELL;
use crate::numeric::tensor::Tensors;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// A model with the adapter that is trained on it: everything that a device needs to compute leases.
#[derive(Clone)]
pub struct Blueprint {
    /// The model's configuration, with the labels of a classifier.
    pub config: Config,
    /// The model's weights.
    pub tensors: Arc<dyn Tensors>,
    /// The configuration of the run for this model.
    pub shape: Shape,
}

/// The configuration of a run for a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// A classifier's labels.
    pub labels: Option<Vec<String>>,
    /// Whether they are those of tokens.
    pub tags: bool,
    /// Loss weights, one per class.
    pub class_weights: Option<Vec<f32>>,
    /// How the base model is quantized.
    pub quantize: Option<String>,
    /// Number of rows of the embedding; `None`: those in the files.
    pub vocabulary: Option<u64>,
    /// The adapter.
    pub lora: LoraSpec,
    /// Tokens of the longest microbatch.
    pub tokens: usize,
    /// The numeric type that the run's user typed.
    pub dtype: Option<String>,
    /// Bits to which gradients are rounded before they are added; 0: none are.
    pub sum_bits: u32,
    /// Whether moments come with the parameters, for islands.
    pub moments: bool,
    /// Number of parameters before the newest that a conversation keeps, for delayed gradients.
    pub delay: u64,
    /// The part that is built here; `None` for the whole model.
    pub portion: Option<Portion>,
}

/// The part of a model that a seat of a line holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Portion {
    /// Its layers.
    pub layers: Range<usize>,
    /// Number of its layers that it streams, unless its user typed another one.
    pub streamed: usize,
    /// Its range of the model's flat parameter vector.
    pub values: Range<usize>,
    /// Most microbatches that wait for their backward pass at the same time.
    pub depth: usize,
}

impl Portion {
    /// The part that the plan gives a seat.
    pub fn of(plan: &SeatPlan) -> Self {
        let at = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
        Portion {
            layers: plan.layers.0 as usize..plan.layers.1 as usize,
            streamed: plan.streamed as usize,
            values: at(plan.values.0)..at(plan.values.1),
            depth: usize::from(plan.depth).max(1),
        }
    }

    /// Zeros before its first value in a sum. With them the cells of its sum are cells of the whole vector.
    pub fn pad(&self) -> usize {
        self.values.start % CELL
    }
}

impl Shape {
    /// The whole model as a language model with this adapter, in the device's own type; nothing is rounded.
    pub fn plain(lora: LoraSpec, tokens: usize) -> Self {
        Shape {
            labels: None,
            tags: false,
            class_weights: None,
            quantize: None,
            vocabulary: None,
            lora,
            tokens,
            dtype: None,
            sum_bits: 0,
            moments: false,
            delay: 0,
            portion: None,
        }
    }

    /// The shape of the whole model that the manifest describes.
    pub fn of(manifest: &Manifest) -> Self {
        Shape {
            labels: manifest.labels.clone(),
            tags: manifest.tags,
            class_weights: manifest.class_weights.clone(),
            quantize: manifest.quantize.clone(),
            vocabulary: Some(manifest.vocabulary),
            lora: manifest.lora.clone(),
            tokens: usize::try_from(manifest.tokens).unwrap_or(usize::MAX),
            dtype: manifest.dtype.clone(),
            sum_bits: manifest.sum_bits,
            moments: manifest.moments,
            delay: manifest.delay,
            portion: None,
        }
    }
}

/// Why a model cannot be built here.
#[derive(Debug, thiserror::Error)]
pub enum Unfit {
    /// Its files cannot be read.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Its configuration is not supported.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The requested quantization is not possible.
    #[error(transparent)]
    Quantise(#[from] QuantiseError),
    /// The embedding cannot have the rows of the run.
    #[error(transparent)]
    Rows(#[from] NoRoom),
}

impl Unfit {
    /// Whether a retry is pointless (exit code 78).
    pub fn is_configuration(&self) -> bool {
        match self {
            Unfit::Format(e) => e.is_configuration(),
            Unfit::Config(_) | Unfit::Quantise(_) | Unfit::Rows(_) => true,
        }
    }
}

impl Blueprint {
    /// Opens the model at `path`. No weight is read yet.
    pub fn open(path: &Path, shape: Shape) -> Result<Self, Unfit> {
        let files = format::open(path)?;
        let mut config = Config::from_json(&files.config)?;
        if let Some(labels) = &shape.labels {
            config = match shape.tags {
                true => config.into_tagger(labels.clone())?,
                false => config.into_classifier(labels.clone())?,
            };
        }
        let tensors: Arc<dyn Tensors> = match &shape.quantize {
            Some(name) => Arc::new(Quantised::new(files.tensors, Recipe::named(name)?)?),
            None => files.tensors,
        };
        let tensors = match shape.vocabulary {
            Some(rows) => enlarge(tensors, &mut config, usize::try_from(rows).unwrap_or(usize::MAX))?,
            None => tensors,
        };
        Ok(Blueprint { config, tensors, shape })
    }

    /// The layout of the flat parameter vector.
    pub fn layout(&self) -> Layout {
        layout::of(&self.config, &self.shape.lora, 0..self.config.layers)
    }
}

/// One backend of one device.
pub trait Opener: Send + Sync {
    /// `cuda`, `wgpu` or `cpu`.
    fn backend(&self) -> &str;

    /// Builds the complete model on this backend.
    fn open(&self, blueprint: &Blueprint) -> Result<Box<dyn Model>, ModelError>;

    /// What the device can hold of the model as a seat of a line of up to `most` seats.
    fn capacity(&self, _: &Blueprint, _most: usize) -> Result<Capacity, ModelError> {
        Err(ModelError::Source(format!("{} is no seat of a line of workers (--stages)", self.backend())))
    }

    /// Simulates the loss of the device, for tests.
    #[cfg(feature = "faults")]
    fn lose(&self) {}
}

/// A device and the backends that can drive it, best first. When one fails, the next takes over.
#[derive(Clone)]
pub struct Candidate {
    /// Display name, such as `cpu 0`.
    pub name: String,
    /// The backends; at least one.
    pub chain: Vec<Arc<dyn Opener>>,
    /// The backends that may be used at the start.
    pub begin: Begin,
}

/// The backends that a device may start with. During a run the next backend takes over in either case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// The first backend that works.
    Anywhere,
    /// Only the first, because the user named it.
    Named,
}
