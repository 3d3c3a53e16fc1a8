//! What a GPU does beside its arithmetic (which tests/op_verbs checks): round trips, sizes that one binding does not
//! hold, and faults. On every software adapter that is installed; a missing driver is skipped loudly, and fails where
//! FINETUNE_NEED_VULKAN is set.

// A test that cannot go on should stop there.
#![allow(clippy::unwrap_used)]

#[path = "../parity/case.rs"]
mod case;
mod compiled;
mod faults;
mod lengths;
mod sizes;
mod trips;

use finetune::backend::Wgpu;
use finetune::backend::wgpu::{Options, adapters};

/// A device on every software adapter.
pub fn devices(options: Options) -> Vec<Wgpu> {
    let all: Vec<_> = adapters().into_iter().filter(|a| a.is_software()).collect();
    for driver in ["llvmpipe", "SwiftShader"] {
        if !all.iter().any(|a| a.name().contains(driver)) {
            assert!(std::env::var_os("FINETUNE_NEED_VULKAN").is_none(), "no Vulkan driver {driver}");
            println!("skipped: no Vulkan driver {driver}");
        }
    }
    let open = |adapter| Wgpu::open(adapter, options.clone()).unwrap();
    all.iter().map(open).collect()
}
