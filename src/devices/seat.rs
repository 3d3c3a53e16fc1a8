//! A device with its share of this process: what a run opens, after a check of its memory.

use super::building::{How, Whole, note_streaming};
use super::capacity::Holder;
use super::drivers::{Among, Device, Share, cpu, speaking};
use super::room::{Room, packed};
use super::speed::Speed;
use crate::backend::Fault;
use crate::cluster::inject::Inject;
use crate::cluster::message::Capacity;
use crate::cluster::worker::{Blueprint, Opener, Portion, Reference};
use crate::config::groups::ComputeDtype;
use crate::model::decoder::Build;
use crate::model::memory::{Limit, Offload, size};
use crate::model::stage::Model;
use crate::model::weights::ModelError;
use crate::support::stderr::say;
use crate::support::waiting::LOADING;
use std::sync::{Mutex, PoisonError};

/// Address of a device's properties, number of threads, and type of the products.
type Measured = (usize, usize, ComputeDtype);

/// Speeds measured so far.
static SPEEDS: Mutex<Vec<(Measured, Speed)>> = Mutex::new(Vec::new());

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

    /// Builds the part of a model that a seat of a line of workers holds.
    fn portion(&self, whole: &Whole, portion: &Portion) -> Result<Box<dyn Model>, ModelError> {
        let (layers, depth) = (portion.layers.clone(), portion.depth);
        let offload = match self.share.offload {
            Offload::Auto => Offload::Layers(portion.streamed),
            typed => typed,
        };
        let whole = &Whole { offload, ..*whole };
        if layers.is_empty() || layers.end > whole.config.layers {
            let reason = format!("the coordinator gave layers {layers:?} of {}", whole.config.layers);
            return Err(ModelError::Source(reason));
        }
        let load = self.device.load(&speaking(whole), self.share.dtype)?;
        let room = Room::new((load, packed(&load, whole)?), self.share.limit, (depth, depth));
        let (keep, takes) = room.choose(&layers)?;
        let (last, all) = (layers.end - 1, whole.config.layers);
        say!("holds    layers {} to {last} of {all}: {}", layers.start, size(takes.total()));
        note_streaming(takes.streamed, layers.len());
        self.part(whole, Build { layers, keep, streamed: takes.streamed, ..Build::whole(whole.config) })
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
        LOADING.begin(whole.config.layers as u64);
        note_streaming(how.streamed, whole.config.layers);
        self.device.open(self.share)?.build(whole, whole.build(how))
    }

    /// The device as one that may be a seat of a line of workers.
    pub fn holder<'a>(&self, whole: &Whole<'a>) -> Result<Holder<'a>, ModelError> {
        let whole = Whole { offload: self.share.offload, ..*whole };
        Holder::new(self.device.load(&speaking(&whole), self.share.dtype)?, self.share.limit, &whole)
    }

    /// Measured speed. Plan and run of a process see the same one, and equal devices are equally fast.
    pub fn measured(&self) -> Result<Speed, Fault> {
        let of = (std::ptr::from_ref(self.device.facts()).addr(), self.share.threads, self.share.dtype);
        let mut known = SPEEDS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, speed)) = known.iter().find(|(other, _)| *other == of) {
            return Ok(*speed);
        }
        let speed = self.speed()?;
        let speed = Speed { gflops: speed.gflops.max(1e-3), loading: speed.loading.max(1e-3), ..speed };
        known.push((of, speed));
        Ok(speed)
    }

    /// Measured speed of the device, also for a plan, which runs no trial.
    pub fn speed(&self) -> Result<Speed, Fault> {
        self.device.open_untried(Share { limit: Limit::Typed(u64::MAX), ..self.share })?.speed()
    }
}

impl Opener for Seat {
    fn backend(&self) -> &str {
        self.device.driver().name()
    }

    fn open(&self, blueprint: &Blueprint) -> Result<Box<dyn Model>, ModelError> {
        let (seat, whole) = (self.typed(blueprint)?, Whole::of(blueprint));
        match &blueprint.shape.portion {
            Some(portion) => seat.portion(&whole, portion),
            None => seat.whole(&whole),
        }
    }

    fn capacity(&self, blueprint: &Blueprint, most: usize) -> Result<Capacity, ModelError> {
        let (seat, whole) = (self.typed(blueprint)?, Whole::of(blueprint));
        seat.holder(&whole)?.capacity(most, seat.measured()?)
    }

    #[cfg(feature = "faults")]
    fn lose(&self) {
        self.device.lose();
    }
}
