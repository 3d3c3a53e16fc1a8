//! Attention in the CPU's blocks of keys and queries. Every query head has parts of dk and dv of its own, which are added
//! up over the heads that share a key/value head.

use super::super::kernel::Access::{Read, Write as Written};
use super::super::kernel::{Constant, Kernel};
use super::super::rows::kernel;
use super::super::{Memory, Wgpu};
use crate::backend::{Backend, Heads, ViewMut};

kernel!(
    ATTENTION,
    "portable_attention_rows",
    ["portable", "window", "portable_attention"],
    [Written, Written, Read, Read, Read, Read]
);
kernel!(CACHED, "portable_attention_cached", ["portable", "portable_attention"], [Written, Read, Read, Read]);
kernel!(
    GRAD_Q,
    "portable_attention_grad_q",
    ["portable", "window"],
    [Written, Read, Read, Read, Read, Read, Read]
);
kernel!(
    GRAD_KV,
    "portable_attention_grad_kv",
    ["portable", "window"],
    [Written, Written, Read, Read, Read, Read, Read, Read]
);
kernel!(GATHER_HEADS, "gather_heads", [], [Written, Read]);

/// The kernels of this file.
pub(super) const KERNELS: &[&Kernel] = &[&ATTENTION, &CACHED, &GRAD_Q, &GRAD_KV, &GATHER_HEADS];

/// Constants for this head size.
pub(in super::super) fn constants_of(size: u32) -> [Constant; 2] {
    [("SIZE", size), ("PER_LANE", size.div_ceil(96))]
}

impl Wgpu {
    /// The portable kernel of attention, its constants, and what an operation costs.
    pub(in super::super) fn portable_attention(
        &self,
        usual: &Kernel,
        size: usize,
    ) -> Option<(&'static Kernel, Vec<Constant>, f64)> {
        let fma = self.portable?;
        let kernel = match usual.name {
            "attention" => &ATTENTION,
            "attention_cached" => &CACHED,
            "attention_grad_q" => &GRAD_Q,
            _ => &GRAD_KV,
        };
        let constants = [&constants_of(size as u32)[..], &[fma.constant()]].concat();
        Some((kernel, constants, fma.cost()))
    }

    /// Memory for the parts of dk or dv, if several query heads share a key/value head.
    pub(in super::super) fn parts_of_heads(&mut self, rows: usize, heads: Heads) -> Option<Memory> {
        let shared = self.portable.is_some() && heads.query > heads.kv;
        shared.then(|| self.memory(rows * heads.query * heads.size))
    }

    /// out[T, G*D] = the sum of the parts [T, H*D] over the heads of each group, in order.
    pub(in super::super) fn gather_heads(&mut self, mut out: ViewMut<Memory>, parts: &Memory, heads: Heads) {
        let wide = heads.query * heads.size;
        let each = (heads.query / heads.kv) as u32;
        for (from, rows) in self.pieces(out.rows, wide, super::super::rows::ELEMENT * wide as f64) {
            let part = out.again().rows(from, rows);
            let (o, n) = (self.at_mut(&part), part.len());
            let x = self.place(&parts.storage, from * wide, rows * wide);
            let params = [o.base, x.base, n as u32, heads.size as u32, each];
            self.each(&GATHER_HEADS, n, &params, &[&o, &x]);
        }
    }
}
