//! What there is of GPUs, as people and the choice of devices see it: facts, in an order that does not change from
//! run to run ([`super::instance`] sorts), with one key per physical card, because a card may have several drivers.
//! Asked once per process: an adapter that comes or goes while a run goes on is not looked for.

use super::absence::{self, Absence};
use super::instance::{self, Adapter};
use std::collections::BTreeMap;
use std::sync::OnceLock;
use wgpu::{DeviceType, Features};

/// Bytes of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Memory {
    /// All of it.
    pub total: u64,
    /// What nobody uses at the moment, as far as the driver says.
    pub free: u64,
}

/// What kind of thing computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A card with memory of its own.
    Discrete,
    /// A part of the processor, on the machine's memory.
    Integrated,
    /// A part of a card, given to a virtual machine.
    Virtual,
    /// A driver that does not say.
    Unknown,
    /// A driver that computes on the processor: slower than the CPU backend.
    Software,
}

/// An adapter.
#[derive(Debug)]
pub struct Found {
    /// What it says of itself.
    pub facts: Facts,
    /// To open it with.
    pub adapter: Adapter,
}

/// What an adapter says of itself.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Facts {
    /// As its driver spells it.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// `vulkan`, `metal`, `dx12`.
    pub api: String,
    /// Driver and its version.
    pub driver: String,
    /// Where it is plugged in; empty where that is unknown.
    pub pci: String,
    /// The same for all drivers of one card.
    pub card: String,
    /// What kernels may use.
    pub features: Vec<String>,
    /// What bounds them.
    pub limits: BTreeMap<&'static str, u64>,
}

/// All of them, software last.
pub fn all() -> &'static [Found] {
    static ALL: OnceLock<Vec<Found>> = OnceLock::new();
    ALL.get_or_init(|| {
        let mut twins = BTreeMap::new();
        let found = instance::adapters().into_iter();
        found.map(|adapter| Found { facts: facts(&adapter, &mut twins), adapter }).collect()
    })
}

/// Why there is none, or no real one.
pub fn why_none() -> Absence {
    absence::of(&absence::Facts::gather())
}

impl Found {
    /// How much it has and how much of that is free now; None where its driver does not say.
    pub fn memory(&self) -> Option<Memory> {
        #[cfg(any(windows, target_os = "linux", target_os = "android", target_os = "freebsd"))]
        return super::vulkan::memory(self.adapter.handle());
        #[cfg(not(any(windows, target_os = "linux", target_os = "android", target_os = "freebsd")))]
        None
    }
}

/// `twins` counts adapters that nothing but their order tells apart, per API.
fn facts(adapter: &Adapter, twins: &mut BTreeMap<String, usize>) -> Facts {
    let info = &adapter.info;
    let drivers = [info.driver.trim(), info.driver_info.trim()];
    let driver: Vec<&str> = drivers.into_iter().filter(|part| !part.is_empty()).collect();
    let model = format!("{:04x}:{:04x} {}", info.vendor, info.device, info.name);
    let nth = twins.entry(format!("{} {model}", info.backend)).or_insert(0);
    *nth += 1;
    let card = match (info.device_pci_bus_id.as_str(), uuid(adapter)) {
        ("", Some(uuid)) => uuid,
        ("", None) => format!("{model} {nth}"),
        // Without a domain, as DX12 says it.
        (pci, _) => pci.trim_start_matches("0000:").to_string(),
    };
    Facts {
        name: info.name.trim().to_string(),
        kind: kind(adapter),
        api: info.backend.to_string(),
        driver: driver.join(" "),
        pci: info.device_pci_bus_id.clone(),
        card,
        features: features(adapter),
        limits: limits(adapter),
    }
}

fn uuid(adapter: &Adapter) -> Option<String> {
    #[cfg(any(windows, target_os = "linux", target_os = "android", target_os = "freebsd"))]
    let uuid = super::vulkan::uuid(adapter.handle());
    #[cfg(not(any(windows, target_os = "linux", target_os = "android", target_os = "freebsd")))]
    let (uuid, _) = (None::<[u8; 16]>, adapter);
    uuid.map(|uuid| uuid.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn kind(adapter: &Adapter) -> Kind {
    match adapter.info.device_type {
        _ if adapter.is_software() => Kind::Software,
        DeviceType::DiscreteGpu => Kind::Discrete,
        DeviceType::IntegratedGpu => Kind::Integrated,
        DeviceType::VirtualGpu => Kind::Virtual,
        DeviceType::Other | DeviceType::Cpu => Kind::Unknown,
    }
}

/// Those that a kernel of ours may use, with the sizes of subgroups and cooperative matrices.
fn features(adapter: &Adapter) -> Vec<String> {
    let has = adapter.features();
    let named = [
        (Features::SHADER_F16, "f16"),
        (Features::SHADER_I16, "i16"),
        (Features::SHADER_INT64, "int64"),
        (Features::TIMESTAMP_QUERY, "timestamps"),
        (Features::PIPELINE_CACHE, "pipeline-cache"),
    ];
    let mut out: Vec<String> =
        named.into_iter().filter(|(f, _)| has.contains(*f)).map(|(_, name)| name.to_string()).collect();
    if has.contains(Features::SUBGROUP) {
        let (least, most) = (adapter.info.subgroup_min_size, adapter.info.subgroup_max_size);
        out.push(if least == most {
            format!("subgroups {least}")
        } else {
            format!("subgroups {least}-{most}")
        });
    }
    if has.contains(Features::EXPERIMENTAL_COOPERATIVE_MATRIX) {
        let mut shapes: Vec<String> = adapter
            .handle()
            .cooperative_matrix_properties()
            .iter()
            .map(|m| format!("coop {}x{}x{} {:?}/{:?}", m.m_size, m.n_size, m.k_size, m.ab_type, m.cr_type))
            .collect();
        shapes.sort();
        shapes.dedup();
        out.extend(shapes);
    }
    out
}

fn limits(adapter: &Adapter) -> BTreeMap<&'static str, u64> {
    let l = adapter.limits();
    BTreeMap::from([
        ("max_buffer_size", l.max_buffer_size),
        ("max_storage_buffer_binding_size", l.max_storage_buffer_binding_size),
        ("max_storage_buffers_per_shader_stage", l.max_storage_buffers_per_shader_stage.into()),
        ("max_compute_invocations_per_workgroup", l.max_compute_invocations_per_workgroup.into()),
        ("max_compute_workgroup_storage_size", l.max_compute_workgroup_storage_size.into()),
        ("max_compute_workgroups_per_dimension", l.max_compute_workgroups_per_dimension.into()),
        ("min_uniform_buffer_offset_alignment", l.min_uniform_buffer_offset_alignment.into()),
        ("min_storage_buffer_offset_alignment", l.min_storage_buffer_offset_alignment.into()),
    ])
}
