//! A card under any driver: its usable memory, the memory of a model on it, and its self-test. Drivers differ in how
//! they list and open cards; code outside this file does not depend on the driver.

use super::building::{self, Whole};
use super::{cpu, gpu, nvidia, speed};
use crate::backend::wgpu::adapters::{self, Facts, Kind};
use crate::backend::wgpu::{self, Breaker};
use crate::backend::{Backend, Fault, Target, cuda};
use crate::cluster::inject::Inject;
use crate::cluster::worker::{Blueprint, Opener, Reference};
use crate::config::groups::ComputeDtype;
use crate::model::decoder::Keep;
use crate::model::memory::{self, Home, Load};
use crate::model::stage::Model;
use crate::model::weights::ModelError;
use std::sync::{Mutex, PoisonError};

/// Percentage of a card's free memory that is left to its driver and to other processes.
const LEFT_ALONE: u64 = 5;
/// Minimum prompt length in tokens that a device must have memory for.
const SPEAKING: usize = 256;

/// A card as its driver lists it.
#[derive(Debug, Clone, Copy)]
pub enum FoundCard {
    /// Through Vulkan, Metal or DX12.
    Wgpu(&'static adapters::Found),
    /// Through NVIDIA's own driver.
    Cuda(&'static nvidia::FoundNvidia),
}

/// Bytes of usable memory.
#[derive(Debug, Clone, Copy)]
pub struct Room {
    /// On the card, as reported by its driver.
    pub own: u64,
    /// Whether the card uses host memory.
    pub shared: bool,
}

impl Room {
    /// Usable bytes where `machine` bytes of host memory are free.
    pub fn within(self, machine: u64) -> u64 {
        if self.shared { self.own.min(machine) } else { self.own }
    }
}

impl FoundCard {
    /// The adapter with that index.
    pub fn adapter(index: usize) -> Option<FoundCard> {
        adapters::all().get(index).map(FoundCard::Wgpu)
    }

    /// The card of NVIDIA's driver with that index.
    pub fn cuda(index: usize) -> Option<FoundCard> {
        nvidia::all().ok()?.get(index).map(FoundCard::Cuda)
    }

    /// The card's properties as reported by its driver.
    pub fn facts(self) -> &'static Facts {
        match self {
            FoundCard::Wgpu(found) => &found.facts,
            FoundCard::Cuda(found) => &found.facts,
        }
    }

    /// Total memory, where the driver reports it.
    pub fn total(self) -> Option<u64> {
        match self {
            FoundCard::Wgpu(found) => found.memory().map(|memory| memory.total),
            FoundCard::Cuda(found) => Some(found.device.memory),
        }
    }

    /// Free memory without the reserved part, where the driver reports it. A card without its own memory uses host
    /// memory, of which `machine` bytes are free.
    pub fn free(self, machine: u64) -> Option<u64> {
        self.told().map(|own| Room { own, shared: self.shared() }.within(machine))
    }

    /// Usable memory. Where the driver does not report free memory this is the total: opening the card fails if other
    /// processes use it.
    pub fn room(self) -> Room {
        let all = match self {
            FoundCard::Wgpu(_) => u64::MAX,
            FoundCard::Cuda(found) => usable(found.device.memory),
        };
        Room { own: self.told().unwrap_or(all), shared: self.shared() }
    }

    fn told(self) -> Option<u64> {
        let free = match self {
            FoundCard::Wgpu(found) => found.memory().map(|memory| memory.free),
            FoundCard::Cuda(found) => cuda::free(found.device.ordinal),
        };
        free.map(usable)
    }

    fn shared(self) -> bool {
        matches!(self.facts().kind, Kind::Software | Kind::Integrated)
    }

    /// Numeric class; this opens the card.
    pub fn class(self, dtype: ComputeDtype) -> Result<String, Fault> {
        match self {
            FoundCard::Wgpu(found) => gpu::device(found, dtype, None).map(|device| device.class()),
            FoundCard::Cuda(found) => nvidia::device(found, dtype, None).map(|device| device.class()),
        }
    }

    /// Measured speed.
    pub fn speed(self) -> Result<speed::Speed, Fault> {
        match self {
            FoundCard::Wgpu(found) => gpu::device(found, ComputeDtype::Auto, None).and_then(speed::of),
            FoundCard::Cuda(found) => nvidia::device(found, ComputeDtype::Auto, None).and_then(speed::of),
        }
    }

    /// Input of the memory estimate of a model on the card. Generation needs little memory besides the weights.
    pub fn load<'a>(self, whole: &Whole<'a>, dtype: ComputeDtype) -> Result<Load<'a>, ModelError> {
        let through = match self {
            FoundCard::Wgpu(_) => Through::Wgpu,
            FoundCard::Cuda(found) => Through::Cuda(nvidia::settled(found, dtype)),
        };
        through.load(whole, if self.shared() { Home::Shared } else { Home::Own })
    }
}

/// Driver of a card, as far as memory is concerned.
#[derive(Debug, Clone, Copy)]
pub enum Through {
    /// Vulkan, Metal or DX12.
    Wgpu,
    /// NVIDIA's own driver, with this type of products.
    Cuda(ComputeDtype),
}

impl Through {
    /// Input of the memory estimate on a card with memory at `home`.
    pub fn load<'a>(self, whole: &Whole<'a>, home: Home) -> Result<Load<'a>, ModelError> {
        let tokens = if whole.tokens == 0 { SPEAKING } else { whole.tokens };
        let whole = Whole { tokens, ..*whole };
        let device = match self {
            Through::Wgpu if home == Home::Shared => Target::Wgpu(wgpu::Footprint::of_software()),
            Through::Wgpu => Target::Wgpu(wgpu::Footprint::of_card()),
            Through::Cuda(ComputeDtype::Bf16) => Target::Cuda(cuda::Footprint::of_bf16()),
            Through::Cuda(_) => Target::Cuda(cuda::Footprint::of_f32()),
        };
        Ok(Load { home, ..whole.load_on(device)? })
    }
}

/// The usable part of free bytes.
pub fn usable(free: u64) -> u64 {
    free - free / 100 * LEFT_ALONE
}

/// A card with its share of memory.
pub struct Card {
    /// The card to open.
    pub found: FoundCard,
    /// Bytes that this device may use, measured before any device of the process was opened: the data of one device
    /// reduces the free memory for the next.
    pub budget: u64,
    /// Type of products where the run does not set one.
    dtype: ComputeDtype,
    /// Breaker of the device opened last; tests use it to make the device disappear.
    breaker: Mutex<Option<Breaker>>,
}

impl Card {
    /// A card with a budget of `budget` bytes.
    pub fn new(found: FoundCard, budget: u64, dtype: ComputeDtype) -> Self {
        Card { found, budget, dtype, breaker: Mutex::default() }
    }

    /// A type that the run's user typed is used on every device.
    fn dtype(&self, blueprint: &Blueprint) -> Result<ComputeDtype, ModelError> {
        match (blueprint.shape.dtype.as_deref(), self.found) {
            (None, _) => Ok(self.dtype),
            (Some("f32"), _) => Ok(ComputeDtype::F32),
            (Some("bf16"), FoundCard::Cuda(found)) if nvidia::has_bf16(&found.facts) => {
                Ok(ComputeDtype::Bf16)
            }
            (Some(other), _) => {
                let why = "leave --dtype out on the coordinator, or compute on the CPU here (--gpus cpu)";
                let line = format!("the run computes in {other}, which this device has not: {why}");
                Err(ModelError::Source(line))
            }
        }
    }

    /// Builds a whole model on the card; memory is checked before the device is opened.
    fn whole(&self, whole: &Whole, dtype: ComputeDtype) -> Result<Box<dyn Model>, ModelError> {
        if let FoundCard::Cuda(found) = self.found
            && let Some(reason) = found.device.unusable()
        {
            return Err(Fault::Device { device: found.facts.name.clone(), reason }.into());
        }
        self.kept(whole, dtype, self.choose(whole, dtype)?)
    }

    /// The policy for kept values within this device's budget.
    fn choose(&self, whole: &Whole, dtype: ComputeDtype) -> Result<Keep, ModelError> {
        Ok(memory::choose(self.found.load(whole, dtype)?, self.budget)?.0)
    }

    fn kept(&self, whole: &Whole, dtype: ComputeDtype, keep: Keep) -> Result<Box<dyn Model>, ModelError> {
        match self.found {
            FoundCard::Wgpu(found) => {
                let device = gpu::device(found, dtype, Some(self.budget))?;
                *self.breaker.lock().unwrap_or_else(PoisonError::into_inner) = Some(device.breaker());
                building::built(device, whole, keep)
            }
            FoundCard::Cuda(found) => {
                building::built(nvidia::device(found, dtype, Some(self.budget))?, whole, keep)
            }
        }
    }

    /// Builds a whole model after the card has passed the self-test, because later results are not compared.
    pub fn proved(&self, whole: &Whole) -> Result<Box<dyn Model>, ModelError> {
        // Memory is checked first, so that a user does not wait for the self-test of a model that does not fit.
        let keep = self.choose(whole, self.dtype)?;
        let deviation = Reference::new(&cpu::Twin)?.measure(self, &Inject::default())?;
        deviation.verdict().map_err(ModelError::Source)?;
        self.kept(whole, self.dtype, keep)
    }
}

impl Opener for Card {
    fn backend(&self) -> &str {
        match self.found {
            FoundCard::Wgpu(_) => "wgpu",
            FoundCard::Cuda(_) => "cuda",
        }
    }

    fn open(&self, blueprint: &Blueprint) -> Result<Box<dyn Model>, ModelError> {
        self.whole(&Whole::of(blueprint), self.dtype(blueprint)?)
    }

    fn lose(&self) {
        let opened = self.breaker.lock().unwrap_or_else(PoisonError::into_inner);
        opened.iter().for_each(Breaker::strike);
    }
}

#[cfg(test)]
mod tests;
