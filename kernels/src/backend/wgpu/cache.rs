//! The driver's compiled kernels, kept across runs if the driver allows it. This module does no file access: the caller
//! of `open` supplies the stored bytes and a callback that stores new ones.

use super::Wgpu;
use std::sync::Arc;

/// Stores bytes.
pub type Keep = Arc<dyn Fn(&[u8]) + Send + Sync>;

/// A driver's cache across runs.
#[derive(Clone)]
pub struct Cache {
    /// Stored bytes of the same adapter.
    pub found: Option<Vec<u8>>,
    /// Called after a read that compiled new kernels.
    pub keep: Keep,
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cache({:?} bytes)", self.found.as_ref().map(Vec::len))
    }
}

/// The driver's cache, initialized with stored bytes.
pub(super) fn begin(device: &wgpu::Device, data: Option<&[u8]>) -> wgpu::PipelineCache {
    let descriptor = wgpu::PipelineCacheDescriptor { label: None, data, fallback: true };
    // SAFETY: the bytes come from `get_data` for this adapter: their hash is checked where they are stored, and wgpu
    // checks that they belong to this driver; bytes that do not fit are ignored (`fallback`).
    unsafe { device.create_pipeline_cache(&descriptor) }
}

impl Wgpu {
    /// Passes newly compiled kernels to the callback; does nothing in the steady state.
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
