//! Simulated devices for tests of real processes: a missing backend, and a CPU under another backend's name, for tests
//! of the fallback.

use crate::cluster::worker::{Blueprint, Opener};
use crate::model::layout::Layout;
use crate::model::stage::{
    Cancel, Fault, Generate, InUse, LossSums, Microbatch, Model, Output, Sampling, Stage, Traffic, Want,
};
use crate::model::weights::ModelError;
use std::sync::Arc;

/// A backend that is not part of this build.
pub struct NotBuilt(pub &'static str);

impl Opener for NotBuilt {
    fn backend(&self) -> &str {
        self.0
    }

    fn open(&self, _: &Blueprint) -> Result<Box<dyn Model>, ModelError> {
        Err(ModelError::Source("this build has not got it".into()))
    }
}

/// A CPU under another backend's name, for tests of its fallback.
pub struct Pretended {
    /// The other backend's name.
    pub name: String,
    /// The actual device.
    pub cpu: Arc<dyn Opener>,
}

impl Opener for Pretended {
    fn backend(&self) -> &str {
        &self.name
    }

    fn open(&self, blueprint: &Blueprint) -> Result<Box<dyn Model>, ModelError> {
        let model = self.cpu.open(blueprint)?;
        let class = model.class().replacen("cpu", &self.name, 1);
        Ok(Box::new(Renamed { model, class }))
    }
}

struct Renamed {
    model: Box<dyn Model>,
    class: String,
}

impl Stage for Renamed {
    fn layout(&self) -> &Layout {
        self.model.layout()
    }

    fn class(&self) -> String {
        self.class.clone()
    }

    fn set_parameters(&mut self, flat: &[f32]) -> Result<(), Fault> {
        self.model.set_parameters(flat)
    }

    fn forward(&mut self, batch: &Microbatch, input: Option<&[f32]>, want: Want) -> Result<Output, Fault> {
        self.model.forward(batch, input, want)
    }

    fn backward(&mut self, grad: Option<&[f32]>, gradient: &mut [f32]) -> Result<Option<Vec<f32>>, Fault> {
        self.model.backward(grad, gradient)
    }

    fn gradient(&mut self, batch: &Microbatch, gradient: &mut [f32]) -> Result<LossSums, Fault> {
        self.model.gradient(batch, gradient)
    }

    fn traffic(&self) -> Traffic {
        self.model.traffic()
    }

    fn in_use(&mut self) -> Option<InUse> {
        self.model.in_use()
    }

    fn heed(&mut self, cancel: Cancel) {
        self.model.heed(cancel);
    }
}

impl Generate for Renamed {
    fn generate(
        &mut self,
        prompt: &[u32],
        sampling: &Sampling,
        each: &mut dyn FnMut(u32) -> bool,
    ) -> Result<Vec<u32>, Fault> {
        self.model.generate(prompt, sampling, each)
    }
}
