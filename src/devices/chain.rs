//! Every chosen device with the backends that may drive it, best first: an adapter, then the CPU. Where a backend was
//! asked for by name, a device begins with it or not at all; one that fails later falls back all the same, and says so.

use super::card::{Card, FoundCard, Room};
use super::choose::{Chosen, DeviceId, Picked};
use super::cpu::{self, Processor, Twin, cores};
use super::pretend::{NotBuilt, Pretended};
use crate::backend::wgpu::adapters;
use crate::cluster::inject::Inject;
use crate::cluster::worker::{Begin, Candidate, Equipment, Opener};
use crate::config::groups::Driver;
use crate::model::memory::Limit;
use std::sync::Arc;

/// What this process computes with when it takes part in a run of many devices. What is free is asked once, before
/// any of them is opened: an adapter's own memory is divided among the devices on it, the machine's among all.
pub fn equipment(chosen: &Chosen, inject: Inject) -> Equipment {
    let machine = cpu::free_memory();
    Equipment {
        candidates: (0..chosen.picks.len()).map(|at| candidate(chosen, at, machine, &inject)).collect(),
        reference: Arc::new(Twin),
        inject,
    }
}

fn candidate(chosen: &Chosen, at: usize, machine: u64, inject: &Inject) -> Candidate {
    let Picked { name, device, .. } = &chosen.picks[at];
    let cpu: Arc<dyn Opener> = Arc::new(processor(chosen, at, machine));
    let mut chain = Vec::new();
    if let Some(name) = inject.pretend() {
        chain.push(Arc::new(Pretended { name: name.into(), cpu: cpu.clone() }) as Arc<dyn Opener>);
    }
    if inject.pretend() == Some("cuda") {
        chain.push(Arc::new(NotBuilt("wgpu")));
    }
    let card = found(*device);
    // The same card through Vulkan comes next.
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

/// The card that a device is, where it is one.
pub fn found(device: DeviceId) -> Option<FoundCard> {
    match device {
        DeviceId::Cpu => None,
        DeviceId::Gpu(index) => FoundCard::adapter(index),
        DeviceId::Cuda(index) => FoundCard::cuda(index),
    }
}

/// Bytes that the device `at`, on a card, may use where `machine` bytes of the machine's memory are free.
pub fn budget(chosen: &Chosen, at: usize, found: FoundCard, machine: u64) -> u64 {
    let among = Among { adapter: chosen.picks[at].sharing as u64, machine: chosen.picks.len() as u64 };
    match chosen.options.memory_limit {
        Some(limit) => limit / among.adapter,
        None => among.share(machine, found.room()),
    }
}

/// How many devices divide what is free.
struct Among {
    /// On the same adapter.
    adapter: u64,
    /// In this process.
    machine: u64,
}

impl Among {
    /// Bytes for one of them, of a card's `room` in a machine with so much.
    fn share(&self, machine: u64, room: Room) -> u64 {
        (room.own / self.adapter).min(room.within(machine / self.machine))
    }
}

/// The part of the CPU that a device computes on, or falls back to.
fn processor(chosen: &Chosen, at: usize, machine: u64) -> Processor {
    let (devices, threads) = (chosen.picks.len() as u64, threads(chosen, at));
    let limit = Limit::of(chosen.options.memory_limit, || machine).among(devices);
    Processor { dtype: chosen.options.dtype, threads, limit }
}

/// Threads of the part of the CPU that is `at`'s.
pub fn threads(chosen: &Chosen, at: usize) -> usize {
    let devices = chosen.picks.len();
    let threads = chosen.options.threads.unwrap_or_else(cores);
    // What does not divide evenly goes to the first ones.
    (threads / devices + usize::from(at < threads % devices)).max(1)
}

/// The hardware of device `at`, as a person would name it.
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
