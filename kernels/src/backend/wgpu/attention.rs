//! Attention: blocked over keys, with an online softmax and nothing of size T x T. Queries (for dk and dv: keys) are
//! split if a dispatch would take too long.

use super::device::Call;
use super::kernel::Access::{Read, Write as Written};
use super::kernel::{Constant, Kernel};
use super::memory::Place;
use super::pipelines::Slot;
use super::rows::kernel;
use super::variants::Variant;
use super::{Memory, Tokens, Wgpu};
use crate::backend::{AttentionSaved, Backend, Heads, Qkv, QkvGrad, View, ViewMut, view, view_mut};

kernel!(ATTENTION, "attention", ["window", "attention_row"], [Written, Written, Read, Read, Read, Read]);
kernel!(CACHED, "attention_cached", ["attention_row"], [Written, Written, Read, Read, Read]);
kernel!(DELTA, "attention_delta", [], [Written, Read, Read, Read]);
kernel!(GRAD_Q, "attention_grad_q", ["window"], [Written, Read, Read, Read, Read, Read, Read]);
kernel!(GRAD_KV, "attention_grad_kv", ["window"], [Written, Written, Read, Read, Read, Read, Read, Read]);

kernel!(FLASH, "flash", ["window", "flash_tile"], [Written, Written, Read, Read, Read, Read]);
kernel!(FLASH_Q, "flash_grad_q", ["window", "flash_tile"], [Written, Read, Read, Read, Read, Read, Read]);
kernel!(
    FLASH_KV,
    "flash_grad_kv",
    ["window", "flash_tile"],
    [Written, Written, Read, Read, Read, Read, Read, Read]
);

/// The kernels of this file.
pub(super) const KERNELS: &[&Kernel] =
    &[&ATTENTION, &CACHED, &DELTA, &GRAD_Q, &GRAD_KV, &FLASH, &FLASH_Q, &FLASH_KV];

/// The largest head whose sums flash attention keeps in registers.
pub(super) const FLASH_SIZE: usize = 256;

/// Cost of an operation in scalar loops relative to one in a tiled product.
const SCALAR: f64 = 4.0;

/// Constants for this head size and for subgroups of `lanes` that share their loads; 0 if they do not.
pub(super) fn constants_of(size: u32, lanes: u32) -> [Constant; 4] {
    [("SIZE", size), ("PER_LANE", size.div_ceil(64)), ("CHUNKS", size.div_ceil(32)), ("LANES", lanes)]
}

/// The parts in which a kernel is computed: dk and dv of large heads one after the other, because a card's registers do
/// not hold the sums of both.
pub(super) fn parts_of(kernel: &str, size: u32) -> &'static [u32] {
    if kernel == FLASH_KV.name && size > 128 { &[1, 2] } else { &[0] }
}

/// The number of keys that a query sees, as kernels count it.
fn window(heads: Heads) -> u32 {
    heads.window.map_or(u32::MAX, |keys| keys.try_into().unwrap_or(u32::MAX))
}

/// One dispatch over some queries or keys.
struct Part<'a> {
    kernel: &'static Kernel,
    heads: Heads,
    /// Workgroups per query or key.
    each: usize,
    slots: &'a [Slot],
    work: f64,
}

impl Wgpu {
    fn part(&mut self, part: &Part, (count, params): (usize, &[u32])) {
        if let Some((kernel, constants)) = self.portable_attention(part.kernel, part.heads.size) {
            return self.gpu.dispatch(Call {
                kernel,
                constants: &constants,
                params,
                slots: part.slots,
                groups: (count * part.each) as u64,
                work: part.work * count as f64,
            });
        }
        let fast = match part.kernel.name {
            "attention" => Some(&FLASH),
            "attention_grad_q" => Some(&FLASH_Q),
            "attention_grad_kv" => Some(&FLASH_KV),
            _ => None,
        };
        let fast = fast.filter(|_| self.variants.flash && part.heads.size <= FLASH_SIZE);
        // A workgroup of a flash kernel takes 32 queries or keys, one of the plain kernel takes one.
        let blocks = if fast.is_some() { count.div_ceil(32) } else { count };
        let lanes = if fast.is_some() { self.variants.lanes } else { 0 };
        let (kernel, size) = (fast.unwrap_or(part.kernel), part.heads.size as u32);
        let parts = parts_of(kernel.name, size);
        for &number in parts {
            self.gpu.dispatch(Call {
                kernel,
                constants: &[&constants_of(size, lanes)[..], &[("PART", number)]].concat(),
                params,
                slots: part.slots,
                groups: (blocks * part.each) as u64,
                // Both parts compute the scores: five products instead of four.
                work: part.work * count as f64 * if parts.len() > 1 { 0.625 } else { 1.0 },
            });
        }
    }

    /// 1/sqrt(D), as bits.
    fn scale(&self, heads: Heads) -> u32 {
        let spoil = if self.variants.flash { self.variants.spoil(Variant::Flash, heads.size) } else { 1.0 };
        ((heads.size as f32).sqrt().recip() * spoil).to_bits()
    }

    /// The work of a query: `products` products over its share of the `pairs`.
    fn per_query(&self, pairs: f64, queries: usize, heads: Heads, products: f64) -> f64 {
        self.cost() * SCALAR * products * 2.0 * pairs / queries.max(1) as f64
            * (heads.query * heads.size) as f64
    }

    pub(super) fn attend(
        &mut self,
        out: (ViewMut<Memory>, ViewMut<Memory>),
        qkv: Qkv<Memory>,
        heads: Heads,
        tokens: &Tokens,
    ) {
        let [o, lse] = [self.at_mut(&out.0), self.at_mut(&out.1)];
        let [q, k, v] = [qkv.q, qkv.k, qkv.v].map(|x| self.at(x));
        let (t, integers) = (tokens.len(), self.integers(&tokens.integers));
        let slots = [&o, &lse, &q, &k, &v].map(|p: &Place| p.slot.clone());
        let slots: Vec<Slot> = slots.into_iter().chain([integers]).collect();
        let work = self.per_query(tokens.pairs(heads), t, heads, 2.0);
        let part = Part { kernel: &ATTENTION, heads, each: heads.query, slots: &slots, work };
        let scale = self.scale(heads);
        for (from, count) in self.pieces(t, 0, work) {
            let at = [o.base, lse.base, q.base, k.base, v.base];
            let range = [t, from, count, heads.query, heads.kv].map(|x| x as u32);
            self.part(&part, (count, &[&at[..], &range, &[scale, window(heads)]].concat()));
        }
    }

    pub(super) fn attend_cached(
        &mut self,
        (out, logsumexp): (ViewMut<Memory>, ViewMut<Memory>),
        qkv: Qkv<Memory>,
        heads: Heads,
    ) {
        let (t, past) = (qkv.q.rows, qkv.k.rows - qkv.q.rows);
        let (o, lse) = (self.at_mut(&out), self.at_mut(&logsumexp));
        let [q, k, v] = [qkv.q, qkv.k, qkv.v].map(|x| self.at(x));
        let slots = [&o, &lse, &q, &k, &v].map(|p: &Place| p.slot.clone());
        let seen = heads.window.unwrap_or(usize::MAX).min(qkv.k.rows);
        let work = self.per_query((t * seen) as f64, t, heads, 2.0);
        let part = Part { kernel: &CACHED, heads, each: heads.query, slots: &slots, work };
        let scale = (heads.size as f32).sqrt().recip().to_bits();
        for (from, count) in self.pieces(t, 0, work) {
            let at = [o.base, lse.base, q.base, k.base, v.base, from as u32, count as u32];
            let range = [heads.query as u32, heads.kv as u32, scale, past as u32, window(heads)];
            self.part(&part, (count, &[&at[..], &range].concat()));
        }
    }

    pub(super) fn attend_grad(
        &mut self,
        grad: QkvGrad<Memory>,
        dout: View<Memory>,
        saved: AttentionSaved<Memory>,
        heads: Heads,
        tokens: &Tokens,
    ) {
        let (t, h) = (tokens.len(), heads.query);
        let mut beside = self.memory(2 * t * h);
        self.delta(view_mut(&mut beside, 2 * t, h), dout, &saved, heads);
        let [q, k, v] = [saved.qkv.q, saved.qkv.k, saved.qkv.v].map(|x| self.at(x));
        let (d, both) = (self.at(dout), self.at(view(&beside, 2 * t, h)));
        let mut parts = [(); 2].map(|()| self.parts_of_heads(t, heads));
        let [dq, mut dk, mut dv] = [&grad.dq, &grad.dk, &grad.dv].map(|x| self.at_mut(x));
        for (place, part) in [&mut dk, &mut dv].into_iter().zip(&mut parts) {
            part.iter_mut().for_each(|part| *place = self.at_mut(&view_mut(part, t, h * heads.size)));
        }
        let integers = self.integers(&tokens.integers);
        let scale = self.scale(heads);
        let inputs = [&q, &k, &v, &d, &both].map(|p: &Place| p.slot.clone());
        let slots = |outs: &[&Place]| -> Vec<Slot> {
            let outs = outs.iter().map(|p| p.slot.clone());
            outs.chain(inputs.iter().cloned()).chain([integers.clone()]).collect()
        };
        let range = |from: usize, count: usize| {
            [t, from, count, heads.query, heads.kv]
                .map(|x| x as u32)
                .into_iter()
                .chain([scale, window(heads)])
        };
        let at = [q.base, k.base, v.base, d.base];
        let (to_q, to_kv) = (slots(&[&dq]), slots(&[&dk, &dv]));
        let work = self.per_query(tokens.pairs(heads), t, heads, 3.0);
        let part = Part { kernel: &GRAD_Q, heads, each: heads.query, slots: &to_q, work };
        for (from, count) in self.pieces(t, 0, work) {
            let params: Vec<u32> = [dq.base].into_iter().chain(at).chain(range(from, count)).collect();
            self.part(&part, (count, &params));
        }
        let work = self.per_query(tokens.pairs(heads), t, heads, 4.0);
        let each = if self.portable.is_some() { heads.query } else { heads.kv };
        let part = Part { kernel: &GRAD_KV, heads, each, slots: &to_kv, work };
        for (from, count) in self.pieces(t, 0, work) {
            let params: Vec<u32> =
                [dk.base, dv.base].into_iter().chain(at).chain(range(from, count)).collect();
            self.part(&part, (count, &params));
        }
        for (out, part) in [&grad.dk, &grad.dv].into_iter().zip(parts) {
            part.into_iter().for_each(|part| self.fold_heads(out, part));
        }
        self.recycle(beside);
    }

    fn delta(
        &mut self,
        out: ViewMut<Memory>,
        dout: View<Memory>,
        saved: &AttentionSaved<Memory>,
        heads: Heads,
    ) {
        let n = dout.rows * heads.query;
        let [o, d] = [self.at_mut(&out), self.at(dout)];
        let [x, lse] = [self.at(saved.out), self.at(saved.logsumexp)];
        let params = [o.base, lse.base, d.base, x.base, n as u32, heads.size as u32];
        self.each(&DELTA, n, &params, &[&o, &d, &x, &lse]);
    }
}

impl Tokens {
    /// The number of (query, visible key) pairs.
    pub(super) fn pairs(&self, heads: Heads) -> f64 {
        let of_row = |w: &[u32]| {
            let tokens = w[1] - w[0];
            // The first queries see fewer keys than a window has.
            let begin = f64::from(tokens.min(window(heads)));
            begin * (begin + 1.0) / 2.0 + (f64::from(tokens) - begin) * begin
        };
        self.bounds.windows(2).map(of_row).sum()
    }
}
