//! Behaviour of a GPU beside its arithmetic (which tests/op_verbs checks): round trips, sizes beyond one binding, and
//! faults. On every adapter of tests/tested_adapters.

#[path = "../parity/case.rs"]
mod case;
mod compiled;
mod faults;
#[cfg(unix)]
mod first_contact;
mod lengths;
mod sizes;
mod streamed;
#[path = "../tested_adapters/mod.rs"]
mod tested_adapters;
mod trips;

use finetune::backend::Wgpu;
use finetune::backend::wgpu::Options;

/// A device on every adapter.
pub fn devices(options: Options) -> Vec<Wgpu> {
    tested_adapters::all().iter().map(|tested| tested.open(options.clone()).unwrap()).collect()
}

#[test]
fn named_adapter_is_tested_in_place_of_software_drivers() {
    let installed =
        ["AMD Radeon RX 6800M (RADV NAVI22)", "llvmpipe (LLVM 15.0.6, 256 bits)"].map(String::from);
    let choose = |named| tested_adapters::choose(&installed, named, &["llvmpipe", "SwiftShader"]);
    assert_eq!(choose(None), (vec![1], vec!["SwiftShader"]));
    assert_eq!(choose(Some("radeon")), (vec![0], vec![]));
    assert_eq!(choose(Some("NVIDIA")), (vec![], vec!["NVIDIA"]));
}
