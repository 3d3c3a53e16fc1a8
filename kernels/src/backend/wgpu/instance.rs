//! The adapters that wgpu finds on this machine, in an order that is the same in every run.
//!
//! Drivers enumerate adapters in arbitrary order (a software adapter may come first), so they are sorted: discrete,
//! integrated, virtual, unknown, software; then by PCI address, backend (Vulkan first) and name.

use wgpu::{AdapterInfo, Backend, Backends, DeviceType, Instance, InstanceDescriptor, InstanceFlags};

/// An adapter that is not opened.
#[derive(Debug, Clone)]
pub struct Adapter {
    pub(super) inner: wgpu::Adapter,
    /// The driver's description.
    pub info: wgpu::AdapterInfo,
}

impl Adapter {
    /// The adapter's name, in the driver's spelling.
    pub fn name(&self) -> &str {
        &self.info.name
    }

    /// Whether the driver computes on the CPU.
    pub fn is_software(&self) -> bool {
        self.info.device_type == DeviceType::Cpu
    }

    /// Its features.
    pub fn features(&self) -> wgpu::Features {
        self.inner.features()
    }

    /// Its limits.
    pub fn limits(&self) -> wgpu::Limits {
        self.inner.limits()
    }

    /// The key under which compiled kernels of this adapter and driver are stored; `None` if they cannot be stored.
    pub fn cache_key(&self) -> Option<String> {
        let key = wgpu::util::pipeline_cache_key(&self.info)?;
        let allowed = self.features().contains(wgpu::Features::PIPELINE_CACHE);
        let driver: String = self.info.driver_info.chars().filter(char::is_ascii_alphanumeric).collect();
        allowed.then(|| format!("{key}_{driver}"))
    }

    /// wgpu's own handle.
    pub fn handle(&self) -> &wgpu::Adapter {
        &self.inner
    }
}

/// Every adapter that can compute, of the native backends of this system (Vulkan, Metal, DX12).
pub fn adapters() -> Vec<Adapter> {
    // The self-test decides about a nonconforming driver (Mesa's on top of DX12, under WSL), not the driver's claim.
    let flags = InstanceFlags::ALLOW_UNDERLYING_NONCOMPLIANT_ADAPTER;
    let instance =
        Instance::new(InstanceDescriptor { flags, ..InstanceDescriptor::new_without_display_handle() });
    let backends = Backends::VULKAN | Backends::METAL | Backends::DX12;
    let found = pollster::block_on(instance.enumerate_adapters(backends));
    let mut all: Vec<Adapter> =
        found.into_iter().map(|inner| Adapter { info: inner.get_info(), inner }).collect();
    all.sort_by_cached_key(|a| order(&a.info));
    all
}

/// The place of an adapter. A card that two systems offer is used through the first: Vulkan, Metal, then DX12, whose
/// older compiler has no f16 and no subgroups.
fn order(info: &AdapterInfo) -> impl Ord + use<> {
    let address = (info.device_pci_bus_id.clone(), info.vendor, info.device);
    let backend = match info.backend {
        Backend::Vulkan => 0,
        Backend::Metal => 1,
        _ => 2,
    };
    (rank(info.device_type), address, backend, info.name.clone())
}

fn rank(kind: DeviceType) -> u8 {
    match kind {
        DeviceType::DiscreteGpu => 0,
        DeviceType::IntegratedGpu => 1,
        DeviceType::VirtualGpu => 2,
        DeviceType::Other => 3,
        DeviceType::Cpu => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn card_is_used_through_vulkan_before_dx12() {
        let adapter = |kind, backend, slot: &str| AdapterInfo {
            device_pci_bus_id: slot.into(),
            ..AdapterInfo::new(kind, backend)
        };
        let ordered = [
            adapter(DeviceType::DiscreteGpu, Backend::Vulkan, "0000:01:00.0"),
            adapter(DeviceType::DiscreteGpu, Backend::Dx12, "0000:01:00.0"),
            adapter(DeviceType::DiscreteGpu, Backend::Vulkan, "0000:02:00.0"),
            adapter(DeviceType::IntegratedGpu, Backend::Metal, ""),
            adapter(DeviceType::IntegratedGpu, Backend::Dx12, ""),
            adapter(DeviceType::Cpu, Backend::Vulkan, ""),
        ];
        assert!(ordered.is_sorted_by(|a, b| order(a) < order(b)));
    }
}
