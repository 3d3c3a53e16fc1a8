//! Attention in the CPU's blocks of keys and queries. Every query head has parts of dk and dv of its own, which are added
//! up over the heads that share a key/value head.

use super::super::kernel::Access::{Read, Write as Written};
use super::super::kernel::{Constant, Kernel};
use super::super::rows::kernel;
use super::super::{Memory, Wgpu};
use crate::backend::{Backend, Heads};
use crate::numeric::slices::{KEYS, STRETCH};

kernel!(
    ATTENTION,
    "portable_attention_rows",
    ["portable", "window", "portable_attention"],
    [Written, Written, Read, Read, Read, Read]
);
kernel!(
    CACHED,
    "portable_attention_cached",
    ["portable", "portable_attention"],
    [Written, Written, Read, Read, Read]
);
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

/// The kernels of this file.
pub(super) const KERNELS: &[&Kernel] = &[&ATTENTION, &CACHED, &GRAD_Q, &GRAD_KV];

/// Constants for this head size.
pub(super) fn constants_of(size: u32) -> [Constant; 4] {
    let (keys, stretch) = (KEYS as u32, STRETCH as u32);
    [("SIZE", size), ("PER_LANE", size.div_ceil(keys)), ("KEYS", keys), ("STRETCH", stretch)]
}

impl Wgpu {
    /// The portable kernel of attention and its constants.
    pub(in super::super) fn portable_attention(
        &self,
        usual: &Kernel,
        size: usize,
    ) -> Option<(&'static Kernel, Vec<Constant>)> {
        let fma = self.portable?;
        let kernel = match usual.name {
            "attention" => &ATTENTION,
            "attention_cached" => &CACHED,
            "attention_grad_q" => &GRAD_Q,
            "attention_grad_kv" => &GRAD_KV,
            _ => return None,
        };
        let constants = [&constants_of(size as u32)[..], &[fma.constant()]].concat();
        Some((kernel, constants))
    }

    /// Memory for the parts of dk or dv, if several query heads share a key/value head.
    pub(in super::super) fn parts_of_heads(&mut self, rows: usize, heads: Heads) -> Option<Memory> {
        let shared = self.portable.is_some() && heads.query > heads.kv;
        shared.then(|| self.memory(rows * heads.query * heads.size))
    }
}
