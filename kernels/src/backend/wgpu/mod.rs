//! Any GPU through wgpu (Vulkan, Metal, DX12): kernels in hand-written WGSL under `kernels/wgsl`, one file per verb.
//!
//! Verbs record; [`Backend::read`](super::Backend::read) submits, waits and reads back once. A verb that takes too long
//! for one submission is split into windows of its output, so that no sum depends on the split: results depend on the
//! shapes, the kernels and the driver alone. A fault is latched and returned by the next read.

pub mod absence;
pub mod adapters;
mod attention;
#[cfg(feature = "faults")]
mod breaker;
mod cache;
mod catalogue;
mod check;
mod checks;
mod convolution;
mod delta;
mod device;
mod dry;
mod encodings;
mod experimental;
mod faults;
mod fused;
#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod glibc;
pub mod instance;
pub mod kernel;
mod loss;
mod memory;
mod open;
mod pace;
mod pipelines;
mod pool;
mod portable;
mod products;
mod rows;
mod template;
mod variants;
mod verbs;
#[cfg(any(windows, target_os = "linux", target_os = "android", target_os = "freebsd"))]
mod vulkan;
mod weight;

use crate::numeric::block::Encoding;
#[cfg(feature = "faults")]
pub use breaker::{Breaker, Harm};
pub use cache::{Cache, Keep};
pub use catalogue::{Entry, catalogue};
pub use checks::{Checks, PROVED};
use device::Gpu;
pub use dry::{DryWgpu, Footprint};
pub use instance::{Adapter, adapters};
pub use memory::{Ids, Memory, Tokens};
pub use open::Options;
use pool::Leased;
pub use portable::MultiplyAdd;
use variants::Variants;
pub use variants::{Precision, Variant};
pub use weight::{Weight, matrix_bytes};

/// One opened device.
pub struct Wgpu {
    gpu: Gpu,
    class: String,
    /// The variants in use.
    variants: Variants,
    origin: Origin,
    /// How it multiplies and adds, if it computes as the portable class does.
    portable: Option<MultiplyAdd>,
    /// Most bytes of one binding.
    binding_limit: u64,
    poison: bool,
    /// Matrix encodings on which the products were tried.
    tried: Vec<Encoding>,
    /// Row hashes of the tokens of the last dropout.
    masks: Option<Masks>,
    keep: Option<Keep>,
    /// Number of compiled kernels at the last call of the cache's callback.
    kept: usize,
}

/// Facts about a device that are known before it computes.
struct Origin {
    /// The card and its driver.
    card: String,
    /// The same as part of a class name.
    slug: String,
    /// Variants that the device could run, the best first.
    offered: Vec<Variant>,
}

/// The inputs of a mask before module, token and channel.
struct Masks {
    key: (u64, u64, u64),
    bases: Leased,
}
