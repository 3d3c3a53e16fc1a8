//! Opening a device.

use super::cache::{self, Cache};
use super::checks::Checks;
use super::device::Gpu;
use super::faults::Faults;
use super::instance::Adapter;
use super::pace::{Kind, Pace};
use super::portable::MultiplyAdd;
use super::variants::{Precision, Variant, Variants};
use super::{Origin, Wgpu};
use crate::backend::{Checked, Fault};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use wgpu::Features;

/// Options for opening a device.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Most bytes of its buffers, used or free.
    pub memory: Option<u64>,
    /// Initial rate in work per second, used until a measurement: for tests.
    pub rate: Option<f64>,
    /// Keeps the initial rate despite measurements: for tests.
    pub steady: bool,
    /// Most bind groups that are kept: for tests.
    pub bind_groups: Option<usize>,
    /// Most bytes of a binding: for tests.
    pub binding_limit: Option<u64>,
    /// Fills new memory with NaN: for tests.
    pub poison: bool,
    /// Run-time checks of its kernels.
    pub checks: Checks,
    /// How products with frozen matrices may be rounded.
    pub precision: Precision,
    /// Computes as the portable class does, in f32.
    pub portable: bool,
    /// Multiplies and adds like this in the portable class, without a trial: for tests.
    pub multiply_add: Option<MultiplyAdd>,
    /// Tries these variants instead of those that the adapter offers.
    pub variants: Option<Vec<Variant>>,
    /// A variant that computes wrong results: for tests.
    pub spoiled: Option<Variant>,
    /// Head size or sum length above which the spoiled variant is wrong.
    pub spoiled_beyond: usize,
    /// The driver's compiled kernels, across runs.
    pub cache: Option<Cache>,
}

/// The optional features that kernels use.
const WELCOME: Features = Features::SHADER_F16.union(Features::SUBGROUP).union(Features::PIPELINE_CACHE);

impl Checked<Wgpu> {
    /// Opens a device on an adapter. Several devices may be open on one adapter.
    pub fn open(adapter: &Adapter, options: Options) -> Result<Self, Fault> {
        let name = adapter.name().to_string();
        let fault = |reason: String| Fault::Device { device: name.clone(), reason };
        let limits = adapter.limits();
        if limits.max_storage_buffers_per_shader_stage < 8
            || limits.max_compute_invocations_per_workgroup < 256
        {
            return Err(fault(
                "its driver allows less than kernels need (8 buffers, 256 invocations)".into(),
            ));
        }
        let mut features = adapter.features() & WELCOME;
        let offered = options.variants.unwrap_or_else(|| Variant::offered(adapter, options.precision));
        if offered.iter().any(|variant| matches!(variant, Variant::Cooperative(_))) {
            features |= adapter.features() & Features::EXPERIMENTAL_COOPERATIVE_MATRIX;
        }
        let descriptor = wgpu::DeviceDescriptor {
            required_features: features,
            experimental_features: super::experimental::consent(features),
            required_limits: limits.clone(),
            memory_hints: wgpu::MemoryHints::Performance,
            ..Default::default()
        };
        let opened = pollster::block_on(adapter.inner.request_device(&descriptor))
            .map_err(|e| fault(format!("cannot be opened: {e}")))?;
        let binding = options.binding_limit.unwrap_or(u64::MAX).min(binding(&limits));
        let mut pace = options.rate.map_or_else(|| Pace::guess(Kind::of(adapter)), Pace::of);
        pace.steady = options.steady;
        let budget = options.memory.unwrap_or(u64::MAX);
        let mut gpu = Gpu::new(opened, (limits, budget), Faults::new(name.clone()), pace);
        gpu.pipelines.checks = options.checks;
        gpu.pipelines.most = options.bind_groups.unwrap_or(gpu.pipelines.most);
        begin(&mut gpu, options.cache.as_ref().filter(|_| features.contains(Features::PIPELINE_CACHE)));
        gpu.faults.check()?;
        let (spoiled, spoiled_beyond) = (options.spoiled, options.spoiled_beyond);
        let lanes = super::variants::lanes(adapter);
        let variants = Variants { spoiled, spoiled_beyond, lanes, ..Variants::default() };
        let slug = slug(adapter);
        let origin = Origin { card: format!("{} {slug}", adapter.info.device_pci_bus_id), slug, offered };
        let mut device = Wgpu {
            gpu,
            class: String::new(),
            variants,
            origin,
            portable: None,
            binding_limit: binding,
            poison: options.poison,
            tried: vec![],
            masks: None,
            keep: options.cache.map(|cache| cache.keep),
            kept: 0,
        };
        if options.portable {
            device.become_portable(adapter, options.multiply_add)?
        } else {
            device.choose()?
        }
        Ok(Checked::around(device))
    }
}

impl Wgpu {
    /// The most work of one submission since the last call.
    pub fn heaviest(&mut self) -> f64 {
        std::mem::take(&mut self.gpu.heaviest)
    }

    /// Bytes of all its buffers.
    pub fn held(&self) -> u64 {
        self.gpu.pool.held()
    }

    /// Bytes of the buffers in use, without frozen ones.
    pub fn used(&self) -> u64 {
        self.gpu.pool.used()
    }

    /// Number of bind groups that it keeps.
    pub fn bind_groups(&self) -> usize {
        self.gpu.pipelines.groups_kept()
    }

    /// The counter of submissions that ended inside a block of a model.
    pub fn cut_inside(&self) -> Arc<AtomicU64> {
        self.gpu.inside.clone()
    }

    /// Variants that were wrong on this device, each with the observed difference.
    pub fn dropped(&self) -> &[(Variant, String)] {
        &self.variants.dropped
    }
}

/// Loads stored compiled kernels. Those of another driver are ignored.
fn begin(gpu: &mut Gpu, kept: Option<&Cache>) {
    let Some(cache) = kept else { return };
    gpu.pipelines.cache = Some(cache::begin(&gpu.device, cache.found.as_deref()));
    if gpu.faults.raised() && gpu.faults.forgive().is_some() {
        gpu.pipelines.cache = Some(cache::begin(&gpu.device, None));
    }
}

/// Most bytes of a kernel's binding. A kernel counts bytes in 32 bits, so a larger limit of the driver (as on Metal) is
/// reduced to that.
fn binding(limits: &wgpu::Limits) -> u64 {
    limits.max_storage_buffer_binding_size.min(u64::from(u32::MAX - 3))
}

/// Device model and driver as part of a class name.
fn slug(adapter: &Adapter) -> String {
    let text = format!("{} {}", adapter.info.name, adapter.info.driver_info);
    let word = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c.to_ascii_lowercase() } else { ' ' };
    let words: String = text.chars().map(word).collect();
    let words: Vec<&str> = words.split_whitespace().collect();
    words.join("-")
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_binding_is_counted_in_32_bits() {
        for (offered, used) in [(1 << 27, 1 << 27), ((1 << 32) - 4, (1 << 32) - 4), (1 << 34, (1 << 32) - 4)]
        {
            let limits = wgpu::Limits { max_storage_buffer_binding_size: offered, ..Default::default() };
            assert_eq!(super::binding(&limits), used);
        }
    }
}
