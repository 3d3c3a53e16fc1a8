//! Adapters: what wgpu finds on this machine, in an order that does not change from run to run.
//!
//! Drivers enumerate in an order of their own (a software adapter may come first), so adapters are sorted:
//! discrete, integrated, virtual, unknown, software; then by PCI address, backend and name.

use wgpu::{Backends, DeviceType, Instance, InstanceDescriptor, InstanceFlags};

/// An adapter, not yet opened.
#[derive(Debug, Clone)]
pub struct Adapter {
    pub(super) inner: wgpu::Adapter,
    /// What its driver says of it.
    pub info: wgpu::AdapterInfo,
}

impl Adapter {
    /// The adapter's name, as its driver spells it.
    pub fn name(&self) -> &str {
        &self.info.name
    }

    /// True of drivers that compute on the CPU.
    pub fn is_software(&self) -> bool {
        self.info.device_type == DeviceType::Cpu
    }

    /// What it offers.
    pub fn features(&self) -> wgpu::Features {
        self.inner.features()
    }

    /// What it allows.
    pub fn limits(&self) -> wgpu::Limits {
        self.inner.limits()
    }

    /// What compiled kernels of this adapter and driver are kept under; None where they cannot be kept.
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
    // A driver that does not conform (Mesa's on top of DX12, under WSL) is judged by the self-test, not by its claim.
    let flags = InstanceFlags::ALLOW_UNDERLYING_NONCOMPLIANT_ADAPTER;
    let instance =
        Instance::new(InstanceDescriptor { flags, ..InstanceDescriptor::new_without_display_handle() });
    let backends = Backends::VULKAN | Backends::METAL | Backends::DX12;
    let found = futures::executor::block_on(instance.enumerate_adapters(backends));
    let mut all: Vec<Adapter> =
        found.into_iter().map(|inner| Adapter { info: inner.get_info(), inner }).collect();
    all.sort_by_cached_key(|a| {
        let address = (a.info.device_pci_bus_id.clone(), a.info.vendor, a.info.device);
        (rank(a.info.device_type), address, a.info.backend.to_str(), a.info.name.clone())
    });
    all
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
