//! The portable class: f32 with the CPU's bits (docs/explain/numerics.md, "Portable"). A verb takes the kernel that has them
//! in place of its usual one; products, the gradient of attention and the loss over a vocabulary follow the CPU's slices,
//! blocks and parts.
//!
//! A kernel's parameters end with a 0 that the driver does not know, with which it is kept from fusing and reordering:
//! parameters that a call leaves out are 0.

mod attention;
mod head;
mod products;
mod trial;

use super::Wgpu;
use super::kernel::Access::{Read, Write as Written};
use super::kernel::{Constant, Kernel};
use super::rows::kernel;
pub(super) use head::room as head_room;
pub(super) use products::Low;

kernel!(RMSNORM, "portable_rmsnorm", ["portable", "portable_rows"], [Written, Written, Read, Read]);
kernel!(
    RMSNORM_GRAD,
    "portable_rmsnorm_grad",
    ["portable", "portable_rows"],
    [Written, Read, Read, Read, Read]
);
kernel!(
    SCALE_ROWS_GRAD,
    "portable_scale_rows_grad",
    ["portable", "portable_rows"],
    [Written, Written, Read, Read]
);
kernel!(
    CROSS_ENTROPY,
    "portable_cross_entropy",
    ["portable", "portable_rows"],
    [Written, Written, Read, Read]
);
kernel!(DELTA, "portable_attention_delta", ["portable", "portable_rows"], [Written, Read, Read, Read]);
kernel!(ROPE, "rope" as "portable_rope", ["portable"], [Written, Read, Read]);
kernel!(GATED, "portable_gated", ["portable", "portable_act"], [Written, Read, Read]);
kernel!(GATED_GRAD, "portable_gated_grad", ["portable", "portable_act"], [Written, Written, Read]);
kernel!(DROPOUT, "dropout" as "portable_dropout", ["portable"], [Written, Read, Read, Read]);
kernel!(CONVOLUTION, "convolution" as "portable_convolution", ["portable"], [Written, Read, Read, Read, Read, Read]);
kernel!(
    CONVOLUTION_GRAD,
    "convolution_grad" as "portable_convolution_grad",
    ["portable"],
    [Written, Written, Read, Read, Read, Read, Read, Read]
);
kernel!(SILU, "convolution_silu" as "portable_convolution_silu", ["portable"], [Written, Read, Read, Read]);
kernel!(SILU_GRAD, "convolution_silu_grad" as "portable_convolution_silu_grad", ["portable"], [Written, Read, Read, Read, Read]);

/// The kernels of this file.
const KERNELS: &[&Kernel] = &[
    &RMSNORM,
    &RMSNORM_GRAD,
    &SCALE_ROWS_GRAD,
    &CROSS_ENTROPY,
    &DELTA,
    &ROPE,
    &GATED,
    &GATED_GRAD,
    &DROPOUT,
    &CONVOLUTION,
    &CONVOLUTION_GRAD,
    &SILU,
    &SILU_GRAD,
];

/// All kernels of the portable class.
pub(super) fn kernels() -> Vec<&'static Kernel> {
    [KERNELS, products::KERNELS, attention::KERNELS, head::KERNELS, trial::KERNELS].concat()
}

/// The sets of constants for a kernel, by its name.
pub(super) fn sets(kernel: &str) -> Vec<Vec<Constant>> {
    if products::KERNELS.iter().any(|of| of.name == kernel) {
        return products::sets();
    }
    let sized = attention::KERNELS.iter().any(|of| of.name == kernel);
    let sizes: &[u32] = if sized { &[16, 32, 64, 80, 128, 256] } else { &[0] };
    let constants = |size: u32| if sized { attention::constants_of(size).to_vec() } else { Vec::new() };
    let both = [MultiplyAdd::Composed, MultiplyAdd::Fused];
    sizes.iter().flat_map(|size| both.map(|fma| [constants(*size), vec![fma.constant()]].concat())).collect()
}

/// How a device makes a multiply-add that rounds once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MultiplyAdd {
    /// By `fma`.
    Fused,
    /// By about eighty other operations: for software drivers, whose `fma` rounds twice.
    Composed,
}

impl MultiplyAdd {
    fn constant(self) -> Constant {
        ("FUSED", u32::from(self == MultiplyAdd::Fused))
    }

    /// What an operation costs, relative to a device's own.
    fn cost(self) -> f64 {
        if self == MultiplyAdd::Fused { 1.0 } else { 64.0 }
    }
}

/// The portable kernel of a usual one, and how many elements, rows or groups of a row a workgroup has.
fn counterpart(name: &str) -> Option<(&'static Kernel, usize)> {
    const ROWS: usize = 4;
    const ELEMENTS: usize = 256;
    Some(match name {
        "rmsnorm" => (&RMSNORM, ROWS),
        "rmsnorm_grad" => (&RMSNORM_GRAD, ROWS),
        "scale_rows_grad" => (&SCALE_ROWS_GRAD, ROWS),
        "cross_entropy" => (&CROSS_ENTROPY, ROWS),
        "attention_delta" => (&DELTA, ROWS),
        "rope" => (&ROPE, ELEMENTS),
        "gated" => (&GATED, ELEMENTS),
        "gated_grad" => (&GATED_GRAD, ELEMENTS),
        "dropout" => (&DROPOUT, ELEMENTS),
        "convolution" => (&CONVOLUTION, ELEMENTS),
        "convolution_grad" => (&CONVOLUTION_GRAD, ELEMENTS),
        "convolution_silu" => (&SILU, ELEMENTS),
        "convolution_silu_grad" => (&SILU_GRAD, ELEMENTS),
        _ => return None,
    })
}

/// A portable kernel, its constants, and how many elements or rows a workgroup has.
pub(super) type Chosen = (&'static Kernel, [Constant; 1], usize);

impl Wgpu {
    /// What an operation of this device costs, relative to one of its own.
    pub(super) fn cost(&self) -> f64 {
        self.portable.map_or(1.0, MultiplyAdd::cost)
    }

    /// Its multiply-add, as a constant of kernels.
    fn multiply_add(&self) -> Constant {
        self.portable.unwrap_or(MultiplyAdd::Fused).constant()
    }

    /// The portable kernel in place of a usual one, if this device is of the portable class and the usual one has other bits.
    pub(super) fn portable_kernel(&self, usual: &Kernel) -> Option<Chosen> {
        let (kernel, each) = counterpart(usual.name)?;
        Some((kernel, [self.portable?.constant()], each))
    }
}
