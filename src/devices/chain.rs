//! The backends for each chosen device, best first: an adapter, then the CPU. A backend given by name must work at the
//! start; a device that fails later falls back nevertheless and reports this.

use super::card::{Card, FoundCard, Room};
use super::choose::{Chosen, DeviceId, Picked};
use super::cpu::{self, Processor, Twin, cores};
use crate::backend::wgpu::adapters;
use crate::cluster::inject::Inject;
use crate::cluster::worker::{Begin, Candidate, Equipment, Opener};
use crate::config::groups::Driver;
use crate::model::memory::Limit;
use std::sync::Arc;

/// The devices of this process for a run with many devices. Free memory is read once, before any device is opened: an
/// adapter's own memory is divided among the devices on it, host memory among all devices.
pub fn equipment(chosen: &Chosen, inject: Inject) -> Equipment {
    let machine = cpu::free_memory();
    let candidates = (0..chosen.picks.len()).map(|at| candidate(chosen, at, machine)).collect();
    let equipment = Equipment { candidates, reference: Arc::new(Twin), inject };
    #[cfg(feature = "faults")]
    let equipment = super::pretend::ahead(equipment);
    equipment
}

fn candidate(chosen: &Chosen, at: usize, machine: u64) -> Candidate {
    let Picked { name, device, .. } = &chosen.picks[at];
    let cpu: Arc<dyn Opener> = Arc::new(processor(chosen, at, machine));
    let mut chain: Vec<Arc<dyn Opener>> = Vec::new();
    let card = found(*device);
    // The same card through Vulkan is the next choice.
    let next = match card {
        Some(FoundCard::Cuda(card)) => {
            let same = |adapter: &adapters::Found| adapter.facts.card == card.facts.card;
            adapters::all().iter().position(same).and_then(FoundCard::adapter)
        }
        _ => None,
    };
    for found in card.into_iter().chain(next) {
        let budget = budget(chosen, at, found, machine);
        chain.push(Arc::new(Card::new(found, budget, chosen.options.dtype)));
    }
    chain.push(cpu);
    let begin = match chosen.options.backend {
        Driver::Wgpu | Driver::Cuda => Begin::Named,
        Driver::Auto | Driver::Cpu => Begin::Anywhere,
    };
    Candidate { name: name.clone(), chain, begin }
}

/// The card of a device, where it is one.
pub fn found(device: DeviceId) -> Option<FoundCard> {
    match device {
        DeviceId::Cpu => None,
        DeviceId::Gpu(index) => FoundCard::adapter(index),
        DeviceId::Cuda(index) => FoundCard::cuda(index),
    }
}

/// Bytes for the device `at`, on a card, where `machine` bytes of host memory are free.
pub fn budget(chosen: &Chosen, at: usize, found: FoundCard, machine: u64) -> u64 {
    let among = Among { adapter: chosen.picks[at].sharing as u64, machine: chosen.picks.len() as u64 };
    match chosen.options.memory_limit {
        Some(limit) => limit / among.adapter,
        None => among.share(machine, found.room()),
    }
}

/// Numbers of devices that share free memory.
struct Among {
    /// On the same adapter.
    adapter: u64,
    /// In this process.
    machine: u64,
}

impl Among {
    /// Bytes per device, for a card's `room` and `machine` bytes of host memory.
    fn share(&self, machine: u64, room: Room) -> u64 {
        (room.own / self.adapter).min(room.within(machine / self.machine))
    }
}

/// The part of the CPU that a device computes on or falls back to.
fn processor(chosen: &Chosen, at: usize, machine: u64) -> Processor {
    let (devices, threads) = (chosen.picks.len() as u64, threads(chosen, at));
    let limit = Limit::of(chosen.options.memory_limit, || machine).among(devices);
    Processor { dtype: chosen.options.dtype, threads, limit }
}

/// Number of threads of device `at` on the CPU.
pub fn threads(chosen: &Chosen, at: usize) -> usize {
    let devices = chosen.picks.len();
    let threads = chosen.options.threads.unwrap_or_else(cores);
    // The remainder goes to the first devices.
    (threads / devices + usize::from(at < threads % devices)).max(1)
}

/// Name of the hardware of device `at`, for users.
pub fn hardware(chosen: &Chosen, at: usize) -> String {
    let pick = &chosen.picks[at];
    match (found(pick.device), threads(chosen, at)) {
        (Some(found), _) if pick.sharing > 1 => {
            format!("{}, one of {} on it", found.facts().name, pick.sharing)
        }
        (Some(found), _) => found.facts().name.clone(),
        (None, 1) => format!("{}, 1 thread", cpu::processor()),
        (None, n) => format!("{}, {n} threads", cpu::processor()),
    }
}

#[cfg(test)]
mod tests {
    use super::{Among, Room};

    #[test]
    fn free_memory_is_divided_among_devices() {
        let (card, host) = (24, 16);
        let (discrete, software) = (Room { own: card, shared: false }, Room { own: card, shared: true });
        let two = Among { adapter: 2, machine: 2 };
        assert_eq!(two.share(host, discrete), 12, "both get the same, whichever opens first");
        assert_eq!(two.share(host, software), 8);
        let beside_the_cpu = Among { adapter: 1, machine: 2 };
        assert_eq!(beside_the_cpu.share(host, software), 8, "the CPU has the other half");
        assert_eq!(beside_the_cpu.share(host, discrete), 24);
    }
}
