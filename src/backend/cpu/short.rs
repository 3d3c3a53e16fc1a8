//! Activations in 16 bits: bf16 numbers in pairs, as the left factor of a frozen product reads them
//! (`avx512_bf16.rs`), the first of each pair in the upper half of a word. What only products read is never written in
//! f32: it takes half the memory and half the way to it, and nobody has to pair it again. Rows have even numbers of
//! columns, so that pairs do not cross rows.

use super::isa::kernel;
use super::left::{Precision, round};
use super::{Context, Cpu, Memory, avx512_bf16, math};
use crate::backend::{View, ViewMut};

/// Pairs per task.
const CHUNK: usize = 16 * 1024;

/// The numbers of a pair.
#[inline(always)]
fn apart(pair: u32) -> (f32, f32) {
    (f32::from_bits(pair & 0xffff_0000), f32::from_bits(pair << 16))
}

/// Two numbers, rounded.
#[inline(always)]
pub fn together(even: f32, odd: f32) -> u32 {
    round(even).to_bits() | round(odd).to_bits() >> 16
}

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

kernel! {
    fn swiglu_pairs<L>(out: &mut [u32], gate: &[u32], up: &[u32]) {
        let one = |g: f32, u: f32| g * math::sigmoid::<L>(g) * u;
        for ((o, &g), &u) in out.iter_mut().zip(gate).zip(up) {
            let ((g0, g1), (u0, u1)) = (apart(g), apart(u));
            *o = together(one(g0, u0), one(g1, u1));
        }
    }
}

kernel! {
    fn swiglu_grad_pairs<L>(gate: &mut [u32], up: &mut [u32], dout: &[u32]) {
        let one = |g: f32, u: f32, d: f32| {
            let s = math::sigmoid::<L>(g);
            let silu = g * s;
            (d * u * L::fma(silu, 1.0 - s, s), d * silu)
        };
        for ((g, u), &d) in gate.iter_mut().zip(up).zip(dout) {
            let ((g0, g1), (u0, u1), (d0, d1)) = (apart(*g), apart(*u), apart(d));
            let (even, odd) = (one(g0, u0, d0), one(g1, u1, d1));
            *g = together(even.0, odd.0);
            *u = together(even.1, odd.1);
        }
    }
}

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

/// out = silu(gate) * up
pub fn swiglu(cx: Context, out: &mut [u32], gate: &[u32], up: &[u32]) {
    cx.threads.chunks(out, CHUNK, |i, out| {
        let part = i * CHUNK..i * CHUNK + out.len();
        swiglu_pairs(cx.isa, out, &gate[part.clone()], &up[part]);
    });
}

/// gate := d gate, up := d up
pub fn swiglu_grad(cx: Context, gate: &mut [u32], up: &mut [u32], dout: &[u32]) {
    let values = (bytemuck::cast_slice_mut(gate), bytemuck::cast_slice_mut(up));
    cx.threads.chunks2(values, (CHUNK, CHUNK), |i, gate, up| {
        let (gate, up) = (bytemuck::cast_slice_mut(gate), bytemuck::cast_slice_mut(up));
        swiglu_grad_pairs(cx.isa, gate, up, &dout[i * CHUNK..][..up.len()]);
    });
}

impl<'a> View<'a, Memory> {
    /// Its pairs.
    pub(super) fn pairs(&self) -> &'a [u32] {
        assert!(self.cols.is_multiple_of(2) && self.offset.is_multiple_of(2), "rows of pairs");
        &self.memory.pairs()[self.offset / 2..][..self.len() / 2]
    }
}

impl ViewMut<'_, Memory> {
    /// Its pairs, to write.
    pub(super) fn pairs_mut(&mut self) -> &mut [u32] {
        assert!(self.cols.is_multiple_of(2) && self.offset.is_multiple_of(2), "rows of pairs");
        let part = self.offset / 2..(self.offset + self.len()) / 2;
        &mut self.memory.pairs_mut()[part]
    }
}

impl Cpu {
    /// Whether such rows are kept in 16 bits: in bf16, where our own kernels read them.
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
