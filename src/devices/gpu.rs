//! Adapters that wgpu drives, as devices.

use super::compiled;
use crate::backend::wgpu::adapters::{Found, Kind};
use crate::backend::wgpu::{Options, Precision};
use crate::backend::{Fault, Wgpu};
use crate::config::groups::ComputeDtype;

/// Opens the adapter with `memory` bytes for its buffers. Without a typed dtype a card may round the factors of frozen
/// products to f16; this does not help a driver that computes on the CPU. bf16 is not available.
pub fn device(found: &Found, dtype: ComputeDtype, memory: Option<u64>) -> Result<Wgpu, Fault> {
    let exact = dtype != ComputeDtype::Auto || found.facts.kind == Kind::Software;
    let precision = if exact { Precision::F32 } else { Precision::F16 };
    let cache = compiled::of(&found.adapter);
    Wgpu::open(&found.adapter, Options { precision, cache, memory, ..Options::default() })
}
