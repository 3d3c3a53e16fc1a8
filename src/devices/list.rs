//! List of devices for users: every adapter in the order of its indices, then the CPU; on request with the result of
//! each self-test.

use super::drivers::{self, DRIVERS, Device, Driver, cpu};
use super::seat::Seat;
use super::speed;
use crate::backend::facts::{Facts, Kind};
use crate::backend::wgpu::absence::{self, Absence};
use crate::backend::wgpu::adapters;
use crate::cluster::inject::Inject;
use crate::cluster::worker::{Deviation, Reference};
use crate::config::groups::{CPU, ComputeDtype};
use crate::config::refusal::Refusal;
use crate::model::memory::Offload;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::Instant;

/// A device.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Listed {
    /// Name of the device: `cuda 0`, `wgpu 0`, `cpu`.
    pub name: String,
    /// `cuda`, `wgpu`, `cpu`.
    pub backend: &'static str,
    /// Index for `--gpus`.
    pub index: Option<usize>,
    /// Name from the driver or the processor.
    pub model: String,
    /// `discrete`, `integrated`, `virtual`, `unknown`, `software`, `cpu`.
    pub kind: &'static str,
    /// API through which wgpu drives it.
    pub api: Option<String>,
    /// Version of the driver.
    pub driver: Option<String>,
    /// PCI address.
    pub pci: Option<String>,
    /// Identifier of the card, equal for all adapters of one card.
    pub card: Option<String>,
    /// Cores that this process may use.
    pub cores: Option<usize>,
    /// Total bytes of memory.
    pub memory_total: Option<u64>,
    /// Free bytes of memory.
    pub memory_free: Option<u64>,
    /// Features for its kernels.
    pub features: Vec<String>,
    /// Limits of its kernels.
    pub limits: BTreeMap<&'static str, u64>,
    /// Its numeric class, which names the kernel variant.
    pub class: Option<String>,
    /// Why the class is unknown.
    pub error: Option<String>,
    /// Result of the self-test.
    pub check: Option<Checked>,
}

/// Result of a self-test.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Checked {
    /// The failure; `None`: passed.
    pub failed: Option<String>,
    /// Deviation from the reference.
    pub deviation: Option<Deviation>,
    /// Duration, including opening and compiling.
    pub seconds: f64,
    /// Speed of the operation with the most time in training.
    pub speed: Option<speed::Speed>,
}

/// All devices of this machine.
pub fn list() -> Vec<Listed> {
    let of = |driver: &'static dyn Driver| {
        let devices = driver.devices().iter().enumerate().map(|(index, device)| opened(index, &**device));
        let broken = driver
            .broken()
            .iter()
            .map(|(facts, why)| Listed { error: Some(why.clone()), ..described(driver.name(), None, facts) });
        devices.chain(broken)
    };
    DRIVERS.into_iter().flat_map(of).collect()
}

fn opened(index: usize, device: &dyn Device) -> Listed {
    let facts = device.facts();
    let index = (facts.kind != Kind::Cpu).then_some(index);
    let class = device.class(ComputeDtype::Auto).map_err(|e| e.to_string());
    let (memory_total, free) = device.memory();
    let host = if device.is_shared() { cpu::free_memory() } else { u64::MAX };
    Listed {
        cores: index.is_none().then(cpu::cores),
        memory_total,
        memory_free: free.map(|own| own.min(host)),
        class: class.as_ref().ok().cloned(),
        error: class.err(),
        ..described(device.driver().name(), index, facts)
    }
}

/// A device that is not opened. `--gpus` cannot name it without an index.
fn described(backend: &'static str, index: Option<usize>, facts: &Facts) -> Listed {
    let filled = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
    Listed {
        name: index.map_or(backend.into(), |index| format!("{backend} {index}")),
        backend,
        index,
        model: facts.name.clone(),
        kind: facts.kind.word(),
        api: filled(&facts.api),
        driver: filled(&facts.driver),
        pci: filled(&facts.pci),
        card: filled(&facts.card),
        cores: None,
        memory_total: None,
        memory_free: None,
        features: facts.features.clone(),
        limits: facts.limits.clone(),
        class: None,
        error: None,
        check: None,
    }
}

/// Why no real GPU is among the devices; `None` where one is.
pub fn no_gpu(found: &[Listed]) -> Option<Absence> {
    let real = |d: &Listed| d.backend != "cpu" && d.kind != "software";
    (!found.iter().any(real)).then(adapters::why_none)
}

/// Vulkan drivers known to the system, for a report.
pub fn drivers() -> Value {
    let facts = absence::Facts::gather();
    serde_json::json!({
        "loader": facts.loader, "drivers": facts.drivers, "wsl": facts.wsl, "container": facts.container,
        "nvidia": facts.nvidia,
        "nodes": facts.nodes.iter().map(|node| node.path.display().to_string()).collect::<Vec<_>>(),
        "denied": facts.nodes.iter().filter_map(|node| node.denied_to_all_but.clone()).collect::<Vec<_>>(),
    })
}

/// Runs the self-test of each device in turn, and measures its speed.
pub fn check(found: &mut [Listed], threads: usize, inject: &Inject) -> Result<(), Refusal> {
    let reference = Reference::new(&cpu::ReferenceCpu)?;
    for listed in found {
        let index = match listed.index {
            Some(index) => index,
            None if listed.backend == CPU => 0,
            // A card without a description already has its error.
            None => continue,
        };
        let Some(device) = drivers::named(listed.backend).devices().get(index) else { continue };
        let seat = Seat::alone(&**device, ComputeDtype::Auto, threads, (None, Offload::Never));
        listed.check = Some(checked(&reference, &seat, inject));
    }
    Ok(())
}

fn checked(reference: &Reference, seat: &Seat, inject: &Inject) -> Checked {
    let began = Instant::now();
    let measured = reference.measure(seat, inject);
    let seconds = began.elapsed().as_secs_f64();
    let failed = |why: String, deviation| Checked { failed: Some(why), deviation, seconds, speed: None };
    match measured {
        Err(e) => failed(e.to_string(), None),
        Ok(deviation) => match (deviation.verdict(), seat.speed()) {
            (Err(wrong), _) => failed(wrong, Some(deviation)),
            (Ok(()), Err(fault)) => failed(fault.to_string(), Some(deviation)),
            (Ok(()), Ok(speed)) => {
                Checked { failed: None, deviation: Some(deviation), seconds, speed: Some(speed) }
            }
        },
    }
}
