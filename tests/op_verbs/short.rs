//! Memory of 16 bits: verbs write into it the rounded values that they write into f32 memory, and read from it the same
//! values as from f32 memory with the same numbers.

use crate::bf16::bits;
use crate::op_cases::{Mat, tokens, weight};
use finetune::backend::cpu::Memory;
use finetune::backend::{
    Activation, Backend, Cpu, DropoutKey, Fused, LoraGrad, LoraPart, View, Write, view, view_mut,
};
use finetune::numeric::dtype::Dtype;

/// A backend whose activations have 16 bits, or are in f32 memory and are rounded by the host.
struct Rounded {
    cpu: Cpu,
    short: bool,
    t: usize,
    /// All values that were read.
    out: Vec<Vec<f32>>,
}

impl Rounded {
    fn up(&mut self, m: &Mat) -> Memory {
        let mut memory = self.cpu.memory(m.v.len());
        self.cpu.upload(view_mut(&mut memory, m.rows, m.cols), &m.f32s());
        memory
    }

    fn memory(&mut self, n: usize) -> Memory {
        if self.short { self.cpu.short(self.t, n) } else { self.cpu.memory(self.t * n) }
    }

    fn read(&mut self, memory: &Memory, (rows, cols): (usize, usize)) -> Vec<f32> {
        let mut values = vec![0.0; rows * cols];
        self.cpu.read(view(memory, rows, cols), &mut values).unwrap();
        values
    }

    fn note(&mut self, memory: &Memory, shape: (usize, usize)) {
        let values = self.read(memory, shape);
        self.out.push(values);
    }

    /// Rounds the values, if the memory does not.
    fn settle(&mut self, memory: &mut Memory, n: usize) {
        let values = self.read(memory, (self.t, n));
        let kept: Vec<f32> = values.iter().map(|&v| half::bf16::from_f32(v).to_f32()).collect();
        if !self.short {
            self.cpu.upload(view_mut(memory, self.t, n), &kept);
        }
        self.out.push(kept);
    }
}

/// A feed-forward half of a block, forward and backward: input, gain, gate and up, down, A and B.
fn feed_forward(
    (mut on, activation): (Rounded, Activation),
    [x, gain, w, down, a, b]: [&Mat; 6],
) -> Vec<Vec<f32>> {
    let (t, c, f, r) = (x.rows, x.cols, w.rows, a.rows);
    let [mx, mg, ma, mb] = [x, gain, a, b].map(|m| on.up(m));
    let (wide, narrow) = (weight(&mut on.cpu, w, Dtype::Bf16), weight(&mut on.cpu, down, Dtype::Bf16));
    let ab = (view(&ma, r, c), view(&mb, f, r));
    let (mut normed, mut inv) = (on.memory(c), on.cpu.memory(t));
    let x = View { memory: &mx, offset: 0, rows: t, cols: c };
    on.cpu.rmsnorm(view_mut(&mut normed, t, c), view_mut(&mut inv, t, 1), x, view(&mg, 1, c), 1e-5);
    on.settle(&mut normed, c);
    let (mut gate, mut up, mut act, mut dact) = (on.memory(f), on.memory(f), on.memory(f), on.memory(f));
    let mut h = on.cpu.memory(t * r);
    on.cpu.linear(view_mut(&mut gate, t, f), Write::Set, view(&normed, t, c), &wide);
    on.settle(&mut gate, f);
    let part = LoraPart { h: view_mut(&mut h, t, r), x: view(&normed, t, c), ab, scale: 0.7 };
    on.cpu.lora_linear((view_mut(&mut up, t, f), Write::Set), view(&normed, t, c), &wide, part);
    on.settle(&mut up, f);
    on.note(&h, (t, r));
    on.cpu.lora_down(view_mut(&mut h, t, r), view(&normed, t, c), ab.0);
    on.note(&h, (t, r));
    on.cpu.gated(view_mut(&mut act, t, f), view(&gate, t, f), view(&up, t, f), activation);
    on.settle(&mut act, f);
    let (mut y, mut dx, mut dab) = (on.cpu.memory(t * c), on.cpu.memory(t * c), on.cpu.memory(r * (c + f)));
    on.cpu.linear(view_mut(&mut y, t, c), Write::Set, view(&act, t, f), &narrow);
    on.note(&y, (t, c));
    on.cpu.linear_grad(view_mut(&mut dact, t, f), Write::Set, view(&y, t, c), &narrow);
    on.settle(&mut dact, f);
    on.cpu.gated_grad(view_mut(&mut gate, t, f), view_mut(&mut up, t, f), view(&dact, t, f), activation);
    on.settle(&mut gate, f);
    on.settle(&mut up, f);
    for alone in [false, true] {
        let dab = view_mut(&mut dab, 1, r * (c + f));
        let (dy, x, h) = (view(&up, t, f), view(&normed, t, c), view(&h, t, r));
        let args = LoraGrad { dab, dy, x, h, ab, scale: 0.7 };
        match alone {
            false => on.cpu.lora_linear_grad((view_mut(&mut dx, t, c), Write::Set), &wide, args),
            true => on.cpu.lora_grad(Some((view_mut(&mut dx, t, c), Write::Add)), args),
        }
        on.note(&dx, (t, c));
    }
    on.note(&dab, (1, r * (c + f)));
    // An adapter's input, masked.
    let tokens = tokens(&mut on.cpu, &[0, t as u32]);
    let key = DropoutKey { seed: 1, step: 2, rows: &[3], module: 4, p: 0.3 };
    let mut masked = on.cpu.memory(t * f);
    on.cpu.dropout(view_mut(&mut masked, t, f), Write::Set, view(&gate, t, f), key, &tokens);
    on.note(&masked, (t, f));
    // `settle` gives the values that a write into 16-bit memory gives.
    let settled = if on.short { on.cpu.settle(masked, t, f) } else { masked };
    let values = on.read(&settled, (t, f));
    on.out.push(values.iter().map(|&v| half::bf16::from_f32(v).to_f32()).collect());
    on.out
}

#[test]
fn sixteen_bit_memory_holds_rounded_f32_values() {
    if Cpu::bf16(1).short_bytes() == 4 {
        return println!("skipped: numbers are kept in 16 bits where our own kernels multiply");
    }
    let sizes = [
        (1, 2, 6, 1),
        (2, 34, 66, 3),
        (3, 34, 66, 16),
        (17, 576, 100, 8),
        (130, 48, 1100, 17),
        (301, 900, 34, 5),
        (900, 40, 34, 2),
    ];
    let activations = [Activation::SwiGlu, Activation::GeGlu, Activation::Sigmoid, Activation::ClampedSwiGlu];
    for (activation, (t, c, f, r)) in activations.into_iter().flat_map(|a| sizes.map(|size| (a, size))) {
        let name = format!("{t}x{c}x{f}x{r} {activation:?}");
        let all = [(t, c), (1, c), (f, c), (c, f), (r, c), (f, r)];
        let all = all.map(|(rows, cols)| Mat::random(rows, cols, (7 * rows + cols) as u64));
        let go = |cpu: Cpu, short: bool| {
            let on = Rounded { cpu: cpu.poisoning(), short, t, out: Vec::new() };
            feed_forward((on, activation), all.each_ref())
        };
        let got = go(Cpu::bf16(2), true);
        assert!(got.iter().flatten().all(|v| v.is_finite()), "{name}");
        for threads in [1, 3, 7] {
            assert!(bits(&go(Cpu::bf16(threads), true)) == bits(&got), "{name}: {threads} threads");
        }
        if let Some(reference) = Cpu::bf16_reference(2) {
            assert!(bits(&go(reference, true)) == bits(&got), "{name}: the other kernel");
        }
        for (i, (got, want)) in got.iter().zip(go(Cpu::bf16(2), false)).enumerate() {
            assert!(bits(std::slice::from_ref(got)) == bits(&[want]), "{name}: output {i}");
        }
    }
}

#[test]
fn lent_memory_equals_a_read() {
    let mut rounded = Rounded { cpu: Cpu::new(1), short: true, t: 3, out: vec![] };
    let wide = rounded.up(&Mat { rows: 3, cols: 5, v: (0..15).map(f64::from).collect() });
    let read = rounded.read(&wide, (3, 5));
    assert_eq!(rounded.cpu.lend(&wide), Some(&read[..]));
    let mut short = Cpu::bf16(1);
    if short.short_bytes() < 4 {
        // Memory of 16 bits is not lent: a read widens its numbers.
        let memory = short.short(4, 6);
        assert_eq!(short.lend(&memory), None);
    }
}
