//! Speed of a card, for benches/first_contact.sh: products, projections with adapters (fused and not), attention, the gradient
//! of each, at the shapes of a model with 4 billion parameters, and memory bandwidth. In bf16 the inputs of products,
//! q, k and v are narrowed once for the five measured runs, gradients each time. The times are not asserted;
//! without a card the test only runs small sizes. All numbers are random: a card with a power limit runs
//! faster on equal numbers.

use crate::device::device_at;
use crate::op_cases::tokens;
use finetune::backend::cuda::{AttentionTrial, Driver, Flash, Trial};
use finetune::backend::{
    AttentionSaved, Backend, Cuda, Fault, Frozen, Fused, Heads, LoraGrad, LoraPart, Qkv, QkvGrad, ViewMut,
    Write, view, view_mut,
};
use finetune::numeric::block::{Block, Blocks, quantise};
use finetune::numeric::dtype::Dtype;
use finetune::numeric::rng::Stream;
use std::time::Instant;

type Device = Cuda<Box<dyn Driver>>;
type Weight = <Device as Backend>::Weight;

/// (T, N, K)
type Product = (usize, usize, usize);

/// The largest, then those of a model with 4 billion parameters.
const PRODUCTS: [Product; 7] = [
    (8192, 8192, 8192),
    (8192, 2560, 2560),
    (8192, 9728, 2560),
    (8192, 2560, 9728),
    (8192, 1024, 2560),
    (4096, 9728, 2560),
    (16_384, 9728, 2560),
];

/// Seconds of one of several runs, after two runs without measurement: the first compiles kernels, the second may
/// build a graph. A number is read at the end, so that all work is finished.
fn seconds(device: &mut Device, mut work: impl FnMut(&mut Device)) -> f64 {
    const TIMES: u32 = 5;
    let mut one = device.memory(1);
    let mut end = |device: &mut Device| {
        device.fill(view_mut(&mut one, 1, 1), 0.0);
        device.read(view(&one, 1, 1), &mut [0.0]).unwrap();
    };
    let mut last = 0.0;
    for _ in 0..3 {
        let began = Instant::now();
        (0..TIMES).for_each(|_| work(device));
        end(device);
        last = began.elapsed().as_secs_f64();
    }
    last / f64::from(TIMES)
}

/// Numbers that are repeated as needed: generating all of them would take longer than all measurements.
const STRETCH: usize = 1 << 16;

/// Uniform in -size .. size.
fn stretch(size: f32) -> Vec<f32> {
    let mut s = Stream::new(&[1, 2, 3]);
    (0..STRETCH).map(|_| (2.0 * s.unit() - 1.0) * size).collect()
}

fn filled(device: &mut Device, rows: usize, cols: usize) -> <Device as Backend>::Memory {
    let mut memory = device.memory(rows * cols);
    let some = stretch(1.0);
    for offset in (0..rows * cols).step_by(STRETCH) {
        let len = STRETCH.min(rows * cols - offset);
        device.upload(ViewMut { memory: &mut memory, offset, rows: 1, cols: len }, &some[..len]);
    }
    memory
}

/// Scaled so that the outputs of a product are no larger than its inputs, for any number of products in a row.
fn weights(n: usize, k: usize) -> Vec<f32> {
    stretch((3.0 / n.max(k) as f32).sqrt())
}

fn over_and_over(bytes: Vec<u8>, len: usize) -> Vec<u8> {
    bytes.into_iter().cycle().take(len).collect()
}

fn plain(device: &mut Device, n: usize, k: usize) -> Result<Weight, Fault> {
    let bytes = over_and_over(Dtype::Bf16.narrow(&weights(n, k)), 2 * n * k);
    device.weight(Frozen { rows: n, cols: k, dtype: Dtype::Bf16, bytes: &bytes })
}

/// The fault is that of a card that widens wrongly, like one that computes nothing.
fn in_blocks(device: &mut Device, n: usize, k: usize) -> Result<Weight, Fault> {
    let blocks = quantise(Block::Q4_K, &weights(n, k)).unwrap();
    let blocks = over_and_over(blocks, Block::Q4_K.size_of(n * k)).into();
    device.weight_of_blocks(&Blocks::new((n, k), Block::Q4_K, blocks).unwrap())
}

fn products(
    (tier, stored): (&str, &str),
    device: &mut Device,
    sizes: &[Product],
    weight: fn(&mut Device, usize, usize) -> Result<Weight, Fault>,
) -> Result<(), Fault> {
    for &(t, n, k) in sizes {
        let w = weight(device, n, k)?;
        let (mut x, mut y) = (filled(device, t, k), filled(device, t, n));
        let forward = seconds(device, |d| d.linear(view_mut(&mut y, t, n), Write::Set, view(&x, t, k), &w));
        let backward =
            seconds(device, |d| d.linear_grad(view_mut(&mut x, t, k), Write::Set, view(&y, t, n), &w));
        let rate = |seconds: f64| 2.0 * (t * n * k) as f64 / seconds / 1e12;
        println!(
            "timing {tier} linear {t} x {n} x {k} of {stored}: {:.1} TFLOP/s, gradient {:.1}",
            rate(forward),
            rate(backward)
        );
    }
    Ok(())
}

/// Memory bandwidth: two values read and one written.
fn ceiling(device: &mut Device, (rows, cols): (usize, usize)) {
    let (x, mut y) = (filled(device, rows, cols), filled(device, rows, cols));
    let once = seconds(device, |d| d.add(view_mut(&mut y, rows, cols), view(&x, rows, cols)));
    println!("timing f32 add {rows} x {cols}: {:.0} GB/s", 12.0 * (rows * cols) as f64 / once / 1e9);
}

/// A projection with an adapter of rank 16.
fn adapters(how: &str, device: &mut Device, sizes: &[Product]) {
    let r = 16;
    for &(t, n, k) in sizes {
        let w = plain(device, n, k).unwrap();
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
            "timing lora_linear {t} x {n} x {k}, {how}: {:.3} ms, gradient {:.3}",
            1e3 * forward,
            1e3 * backward
        );
    }
}

fn attention(tier: &str, device: &mut Device, (heads, length): (Heads, usize)) {
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
    // They would take hours on the interpreter.
    if std::env::var_os("FINETUNE_PTX_DEVICE").is_none() {
        println!("skipped: no card is named (FINETUNE_PTX_DEVICE)");
        return;
    }
    // Heads of a model with 4 billion parameters, and the same width in smaller heads.
    let attended = [(32, 8, 128), (64, 16, 64)].map(|(query, kv, size)| (Heads::new(query, kv, size), 4096));
    if let Err(why) = all(&PRODUCTS, &attended, (Trial::default(), AttentionTrial::default())) {
        println!("skipped: blocks: {why}");
    }
}

#[test]
fn small_ones_go_through() {
    let trials = (
        Trial { timed: (128, 256, 64), faster: 0.0 },
        AttentionTrial { timed: 2, heads: (2, 1), faster: 0.0 },
    );
    let attended = [8, 64].map(|size| (Heads::new(2, 1, size), 7));
    all(&[(3, 6, 256), (128, 256, 256)], &attended, trials).unwrap();
}

/// The fault is that of blocks; everything else is still timed.
fn all(sizes: &[Product], attended: &[(Heads, usize)], trials: (Trial, AttentionTrial)) -> Result<(), Fault> {
    let mut f32 = device_at((9, 0), 0);
    let &(t, n, _) = sizes.iter().max_by_key(|s| s.1).unwrap();
    ceiling(&mut f32, (t, n));
    products(("f32", "bf16"), &mut f32, sizes, plain).unwrap();
    let blocks = products(("f32", "Q4_K"), &mut f32, sizes, in_blocks);
    attended.iter().for_each(|one| attention("f32", &mut f32, *one));
    // For capability 7.x; other cards compute as in the rows above. Timed in any case, so that a rejected variant has a
    // number too.
    let tried = device_at((7, 5), 0).sm70(trials.0);
    println!("timing f16: {} {}", tried.class(), tried.below().unwrap_or(""));
    let mut f16 = tried.f16();
    let blocks = match f16.class().contains("-f16") {
        true => {
            products(("f16", "bf16"), &mut f16, sizes, plain).unwrap();
            blocks.and(products(("f16", "Q4_K"), &mut f16, sizes, in_blocks))
        }
        false => blocks,
    };
    let mut bf16 = match f32.bf16() {
        Ok(bf16) => bf16,
        Err(why) => {
            println!("skipped: {why}");
            return blocks;
        }
    };
    products(("bf16", "bf16"), &mut bf16, sizes, plain).unwrap();
    let blocks = blocks.and(products(("bf16", "Q4_K"), &mut bf16, sizes, in_blocks));
    attended.iter().for_each(|one| attention("bf16", &mut bf16, *one));
    adapters("bf16", &mut bf16, &sizes[1..]);
    let tried = bf16.sm90a(trials.0).attention_sm90a(trials.1);
    let below = [tried.below(), tried.attention_below()].map(|why| why.unwrap_or(""));
    println!("timing wgmma: {} {}", tried.class(), below.join(" "));
    // Timed whenever it can run, so that a rejected variant has a number too.
    let mut wgmma = tried.untried().attending(Flash { forward: true, backward: true });
    let blocks = match wgmma.class().contains("-wgmma") {
        true => {
            products(("wgmma", "bf16"), &mut wgmma, sizes, plain).unwrap();
            adapters("wgmma", &mut wgmma, &sizes[1..]);
            attended.iter().for_each(|one| attention("wgmma", &mut wgmma, *one));
            blocks.and(products(("wgmma", "Q4_K"), &mut wgmma, sizes, in_blocks))
        }
        false => blocks,
    };
    adapters("spelled in verbs", &mut wgmma.spelled(), &sizes[1..]);
    blocks
}
