//! List of devices for users: every adapter in the order of its indices, then the CPU; on request with the result of
//! each self-test.

use super::card::{Card, FoundCard};
use super::{cpu, nvidia, speed};
use crate::backend::Backend;
use crate::backend::wgpu::absence::{self, Absence};
use crate::backend::wgpu::adapters::{self, Kind};
use crate::cluster::inject::Inject;
use crate::cluster::worker::{Deviation, Opener, Reference};
use crate::config::groups::ComputeDtype;
use crate::config::refusal::Refusal;
use crate::model::memory::Limit;
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
    let cards = nvidia::all().unwrap_or_default().iter().map(FoundCard::Cuda).enumerate();
    let gpus = adapters::all().iter().map(FoundCard::Wgpu).enumerate();
    let cards = cards.map(|(index, found)| card("cuda", index, found));
    let gpus = gpus.map(|(index, found)| card("wgpu", index, found));
    cards.chain(nvidia::broken().iter().map(broken)).chain(gpus).chain([processor()]).collect()
}

fn card(backend: &'static str, index: usize, found: FoundCard) -> Listed {
    let facts = found.facts();
    let class = found.class(ComputeDtype::Auto).map_err(|e| e.to_string());
    let total = found.total();
    let filled = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
    Listed {
        name: format!("{backend} {index}"),
        backend,
        index: Some(index),
        model: facts.name.clone(),
        kind: match facts.kind {
            Kind::Discrete => "discrete",
            Kind::Integrated => "integrated",
            Kind::Virtual => "virtual",
            Kind::Unknown => "unknown",
            Kind::Software => "software",
        },
        api: filled(&facts.api),
        driver: filled(&facts.driver),
        pci: filled(&facts.pci),
        card: filled(&facts.card),
        cores: None,
        memory_total: total,
        memory_free: total.and_then(|_| found.free(cpu::free_memory())),
        features: facts.features.clone(),
        limits: facts.limits.clone(),
        class: class.as_ref().ok().cloned(),
        error: class.err(),
        check: None,
    }
}

/// A card without an index: `--gpus` cannot name it.
fn broken(card: &nvidia::Broken) -> Listed {
    Listed {
        name: "cuda".into(),
        backend: "cuda",
        index: None,
        model: format!("device {} of NVIDIA's driver, which cannot describe it", card.ordinal),
        kind: "discrete",
        api: Some("cuda".into()),
        driver: None,
        pci: None,
        card: None,
        cores: None,
        memory_total: None,
        memory_free: None,
        features: vec![],
        limits: BTreeMap::new(),
        class: None,
        error: Some(card.why.clone()),
        check: None,
    }
}

fn processor() -> Listed {
    Listed {
        name: "cpu".into(),
        backend: "cpu",
        index: None,
        model: cpu::processor(),
        kind: "cpu",
        api: None,
        driver: None,
        pci: None,
        card: None,
        cores: Some(cpu::cores()),
        memory_total: None,
        memory_free: Some(cpu::free_memory()),
        features: cpu::features().into_iter().map(String::from).collect(),
        limits: BTreeMap::new(),
        class: Some(cpu::cpu(ComputeDtype::Auto, 1).class()),
        error: None,
        check: None,
    }
}

/// Why no real GPU is among the devices; `None` where one is.
pub fn no_gpu(found: &[Listed]) -> Option<Absence> {
    let real = |d: &Listed| d.backend != "cpu" && d.kind != "software";
    (!found.iter().any(real)).then(adapters::why_none)
}

/// Why NVIDIA's installed driver lists no card.
pub fn no_cuda() -> Option<&'static str> {
    nvidia::silent()
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
    let reference = Reference::new(&cpu::Twin)?;
    for device in found {
        let card = match (device.backend, device.index) {
            ("cuda", Some(index)) => FoundCard::cuda(index),
            (_, Some(index)) => FoundCard::adapter(index),
            // A card without a description already has its error.
            ("cuda", None) => continue,
            (_, None) => None,
        };
        device.check = Some(match card {
            Some(found) => {
                let budget = found.room().within(cpu::free_memory());
                let card = Card::new(found, budget, ComputeDtype::Auto);
                checked(&reference, &card, inject, || found.speed())
            }
            None => {
                let processor = cpu::Processor {
                    dtype: ComputeDtype::Auto,
                    threads,
                    limit: Limit::Free(cpu::free_memory()),
                };
                let cpu = || speed::of(cpu::cpu(ComputeDtype::Auto, threads));
                checked(&reference, &processor, inject, cpu)
            }
        });
    }
    Ok(())
}

fn checked(
    reference: &Reference,
    opener: &dyn Opener,
    inject: &Inject,
    speed: impl FnOnce() -> Result<speed::Speed, crate::backend::Fault>,
) -> Checked {
    let began = Instant::now();
    let measured = reference.measure(opener, inject);
    let seconds = began.elapsed().as_secs_f64();
    let failed = |why: String, deviation| Checked { failed: Some(why), deviation, seconds, speed: None };
    match measured {
        Err(e) => failed(e.to_string(), None),
        Ok(deviation) => match (deviation.verdict(), speed()) {
            (Err(wrong), _) => failed(wrong, Some(deviation)),
            (Ok(()), Err(fault)) => failed(fault.to_string(), Some(deviation)),
            (Ok(()), Ok(speed)) => {
                Checked { failed: None, deviation: Some(deviation), seconds, speed: Some(speed) }
            }
        },
    }
}
