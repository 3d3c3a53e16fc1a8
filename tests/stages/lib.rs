//! Stages on the CPU and on wgpu. A test program that names `Decoder<Cpu>` compiles the whole decoder for this backend
//! again (18 to 30 processor seconds). One that takes its stages from here does not.

use finetune::backend::{Cpu, Fused, Wgpu};
use finetune::model::config::Config;
use finetune::model::decoder::{Build, Decoder};
use finetune::model::lora::LoraSpec;
use finetune::model::stage::Model;
use finetune::model::weights::ModelError;
use finetune::numeric::tensor::Tensors;

/// What a stage is loaded from: configuration, weights, and adapter.
pub type Source<'a> = (&'a Config, &'a dyn Tensors, &'a LoraSpec);

/// Backends whose stages are compiled here.
pub trait Loads: Fused {
    /// `Decoder::load`.
    fn stage(self, source: Source, build: Build) -> Result<Box<dyn Model>, ModelError>;
}

// Functions that are not generic are compiled here, not where they are called.
impl Loads for Cpu {
    #[inline(never)]
    fn stage(self, (config, tensors, lora): Source, build: Build) -> Result<Box<dyn Model>, ModelError> {
        Ok(Box::new(Decoder::load(self, config, tensors, lora, build)?))
    }
}

impl Loads for Wgpu {
    #[inline(never)]
    fn stage(self, (config, tensors, lora): Source, build: Build) -> Result<Box<dyn Model>, ModelError> {
        Ok(Box::new(Decoder::load(self, config, tensors, lora, build)?))
    }
}
