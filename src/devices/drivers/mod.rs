//! The drivers of devices. A driver is one file of this folder and one row of [`DRIVERS`]; code outside knows what all
//! of them have in common.

pub mod cpu;
pub mod cuda;
pub mod wgpu;

use super::building::{Opened, Whole};
use crate::backend::Fault;
use crate::backend::facts::{Facts, Kind};
use crate::config::groups::ComputeDtype;
use crate::model::memory::{Home, Limit, Load, Offload};
use crate::model::weights::ModelError;

/// All drivers, best first. If a device fails under one of them, the next one that drives the same card takes over, and
/// the CPU at last.
pub static DRIVERS: [&dyn Driver; 3] = [&cuda::Nvidia, &wgpu::Graphics, &cpu::Processor];

/// Percentage of a card's free memory that is left to its driver and to other processes.
const LEFT_ALONE: u64 = 5;
/// Minimum prompt length in tokens that a device must have memory for. Generation needs little besides the weights.
const SPEAKING: usize = 256;

/// A kind of driver.
pub trait Driver: Sync {
    /// Its name in `--gpu-backend` and in messages.
    fn name(&self) -> &'static str;

    /// Its devices in the order of their indices, listed once per process.
    fn devices(&self) -> &'static [Box<dyn Device>];

    /// Devices that it counts but cannot describe, with the errors: they have no index.
    fn broken(&self) -> &'static [(Facts, String)] {
        &[]
    }

    /// Why it has no device, or only software, with a solution.
    fn absence(&self) -> String {
        String::new()
    }

    /// Input of the memory estimate of a model in the type `dtype` on a device with memory at `home`, which need not be
    /// here.
    fn load<'a>(&self, whole: &Whole<'a>, dtype: ComputeDtype, home: Home) -> Result<Load<'a>, ModelError>;

    /// Type of products and numeric class of a card that is not here.
    fn assumed(&self, dtype: ComputeDtype) -> (ComputeDtype, &'static str) {
        (dtype, self.name())
    }
}

/// A device as its driver lists it.
pub trait Device: Send + Sync {
    /// Its driver.
    fn driver(&self) -> &'static dyn Driver;

    /// Its properties as reported by the driver.
    fn facts(&self) -> &Facts;

    /// Total bytes of memory, and free ones without the reserved part, where the driver reports them.
    fn memory(&self) -> (Option<u64>, Option<u64>);

    /// Why it cannot compute, as far as its facts say.
    fn refusal(&self) -> Option<Fault> {
        None
    }

    /// Type of products where `dtype` was typed, or not.
    fn settled(&self, dtype: ComputeDtype) -> ComputeDtype {
        dtype
    }

    /// Whether its kernels are of the portable class, as far as its driver decides that.
    fn is_portable(&self) -> bool {
        true
    }

    /// Opens the device.
    fn open(&self, share: Share) -> Result<Box<dyn Opened>, Fault>;

    /// Opens the device, and launches no kernel that needs a trial and has not passed one.
    fn open_untried(&self, share: Share) -> Result<Box<dyn Opened>, Fault> {
        self.open(share)
    }

    /// Numeric class, as far as it is known without computing; the device is opened for it.
    fn class(&self, dtype: ComputeDtype) -> Result<String, Fault> {
        Ok(self.open_untried(Share::of_class(dtype))?.class())
    }

    /// Simulates the loss of the device as it was opened last.
    #[cfg(feature = "faults")]
    fn lose(&self) {}
}

/// What a device may use of this process.
#[derive(Debug, Clone, Copy)]
pub struct Share {
    /// Type of products.
    pub dtype: ComputeDtype,
    /// Threads of the CPU.
    pub threads: usize,
    /// Memory, measured before any device of the process was opened: the data of one device reduces the free memory for
    /// the next.
    pub limit: Limit,
    /// Which layers may be streamed.
    pub offload: Offload,
}

impl Share {
    /// Enough to know the class in this type of products.
    fn of_class(dtype: ComputeDtype) -> Self {
        Share { dtype, threads: 1, limit: Limit::Typed(u64::MAX), offload: Offload::Never }
    }
}

/// Numbers of devices that share free memory.
#[derive(Debug, Clone, Copy)]
pub struct Among {
    /// On the same card.
    pub card: u64,
    /// In this process.
    pub machine: u64,
}

impl Among {
    /// Memory per device where a card has `own` bytes, and uses `host` bytes of host memory if it has none of its own.
    /// Memory of unknown size is not filled without need: a system without a limit would move it to disk.
    fn share(self, own: Option<u64>, host: Option<u64>) -> Limit {
        let bytes = own.unwrap_or(u64::MAX) / self.card;
        let bytes = host.map_or(bytes, |host| bytes.min(host / self.machine));
        if own.is_some() { Limit::Typed(bytes) } else { Limit::Free(bytes) }
    }
}

impl dyn Device + '_ {
    /// Memory of one of several devices of this process, where `machine` bytes of host memory are free and a limit may
    /// have been typed. Where the driver does not report free memory the total counts: opening the card fails if other
    /// processes use it.
    pub fn limit(&self, typed: Option<u64>, among: Among, machine: u64) -> Limit {
        let own = |(total, free): (Option<u64>, Option<u64>)| free.or(total.map(usable));
        match (self.facts().kind, typed) {
            (Kind::Cpu, _) => Limit::of(typed, || machine).among(among.machine),
            (_, Some(limit)) => Limit::Typed(limit / among.card),
            (_, None) => among.share(own(self.memory()), self.is_shared().then_some(machine)),
        }
    }

    /// Input of the memory estimate of a model on the device.
    pub fn load<'a>(&self, whole: &Whole<'a>, dtype: ComputeDtype) -> Result<Load<'a>, ModelError> {
        let home = match self.facts().kind {
            _ if whole.tokens == 0 => Home::Untrained,
            Kind::Cpu => Home::HostInTeam,
            _ if self.is_shared() => Home::Shared,
            _ => Home::Own,
        };
        self.driver().load(whole, self.settled(dtype), home)
    }

    /// Whether it uses host memory.
    pub fn is_shared(&self) -> bool {
        matches!(self.facts().kind, Kind::Software | Kind::Integrated)
    }

    /// The type of products that the run's user typed, which every device uses.
    pub fn typed(&self, dtype: &str) -> Result<ComputeDtype, ModelError> {
        let facts = self.facts();
        let refused = |why: &str| Err(ModelError::Source(format!("the run computes in {dtype}, {why}")));
        match dtype {
            "f32" => Ok(ComputeDtype::F32),
            "portable" if self.is_portable() => Ok(ComputeDtype::Portable),
            "bf16" if facts.has_bf16() => Ok(ComputeDtype::Bf16),
            _ if facts.kind == Kind::Cpu => refused("this device cannot"),
            _ => refused(
                "which this device has not: leave --dtype out on the coordinator, or compute on the CPU here (--gpus cpu)",
            ),
        }
    }
}

/// The driver with that name.
pub fn named(name: &str) -> &'static dyn Driver {
    DRIVERS.into_iter().find(|driver| driver.name() == name).unwrap_or(&cpu::Processor)
}

/// The usable part of free bytes.
pub fn usable(free: u64) -> u64 {
    free - free / 100 * LEFT_ALONE
}

/// The model for the memory estimate of a device that may only generate.
pub fn speaking<'a>(whole: &Whole<'a>) -> Whole<'a> {
    Whole { tokens: if whole.tokens == 0 { SPEAKING } else { whole.tokens }, ..*whole }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::groups::BACKENDS;

    #[test]
    fn every_backend_that_can_be_named_has_a_driver() {
        assert_eq!(DRIVERS.map(|driver| driver.name()), BACKENDS);
    }

    #[test]
    fn free_memory_is_divided_among_devices() {
        let (card, discrete, software) = (Some(24), None, Some(16));
        let two = Among { card: 2, machine: 2 };
        assert_eq!(two.share(card, discrete), Limit::Typed(12), "both get the same, whichever opens first");
        assert_eq!(two.share(card, software), Limit::Typed(8));
        assert_eq!(two.share(None, software), Limit::Free(8));
        assert_eq!(two.share(None, discrete), Limit::Free(u64::MAX / 2));
        let beside_the_cpu = Among { card: 1, machine: 2 };
        assert_eq!(beside_the_cpu.share(card, software), Limit::Typed(8), "the CPU has the other half");
        assert_eq!(beside_the_cpu.share(card, discrete), Limit::Typed(24));
    }
}
