//! An adapter as a device. What it takes is worked out before anything is uploaded, from what its driver says is free.

use super::building::{self, Whole};
use super::{compiled, cpu};
use crate::backend::Fault;
use crate::backend::wgpu::adapters::{Found, Kind};
use crate::backend::wgpu::{Breaker, Options, Precision, Wgpu};
use crate::cluster::worker::{Blueprint, Opener};
use crate::model::memory;
use crate::model::stage::Model;
use crate::model::weights::ModelError;
use std::sync::{Mutex, PoisonError};

/// What of a card's free memory is left to its driver and to others, in parts of a hundred.
const LEFT_ALONE: u64 = 5;

/// Tokens of a prompt that a device must have room for at least.
const SPEAKING: usize = 256;

/// Opens it. Where nobody typed a dtype, a card may round the factors of frozen products to f16; a driver that
/// computes on the CPU gains nothing by that.
pub fn device(found: &Found, dtype: Option<&str>) -> Result<Wgpu, Fault> {
    let exact = dtype.is_some() || found.facts.kind == Kind::Software;
    let precision = if exact { Precision::F32 } else { Precision::F16 };
    let cache = compiled::of(&found.adapter);
    Wgpu::open(&found.adapter, Options { precision, cache, ..Options::default() })
}

/// An adapter that wgpu drives.
pub struct Card {
    /// What is opened.
    pub found: &'static Found,
    /// Bytes that may be used of it, by all devices on it.
    pub limit: Option<u64>,
    /// How many they are.
    pub sharing: usize,
    /// What was opened last.
    breaker: Mutex<Option<Breaker>>,
}

impl Card {
    /// One of `sharing` devices on it.
    pub fn new(found: &'static Found, limit: Option<u64>, sharing: usize) -> Self {
        Card { found, limit, sharing, breaker: Mutex::default() }
    }

    /// A whole model on it; whether it fits is asked before any of it is uploaded.
    pub fn whole(&self, whole: &Whole, dtype: Option<&str>) -> Result<Box<dyn Model>, ModelError> {
        let device = device(self.found, dtype)?;
        *self.breaker.lock().unwrap_or_else(PoisonError::into_inner) = Some(device.breaker());
        // What only speaks needs little beside its weights, and keeps nothing.
        let tokens = if whole.tokens == 0 { SPEAKING } else { whole.tokens };
        let keep = memory::choose(Whole { tokens, ..*whole }.load(&device)?, self.budget())?.0;
        building::built(device, whole, keep)
    }

    /// Bytes that this device may use.
    pub fn budget(&self) -> u64 {
        self.limit.unwrap_or_else(|| free(self.found)) / self.sharing as u64
    }
}

/// What is free on the card, where its driver says it; what has no memory of its own takes the machine's.
pub fn free(found: &Found) -> u64 {
    let own = found.memory().map_or(u64::MAX, |memory| memory.free - memory.free / 100 * LEFT_ALONE);
    match found.facts.kind {
        Kind::Software | Kind::Integrated => own.min(cpu::free_memory()),
        Kind::Discrete | Kind::Virtual | Kind::Unknown => own,
    }
}

impl Opener for Card {
    fn backend(&self) -> &str {
        "wgpu"
    }

    /// A dtype that the run's user typed binds every device; these compute in what their variant is, never in bf16.
    fn open(&self, blueprint: &Blueprint) -> Result<Box<dyn Model>, ModelError> {
        match blueprint.shape.dtype.as_deref() {
            dtype @ (None | Some("f32")) => self.whole(&Whole::of(blueprint), dtype),
            Some(other) => {
                let why = "leave --dtype out on the coordinator, or compute on the CPU here (--gpus cpu)";
                Err(ModelError::Source(format!(
                    "the run computes in {other}, which this device has not: {why}"
                )))
            }
        }
    }

    fn lose(&self) {
        let opened = self.breaker.lock().unwrap_or_else(PoisonError::into_inner);
        opened.iter().for_each(Breaker::strike);
    }

    fn largest(&self, blueprint: &Blueprint) -> usize {
        let device = device(self.found, blueprint.shape.dtype.as_deref()).ok();
        let load = device.and_then(|device| Whole::of(blueprint).load(&device).ok());
        load.map_or(0, |load| memory::largest(load, self.budget()))
    }
}
