//! Behaviour of a GPU beside its arithmetic (which tests/op_verbs checks): round trips, sizes beyond one binding, and
//! faults. On every installed software adapter; a missing driver is printed as skipped, and is a failure if
//! FINETUNE_NEED_VULKAN is set.

#[path = "../parity/case.rs"]
mod case;
mod compiled;
mod faults;
mod lengths;
mod sizes;
mod streamed;
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
