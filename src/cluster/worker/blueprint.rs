//! What a device is to build, and the chain of backends that it may be built on.

use crate::cluster::message::Manifest;
use crate::format::{self, FormatError};
use crate::model::config::{Config, ConfigError};
use crate::model::layout::{self, Layout};
use crate::model::lora::LoraSpec;
use crate::model::memory::Fit;
use crate::model::quantised::{QuantiseError, Quantised, Recipe};
use crate::model::stage::Model;
use crate::model::weights::ModelError;
use crate::numeric::tensor::Tensors;
use std::path::Path;
use std::sync::Arc;

/// A model with the adapter that is trained on it: everything that a device needs to compute leases.
#[derive(Clone)]
pub struct Blueprint {
    /// Its shape; a classifier's with its labels.
    pub config: Config,
    /// Its weights.
    pub tensors: Arc<dyn Tensors>,
    /// What is trained on it, and how large a microbatch may be.
    pub shape: Shape,
}

/// What a run makes of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// A classifier's labels.
    pub labels: Option<Vec<String>>,
    /// One per class.
    pub class_weights: Option<Vec<f32>>,
    /// How the base is quantised.
    pub quantize: Option<String>,
    /// The adapter.
    pub lora: LoraSpec,
    /// Longest microbatch, in tokens.
    pub tokens: usize,
    /// The numeric type that the run's user typed.
    pub dtype: Option<String>,
}

impl Shape {
    /// As the coordinator says.
    pub fn of(manifest: &Manifest) -> Self {
        Shape {
            labels: manifest.labels.clone(),
            class_weights: manifest.class_weights.clone(),
            quantize: manifest.quantize.clone(),
            lora: manifest.lora.clone(),
            tokens: usize::try_from(manifest.tokens).unwrap_or(usize::MAX),
            dtype: manifest.dtype.clone(),
        }
    }
}

/// Why a model cannot be built here.
#[derive(Debug, thiserror::Error)]
pub enum Unfit {
    /// Its files.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Its configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// What it cannot be quantised to.
    #[error(transparent)]
    Quantise(#[from] QuantiseError),
}

impl Unfit {
    /// True where trying again is pointless (exit code 78).
    pub fn is_configuration(&self) -> bool {
        match self {
            Unfit::Format(e) => e.is_configuration(),
            Unfit::Config(_) | Unfit::Quantise(_) => true,
        }
    }
}

impl Blueprint {
    /// Opens the model at `path`; no weight is read yet.
    pub fn open(path: &Path, shape: Shape) -> Result<Self, Unfit> {
        let files = format::open(path)?;
        let mut config = Config::from_json(&files.config)?;
        if let Some(labels) = &shape.labels {
            config = config.into_classifier(labels.clone())?;
        }
        let tensors: Arc<dyn Tensors> = match &shape.quantize {
            Some(name) => Arc::new(Quantised::new(files.tensors, Recipe::named(name)?)?),
            None => Arc::from(files.tensors),
        };
        Ok(Blueprint { config, tensors, shape })
    }

    /// The flat parameter vector.
    pub fn layout(&self) -> Layout {
        layout::of(&self.config, &self.shape.lora, 0..self.config.layers)
    }
}

/// One backend of one device.
pub trait Opener: Send + Sync {
    /// `cuda`, `wgpu`, `cpu`.
    fn backend(&self) -> &str;

    /// A whole model on it.
    fn open(&self, blueprint: &Blueprint) -> Result<Box<dyn Model>, ModelError>;

    /// Whether a model that was opened has room for the run's longest microbatch, by what it was measured to take;
    /// false where blocks have to keep less. The error is that nothing fits.
    fn stands(&self, _: &Blueprint, _: Fit) -> Result<bool, ModelError> {
        Ok(true)
    }

    /// Opens it so that it has room, by what it was measured to take.
    fn open_within(&self, blueprint: &Blueprint, _: Fit) -> Result<Box<dyn Model>, ModelError> {
        self.open(blueprint)
    }

    /// Takes away what was opened, so that tests can see what becomes of a run whose device is lost.
    fn lose(&self) {}
}

/// A device and the backends that can drive it, best first: when one fails, the next takes over.
#[derive(Clone)]
pub struct Candidate {
    /// For people: `cpu 0`.
    pub name: String,
    /// At least one.
    pub chain: Vec<Arc<dyn Opener>>,
    /// With which of them.
    pub begin: Begin,
}

/// What a device may begin with. In the middle of a run the next backend takes over in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// The first of its backends that works.
    Anywhere,
    /// The first one, which was asked for by name.
    Named,
}
