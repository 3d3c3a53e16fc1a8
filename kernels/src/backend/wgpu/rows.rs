//! Verbs over rows: every output depends on one row of the inputs, so rows may be split anywhere.

use super::encodings;
use super::kernel::Access::{Read, Write as Written};
use super::kernel::{Constant, Kernel};
use super::memory::Place;
use super::{Masks, Memory, Tokens, Weight, Wgpu};
use crate::backend::{Activation, DropoutKey, View, ViewMut, Write};
use crate::numeric::block::Encoding;
use crate::numeric::rng;

macro_rules! kernel {
    ($name:ident, $stem:literal, $pieces:tt, $buffers:tt) => {
        kernel!($name, $stem as $stem, $pieces, $buffers);
    };
    ($name:ident, $stem:literal as $label:literal, [$($piece:literal),*], [$($access:expr),*]) => {
        static $name: Kernel = Kernel {
            name: $label,
            source: &[
                $(include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/wgsl/", $piece, ".wgsl")),)*
                include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/wgsl/", $stem, ".wgsl")),
            ],
            buffers: &[$($access),*],
        };
    };
}
pub(super) use kernel;

kernel!(FILL, "fill", [], [Written]);
kernel!(COPY, "copy", [], [Written, Read]);
kernel!(ADD, "add", [], [Written, Read]);
kernel!(BIAS, "bias", [], [Written, Read]);
kernel!(WIDEN, "widen", ["packed"], [Written, Read]);
kernel!(EMBED, "embed", ["packed"], [Written, Read, Read]);
kernel!(ROPE, "rope", ["usual"], [Written, Read, Read]);
kernel!(GATED, "gated", ["gelu"], [Written, Read, Read]);
kernel!(GATED_GRAD, "gated_grad", ["gelu"], [Written, Written, Read]);
kernel!(DROPOUT, "dropout", ["usual"], [Written, Read, Read, Read]);

/// The kernels of this file.
pub(super) const KERNELS: &[&Kernel] =
    &[&FILL, &COPY, &ADD, &BIAS, &WIDEN, &EMBED, &ROPE, &GATED, &GATED_GRAD, &DROPOUT];

/// Cost of an element of a simple verb, in multiplications and additions of a product.
pub(super) const ELEMENT: f64 = 16.0;

/// An activation as kernels know it.
fn number(activation: Activation) -> u32 {
    match activation {
        Activation::SwiGlu => 0,
        Activation::GeGlu => 1,
        Activation::Sigmoid => 2,
        Activation::ClampedSwiGlu => 3,
    }
}

impl Wgpu {
    /// One lane per element.
    pub(super) fn each(&mut self, kernel: &'static Kernel, n: usize, params: &[u32], places: &[&Place]) {
        match self.portable_kernel(kernel) {
            Some((kernel, constants, each)) => self.elements((kernel, &constants), (n, each), params, places),
            None => self.elements((kernel, &[]), (n, 256), params, places),
        }
    }

    /// A kernel whose workgroups have `each` elements.
    pub(super) fn elements(
        &mut self,
        (kernel, constants): (&'static Kernel, &[Constant]),
        (n, each): (usize, usize),
        params: &[u32],
        places: &[&Place],
    ) {
        let slots: Vec<_> = places.iter().map(|p| p.slot.clone()).collect();
        let (groups, work) = (n.div_ceil(each) as u64, n as f64 * ELEMENT * self.cost());
        self.gpu.dispatch(super::device::Call { kernel, constants, params, slots: &slots, groups, work });
    }

    /// Splits `len` elements into pieces that can be bound and take no longer than a submission may.
    fn runs(&self, len: usize) -> Vec<(usize, usize)> {
        self.pieces(len, 1, ELEMENT)
    }

    pub(super) fn fill_view(&mut self, out: ViewMut<Memory>, value: f32) {
        for (from, n) in self.runs(out.len()) {
            let o = self.place(&out.memory.storage, out.offset + from, n);
            self.each(&FILL, n, &[o.base, n as u32, value.to_bits()], &[&o]);
        }
    }

    pub(super) fn copy_view(&mut self, out: ViewMut<Memory>, x: View<Memory>) {
        self.onto(&COPY, out, x);
    }

    pub(super) fn add_view(&mut self, out: ViewMut<Memory>, x: View<Memory>) {
        self.onto(&ADD, out, x);
    }

    fn onto(&mut self, kernel: &'static Kernel, out: ViewMut<Memory>, x: View<Memory>) {
        for (from, n) in self.runs(out.len()) {
            let o = self.place(&out.memory.storage, out.offset + from, n);
            let x = self.place(&x.memory.storage, x.offset + from, n);
            self.each(kernel, n, &[o.base, x.base, n as u32], &[&o, &x]);
        }
    }

    pub(super) fn add_bias(&mut self, mut y: ViewMut<Memory>, bias: View<Memory>) {
        let b = self.at(bias);
        for (from, rows) in self.pieces(y.rows, y.cols, ELEMENT * y.cols as f64) {
            let part = y.again().rows(from, rows);
            let (o, n) = (self.at_mut(&part), part.len());
            self.each(&BIAS, n, &[o.base, b.base, n as u32, part.cols as u32], &[&o, &b]);
        }
    }

    pub(super) fn embed_rows(
        &mut self,
        mut out: ViewMut<Memory>,
        table: &Weight,
        tokens: &Tokens,
        scale: f32,
    ) {
        let ids = Place { slot: self.integers(&tokens.integers), base: 0 };
        let constants = [("ENCODING", encodings::number(table.encoding)), ("VECTOR", 0)];
        for (from, rows) in self.pieces(out.rows, out.cols, ELEMENT * out.cols as f64) {
            let view = out.again().rows(from, rows);
            let (o, n) = (self.at_mut(&view), view.len());
            for part in &table.parts {
                let t = self.place(&part.storage, 0, part.storage.bytes as usize / 4);
                let part = [from, n, view.cols, part.from, part.rows].map(|x| x as u32);
                let params = [&[o.base][..], &part, &[scale.to_bits()]].concat();
                self.elements((&EMBED, &constants), (n, 256), &params, &[&o, &t, &ids]);
            }
        }
    }

    /// Widens blocks from the start of a block on. The count of numbers is a multiple of four.
    pub(super) fn widen_rows(
        &mut self,
        [out, blocks]: [&Place; 2],
        encoding: Encoding,
        (from, numbers): (usize, usize),
    ) {
        let constants = [("ENCODING", encodings::number(encoding)), ("VECTOR", 0)];
        let slots = [out.slot.clone(), blocks.slot.clone()];
        for (at, count) in self.pieces(numbers / 4, 1, 4.0 * ELEMENT) {
            let params = [out.base + 4 * at as u32, (from + 4 * at) as u32, count as u32];
            self.gpu.dispatch(super::device::Call {
                kernel: &WIDEN,
                constants: &constants,
                params: &params,
                slots: &slots,
                groups: count.div_ceil(256) as u64,
                work: 4.0 * count as f64 * ELEMENT,
            });
        }
    }

    pub(super) fn turn(&mut self, mut x: ViewMut<Memory>, table: View<Memory>, tokens: &Tokens, sign: f32) {
        let (size, t) = (table.cols, tokens.len());
        let positions = Place { slot: self.integers(&tokens.integers), base: 0 };
        let table = self.at(table);
        for (from, rows) in self.pieces(x.rows, x.cols, ELEMENT * x.cols as f64) {
            let part = x.again().rows(from, rows);
            let (o, n, cols) = (self.at_mut(&part), part.len() / 2, part.cols as u32);
            let at = (t + from) as u32;
            let params = [o.base, table.base, at, n as u32, cols, size as u32, sign.to_bits()];
            self.each(&ROPE, n, &params, &[&o, &table, &positions]);
        }
    }

    pub(super) fn gate(
        &mut self,
        out: ViewMut<Memory>,
        gate: View<Memory>,
        up: View<Memory>,
        activation: Activation,
    ) {
        for (from, n) in self.runs(out.len()) {
            let o = self.place(&out.memory.storage, out.offset + from, n);
            let g = self.place(&gate.memory.storage, gate.offset + from, n);
            let u = self.place(&up.memory.storage, up.offset + from, n);
            let params = [o.base, g.base, u.base, n as u32, number(activation)];
            self.each(&GATED, n, &params, &[&o, &g, &u]);
        }
    }

    pub(super) fn gate_grad(
        &mut self,
        gate: ViewMut<Memory>,
        up: ViewMut<Memory>,
        dout: View<Memory>,
        activation: Activation,
    ) {
        for (from, n) in self.runs(dout.len()) {
            let g = self.place(&gate.memory.storage, gate.offset + from, n);
            let u = self.place(&up.memory.storage, up.offset + from, n);
            let d = self.place(&dout.memory.storage, dout.offset + from, n);
            let params = [g.base, u.base, d.base, n as u32, number(activation)];
            self.each(&GATED_GRAD, n, &params, &[&g, &u, &d]);
        }
    }

    /// The mask's hash of every token up to its row, sent once per microbatch.
    fn mask_bases(&mut self, key: DropoutKey, tokens: &Tokens) -> Place {
        let known = (key.seed, key.step, tokens.number);
        if self.masks.as_ref().is_none_or(|m| m.key != known) {
            let of_row = |(&id, w): (&u64, &[u32])| {
                std::iter::repeat_n(rng::hash(&[key.seed, key.step, id]), (w[1] - w[0]) as usize)
            };
            let bases: Vec<u32> = key.rows.iter().zip(tokens.bounds.windows(2)).flat_map(of_row).collect();
            self.masks = None;
            let bases = self.lease(&bases);
            self.masks = Some(Masks { key: known, bases });
        }
        match &self.masks {
            Some(masks) => Place { slot: self.integers(&masks.bases), base: 0 },
            None => Place { slot: self.integers(&tokens.integers), base: 0 },
        }
    }

    pub(super) fn mask(
        &mut self,
        (mut out, write): (ViewMut<Memory>, Write),
        x: View<Memory>,
        key: DropoutKey,
        tokens: &Tokens,
    ) {
        let bases = self.mask_bases(key, tokens);
        let integers = Place { slot: self.integers(&tokens.integers), base: 0 };
        let add = u32::from(write == Write::Add);
        for (from, rows) in self.pieces(x.rows, x.cols, 2.0 * ELEMENT * x.cols as f64) {
            let part = out.again().rows(from, rows);
            let (o, n, xs) = (self.at_mut(&part), part.len(), self.at(x.rows(from, rows)));
            let module = [key.module as u32, (key.module >> 32) as u32];
            let (t, cols) = (tokens.len() as u32, x.cols as u32);
            let [low, high] = module;
            let (threshold, scale) = (key.threshold(), key.scale().to_bits());
            let params = [o.base, xs.base, from as u32, t, n as u32, cols, low, high, threshold, scale, add];
            self.each(&DROPOUT, n, &params, &[&o, &xs, &bases, &integers]);
        }
    }
}
