//! wgpu's run-time checks in compiled kernels: each index is clamped, each loop counts its passes. They stand in every
//! inner loop and cost registers and time. Kernels whose text needs none are compiled without.

use super::kernel::{Constant, Kernel};
use wgpu::{Device, ShaderModule, ShaderModuleDescriptor, ShaderRuntimeChecks, ShaderSource};

/// Which kernels have run-time checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Checks {
    /// Those that are not in [`PROVED`].
    #[default]
    WhereNotProved,
    /// All: for tests.
    Everywhere,
}

/// Kernels without run-time checks. For each of their texts and for the sizes of tests/wgsl/proofs.rs that test proves that
/// every loop ends and that every index is inside its array. The flash kernels take the bounds of rows from data: the
/// decoder has checked that they ascend and end at the last token. Kernels of software drivers alone, and those that
/// take another index from data (tokens, targets), are not among them.
pub const PROVED: &[&str] = &["product_tiled", "product_coop", "flash", "flash_grad_q", "flash_grad_kv"];

impl Checks {
    /// The checks of a kernel. Divisors are checked in all kernels.
    pub fn of(self, kernel: &str) -> ShaderRuntimeChecks {
        let all = ShaderRuntimeChecks::checked();
        match self == Checks::WhereNotProved && PROVED.contains(&kernel) {
            true => ShaderRuntimeChecks { bounds_checks: false, force_loop_bounding: false, ..all },
            false => all,
        }
    }
}

/// Translates a kernel.
pub(super) fn module(
    device: &Device,
    kernel: &Kernel,
    constants: &[Constant],
    checks: Checks,
) -> ShaderModule {
    let source = ShaderSource::Wgsl(kernel.text(constants).into());
    let descriptor = ShaderModuleDescriptor { label: Some(kernel.name), source };
    // SAFETY: no index of the kernels without checks is outside its array, and every loop ends (tests/wgsl/ranges.rs).
    unsafe { device.create_shader_module_trusted(descriptor, checks.of(kernel.name)) }
}
