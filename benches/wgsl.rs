//! GFLOP/s of each verb on an adapter, variant by variant: `cargo bench --bench wgsl -- llvmpipe`. Best of a few
//! repeats by the clock, and by the processor time of this process, which a busy machine affects less.
//!
//! `-- NAME step` prints the time of the verbs of one microbatch of the demonstration model, each with its count; `--
//! NAME blocks` prints the time of a product from blocks of each type, compared with bf16; `-- NAME large` prints rows at
//! sizes that occupy a card: 4096^3, and the shapes of Qwen3-1.7B with 256, 1,024 and 4,096 tokens. With `checked` behind all
//! that, kernels have run-time checks.

use finetune::backend::wgpu::{Adapter, Checks, Options, Precision, Variant, adapters};
use finetune::backend::*;
use finetune::numeric::block::{Block, Blocks, quantise};
use finetune::numeric::dtype::Dtype;
use std::time::Instant;

/// Processor seconds so far; `None` if the system does not report them.
fn processor() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
    let ticks: f64 = fields.get(11)?.parse::<f64>().ok()? + fields.get(12)?.parse::<f64>().ok()?;
    Some(ticks / 100.0)
}

struct Bench {
    device: Wgpu,
    repeats: usize,
    /// Sum of the seconds of all rows, each times its count.
    total: f64,
}

impl Bench {
    fn memory(&mut self, len: usize) -> <Wgpu as Backend>::Memory {
        let mut m = self.device.memory(len);
        let values: Vec<f32> = (0..len).map(|i| ((i * 7919 % 2003) as f32 - 1001.0) / 1001.0).collect();
        self.device.upload(view_mut(&mut m, 1, len), &values);
        m
    }

    fn frozen(&mut self, rows: usize, cols: usize, dtype: Dtype) -> <Wgpu as Backend>::Weight {
        let number = |i: usize| ((i * 104_729 % 4099) as f32 - 2049.0) / 60_000.0;
        let bytes: Vec<u8> = match dtype {
            Dtype::F32 => (0..rows * cols).flat_map(|i| number(i).to_le_bytes()).collect(),
            Dtype::Bf16 => {
                let bits = |i| half::bf16::from_f32(number(i)).to_bits();
                (0..rows * cols).flat_map(|i| bits(i).to_le_bytes()).collect()
            }
            Dtype::F16 => {
                let bits = |i| half::f16::from_f32(number(i)).to_bits();
                (0..rows * cols).flat_map(|i| bits(i).to_le_bytes()).collect()
            }
        };
        let frozen = Frozen { rows, cols, dtype, bytes: &bytes };
        self.device.weight(frozen).unwrap_or_else(|fault| panic!("{fault}"))
    }

    /// Several runs in one submission, so that waiting is not measured; a few values of `out` are read.
    fn row(
        &mut self,
        name: &str,
        (flops, count): (f64, usize),
        out: &mut <Wgpu as Backend>::Memory,
        verb: impl Fn(&mut Wgpu, &mut <Wgpu as Backend>::Memory),
    ) {
        let (mut best, mut least) = (f64::INFINITY, f64::INFINITY);
        let runs = if flops < 1e8 { 4 } else { 1 };
        for warm in 0..self.repeats + 1 {
            let (clock, ticks) = (Instant::now(), processor());
            (0..runs).for_each(|_| verb(&mut self.device, out));
            let mut one = [0.0];
            self.device.read(view(out, 1, 1), &mut one).unwrap_or_else(|fault| panic!("{name}: {fault}"));
            if warm > 0 {
                best = best.min(clock.elapsed().as_secs_f64() / runs as f64);
                if let (Some(a), Some(b)) = (ticks, processor()) {
                    least = least.min(((b - a) / runs as f64).max(1e-9));
                }
            }
        }
        self.total += best * count as f64;
        let rate =
            |s: f64| if flops > 0.0 && s > 1e-6 { format!("{:.2}", flops / s / 1e9) } else { "-".into() };
        println!("{name:<38} {count:>4} {:>9.2} {:>9} {:>12}", best * 1e3, rate(best), rate(least));
    }
}

fn open(adapter: &Adapter, variants: Option<Vec<Variant>>) -> Wgpu {
    let everywhere = std::env::args().any(|word| word == "checked");
    let checks = if everywhere { Checks::Everywhere } else { Checks::default() };
    let options = Options { variants, checks, ..Options::default() };
    let clock = Instant::now();
    let device = Wgpu::open(adapter, options).unwrap_or_else(|fault| panic!("{fault}"));
    println!("\n{}, opened and checked in {:.2} s", device.class(), clock.elapsed().as_secs_f64());
    for (variant, seen) in device.dropped() {
        println!("dropped {}: {seen}", variant.name());
    }
    println!("{:<38} {:>4} {:>9} {:>9} {:>12}", "verb", "", "ms", "GFLOP/s", "a cpu second");
    device
}

fn product(b: &mut Bench, name: &str, (m, n, k): (usize, usize, usize), transpose: Transpose, count: usize) {
    let (left, right, mut out) = (b.memory(m * k), b.memory(k * n), b.memory(m * n));
    let flops = 2.0 * (m * n * k) as f64;
    let name = format!("{name} {m} x {k} x {n}");
    b.row(&name, (flops, count), &mut out, |device, out| {
        let (a, b) = match transpose {
            Transpose::Neither => (view(&left, m, k), view(&right, k, n)),
            Transpose::Right => (view(&left, m, k), view(&right, n, k)),
            Transpose::Left => (view(&left, k, m), view(&right, k, n)),
        };
        device.matmul(view_mut(out, m, n), Write::Set, Product { a, b, transpose, scale: 1.0 });
    });
}

fn frozen(b: &mut Bench, (t, n, k): (usize, usize, usize), dtype: Dtype, (forward, back): (usize, usize)) {
    let (x, w, mut out) = (b.memory(t * n.max(k)), b.frozen(n, k, dtype), b.memory(t * n.max(k)));
    let flops = 2.0 * (t * n * k) as f64;
    if forward > 0 {
        b.row(&format!("linear {t} x {k} -> {n} {dtype:?}"), (flops, forward), &mut out, |device, out| {
            device.linear(view_mut(out, t, n), Write::Set, view(&x, t, k), &w);
        });
    }
    if back > 0 {
        b.row(&format!("linear_grad {t} x {n} -> {k} {dtype:?}"), (flops, back), &mut out, |device, out| {
            device.linear_grad(view_mut(out, t, k), Write::Set, view(&x, t, n), &w);
        });
    }
}

/// The same for a product from blocks.
fn blocks(b: &mut Bench, (t, n, k): (usize, usize, usize), block: Block) {
    let (x, mut out) = (b.memory(t * n.max(k)), b.memory(t * n.max(k)));
    let numbers: Vec<f32> = (0..n * k).map(|i| ((i * 104_729 % 4099) as f32 - 2049.0) / 60_000.0).collect();
    let bytes = quantise(block, &numbers).unwrap_or_default();
    let Some(blocks) = Blocks::new((n, k), block, bytes.into()) else { return };
    let w = b.device.weight_of_blocks(&blocks).unwrap_or_else(|fault| panic!("{fault}"));
    let flops = 2.0 * (t * n * k) as f64;
    b.row(&format!("linear {t} x {k} -> {n} {block:?}"), (flops, 1), &mut out, |device, out| {
        device.linear(view_mut(out, t, n), Write::Set, view(&x, t, k), &w);
    });
    b.row(&format!("linear_grad {t} x {n} -> {k} {block:?}"), (flops, 1), &mut out, |device, out| {
        device.linear_grad(view_mut(out, t, k), Write::Set, view(&x, t, n), &w);
    });
}

fn attention(b: &mut Bench, t: usize, heads: Heads, count: usize) {
    let (wide, narrow) = (heads.query * heads.size, heads.kv * heads.size);
    let [q, dout, saved] = [wide, wide, wide].map(|c| b.memory(t * c));
    let [k, v] = [narrow, narrow].map(|c| b.memory(t * c));
    let [mut out, mut dq] = [wide, wide].map(|c| b.memory(t * c));
    let lse = std::cell::RefCell::new(b.memory(t * heads.query));
    let kv = std::cell::RefCell::new((b.memory(t * narrow), b.memory(t * narrow)));
    let tokens =
        b.device.tokens(TokenRows { ids: &vec![0; t], bounds: &[0, t as u32], past: 0, short: u32::MAX });
    let qkv = Qkv { q: view(&q, t, wide), k: view(&k, t, narrow), v: view(&v, t, narrow) };
    let seen = |i: usize| heads.window.map_or(i, |w| i.min(w));
    let pairs = (1..=t).map(seen).sum::<usize>() as f64 * wide as f64;
    let Heads { query, kv: groups, size, window } = heads;
    let window = window.map_or(String::new(), |w| format!(", window {w}"));
    let name = format!("attention {t}, {query}/{groups} heads of {size}{window}");
    b.row(&name, (4.0 * pairs, count), &mut out, |device, out| {
        let lse = &mut *lse.borrow_mut();
        device.attention(view_mut(out, t, wide), view_mut(lse, t, query), qkv, heads, &tokens);
    });
    b.row(&format!("{name}, gradient"), (10.0 * pairs, count), &mut dq, |device, dq| {
        let (dk, dv) = &mut *kv.borrow_mut();
        let (dq, dk, dv) = (view_mut(dq, t, wide), view_mut(dk, t, narrow), view_mut(dv, t, narrow));
        let lse = lse.borrow();
        let saved = AttentionSaved { qkv, out: view(&saved, t, wide), logsumexp: view(&lse, t, query) };
        device.attention_grad(QkvGrad { dq, dk, dv }, view(&dout, t, wide), saved, heads, &tokens);
    });
}

fn rows(b: &mut Bench, (t, c, f): (usize, usize, usize), [norms, acts]: [usize; 2]) {
    let (x, gain, dy, mut out) = (b.memory(t * c), b.memory(c), b.memory(t * c), b.memory(t * c));
    let inv = std::cell::RefCell::new(b.memory(t));
    b.row(&format!("rmsnorm {t} x {c}"), (0.0, norms), &mut out, |device, out| {
        let inv = &mut *inv.borrow_mut();
        device.rmsnorm(view_mut(out, t, c), view_mut(inv, t, 1), view(&x, t, c), view(&gain, 1, c), 1e-5);
    });
    b.row(&format!("rmsnorm_grad {t} x {c}"), (0.0, norms), &mut out, |device, out| {
        let inv = inv.borrow();
        let norm = Norm { gain: view(&gain, 1, c), inv_rms: view(&inv, t, 1) };
        device.rmsnorm_grad(view_mut(out, t, c), Write::Set, view(&dy, t, c), view(&x, t, c), norm);
    });
    gated(b, (t, f), Activation::SwiGlu, acts);
}

fn gated(b: &mut Bench, (t, f): (usize, usize), activation: Activation, count: usize) {
    let (gate, up, mut act) = (b.memory(t * f), b.memory(t * f), b.memory(t * f));
    b.row(&format!("{activation:?} {t} x {f}"), (0.0, count), &mut act, |device, act| {
        device.gated(view_mut(act, t, f), view(&gate, t, f), view(&up, t, f), activation);
    });
}

fn convolution(b: &mut Bench, (t, c, taps): (usize, usize, usize)) {
    let (before, after, x, w) = (b.memory(t * c), b.memory(t * c), b.memory(t * c), b.memory(taps * c));
    let (dout, mut out) = (b.memory(t * c), b.memory(t * c));
    let more = std::cell::RefCell::new((b.memory(t * c), b.memory(t * c)));
    let ids = vec![0; t];
    let tokens = b.device.tokens(TokenRows { ids: &ids, bounds: &[0, t as u32], past: 0, short: u32::MAX });
    let gates = Gates { before: view(&before, t, c), after: view(&after, t, c), x: view(&x, t, c) };
    b.row(&format!("convolution {t} x {c}, {taps} taps"), (0.0, 1), &mut out, |device, out| {
        device.convolution(view_mut(out, t, c), gates, view(&w, taps, c), &tokens);
    });
    b.row(&format!("convolution_grad {t} x {c}, {taps} taps"), (0.0, 1), &mut out, |device, out| {
        let (after, x) = &mut *more.borrow_mut();
        let [before, after, x] = [out, after, x].map(|m| view_mut(m, t, c));
        device.convolution_grad(
            GatesGrad { before, after, x },
            view(&dout, t, c),
            gates,
            view(&w, taps, c),
            &tokens,
        );
    });
}

fn delta_rule(b: &mut Bench, (t, heads): (usize, DeltaHeads)) {
    let DeltaHeads { values, keys, value_size, key_size } = heads;
    let (n, m) = (keys * key_size, values * value_size);
    let all = [n, n, m, values, values, m, m, m].map(|cols| (b.memory(t * cols), cols));
    let (rates, taps, mut out) = (b.memory(2 * values), b.memory(4 * m), b.memory(t * m));
    let more = std::cell::RefCell::new([n, n, values, values, m].map(|cols| b.memory(t * cols)));
    let ids = vec![0; t];
    let tokens = b.device.tokens(TokenRows { ids: &ids, bounds: &[0, t as u32], past: 0, short: u32::MAX });
    let [q, k, v, beta, decay, dout, of_out, errors] = all.each_ref().map(|(x, cols)| view(x, t, *cols));
    let inputs = Delta { q, k, v, beta, decay, rates: view(&rates, 2, values), heads };
    b.row(&format!("convolution_silu {t} x {m}, 4 taps"), (0.0, 1), &mut out, |device, out| {
        device.convolution_silu(view_mut(out, t, m), v, view(&taps, 4, m), &tokens);
    });
    b.row(&format!("delta_rule {t} x {values} heads"), (0.0, 1), &mut out, |device, out| {
        let [.., errors] = &mut *more.borrow_mut();
        let (out, errors) = (view_mut(out, t, m), view_mut(errors, t, m));
        device.delta_rule(out, errors, None, inputs, &tokens);
    });
    b.row(&format!("delta_rule_grad {t} x {values} heads"), (0.0, 1), &mut out, |device, out| {
        let [dq, dk, dbeta, ddecay, _] = &mut *more.borrow_mut();
        let grad = DeltaGrad {
            dq: view_mut(dq, t, n),
            dk: view_mut(dk, t, n),
            dv: view_mut(out, t, m),
            dbeta: view_mut(dbeta, t, values),
            ddecay: view_mut(ddecay, t, values),
        };
        device.delta_rule_grad(grad, dout, DeltaSaved { out: of_out, errors }, inputs, &tokens);
    });
}

fn cross_entropy(b: &mut Bench, (n, vocab): (usize, usize), count: usize) {
    let (mut logits, losses) = (b.memory(n * vocab), std::cell::RefCell::new(b.memory(n)));
    let targets = b.device.ids(&vec![1; n]);
    b.row(&format!("cross_entropy {n} x {vocab}"), (0.0, count), &mut logits, |device, logits| {
        let losses = &mut *losses.borrow_mut();
        device.cross_entropy(view_mut(losses, n, 1), view_mut(logits, n, vocab), &targets, None);
    });
}

/// The verbs of one microbatch of the demonstration model: 4 blocks, 128 channels, 384 feed-forward, rank 16.
fn step(b: &mut Bench) {
    let (t, c, f, vocab, r) = (256, 128, 384, 2048, 16);
    for (n, k, count) in [(c, c, 8), (64, c, 8), (f, c, 8), (c, f, 4)] {
        frozen(b, (t, n, k), Dtype::Bf16, (count, count));
        product(b, "x aT", (t, r, k), Transpose::Right, count);
        product(b, "h bT", (t, n, r), Transpose::Right, count);
        product(b, "dy b", (t, r, n), Transpose::Neither, count);
        product(b, "dyT h", (n, r, t), Transpose::Left, count);
        product(b, "dhT x", (r, k, t), Transpose::Left, count);
        product(b, "dh a", (t, k, r), Transpose::Neither, count);
    }
    frozen(b, (t, vocab, c), Dtype::Bf16, (1, 1));
    attention(b, t, Heads::new(4, 2, 32), 4);
    rows(b, (t, c, f), [9, 4]);
    cross_entropy(b, (t, vocab), 1);
    println!("{:<38} {:>4} {:>9.2}", "together", "", b.total * 1e3);
}

fn table(b: &mut Bench) {
    for (name, transpose) in [
        ("matmul a bT", Transpose::Right),
        ("matmul a b", Transpose::Neither),
        ("matmul aT b", Transpose::Left),
    ] {
        product(b, name, (512, 512, 512), transpose, 1);
    }
    for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
        frozen(b, (512, 512, 512), dtype, (1, 1));
    }
    frozen(b, (256, 1536, 576), Dtype::Bf16, (1, 1));
    for (t, window) in [(256, None), (1024, None), (1024, Some(128))] {
        attention(b, t, Heads { window, ..Heads::new(9, 3, 64) }, 1);
    }
    rows(b, (256, 576, 1536), [1, 1]);
    gated(b, (256, 1536), Activation::GeGlu, 1);
    convolution(b, (256, 1024, 3));
    delta_rule(b, (256, DeltaHeads { values: 8, keys: 8, value_size: 128, key_size: 128 }));
    cross_entropy(b, (64, 49_152), 1);
}

/// 4096^3, then the matrices of a layer of Qwen3-1.7B, its head, its attention and an adapter's products.
fn large(b: &mut Bench) {
    product(b, "matmul a bT", (4096, 4096, 4096), Transpose::Right, 1);
    frozen(b, (4096, 4096, 4096), Dtype::Bf16, (1, 1));
    let (c, f, r) = (2048, 6144, 16);
    for t in [256, 1024, 4096] {
        for (n, k) in [(c, c), (c / 2, c), (f, c), (c, f)] {
            frozen(b, (t, n, k), Dtype::Bf16, (1, 1));
        }
        product(b, "x aT", (t, r, c), Transpose::Right, 1);
        product(b, "dyT h", (c, r, t), Transpose::Left, 1);
        attention(b, t, Heads::new(16, 8, 128), 1);
        rows(b, (t, c, f), [1, 1]);
    }
    frozen(b, (256, 151_936, c), Dtype::Bf16, (1, 1));
    cross_entropy(b, (256, 151_936), 1);
}

/// A table of each variant of products, the best first, and of the plain kernels.
fn variants(adapter: &Adapter, repeats: usize, table: fn(&mut Bench)) {
    let offered = Variant::offered(adapter, Precision::F16);
    let mut tables = Vec::new();
    for product in offered.iter().copied().filter(|v| v.is_product()) {
        let mut variants = vec![product];
        variants.extend(product.is_reduced().then_some(Variant::Tiled));
        variants.extend(offered.iter().copied().filter(|v| !v.is_product()));
        tables.push(variants);
    }
    tables.push(Vec::new());
    for variants in tables {
        table(&mut Bench { device: open(adapter, Some(variants)), repeats, total: 0.0 });
    }
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let wanted = words.first().map_or("llvmpipe", String::as_str).to_lowercase();
    let found = adapters().into_iter().find(|a| a.name().to_lowercase().contains(&wanted));
    let Some(adapter) = found else {
        println!("skipped: no adapter has {wanted} in its name");
        return;
    };
    let repeats = 3;
    if words.get(1).is_some_and(|w| w == "step") {
        return step(&mut Bench { device: open(&adapter, None), repeats, total: 0.0 });
    }
    if words.get(1).is_some_and(|w| w == "blocks") {
        let (b, size) = (&mut Bench { device: open(&adapter, None), repeats, total: 0.0 }, (1024, 1536, 512));
        frozen(b, size, Dtype::Bf16, (1, 1));
        return Block::ALL.iter().for_each(|block| blocks(b, size, *block));
    }
    variants(&adapter, repeats, if words.get(1).is_some_and(|w| w == "large") { large } else { table });
}
