//! What a driver made of the kernels, kept from run to run where it allows that. Files are not this floor's business:
//! whoever opens a device brings what was kept, and is called when there is more.

use super::Wgpu;
use std::sync::Arc;

/// Takes bytes to keep.
pub type Keep = Arc<dyn Fn(&[u8]) + Send + Sync>;

/// A driver's cache between runs.
#[derive(Clone)]
pub struct Cache {
    /// What was kept, of the same adapter.
    pub found: Option<Vec<u8>>,
    /// Called after a read, where kernels were compiled before it.
    pub keep: Keep,
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cache({:?} bytes)", self.found.as_ref().map(Vec::len))
    }
}

/// The driver's cache, begun with what was kept.
pub(super) fn begin(device: &wgpu::Device, data: Option<&[u8]>) -> wgpu::PipelineCache {
    let descriptor = wgpu::PipelineCacheDescriptor { label: None, data, fallback: true };
    // SAFETY: the bytes are those that `get_data` gave for this adapter: whoever keeps them checks their hash, and
    // wgpu that they are of this driver; what does not fit is left out (`fallback`).
    unsafe { device.create_pipeline_cache(&descriptor) }
}

impl Wgpu {
    /// Hands over what was compiled since the last time; nothing in the steady state.
    pub(super) fn keep_compiled(&mut self) {
        let compiled = self.gpu.pipelines.compiled();
        if self.kept == compiled {
            return;
        }
        self.kept = compiled;
        let data = self.gpu.pipelines.cache.as_ref().and_then(wgpu::PipelineCache::get_data);
        if let (Some(keep), Some(data)) = (&self.keep, data) {
            keep(&data);
        }
    }
}
