//! A device with its share of this process: what a run opens, after a check of its memory.

use super::building::{How, Whole, note_streaming};
use super::drivers::{Among, Device, Share, cpu};
use super::speed::Speed;
use crate::backend::Fault;
use crate::cluster::inject::Inject;
use crate::cluster::worker::{Blueprint, Opener, Reference};
use crate::config::groups::ComputeDtype;
use crate::model::decoder::Build;
use crate::model::memory::{Limit, Offload};
use crate::model::stage::Model;
use crate::model::weights::ModelError;

/// A device with its share.
#[derive(Clone, Copy)]
pub struct Seat {
    /// The device to open.
    pub device: &'static dyn Device,
    /// Its share. The type of products is the one where the run does not set one.
    pub share: Share,
}

impl Seat {
    /// The only device of this process, with `typed` or all free memory.
    pub fn alone(
        device: &'static dyn Device,
        dtype: ComputeDtype,
        threads: usize,
        (typed, offload): (Option<u64>, Offload),
    ) -> Self {
        let limit = device.limit(typed, Among { card: 1, machine: 1 }, cpu::free_memory());
        Seat { device, share: Share { dtype, threads, limit, offload } }
    }

    /// The same share in the type that the run's user typed.
    pub fn typed(&self, blueprint: &Blueprint) -> Result<Seat, ModelError> {
        let typed = blueprint.shape.dtype.as_deref().map(|dtype| self.device.typed(dtype)).transpose()?;
        let dtype = typed.unwrap_or(self.share.dtype);
        Ok(Seat { share: Share { dtype, ..self.share }, ..*self })
    }

    /// How the model fits into this device's memory.
    pub fn choose(&self, whole: &Whole) -> Result<How, ModelError> {
        let whole = Whole { offload: self.share.offload, ..*whole };
        Ok(self.share.limit.choose(self.device.load(&whole, self.share.dtype)?)?.into())
    }

    /// Builds a whole model on the device.
    fn whole(&self, whole: &Whole) -> Result<Box<dyn Model>, ModelError> {
        let how = self.choose(whole)?;
        note_streaming(how.streamed, whole.config.layers);
        self.part(whole, whole.build(how))
    }

    /// Builds a part of a model on the device.
    pub fn part(&self, whole: &Whole, build: Build) -> Result<Box<dyn Model>, ModelError> {
        match self.device.refusal() {
            Some(fault) => Err(fault.into()),
            None => self.device.open(self.share)?.build(whole, build),
        }
    }

    /// Builds a whole model after the device has passed the self-test, because later results are not compared.
    pub fn proved(&self, whole: &Whole) -> Result<Box<dyn Model>, ModelError> {
        // Memory is checked first, so that a user does not wait for the self-test of a model that does not fit.
        let how = self.choose(whole)?;
        let deviation = Reference::new(&cpu::ReferenceCpu)?.measure(self, &Inject::default())?;
        deviation.verdict().map_err(ModelError::Source)?;
        note_streaming(how.streamed, whole.config.layers);
        self.device.open(self.share)?.build(whole, whole.build(how))
    }

    /// Measured speed of the device.
    pub fn speed(&self) -> Result<Speed, Fault> {
        self.device.open(Share { limit: Limit::Typed(u64::MAX), ..self.share })?.speed()
    }
}

impl Opener for Seat {
    fn backend(&self) -> &str {
        self.device.driver().name()
    }

    fn open(&self, blueprint: &Blueprint) -> Result<Box<dyn Model>, ModelError> {
        self.typed(blueprint)?.whole(&Whole::of(blueprint))
    }

    #[cfg(feature = "faults")]
    fn lose(&self) {
        self.device.lose();
    }
}
