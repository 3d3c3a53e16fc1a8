//! Time, GFLOP/s and GB/s of the verbs at SmolLM2-135M's shapes, 4 rows of 256 tokens.
//!
//! `cargo bench --bench ops -- [threads] [f32|bf16|twin] [part of a name]`: twin is the other bf16 kernel. Best of many
//! short runs, which reduces the effect of a busy machine.

use finetune::backend::cpu::Memory;
use finetune::backend::*;
use finetune::numeric::dtype::Dtype;
use std::time::Instant;

const T: usize = 1024;

struct Bench {
    cpu: Cpu,
    repeats: usize,
    /// Only verbs with this in their name are measured.
    only: String,
}

impl Bench {
    fn memory(&mut self, len: usize) -> Memory {
        let mut m = self.cpu.memory(len);
        let values: Vec<f32> = (0..len).map(|i| ((i * 7919) % 1000) as f32 / 1000.0 - 0.5).collect();
        self.cpu.upload(view_mut(&mut m, 1, len), &values);
        m
    }

    /// Prints a line; flops and bytes are the minimum that the verb's definition requires.
    fn row(&mut self, name: &str, flops: f64, bytes: f64, mut verb: impl FnMut(&mut Cpu)) {
        if !name.contains(&self.only) {
            return;
        }
        let mut times = Vec::new();
        for _ in 0..self.repeats {
            let started = Instant::now();
            verb(&mut self.cpu);
            times.push(started.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        let (best, median) = (times[0], times[times.len() / 2]);
        let (gflops, gbytes) = (flops / best / 1e9, bytes / best / 1e9);
        println!("{name:<34} {:>9.3} {:>9.3} {gflops:>9.1} {gbytes:>8.1}", best * 1e3, median * 1e3);
    }
}

fn weight(cpu: &mut Cpu, rows: usize, cols: usize) -> finetune::backend::cpu::Weight {
    let number = |i: usize| half::bf16::from_f32(((i * 7919) % 1000) as f32 / 1000.0 - 0.5).to_le_bytes();
    let bytes: Vec<u8> = (0..rows * cols).flat_map(number).collect();
    cpu.weight(Frozen { rows, cols, dtype: Dtype::Bf16, bytes: &bytes }).unwrap_or_else(|e| panic!("{e}"))
}

fn products(b: &mut Bench) {
    for (t, k, n) in [
        (1024, 576, 1536),
        (1024, 1536, 576),
        (1024, 576, 192),
        (256, 576, 1536),
        (256, 576, 49152),
        (1, 576, 1536),
    ] {
        let (x, mut y, mut dx) = (b.memory(t * k), b.memory(t * n), b.memory(t * k));
        let w = weight(&mut b.cpu, n, k);
        let (flops, bytes) = (2.0 * (t * k * n) as f64, (4 * t * (k + n) + 2 * k * n) as f64);
        b.row(&format!("linear {t}x{k}x{n}"), flops, bytes, |cpu| {
            cpu.linear(view_mut(&mut y, t, n), Write::Set, view(&x, t, k), &w);
        });
        b.row(&format!("linear_grad {t}x{k}x{n}"), flops, bytes, |cpu| {
            cpu.linear_grad(view_mut(&mut dx, t, k), Write::Set, view(&y, t, n), &w);
        });
    }
    for (k, n) in [(576, 1536), (1536, 576)] {
        let r = 16;
        let (x, y, h) = (b.memory(T * k), b.memory(T * n), b.memory(T * r));
        let (a, bb) = (b.memory(r * k), b.memory(n * r));
        let (mut h2, mut db, mut da) = (b.memory(T * r), b.memory(n * r), b.memory(r * k));
        let flops = |c: usize| 2.0 * (T * r * c) as f64;
        b.row(&format!("lora h = x a' {k}"), flops(k), (4 * T * k) as f64, |cpu| {
            let p = Product { a: view(&x, T, k), b: view(&a, r, k), transpose: Transpose::Right, scale: 1.0 };
            cpu.matmul(view_mut(&mut h2, T, r), Write::Set, p);
        });
        b.row(&format!("lora dh = dy b {n}"), flops(n), (4 * T * n) as f64, |cpu| {
            let p =
                Product { a: view(&y, T, n), b: view(&bb, n, r), transpose: Transpose::Neither, scale: 1.0 };
            cpu.matmul(view_mut(&mut h2, T, r), Write::Set, p);
        });
        b.row(&format!("lora db = dy' h {n}"), flops(n), (4 * T * n) as f64, |cpu| {
            let p = Product { a: view(&y, T, n), b: view(&h, T, r), transpose: Transpose::Left, scale: 1.0 };
            cpu.matmul(view_mut(&mut db, n, r), Write::Set, p);
        });
        b.row(&format!("lora da = dh' x {k}"), flops(k), (4 * T * k) as f64, |cpu| {
            let p = Product { a: view(&h, T, r), b: view(&x, T, k), transpose: Transpose::Left, scale: 1.0 };
            cpu.matmul(view_mut(&mut da, r, k), Write::Set, p);
        });
    }
}

fn attention(b: &mut Bench) {
    let heads = Heads { query: 9, kv: 3, size: 64 };
    let (wide, narrow) = (9 * 64, 3 * 64);
    for (rows, length) in [(4usize, 256usize), (1, 1024), (1, 4096)] {
        let t = rows * length;
        let ids = vec![1; t];
        let bounds: Vec<u32> = (0..=rows).map(|r| (r * length) as u32).collect();
        let tokens = b.cpu.tokens(TokenRows { ids: &ids, bounds: &bounds, past: 0 });
        let (q, k, v) = (b.memory(t * wide), b.memory(t * narrow), b.memory(t * narrow));
        let (mut out, mut lse, dout) = (b.memory(t * wide), b.memory(t * 9), b.memory(t * wide));
        let (mut dq, mut dk, mut dv) = (b.memory(t * wide), b.memory(t * narrow), b.memory(t * narrow));
        let qkv = Qkv { q: view(&q, t, wide), k: view(&k, t, narrow), v: view(&v, t, narrow) };
        let flops = 2.0 * (t * length * wide) as f64;
        b.row(&format!("attention {rows}x{length}"), flops, 0.0, |cpu| {
            cpu.attention(view_mut(&mut out, t, wide), view_mut(&mut lse, t, 9), qkv, heads, &tokens);
        });
        b.row(&format!("attention_grad {rows}x{length}"), 2.5 * flops, 0.0, |cpu| {
            let grad = QkvGrad {
                dq: view_mut(&mut dq, t, wide),
                dk: view_mut(&mut dk, t, narrow),
                dv: view_mut(&mut dv, t, narrow),
            };
            let saved = AttentionSaved { qkv, out: view(&out, t, wide), logsumexp: view(&lse, t, 9) };
            cpu.attention_grad(grad, view(&dout, t, wide), saved, heads, &tokens);
        });
    }
}

fn rows(b: &mut Bench) {
    let (c, f) = (576, 1536);
    let (x, gain, mut out, mut inv) = (b.memory(T * c), b.memory(c), b.memory(T * c), b.memory(T));
    b.row("rmsnorm", 0.0, (8 * T * c) as f64, |cpu| {
        let (o, i) = (view_mut(&mut out, T, c), view_mut(&mut inv, T, 1));
        cpu.rmsnorm(o, i, view(&x, T, c), view(&gain, 1, c), 1e-5);
    });
    let dy = b.memory(T * c);
    b.row("rmsnorm_grad", 0.0, (16 * T * c) as f64, |cpu| {
        let norm = Norm { gain: view(&gain, 1, c), inv_rms: view(&inv, T, 1) };
        cpu.rmsnorm_grad(view_mut(&mut out, T, c), Write::Add, view(&dy, T, c), view(&x, T, c), norm);
    });
    let (mut gate, mut up, mut act) = (b.memory(T * f), b.memory(T * f), b.memory(T * f));
    b.row("swiglu", 0.0, (12 * T * f) as f64, |cpu| {
        cpu.swiglu(view_mut(&mut act, T, f), view(&gate, T, f), view(&up, T, f));
    });
    b.row("swiglu_grad", 0.0, (20 * T * f) as f64, |cpu| {
        cpu.swiglu_grad(view_mut(&mut gate, T, f), view_mut(&mut up, T, f), view(&act, T, f));
    });
    let (rows, vocab) = (256, 49152);
    let (mut losses, mut logits) = (b.memory(rows), b.memory(rows * vocab));
    let targets = b.cpu.ids(&vec![1; rows]);
    b.row("cross_entropy 256x49152", 0.0, (8 * rows * vocab) as f64, |cpu| {
        let (l, x) = (view_mut(&mut losses, rows, 1), view_mut(&mut logits, rows, vocab));
        cpu.cross_entropy(l, x, &targets, None);
    });
    b.row("copy", 0.0, (8 * T * f) as f64, |cpu| cpu.copy(view_mut(&mut act, T, f), view(&up, T, f)));
}

fn main() {
    let threads = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(2);
    let cpu = match std::env::args().nth(2).as_deref() {
        Some("bf16") => Cpu::bf16(threads),
        Some("twin") => Cpu::bf16_twin(threads).unwrap_or_else(|| panic!("one bf16 kernel only")),
        _ => Cpu::new(threads),
    };
    let mut b = Bench { cpu, repeats: 31, only: std::env::args().nth(3).unwrap_or_default() };
    println!("{}, {threads} threads", b.cpu.class());
    println!("{:<34} {:>9} {:>9} {:>9} {:>8}", "verb", "best ms", "median", "GFLOP/s", "GB/s");
    products(&mut b);
    attention(&mut b);
    rows(&mut b);
}
