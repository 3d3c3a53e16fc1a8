//! How fast a card is, for benches/gpu.sh: products, their gradients and attention at the shapes of a model with 4
//! billion parameters. Nothing is asserted. It has never run: no card was at hand.

use crate::device::device_at;
use crate::rows::tokens;
use finetune::backend::cuda::{Cuda, Driver};
use finetune::backend::{
    AttentionSaved, Backend, Frozen, Fused, Heads, LoraGrad, LoraPart, Qkv, QkvGrad, Write, view, view_mut,
};
use finetune::numeric::block::{Block, Blocks};
use finetune::numeric::dtype::Dtype;
use std::time::Instant;

type Device = Cuda<Box<dyn Driver>>;

/// (T, N, K)
const PRODUCTS: [(usize, usize, usize); 5] =
    [(8192, 8192, 8192), (8192, 2560, 2560), (8192, 9728, 2560), (8192, 2560, 9728), (8192, 1024, 2560)];

/// Seconds of one of several, after one that compiles; `at` is read, so that all is over.
fn seconds(device: &mut Device, mut work: impl FnMut(&mut Device)) -> f64 {
    const TIMES: u32 = 5;
    let mut one = device.memory(1);
    let mut end = |device: &mut Device| {
        device.fill(view_mut(&mut one, 1, 1), 0.0);
        device.read(view(&one, 1, 1), &mut [0.0]).unwrap();
    };
    work(device);
    end(device);
    let began = Instant::now();
    (0..TIMES).for_each(|_| work(device));
    end(device);
    began.elapsed().as_secs_f64() / f64::from(TIMES)
}

fn filled(device: &mut Device, rows: usize, cols: usize) -> <Device as Backend>::Memory {
    let mut memory = device.memory(rows * cols);
    device.fill(view_mut(&mut memory, rows, cols), 0.5);
    memory
}

fn products(tier: &str, device: &mut Device) {
    for (t, n, k) in PRODUCTS {
        let bytes = 0x3c00_u16.to_le_bytes().repeat(n * k); // bf16 2^-7
        let plain = device.weight(Frozen { rows: n, cols: k, dtype: Dtype::Bf16, bytes: &bytes }).unwrap();
        let blocks = vec![0u8; Block::Q4_K.size_of(n * k)].into();
        let blocks = Blocks::new((n, k), Block::Q4_K, blocks).unwrap();
        let blocks = device.weight_of_blocks(&blocks).unwrap();
        let (mut x, mut y) = (filled(device, t, k), filled(device, t, n));
        for (stored, w) in [("bf16", &plain), ("Q4_K", &blocks)] {
            let forward =
                seconds(device, |d| d.linear(view_mut(&mut y, t, n), Write::Set, view(&x, t, k), w));
            let backward =
                seconds(device, |d| d.linear_grad(view_mut(&mut x, t, k), Write::Set, view(&y, t, n), w));
            let rate = |seconds: f64| 2.0 * (t * n * k) as f64 / seconds / 1e12;
            println!(
                "timing {tier} linear {t} x {n} x {k} of {stored}: {:.1} TFLOP/s, gradient {:.1}",
                rate(forward),
                rate(backward)
            );
        }
    }
}

/// What moving memory can reach: two values read and one written.
fn ceiling(device: &mut Device) {
    let (rows, cols) = (8192, 9728);
    let (x, mut y) = (filled(device, rows, cols), filled(device, rows, cols));
    let once = seconds(device, |d| d.add(view_mut(&mut y, rows, cols), view(&x, rows, cols)));
    println!("timing f32 add {rows} x {cols}: {:.0} GB/s", 12.0 * (rows * cols) as f64 / once / 1e9);
}

/// A projection with an adapter of rank 16.
fn adapters(how: &str, device: &mut Device) {
    let r = 16;
    for (t, n, k) in PRODUCTS.into_iter().skip(1) {
        let bytes = 0x3c00_u16.to_le_bytes().repeat(n * k);
        let w = device.weight(Frozen { rows: n, cols: k, dtype: Dtype::Bf16, bytes: &bytes }).unwrap();
        let (x, mut y, mut h) = (filled(device, t, k), filled(device, t, n), filled(device, t, r));
        let (a, b) = (filled(device, r, k), filled(device, n, r));
        let ab = (view(&a, r, k), view(&b, n, r));
        let forward = seconds(device, |d| {
            let lora = LoraPart { h: view_mut(&mut h, t, r), x: view(&x, t, k), ab, scale: 1.0 };
            d.lora_linear((view_mut(&mut y, t, n), Write::Set), view(&x, t, k), &w, lora);
        });
        let (mut dx, mut dab) = (filled(device, t, k), filled(device, 1, r * (n + k)));
        let backward = seconds(device, |d| {
            let dab = view_mut(&mut dab, 1, r * (n + k));
            let (dy, x, h) = (view(&y, t, n), view(&x, t, k), view(&h, t, r));
            let args = LoraGrad { dab, dy, x, h, ab, scale: 1.0 };
            d.lora_linear_grad((view_mut(&mut dx, t, k), Write::Set), &w, args);
        });
        println!(
            "timing bf16 lora_linear {t} x {n} x {k}, {how}: {:.3} ms, gradient {:.3}",
            1e3 * forward,
            1e3 * backward
        );
    }
}

fn attention(tier: &str, device: &mut Device) {
    let (heads, length) = (Heads { query: 32, kv: 8, size: 128 }, 4096);
    let t = 2 * length;
    let (wide, narrow) = (heads.query * heads.size, heads.kv * heads.size);
    let tokens = tokens(device, &[0, length as u32, t as u32]);
    let [q, mut out, dout, mut dq] = [(); 4].map(|()| filled(device, t, wide));
    let [k, v, mut dk, mut dv] = [(); 4].map(|()| filled(device, t, narrow));
    let mut lse = filled(device, t, heads.query);
    let qkv = Qkv { q: view(&q, t, wide), k: view(&k, t, narrow), v: view(&v, t, narrow) };
    let forward = seconds(device, |d| {
        d.attention(view_mut(&mut out, t, wide), view_mut(&mut lse, t, heads.query), qkv, heads, &tokens);
    });
    let backward = seconds(device, |d| {
        let grad = QkvGrad {
            dq: view_mut(&mut dq, t, wide),
            dk: view_mut(&mut dk, t, narrow),
            dv: view_mut(&mut dv, t, narrow),
        };
        let saved = AttentionSaved { qkv, out: view(&out, t, wide), logsumexp: view(&lse, t, heads.query) };
        d.attention_grad(grad, view(&dout, t, wide), saved, heads, &tokens);
    });
    let work = 2.0 * (length * length) as f64 * 2.0 * wide as f64;
    println!(
        "timing {tier} attention 2 x {length}, {} heads of {}: {:.1} TFLOP/s, gradient {:.1}",
        heads.query,
        heads.size,
        work / forward / 1e12,
        2.5 * work / backward / 1e12
    );
}

#[test]
fn timings() {
    // On the interpreter they would take hours.
    if std::env::var_os("FINETUNE_PTX_DEVICE").is_none() {
        println!("skipped: no card is named (FINETUNE_PTX_DEVICE)");
        return;
    }
    let mut f32 = device_at((8, 0), 0);
    ceiling(&mut f32);
    products("f32", &mut f32);
    attention("f32", &mut f32);
    match f32.bf16() {
        Ok(mut bf16) => {
            products("bf16", &mut bf16);
            attention("bf16", &mut bf16);
            adapters("fused", &mut bf16);
            adapters("spelled in verbs", &mut bf16.spelled());
        }
        Err(why) => println!("skipped: {why}"),
    }
}
