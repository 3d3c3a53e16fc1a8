//! Every chosen device with the backends that may drive it, best first: an adapter, then the CPU. Where a backend was
//! asked for by name, a device begins with it or not at all; one that fails later falls back all the same, and says so.

use super::choose::{Chosen, Device, Picked};
use super::cpu::{self, Processor, Twin, cores};
use super::gpu::{self, Card};
use super::nvidia;
use super::pretend::{NotBuilt, Pretended};
use crate::backend::wgpu::adapters::{self, Found};
use crate::cli::options::groups::Driver;
use crate::cluster::inject::Inject;
use crate::cluster::worker::{Begin, Candidate, Equipment, Opener};
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
    let card = match device {
        Device::Cuda(index) => nvidia::all().ok().and_then(|all| all.get(*index)),
        Device::Cpu | Device::Gpu(_) => None,
    };
    if let Some(found) = card {
        chain.push(Arc::new(nvidia_card(chosen, at, found)));
    }
    // The same card through Vulkan comes next.
    let adapter = match (device, card) {
        (Device::Gpu(index), _) => Some(*index),
        (_, Some(card)) => adapters::all().iter().position(|found| found.facts.card == card.facts.card),
        _ => None,
    };
    if let Some(index) = adapter
        && let Some(found) = adapters::all().get(index)
    {
        chain.push(Arc::new(Card::new(found, budget(chosen, at, found, machine))));
    }
    chain.push(cpu);
    let begin = match chosen.options.backend {
        Driver::Wgpu | Driver::Cuda => Begin::Named,
        Driver::Auto | Driver::Cpu => Begin::Anywhere,
    };
    Candidate { name: name.clone(), chain, begin }
}

/// The device `at`, on NVIDIA's own driver, with its share of what is free on the card.
pub fn nvidia_card(chosen: &Chosen, at: usize, found: &'static nvidia::Found) -> nvidia::Card {
    let bytes = chosen.options.memory_limit.unwrap_or_else(|| nvidia::free(found));
    let budget = bytes / chosen.picks[at].sharing as u64;
    nvidia::Card { found, budget, dtype: chosen.options.dtype }
}

/// Bytes that the device `at`, on an adapter, may use where `machine` bytes of the machine's memory are free.
pub fn budget(chosen: &Chosen, at: usize, found: &Found, machine: u64) -> u64 {
    let among = Among { adapter: chosen.picks[at].sharing as u64, machine: chosen.picks.len() as u64 };
    match chosen.options.memory_limit {
        Some(limit) => limit / among.adapter,
        None => among.share(machine, &|machine| gpu::free(found, machine)),
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
    /// Bytes for one of them; `free` says what is free on its adapter in a machine that has so much.
    fn share(&self, machine: u64, free: &dyn Fn(u64) -> u64) -> u64 {
        (free(u64::MAX) / self.adapter).min(free(machine / self.machine))
    }
}

/// The part of the CPU that a device computes on, or falls back to.
fn processor(chosen: &Chosen, at: usize, machine: u64) -> Processor {
    let (devices, threads) = (chosen.picks.len() as u64, threads(chosen, at));
    let limit = chosen.options.memory_limit.unwrap_or(machine) / devices;
    Processor { dtype: chosen.options.dtype, threads, limit }
}

/// Threads of the part of the CPU that is `at`'s.
pub fn threads(chosen: &Chosen, at: usize) -> usize {
    let devices = chosen.picks.len();
    let threads = chosen.options.threads.unwrap_or_else(cores);
    // What does not divide evenly goes to the first ones.
    (threads / devices + usize::from(at < threads % devices)).max(1)
}

#[cfg(test)]
mod tests {
    use super::Among;

    #[test]
    fn what_is_free_is_divided_once() {
        let (card, host) = (24, 16);
        let discrete = |_: u64| card;
        let software = |machine: u64| machine.min(card);
        let two = Among { adapter: 2, machine: 2 };
        assert_eq!(two.share(host, &discrete), 12, "both get the same, whichever opens first");
        assert_eq!(two.share(host, &software), 8);
        let beside_the_cpu = Among { adapter: 1, machine: 2 };
        assert_eq!(beside_the_cpu.share(host, &software), 8, "the CPU has the other half");
        assert_eq!(beside_the_cpu.share(host, &discrete), 24);
    }
}
