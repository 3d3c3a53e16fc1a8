//! Activations in 16 bits: bf16 numbers in pairs, as the left factor of a frozen product reads them
//! (`avx512_bf16.rs`), the first of each pair in the upper half of a word. What only products read is never written in
//! f32: it takes half the memory and half the way to it, and no product has to pair it again. Rows have even numbers of
//! columns, so that pairs do not cross rows.

use super::super::device::Cpu;
use super::super::gemm::avx512_bf16;
use super::super::operands::{Context, Precision};
use super::super::runtime::bf16::{apart, together};
use super::super::runtime::isa::kernel;
use super::super::runtime::math;
use super::super::runtime::memory::Memory;
use crate::backend::{Activation, View, ViewMut};

/// Pairs per task.
const CHUNK: usize = 16 * 1024;

kernel! {
    fn pair_values<L>(out: &mut [u32], x: &[f32]) {
        out.iter_mut().zip(x.as_chunks::<2>().0).for_each(|(o, x)| *o = together(x[0], x[1]));
    }
}

kernel! {
    fn widen_pairs<L>(out: &mut [f32], x: &[u32]) {
        out.as_chunks_mut::<2>().0.iter_mut().zip(x).for_each(|(o, &x)| (o[0], o[1]) = apart(x));
    }
}

/// Numbers that are computed in f32 at a time, before they are paired: they stay in the first cache.
const AT_ONCE: usize = 512;

/// Some numbers in f32: the first of every pair, and the second.
#[derive(Clone, Copy)]
struct Apart {
    even: [f32; AT_ONCE],
    odd: [f32; AT_ONCE],
}

impl Apart {
    const ROOM: Apart = Apart { even: [0.0; AT_ONCE], odd: [0.0; AT_ONCE] };

    /// The first numbers, in pairs.
    fn put(&self, cx: Context, out: &mut [u32]) {
        let whole = if cx.precision == Precision::Bf16Dot { out.len() / 16 * 16 } else { 0 };
        let (vectors, rest) = out.split_at_mut(whole);
        if whole > 0 {
            // SAFETY: the precision was chosen by `Cpu`, which asked the processor.
            unsafe { avx512_bf16::interleave(vectors, &self.even[..whole], &self.odd[..whole]) };
        }
        pair_two(cx.isa, rest, &self.even[whole..], &self.odd[whole..]);
    }
}

kernel! {
    /// out = the pairs of even and odd numbers; as many as `out` has room for.
    pub fn pair_two<L>(out: &mut [u32], even: &[f32], odd: &[f32]) {
        for ((o, &even), &odd) in out.iter_mut().zip(even).zip(odd) {
            *o = together(even, odd);
        }
    }
}

/// A gate with this activation and this factor, and its gradient (d gate, d up) by the activation's slope.
macro_rules! gate {
    ($values:ident = $act:ident * $factor:ident, $grad:ident = $slope:ident) => {
        kernel! {
            fn $values<L>(out: &mut Apart, gate: &[u32], up: &[u32]) {
                let one = |g: f32, u: f32| math::$act::<L>(g) * math::$factor(u).0;
                let numbers = out.even.iter_mut().zip(&mut out.odd);
                for ((o, &g), &u) in numbers.zip(gate).zip(up) {
                    let ((g0, g1), (u0, u1)) = (apart(g), apart(u));
                    (*o.0, *o.1) = (one(g0, u0), one(g1, u1));
                }
            }
        }

        kernel! {
            fn $grad<L>(out: &mut [Apart; 2], gate: &[u32], up: &[u32], dout: &[u32]) {
                let one = |g: f32, u: f32, d: f32| {
                    let ((act, slope), (factor, varies)) = (math::$slope::<L>(g), math::$factor(u));
                    (d * factor * slope, if varies { d * act } else { 0.0 })
                };
                let [dgate, dup] = out;
                let dgate = dgate.even.iter_mut().zip(&mut dgate.odd);
                let numbers = dgate.zip(dup.even.iter_mut().zip(&mut dup.odd));
                for (((o, &g), &u), &d) in numbers.zip(gate).zip(up).zip(dout) {
                    let ((g0, g1), (u0, u1), (d0, d1)) = (apart(g), apart(u), apart(d));
                    let (even, odd) = (one(g0, u0, d0), one(g1, u1, d1));
                    let ((g0, g1), (u0, u1)) = o;
                    (*g0, *g1, *u0, *u1) = (even.0, odd.0, even.1, odd.1);
                }
            }
        }
    };
}

gate!(swiglu_apart = silu * whole, swiglu_grad_apart = silu_slope);
gate!(geglu_apart = gelu * whole, geglu_grad_apart = gelu_slope);
gate!(sigmoid_apart = sigmoid * whole, sigmoid_grad_apart = sigmoid_slope);
gate!(clamped_apart = clamped_silu * clamped, clamped_grad_apart = clamped_silu_slope);

/// Pairs of x, on this thread.
pub fn pair(cx: Context, out: &mut [u32], x: &[f32]) {
    match cx.precision {
        // SAFETY: the precision was chosen by `Cpu`, which asked the processor.
        Precision::Bf16Dot => unsafe { avx512_bf16::pair_up(out, x) },
        _ => pair_values(cx.isa, out, x),
    }
}

/// Pairs of x.
pub fn pair_all(cx: Context, out: &mut [u32], x: &[f32]) {
    assert_eq!(2 * out.len(), x.len(), "a word for two numbers");
    cx.threads.chunks(out, CHUNK, |i, out| pair(cx, out, &x[2 * i * CHUNK..][..2 * out.len()]));
}

/// out = act(gate) * up
pub fn gated(cx: Context, out: &mut [u32], (gate, up): (&[u32], &[u32]), activation: Activation) {
    let values = match activation {
        Activation::SwiGlu => swiglu_apart,
        Activation::GeGlu => geglu_apart,
        Activation::Sigmoid => sigmoid_apart,
        Activation::ClampedSwiGlu => clamped_apart,
    };
    cx.threads.chunks(out, CHUNK, |i, out| {
        let (gate, up) = (&gate[i * CHUNK..][..out.len()], &up[i * CHUNK..][..out.len()]);
        let mut numbers = Apart::ROOM;
        for ((out, gate), up) in out.chunks_mut(AT_ONCE).zip(gate.chunks(AT_ONCE)).zip(up.chunks(AT_ONCE)) {
            values(cx.isa, &mut numbers, gate, up);
            numbers.put(cx, out);
        }
    });
}

/// gate := d gate, up := d up
pub fn gated_grad(cx: Context, (gate, up): (&mut [u32], &mut [u32]), dout: &[u32], activation: Activation) {
    let values = match activation {
        Activation::SwiGlu => swiglu_grad_apart,
        Activation::GeGlu => geglu_grad_apart,
        Activation::Sigmoid => sigmoid_grad_apart,
        Activation::ClampedSwiGlu => clamped_grad_apart,
    };
    let words = (bytemuck::cast_slice_mut(gate), bytemuck::cast_slice_mut(up));
    cx.threads.chunks2(words, (CHUNK, CHUNK), |i, gate, up| {
        let (gate, up): (&mut [u32], &mut [u32]) =
            (bytemuck::cast_slice_mut(gate), bytemuck::cast_slice_mut(up));
        let dout = &dout[i * CHUNK..][..up.len()];
        let mut numbers = [Apart::ROOM; 2];
        for ((gate, up), dout) in
            gate.chunks_mut(AT_ONCE).zip(up.chunks_mut(AT_ONCE)).zip(dout.chunks(AT_ONCE))
        {
            values(cx.isa, &mut numbers, gate, up, dout);
            numbers[0].put(cx, gate);
            numbers[1].put(cx, up);
        }
    });
}

impl Cpu {
    /// Whether such rows are kept in 16 bits: in bf16, where tiles read them.
    pub(super) fn shortens(&self, cols: usize) -> bool {
        self.rounds() && cols.is_multiple_of(2)
    }

    /// x in f32, in memory to give back; None where it is.
    pub(super) fn widened(&mut self, x: &View<Memory>) -> Option<Memory> {
        if !x.memory.is_short() {
            return None;
        }
        let (mut memory, isa) = (self.recycling.take(x.len()), self.isa);
        let pairs = x.pairs();
        self.threads.chunks(memory.values_mut(), 2 * CHUNK, |i, out| {
            widen_pairs(isa, out, &pairs[i * CHUNK..][..out.len() / 2]);
        });
        Some(memory)
    }

    /// Runs what writes f32 values and puts them into `out`, in whichever way it holds numbers.
    pub(super) fn through(&mut self, out: &mut ViewMut<Memory>, run: impl FnOnce(&mut Cpu, &mut [f32])) {
        if !out.memory.is_short() {
            return run(self, out.values_mut());
        }
        let mut values = self.recycling.take(out.len());
        run(self, values.values_mut());
        pair_all(self.context(), out.pairs_mut(), values.values());
        self.recycling.give(values);
    }
}
