//! The GPUs of this machine as facts for users and for the choice of devices, in an order that is the same in every run
//! ([`super::instance`] sorts). All drivers of one physical card share a key. The list is made once per process, so
//! adapters that appear or disappear during a run are not noticed.

use super::absence::{self, Absence};
use super::instance::{self, Adapter};
use crate::backend::facts::{Facts, Kind};
use std::collections::BTreeMap;
use std::sync::OnceLock;
use wgpu::{DeviceType, Features};

/// Bytes of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Memory {
    /// All bytes.
    pub total: u64,
    /// Free bytes, as reported by the driver.
    pub free: u64,
}

/// An adapter with its facts.
#[derive(Debug)]
pub struct Found {
    /// Facts about the adapter.
    pub facts: Facts,
    /// The handle for opening it.
    pub adapter: Adapter,
}

/// All adapters, software last.
pub fn all() -> &'static [Found] {
    static ALL: OnceLock<Vec<Found>> = OnceLock::new();
    ALL.get_or_init(|| {
        let mut seen = BTreeMap::new();
        let found = instance::adapters().into_iter();
        found.map(|adapter| Found { facts: facts(&adapter, &mut seen), adapter }).collect()
    })
}

/// Why there is no adapter, or no hardware adapter.
pub fn why_none() -> Absence {
    absence::of(&absence::Facts::gather())
}

impl Found {
    /// Total and free memory now; `None` if the driver does not report it.
    pub fn memory(&self) -> Option<Memory> {
        #[cfg(any(windows, target_os = "linux", target_os = "android", target_os = "freebsd"))]
        return super::vulkan::memory(self.adapter.handle());
        #[cfg(not(any(windows, target_os = "linux", target_os = "android", target_os = "freebsd")))]
        None
    }
}

/// `seen` counts adapters of the same API and model, which only their order distinguishes.
fn facts(adapter: &Adapter, seen: &mut BTreeMap<String, usize>) -> Facts {
    let info = &adapter.info;
    let drivers = [info.driver.trim(), info.driver_info.trim()];
    let driver: Vec<&str> = drivers.into_iter().filter(|part| !part.is_empty()).collect();
    let model = format!("{:04x}:{:04x} {}", info.vendor, info.device, info.name);
    let nth = seen.entry(format!("{} {model}", info.backend)).or_insert(0);
    *nth += 1;
    let card = match (info.device_pci_bus_id.as_str(), uuid(adapter)) {
        ("", Some(uuid)) => uuid,
        ("", None) => format!("{model} {nth}"),
        // Without the PCI domain, as DX12 reports it.
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

/// The features that kernels here may use, with the sizes of subgroups and cooperative matrices.
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
