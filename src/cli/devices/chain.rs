//! Every chosen device with the backends that may drive it, best first: an adapter, then the CPU. Where a backend was
//! asked for by name, a device begins with it or not at all; one that fails later falls back all the same, and says so.

use super::choose::{Chosen, Device, Picked};
use super::cpu::{Processor, Twin, cores};
use super::gpu::Card;
use super::pretend::{NotBuilt, Pretended};
use crate::backend::wgpu::adapters;
use crate::cli::options::groups::Driver;
use crate::cluster::inject::Inject;
use crate::cluster::worker::{Begin, Candidate, Equipment, Opener};
use std::sync::Arc;

/// What this process computes with when it takes part in a run of many devices.
pub fn equipment(chosen: &Chosen, inject: Inject) -> Equipment {
    Equipment {
        candidates: (0..chosen.picks.len()).map(|at| candidate(chosen, at, &inject)).collect(),
        reference: Arc::new(Twin),
        inject,
    }
}

fn candidate(chosen: &Chosen, at: usize, inject: &Inject) -> Candidate {
    let Picked { name, device, sharing } = &chosen.picks[at];
    let cpu: Arc<dyn Opener> = Arc::new(processor(chosen, at));
    let mut chain = Vec::new();
    if let Some(name) = inject.pretend() {
        chain.push(Arc::new(Pretended { name: name.into(), cpu: cpu.clone() }) as Arc<dyn Opener>);
    }
    if inject.pretend() == Some("cuda") {
        chain.push(Arc::new(NotBuilt("wgpu")));
    }
    if let Device::Gpu(index) = device
        && let Some(found) = adapters::all().get(*index)
    {
        chain.push(Arc::new(Card::new(found, chosen.options.memory_limit, *sharing)));
    }
    chain.push(cpu);
    let begin = match chosen.options.backend {
        Driver::Wgpu => Begin::Named,
        Driver::Auto | Driver::Cpu => Begin::Anywhere,
    };
    Candidate { name: name.clone(), chain, begin }
}

/// The part of the CPU that a device computes on, or falls back to.
fn processor(chosen: &Chosen, at: usize) -> Processor {
    let (devices, threads) = (chosen.picks.len(), threads(chosen, at));
    Processor { dtype: chosen.options.dtype, threads, limit: chosen.options.memory_limit, devices }
}

/// Threads of the part of the CPU that is `at`'s.
pub fn threads(chosen: &Chosen, at: usize) -> usize {
    let devices = chosen.picks.len();
    let threads = chosen.options.threads.unwrap_or_else(cores);
    // What does not divide evenly goes to the first ones.
    (threads / devices + usize::from(at < threads % devices)).max(1)
}
