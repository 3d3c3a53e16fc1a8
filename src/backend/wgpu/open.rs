//! Opening a device.

use super::cache::{self, Cache};
use super::device::Gpu;
use super::faults::Faults;
use super::instance::Adapter;
use super::pace::{Kind, Pace};
use super::variants::{Precision, Variant, Variants};
use super::{Origin, Wgpu};
use crate::backend::{Checked, Fault};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use wgpu::Features;

/// How a device is opened.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Bytes that its buffers may take, used or free.
    pub memory: Option<u64>,
    /// Pretends that this is how much it does in a second, until it was measured: for tests.
    pub rate: Option<f64>,
    /// Goes on pretending so, whatever is measured: for tests.
    pub steady: bool,
    /// Keeps no more bind groups than this: for tests.
    pub bind_groups: Option<usize>,
    /// Pretends that a binding holds no more bytes than this: for tests.
    pub binding_limit: Option<u64>,
    /// Hands out memory that is full of NaN: for tests.
    pub poison: bool,
    /// How products with frozen matrices may be rounded.
    pub precision: Precision,
    /// Uses these variants, as far as they are right, instead of what the adapter offers.
    pub variants: Option<Vec<Variant>>,
    /// A variant that is made wrong on purpose: for tests.
    pub spoiled: Option<Variant>,
    /// And only for heads, or sums, that are longer than this.
    pub spoiled_beyond: usize,
    /// The driver's compiled kernels, from run to run.
    pub cache: Option<Cache>,
}

/// What kernels may use of what an adapter offers.
const WELCOME: Features = Features::SHADER_F16.union(Features::SUBGROUP).union(Features::PIPELINE_CACHE);

impl Checked<Wgpu> {
    /// Opens a device on an adapter; several may be open on one.
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
        if options.precision == Precision::F16 {
            features |= adapter.features() & Features::EXPERIMENTAL_COOPERATIVE_MATRIX;
        }
        let descriptor = wgpu::DeviceDescriptor {
            required_features: features,
            experimental_features: super::experimental::consent(features),
            required_limits: limits.clone(),
            memory_hints: wgpu::MemoryHints::Performance,
            ..Default::default()
        };
        let opened = futures::executor::block_on(adapter.inner.request_device(&descriptor))
            .map_err(|e| fault(format!("cannot be opened: {e}")))?;
        let binding = options.binding_limit.unwrap_or(u64::MAX).min(binding(&limits));
        let kind = if adapter.is_software() { Kind::Software } else { Kind::Hardware };
        let mut pace = options.rate.map_or_else(|| Pace::guess(kind), Pace::of);
        pace.steady = options.steady;
        let budget = options.memory.unwrap_or(u64::MAX);
        let mut gpu = Gpu::new(opened, (limits, budget), Faults::new(name.clone()), pace);
        gpu.pipelines.most = options.bind_groups.unwrap_or(gpu.pipelines.most);
        begin(&mut gpu, options.cache.as_ref().filter(|_| features.contains(Features::PIPELINE_CACHE)));
        gpu.faults.check()?;
        let lanes = super::variants::lanes(adapter);
        let (spoiled, spoiled_beyond) = (options.spoiled, options.spoiled_beyond);
        let variants = Variants { spoiled, spoiled_beyond, lanes, ..Variants::default() };
        let offered = options.variants.unwrap_or_else(|| Variant::offered(adapter, options.precision));
        let slug = slug(adapter);
        let origin = Origin { card: format!("{} {slug}", adapter.info.device_pci_bus_id), slug, offered };
        let (class, poison) = (String::new(), options.poison);
        let keep = options.cache.map(|cache| cache.keep);
        let mut device = Wgpu {
            gpu,
            class,
            variants,
            origin,
            binding_limit: binding,
            poison,
            tried: vec![],
            masks: None,
            keep,
            kept: 0,
        };
        device.choose()?;
        Ok(Checked::around(device))
    }
}

impl Wgpu {
    /// The most work of one submission since this was asked last.
    pub fn heaviest(&mut self) -> f64 {
        std::mem::take(&mut self.gpu.heaviest)
    }

    /// Bytes of all its buffers.
    pub fn held(&self) -> u64 {
        self.gpu.pool.held()
    }

    /// Bytes of those that are in use and not frozen.
    pub fn used(&self) -> u64 {
        self.gpu.pool.used()
    }

    /// Bind groups that it keeps.
    pub fn bind_groups(&self) -> usize {
        self.gpu.pipelines.groups_kept()
    }

    /// Submissions that had to end inside a block of a model, counted on.
    pub fn cut_inside(&self) -> Arc<AtomicU64> {
        self.gpu.inside.clone()
    }

    /// Variants that this device got wrong, each with what was seen.
    pub fn dropped(&self) -> &[(Variant, String)] {
        &self.variants.dropped
    }
}

/// Goes on with what was kept of compiled kernels; what another driver kept is as good as nothing.
fn begin(gpu: &mut Gpu, kept: Option<&Cache>) {
    let Some(cache) = kept else { return };
    gpu.pipelines.cache = Some(cache::begin(&gpu.device, cache.found.as_deref()));
    if gpu.faults.raised() && gpu.faults.forgive().is_some() {
        gpu.pipelines.cache = Some(cache::begin(&gpu.device, None));
    }
}

/// Bytes that a kernel can be given at a time. It counts them in 32 bits, and where a driver allows more (Metal does)
/// what it is told ends at the last of those.
fn binding(limits: &wgpu::Limits) -> u64 {
    limits.max_storage_buffer_binding_size.min(u64::from(u32::MAX - 3))
}

/// Device model and driver, as a class names them.
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
