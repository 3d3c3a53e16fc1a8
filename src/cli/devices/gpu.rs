//! An adapter as a device. What it takes is worked out before anything is uploaded, from what its driver says is free.

use super::building::{self, Whole};
use super::compiled;
use crate::backend::Fault;
use crate::backend::wgpu::adapters::{Found, Kind};
use crate::backend::wgpu::{Breaker, Options, Precision, Wgpu, matrix_bytes};
use crate::cluster::worker::{Blueprint, Opener};
use crate::model::memory::{self, Home, Load};
use crate::model::stage::Model;
use crate::model::weights::ModelError;
use std::sync::{Mutex, PoisonError};

/// What of a card's free memory is left to its driver and to others, in parts of a hundred.
const LEFT_ALONE: u64 = 5;

/// Tokens of a prompt that a device must have room for at least.
const SPEAKING: usize = 256;

/// Opens it, with `memory` bytes for its buffers. Where nobody typed a dtype, a card may round the factors of frozen
/// products to f16; a driver that computes on the CPU gains nothing by that.
pub fn device(found: &Found, dtype: Option<&str>, memory: Option<u64>) -> Result<Wgpu, Fault> {
    let exact = dtype.is_some() || found.facts.kind == Kind::Software;
    let precision = if exact { Precision::F32 } else { Precision::F16 };
    let cache = compiled::of(&found.adapter);
    Wgpu::open(&found.adapter, Options { precision, cache, memory, ..Options::default() })
}

/// An adapter that wgpu drives.
pub struct Card {
    /// What is opened.
    pub found: &'static Found,
    /// Bytes that this device may use: measured before any device of the process was opened, because what one has
    /// uploaded is not free for the next.
    pub budget: u64,
    /// What was opened last.
    breaker: Mutex<Option<Breaker>>,
}

impl Card {
    /// With that many bytes.
    pub fn new(found: &'static Found, budget: u64) -> Self {
        Card { found, budget, breaker: Mutex::default() }
    }

    /// What a run takes on it.
    fn load<'a>(&self, whole: &Whole<'a>) -> Result<Load<'a>, ModelError> {
        // What only speaks needs little beside its weights, and keeps nothing.
        let tokens = if whole.tokens == 0 { SPEAKING } else { whole.tokens };
        let load = Whole { tokens, ..*whole }.load_as(&matrix_bytes)?;
        Ok(Load { home: home(self.found.facts.kind), ..load })
    }

    /// A whole model on it; whether it fits is asked before the device is opened.
    pub fn whole(&self, whole: &Whole, dtype: Option<&str>) -> Result<Box<dyn Model>, ModelError> {
        let keep = memory::choose(self.load(whole)?, self.budget)?.0;
        let device = device(self.found, dtype, Some(self.budget))?;
        *self.breaker.lock().unwrap_or_else(PoisonError::into_inner) = Some(device.breaker());
        building::built(device, whole, keep)
    }
}

/// Whose memory an adapter computes in.
pub fn home(kind: Kind) -> Home {
    match kind {
        Kind::Software | Kind::Integrated => Home::Shared,
        Kind::Discrete | Kind::Virtual | Kind::Unknown => Home::Own,
    }
}

/// What is free on the card, where its driver says it; what has no memory of its own takes the machine's, of which
/// `machine` bytes are free.
pub fn free(found: &Found, machine: u64) -> u64 {
    let own = found.memory().map_or(u64::MAX, |memory| memory.free - memory.free / 100 * LEFT_ALONE);
    match found.facts.kind {
        Kind::Software | Kind::Integrated => own.min(machine),
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
        let load = self.load(&Whole::of(blueprint));
        load.map_or(0, |load| memory::largest(load, self.budget))
    }
}
