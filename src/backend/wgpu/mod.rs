//! Any GPU through wgpu (Vulkan, Metal, DX12): kernels in hand-written WGSL under `kernels/wgsl`, one file per verb.
//!
//! Verbs record; [`Backend::read`](super::Backend::read) submits, waits and reads back once. A verb that takes too
//! long for one submission is cut into windows of its output, so that no sum depends on where it was cut: results
//! depend on the shapes, the kernels and the driver alone. A fault is latched and surfaces at the next read.

pub mod absence;
pub mod adapters;
mod attention;
mod breaker;
mod cache;
mod catalogue;
mod check;
mod device;
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
mod products;
mod rows;
mod template;
mod variants;
mod verbs;
#[cfg(any(windows, target_os = "linux", target_os = "android", target_os = "freebsd"))]
mod vulkan;
mod weight;

use crate::numeric::block::Encoding;
pub use breaker::Breaker;
pub use cache::{Cache, Keep};
pub use catalogue::{Entry, catalogue};
use device::Gpu;
pub use instance::{Adapter, adapters};
pub use memory::{Ids, Memory, Tokens};
pub use open::Options;
use pool::Leased;
use variants::Variants;
pub use variants::{Precision, Variant};
pub use weight::{Weight, matrix_bytes};

/// One opened device.
pub struct Wgpu {
    gpu: Gpu,
    class: String,
    /// What computes faster than the plain kernels.
    variants: Variants,
    origin: Origin,
    /// Bytes that one binding holds.
    binding_limit: u64,
    poison: bool,
    /// How the numbers of matrices are encoded that its products were tried on.
    tried: Vec<Encoding>,
    /// Hashes of the rows of the tokens that dropout came for last.
    masks: Option<Masks>,
    keep: Option<Keep>,
    /// Kernels that were compiled when they were kept last.
    kept: usize,
}

/// What is known of a device before anything is computed on it.
struct Origin {
    /// Which card and driver it is.
    card: String,
    /// The same, as a class names it.
    slug: String,
    /// Variants that it could run, the best first.
    offered: Vec<Variant>,
}

/// What keys masks before module, token and channel.
struct Masks {
    key: (u64, u64, u64),
    bases: Leased,
}
