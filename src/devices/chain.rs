//! The backends for each chosen device, best first: its driver, then the other drivers of the same card, then the CPU. A
//! backend given by name must work at the start; a device that fails later falls back nevertheless and reports this.

use super::choose::{Chosen, DeviceId};
use super::drivers::{self, Among, DRIVERS, Device, Share, cpu};
use super::line::Seats;
use super::seat::Seat;
use crate::backend::facts::Kind;
use crate::cluster::inject::Inject;
use crate::cluster::worker::{Begin, Candidate, Equipment, Opener};
use crate::config::groups::{CPU, DeviceOptions};
use std::ops::Range;
use std::sync::Arc;

/// The devices of this process for a run with many devices. Free memory is read once, before any device is opened: an
/// adapter's own memory is divided among the devices on it, host memory among all devices.
pub fn equipment(chosen: &Chosen, inject: Inject) -> Equipment {
    let machine = free_memory(chosen);
    let candidates = chosen.devices().map(|picks| match picks.len() {
        1 => candidate(chosen, picks.start, machine),
        _ => line(chosen, picks, machine),
    });
    let candidates = candidates.collect();
    let equipment = Equipment { candidates, reference: Arc::new(cpu::ReferenceCpu), inject };
    #[cfg(feature = "faults")]
    let equipment = super::pretend::ahead(equipment);
    equipment
}

fn candidate(chosen: &Chosen, at: usize, machine: u64) -> Candidate {
    let id = chosen.picks[at].device;
    let first = found(id);
    let drives = |other: &&dyn Device| {
        let facts = other.facts();
        facts.kind == Kind::Cpu || facts.card == first.facts().card
    };
    let others = DRIVERS.into_iter().skip_while(|driver| driver.name() != id.driver).skip(1);
    let others = others.filter_map(|driver| driver.devices().iter().map(|device| &**device).find(drives));
    let seat = |device| Arc::new(seat(chosen, at, device, machine)) as Arc<dyn Opener>;
    let chain = [first].into_iter().chain(others).map(seat).collect();
    let begin = match chosen.options.backend {
        None | Some(CPU) => Begin::Anywhere,
        Some(_) => Begin::Named,
    };
    Candidate { name: chosen.picks[at].name.clone(), chain, begin }
}

/// Devices that hold a model together. If one of them fails, the CPU continues, if it has the memory.
fn line(chosen: &Chosen, picks: Range<usize>, machine: u64) -> Candidate {
    let mut cpu = seat(chosen, picks.start, &cpu::Processor, machine);
    // It replaces all of them.
    cpu.share.threads = picks.clone().map(|at| threads(chosen, at)).sum();
    cpu.share.limit = cpu.share.limit.times(picks.len() as u64);
    let seats = seats(chosen, picks, machine);
    let name = seats.name();
    Candidate { name, chain: vec![Arc::new(seats), Arc::new(cpu)], begin: Begin::Named }
}

/// The devices of a line with their shares.
pub fn seats(chosen: &Chosen, picks: Range<usize>, machine: u64) -> Seats {
    Seats::new(picks.map(|at| {
        let pick = &chosen.picks[at];
        (pick.name.clone(), seat(chosen, at, found(pick.device), machine))
    }))
}

/// The device itself.
pub fn found(id: DeviceId) -> &'static dyn Device {
    let devices = drivers::named(id.driver).devices();
    devices.get(id.index).map_or(&cpu::Processor, |device| &**device)
}

/// The share of the device `at` when `device` computes for it and `machine` bytes of host memory are free.
pub fn seat(chosen: &Chosen, at: usize, device: &'static dyn Device, machine: u64) -> Seat {
    let among = Among { card: chosen.picks[at].sharing as u64, machine: chosen.picks.len() as u64 };
    let limit = device.limit(chosen.options.memory_limit, among, machine);
    let DeviceOptions { dtype, offload, .. } = chosen.options;
    Seat { device, share: Share { dtype, threads: threads(chosen, at), limit, offload } }
}

/// Free host memory for this process.
pub fn free_memory(chosen: &Chosen) -> u64 {
    cpu::free_memory() / chosen.options.processes() as u64
}

/// Number of threads of this process.
pub fn threads_of(chosen: &Chosen) -> usize {
    let cores = || (cpu::cores() / chosen.options.processes()).max(1);
    chosen.options.threads.unwrap_or_else(cores)
}

/// Number of threads of device `at` on the CPU.
fn threads(chosen: &Chosen, at: usize) -> usize {
    let devices = chosen.picks.len();
    let threads = threads_of(chosen);
    // The remainder goes to the first devices.
    (threads / devices + usize::from(at < threads % devices)).max(1)
}

/// Name of the hardware of these picks, for users.
pub fn hardware_of(chosen: &Chosen, picks: Range<usize>) -> String {
    picks.map(|at| hardware(chosen, at)).collect::<Vec<_>>().join(" + ")
}

/// Name of the hardware of pick `at`, for users.
pub fn hardware(chosen: &Chosen, at: usize) -> String {
    let pick = &chosen.picks[at];
    let facts = found(pick.device).facts();
    let name = &facts.name;
    match (facts.kind, threads(chosen, at)) {
        (Kind::Cpu, 1) => format!("{name}, 1 thread"),
        (Kind::Cpu, n) => format!("{name}, {n} threads"),
        _ if pick.sharing > 1 => format!("{name}, one of {} on it", pick.sharing),
        _ => name.clone(),
    }
}
