//! Kernel variants on the adapters of tests/tested_adapters: each against f64, at sizes that fit no tile, at odd offsets, over NaN,
//! between guard words; variants that round their factors are compared with products of equally rounded factors and
//! with f32; a deliberately wrong variant is dropped by name.

#[path = "tested_adapters/mod.rs"]
mod tested_adapters;

use finetune::backend::wgpu::{Adapter, Options, Variant, Weight};
use finetune::backend::*;
use finetune::numeric::block::{Block, Blocks, Encoding, quantise};
use finetune::numeric::dtype::Dtype;
use half::{bf16, f16};

const GUARD: f32 = 12_345.0;

/// The adapters, each with the variants that it can run.
fn devices() -> Vec<(Adapter, Vec<Variant>)> {
    let offered = |tested: tested_adapters::Tested| {
        let variants = Variant::offered(&tested.adapter, finetune::backend::wgpu::Precision::F16);
        (tested.adapter, variants)
    };
    tested_adapters::all().into_iter().map(offered).collect()
}

fn tolerance(key: &str) -> f64 {
    let text = include_str!("../contracts/F-WGPU-003.yaml");
    let contract: serde_json::Value = serde_yaml::from_str(text).unwrap();
    contract["tolerance"][key].as_f64().unwrap()
}

fn numbers(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// A matrix at an odd offset, guard words around it.
fn held(device: &mut Wgpu, values: &[f32], offset: usize) -> <Wgpu as Backend>::Memory {
    let mut memory = device.memory(values.len() + 2 * offset);
    let guard = vec![GUARD; offset];
    let all = [&guard[..], values, &guard[..]].concat();
    device.upload(view_mut(&mut memory, 1, all.len()), &all);
    memory
}

fn taken(device: &mut Wgpu, memory: <Wgpu as Backend>::Memory, len: usize, offset: usize) -> Vec<f32> {
    let mut all = vec![0.0; len + 2 * offset];
    device.read(view(&memory, 1, all.len()), &mut all).unwrap();
    device.recycle(memory);
    let (before, rest) = all.split_at(offset);
    assert!(before.iter().chain(&rest[len..]).all(|v| *v == GUARD), "a guard word was written");
    rest[..len].to_vec()
}

/// sum over k of a(i, k) b(k, j), and of absolute terms.
fn formula(
    (a, row, k_a): (&[f32], usize, usize),
    (b, k_b, col): (&[f32], usize, usize),
    (m, n, k): (usize, usize, usize),
) -> Vec<(f64, f64)> {
    let mut all = Vec::with_capacity(m * n);
    for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
        let term = |t: usize| f64::from(a[i * row + t * k_a]) * f64::from(b[t * k_b + j * col]);
        all.push((0..k).fold((0.0, 0.0), |(s, abs), t| (s + term(t), abs + term(t).abs())));
    }
    all
}

fn largest(want: &[(f64, f64)]) -> f64 {
    want.iter().fold(0.0, |m: f64, (w, _)| m.max(w.abs()))
}

/// Checks every value within `bound` of the expected one, relative to the largest, or to each sum of absolute terms.
fn compare(name: &str, got: &[f32], want: &[(f64, f64)], (bound, by_terms): (f64, bool)) {
    let scale = largest(want);
    for (i, (got, (want, terms))) in got.iter().zip(want).enumerate() {
        let off = (f64::from(*got) - want).abs();
        let most = bound * if by_terms { *terms } else { scale };
        assert!(off <= most, "{name}: element {i} is {got}, want {want}: off {off:e}, allowed {most:e}");
    }
}

fn round16(x: &[f32]) -> Vec<f32> {
    x.iter().map(|v| f16::from_f32(*v).to_f32()).collect()
}

/// A frozen matrix as the bytes of a file, and the values that they represent.
fn frozen(w: &[f32], dtype: Dtype) -> (Vec<u8>, Vec<f32>) {
    match dtype {
        Dtype::F32 => (w.iter().flat_map(|v| v.to_le_bytes()).collect(), w.to_vec()),
        Dtype::Bf16 => {
            let bits: Vec<bf16> = w.iter().map(|v| bf16::from_f32(*v)).collect();
            let bytes = bits.iter().flat_map(|b| b.to_bits().to_le_bytes()).collect();
            (bytes, bits.iter().map(|b| b.to_f32()).collect())
        }
        Dtype::F16 => {
            let bits: Vec<f16> = w.iter().map(|v| f16::from_f32(*v)).collect();
            let bytes = bits.iter().flat_map(|b| b.to_bits().to_le_bytes()).collect();
            (bytes, bits.iter().map(|b| b.to_f32()).collect())
        }
    }
}

/// A frozen matrix on the device, and its values.
fn weight(device: &mut Wgpu, (n, k): (usize, usize), encoding: Encoding) -> (Weight, Vec<f32>) {
    let numbers = numbers(n * k, 3);
    match encoding {
        Encoding::Plain(dtype) => {
            let (bytes, w) = frozen(&numbers, dtype);
            (device.weight(Frozen { rows: n, cols: k, dtype, bytes: &bytes }).unwrap(), w)
        }
        Encoding::Blocks(block) => {
            let blocks = Blocks::new((n, k), block, quantise(block, &numbers).unwrap().into()).unwrap();
            let mut w = vec![0.0; n * k];
            block.widen(&mut w, &blocks.bytes);
            (device.weight_of_blocks(&blocks).unwrap(), w)
        }
    }
}

/// linear and linear_grad at one size.
fn linear(
    device: &mut Wgpu,
    name: &str,
    reduced: bool,
    (t, n, k): (usize, usize, usize),
    encoding: Encoding,
) {
    let (x, dy) = (numbers(t * k, 1), numbers(t * n, 2));
    let (weight, w) = weight(device, (n, k), encoding);
    for (write, offset) in [(Write::Set, 3), (Write::Add, 4)] {
        let old = if write == Write::Add { 0.5 } else { f32::NAN };
        let (mx, mdy) = (held(device, &x, offset), held(device, &dy, offset));
        let (mut y, mut dx) =
            (held(device, &vec![old; t * n], offset), held(device, &vec![old; t * k], offset));
        let at = |m, rows, cols| View { memory: m, offset, rows, cols };
        let out = ViewMut { memory: &mut y, offset, rows: t, cols: n };
        device.linear(out, write, at(&mx, t, k), &weight);
        let out = ViewMut { memory: &mut dx, offset, rows: t, cols: k };
        device.linear_grad(out, write, at(&mdy, t, n), &weight);
        let (y, dx) = (taken(device, y, t * n, offset), taken(device, dx, t * k, offset));
        let (mx, mdy) = (taken(device, mx, t * k, offset), taken(device, mdy, t * n, offset));
        assert!(mx == x && mdy == dy, "{name}: an input was written");
        let plus = if write == Write::Add { 0.5 } else { 0.0 };
        let plus = |v: Vec<(f64, f64)>| -> Vec<(f64, f64)> {
            v.into_iter().map(|(w, s)| (w + plus, s + plus)).collect()
        };
        let name = format!("{name} {t} x {n} x {k} {encoding:?} {write:?}");
        let exact = [
            plus(formula((&x, k, 1), (&w, 1, k), (t, n, k))),
            plus(formula((&dy, n, 1), (&w, k, 1), (t, k, n))),
        ];
        if !reduced {
            compare(&format!("{name} linear"), &y, &exact[0], (tolerance("relative"), false));
            compare(&format!("{name} linear_grad"), &dx, &exact[1], (tolerance("relative"), false));
            continue;
        }
        let rw = round16(&w);
        let same = [
            plus(formula((&round16(&x), k, 1), (&rw, 1, k), (t, n, k))),
            plus(formula((&round16(&dy), n, 1), (&rw, k, 1), (t, k, n))),
        ];
        for (what, got, i) in [("linear", &y, 0), ("linear_grad", &dx, 1)] {
            compare(&format!("{name} {what}, rounded"), got, &same[i], (tolerance("of_terms"), true));
            compare(&format!("{name} {what}, f32"), got, &exact[i], (tolerance("f16"), true));
        }
    }
}

/// Products of an adapter's own factors, each transpose, with a scale.
fn adapter_products(device: &mut Wgpu, name: &str, (m, n, k): (usize, usize, usize)) {
    for transpose in [Transpose::Neither, Transpose::Right, Transpose::Left] {
        for offset in [4, 5] {
            let (a, b) = (numbers(m * k, 4), numbers(k * n, 5));
            let (ma, mb) = (held(device, &a, offset), held(device, &b, offset));
            let mut out = held(device, &vec![f32::NAN; m * n], offset);
            let at = |m, rows, cols| View { memory: m, offset, rows, cols };
            let (la, lb) = match transpose {
                Transpose::Neither => (at(&ma, m, k), at(&mb, k, n)),
                Transpose::Right => (at(&ma, m, k), at(&mb, n, k)),
                Transpose::Left => (at(&ma, k, m), at(&mb, k, n)),
            };
            let product = Product { a: la, b: lb, transpose, scale: 2.0 };
            device.matmul(ViewMut { memory: &mut out, offset, rows: m, cols: n }, Write::Set, product);
            let got = taken(device, out, m * n, offset);
            device.recycle(ma);
            device.recycle(mb);
            let left = if transpose == Transpose::Left { (&a[..], 1, m) } else { (&a[..], k, 1) };
            let right = if transpose == Transpose::Right { (&b[..], 1, k) } else { (&b[..], n, 1) };
            let want: Vec<_> =
                formula(left, right, (m, n, k)).into_iter().map(|(w, s)| (2.0 * w, 2.0 * s)).collect();
            let name = format!("{name} {m} x {n} x {k} {transpose:?} at {offset}");
            compare(&name, &got, &want, (tolerance("relative"), false));
        }
    }
}

const SIZES: [(usize, usize, usize); 6] =
    [(1, 1, 1), (3, 7, 33), (17, 64, 24), (65, 40, 48), (9, 131, 72), (70, 16, 130)];

#[test]
fn every_variant_matches_the_product_formula() {
    for (adapter, offered) in devices() {
        for variant in offered.into_iter().filter(|v| v.is_product()) {
            let name = format!("{} {}", adapter.name(), variant.name());
            let mut variants = vec![variant];
            variants.extend(variant.is_reduced().then_some(Variant::Tiled));
            let options = Options { poison: true, variants: Some(variants), ..Options::default() };
            let mut device = Wgpu::open(&adapter, options).unwrap_or_else(|fault| panic!("{name}: {fault}"));
            assert!(device.dropped().is_empty(), "{name}: {:?}", device.dropped());
            assert!(device.class().contains(variant.name()), "{}", device.class());
            for size in SIZES {
                for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
                    linear(&mut device, &name, variant.is_reduced(), size, Encoding::Plain(dtype));
                }
                adapter_products(&mut device, &name, size);
            }
        }
    }
}

#[test]
fn every_variant_multiplies_every_block_type() {
    for (adapter, offered) in devices() {
        for variant in offered.into_iter().filter(|v| v.is_product()) {
            let name = format!("{} {}", adapter.name(), variant.name());
            let options = Options { poison: true, variants: Some(vec![variant]), ..Options::default() };
            let mut device = Wgpu::open(&adapter, options).unwrap_or_else(|fault| panic!("{name}: {fault}"));
            for &block in Block::ALL {
                // One tile and a remainder, an odd number of rows of blocks.
                linear(&mut device, &name, variant.is_reduced(), (67, 71, 256), Encoding::Blocks(block));
            }
        }
    }
}

#[test]
fn wrong_variant_is_dropped_by_name() {
    for (adapter, offered) in devices() {
        for wrong in offered.into_iter().chain([Variant::Split]) {
            let name = format!("{} {}", adapter.name(), wrong.name());
            let variants = Some(vec![wrong, Variant::Tiled]);
            let options = Options { variants: variants.clone(), spoiled: Some(wrong), ..Options::default() };
            let mut device = Wgpu::open(&adapter, options).unwrap();
            let [(dropped, seen), ..] = device.dropped() else { panic!("{name} was not noticed") };
            assert_eq!(*dropped, wrong, "{name}: {seen}");
            assert!(seen.contains(", not "), "{name}: {seen}");
            assert_eq!(device.used(), 0, "{name}: a verdict keeps nothing");
            let class = device.class();
            assert!(!class.contains(wrong.name()), "{name}: {class}");
            assert_eq!(class.contains("tiled"), wrong != Variant::Tiled, "{name}: {class}");
            linear(&mut device, &name, false, (17, 40, 24), Encoding::Plain(Dtype::Bf16));
        }
    }
}

/// Right when the device is opened, wrong for a model's shapes: other heads, other encodings, longer sums.
#[test]
fn variant_wrong_for_a_model_is_dropped_before_use() {
    for (adapter, _) in devices() {
        for wrong in [Variant::Flash, Variant::Tiled] {
            let (variants, spoiled) = (Some(vec![wrong]), Some(wrong));
            let options = Options { variants, spoiled, spoiled_beyond: 96, ..Options::default() };
            let mut device = Wgpu::open(&adapter, options).unwrap();
            let name = format!("{} {}", adapter.name(), wrong.name());
            assert!(device.dropped().is_empty(), "{name}: {:?}", device.dropped());
            assert!(device.class().contains(wrong.name()), "{}", device.class());
            let submissions = device.traffic().submissions;
            device.prepare(Heads::new(2, 1, 64)).unwrap();
            linear(&mut device, &name, false, (17, 40, 72), Encoding::Plain(Dtype::F16));
            assert!(device.dropped().is_empty(), "{name}: {:?}", device.dropped());
            // Two reads for each matrix of `linear`: trials are not counted.
            assert!(device.traffic().submissions - submissions <= 16, "{name}: {:?}", device.traffic());
            device.prepare(Heads::new(2, 1, 128)).unwrap();
            linear(&mut device, &name, false, (17, 40, 128), Encoding::Plain(Dtype::F32));
            let [(dropped, seen)] = device.dropped() else { panic!("{name} was not noticed") };
            assert!(*dropped == wrong && seen.contains(", not "), "{name}: {seen}");
            assert!(device.class().starts_with("wgpu-plain-f32-"), "{}", device.class());
            assert_eq!(device.used(), 0, "{name}: a verdict keeps nothing");
        }
    }
}

/// Few outputs of long sums: split into parts on cards, in one piece without a split. Both are right and round
/// differently, which shows that both were computed.
#[test]
fn long_sums_of_few_outputs_are_split() {
    for (adapter, _) in devices() {
        let mut got = Vec::new();
        for variants in [vec![Variant::Tiled], vec![Variant::Tiled, Variant::Split]] {
            let options = Options { poison: true, variants: Some(variants), ..Options::default() };
            let mut device = Wgpu::open(&adapter, options).unwrap();
            let name = format!("{} {}", adapter.name(), device.class());
            // A shorter last part, tiles that are not full, a sum that is just long enough.
            for size in [(16, 131, 1_037), (70, 16, 600), (3, 5, 512), (65, 40, 300)] {
                adapter_products(&mut device, &name, size);
            }
            got.push(long(&mut device));
        }
        let [whole, parts] = &got[..] else { panic!("two devices") };
        assert_ne!(whole, parts, "{}: nothing was cut", adapter.name());
        // The same again, with dispatches split into windows: bits follow from the shape.
        for rate in [None, Some(1e6)] {
            let variants = Some(vec![Variant::Tiled, Variant::Split]);
            let options = Options { rate, steady: rate.is_some(), variants, ..Options::default() };
            let mut device = Wgpu::open(&adapter, options).unwrap();
            assert_eq!(&long(&mut device), parts, "{} {rate:?}", adapter.name());
        }
    }
}

/// 40 x 131 sums of 2,000 terms, added to existing values, between guard words.
fn long(device: &mut Wgpu) -> Vec<f32> {
    let (m, n, k, offset) = (40, 131, 2_000, 5);
    let (a, b) = (numbers(k * m, 4), numbers(k * n, 5));
    let (ma, mb) = (held(device, &a, 0), held(device, &b, 0));
    let mut out = held(device, &vec![0.5; m * n], offset);
    let product = Product { a: view(&ma, k, m), b: view(&mb, k, n), transpose: Transpose::Left, scale: 0.25 };
    device.matmul(ViewMut { memory: &mut out, offset, rows: m, cols: n }, Write::Add, product);
    let got = taken(device, out, m * n, offset);
    device.recycle(ma);
    device.recycle(mb);
    let want: Vec<_> = formula((&a, 1, m), (&b, n, 1), (m, n, k))
        .into_iter()
        .map(|(w, s)| (0.25 * w + 0.5, 0.25 * s + 0.5))
        .collect();
    compare("added", &got, &want, (tolerance("relative"), false));
    got
}

#[test]
fn small_gradients_are_not_lost_in_f16() {
    let (half, without): (Vec<_>, Vec<_>) =
        devices().into_iter().partition(|(_, v)| v.contains(&Variant::Half));
    without.iter().for_each(|(adapter, _)| println!("skipped: no f16 on {}", adapter.name()));
    // lavapipe supports f16.
    assert!(!half.is_empty() || std::env::var_os("FINETUNE_NEED_VULKAN").is_none(), "no adapter with f16");
    for (adapter, offered) in half {
        assert!(offered.contains(&Variant::Tiled));
        let options = Options { variants: Some(vec![Variant::Half]), ..Options::default() };
        let mut device = Wgpu::open(&adapter, options).unwrap();
        let (t, n, k) = (5, 33, 7);
        let dy: Vec<f32> = numbers(t * n, 6).iter().map(|v| v * 3e-8).collect();
        let (bytes, w) = frozen(&numbers(n * k, 3), Dtype::Bf16);
        let weight = device.weight(Frozen { rows: n, cols: k, dtype: Dtype::Bf16, bytes: &bytes }).unwrap();
        let (mdy, mut dx) = (held(&mut device, &dy, 0), device.memory(t * k));
        device.linear_grad(view_mut(&mut dx, t, k), Write::Set, view(&mdy, t, n), &weight);
        let got = taken(&mut device, dx, t * k, 0);
        let want = formula((&dy, n, 1), (&w, k, 1), (t, k, n));
        // Without the shift, numbers below 6e-8 are rounded to 0 or 6e-8: an error of 100 %.
        compare("small gradients", &got, &want, (0.01, true));
    }
}

/// A race between subgroups shows in some of many runs.
#[test]
fn one_product_many_times_gives_the_same_bits() {
    for (adapter, offered) in devices() {
        let (runs, (t, n, k)) = match adapter.is_software() {
            true => (5, (33, 70, 96)),
            false => (500, (1024, 1024, 2048)),
        };
        for variant in offered.into_iter().filter(|v| v.is_product()) {
            let name = format!("{} {}", adapter.name(), variant.name());
            let options = Options { variants: Some(vec![variant]), ..Options::default() };
            let mut device = Wgpu::open(&adapter, options).unwrap_or_else(|fault| panic!("{name}: {fault}"));
            let (w, _) = weight(&mut device, (n, k), Encoding::Plain(Dtype::Bf16));
            let (x, mut y) = (held(&mut device, &numbers(t * k, 1), 0), device.memory(t * n));
            let mut first = None;
            for run in 0..runs {
                let mut got = vec![f32::NAN; t * n];
                device.linear(view_mut(&mut y, t, n), Write::Set, view(&x, t, k), &w);
                device.read(view(&y, t, n), &mut got).unwrap();
                let bits: Vec<u32> = got.into_iter().map(f32::to_bits).collect();
                assert!(first.get_or_insert_with(|| bits.clone()) == &bits, "{name}: run {run}");
            }
        }
    }
}
