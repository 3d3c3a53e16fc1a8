//! Fused ops against the compositions that they replace, on the same device: the same operations in the same order,
//! so the same bits.

use crate::bench::{GUARD, Mat, Out, held, run, run_behind, weight};
use crate::device::{device_at, device_bf16};
use crate::op_cases::tokens;
use finetune::backend::cuda::Driver;
use finetune::backend::{
    Activation, Backend, Cuda, Fault, Fused, Heads, LoraGrad, LoraPart, Qkv, View, ViewMut, Write, view,
    view_mut,
};
use finetune::numeric::block::{Block, Blocks, quantise};
use finetune::numeric::dtype::Dtype;

/// (T, N, K, R): less than a tile, its edges, more than one tile; ranks within a part of 32 and above it.
const SIZES: [(usize, usize, usize, usize); 4] =
    [(1, 3, 5, 1), (65, 130, 40, 16), (130, 70, 100, 33), (9, 256, 256, 8)];

/// y, h, the adapter's gradient, dx.
pub fn projection<D: Driver>(
    device: Cuda<D>,
    sizes: (usize, usize, usize, usize),
    write: Write,
) -> Result<Vec<Vec<f32>>, Fault> {
    projection_behind(GUARD, device, sizes, write)
}

/// The same with a given number of guard words.
pub fn projection_behind<D: Driver>(
    guard: usize,
    mut device: Cuda<D>,
    (t, n, k, r): (usize, usize, usize, usize),
    write: Write,
) -> Result<Vec<Vec<f32>>, Fault> {
    let (w, blocks) = (Mat::random(n, k, 2).coarse(), k.is_multiple_of(256));
    let (a, b) = (Mat::random(r, k, 6), Mat::random(n, r, 7));
    let (x, dy) = (Mat::random(t, k, 4), Mat::random(t, n, 5));
    let outs = [held(write, t, n), Out::Poison(t, r), Out::Poison(1, r * (n + k)), held(write, t, k)];
    run_behind(guard, "lora", &mut device, (&[&x, &dy, &a, &b], &outs), |d, i, o| {
        let [y, h, dab, dx] = o else { unreachable!() };
        let w = if blocks { in_blocks(d, &w) } else { weight(d, &w, Dtype::Bf16) };
        let (x, dy, ab) = (i[0], i[1], (i[2], i[3]));
        let lora = LoraPart { h: h.view_mut(), x, ab, scale: 0.5 };
        d.lora_linear((y.view_mut(), write), x, &w, lora);
        let args = LoraGrad { dab: dab.view_mut(), dy, x, h: h.view(), ab, scale: 0.5 };
        d.lora_linear_grad((dx.view_mut(), write), &w, args);
    })
}

/// In blocks, so that a matrix is widened in several parts.
fn in_blocks<D: Driver>(d: &mut Cuda<D>, w: &Mat) -> <Cuda<D> as Backend>::Weight {
    let bytes = quantise(Block::Q8_0, &w.v).unwrap();
    d.weight_of_blocks(&Blocks::new((w.rows, w.cols), Block::Q8_0, bytes.into()).unwrap()).unwrap()
}

#[test]
fn an_adapter_in_the_epilogue_has_the_bits_of_its_own_product() {
    if device_at((8, 0), 0).bf16().is_err() {
        println!("skipped: no tensor cores for bf16");
        return;
    }
    for sizes in SIZES {
        for write in [Write::Set, Write::Add] {
            let on = |order| device_at((8, 0), order).bf16().unwrap().slab(128 * 256);
            let want = projection(on(0).spelled(), sizes, write).unwrap();
            for order in [0, 1, 3] {
                let got = projection(on(order), sizes, write).unwrap_or_else(|e| panic!("{sizes:?}: {e}"));
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    assert!(got == want, "{sizes:?} {write:?}, order {order}: other bits in output {i}");
                }
            }
        }
    }
}

#[test]
fn a_fused_projection_does_not_read_its_output_again() {
    let launches = |mut device: Cuda<Box<dyn Driver>>| {
        let w = weight(&mut device, &Mat::random(8, 8, 1), Dtype::Bf16);
        let mut memory = device.memory(200);
        device.upload(view_mut(&mut memory, 25, 8), &vec![0.5; 200]);
        let (mut y, mut h) = (device.memory(32), device.memory(8));
        let before = device.traffic().dispatches;
        let at = |rows, cols| view(&memory, rows, cols);
        let h = view_mut(&mut h, 4, 2);
        let lora = LoraPart { h, x: at(4, 8), ab: (at(2, 8), at(8, 2)), scale: 1.0 };
        device.lora_linear((view_mut(&mut y, 4, 8), Write::Set), at(4, 8), &w, lora);
        let launched = device.traffic().dispatches - before;
        // y is not initialized: on the interpreter a kernel that reads y is a fault, which this read reports.
        device.read(view(&y, 4, 8), &mut [0.0; 32]).unwrap();
        launched
    };
    let Some(device) = device_bf16() else { return };
    assert_eq!(launches(device), 3, "x is narrowed, h, the projection with its adapter");
    assert_eq!(launches(device_at((8, 0), 0).bf16().unwrap().spelled()), 4);
    assert_eq!(launches(device_at((8, 0), 0)), 3, "f32 narrows nothing");
}

/// The outputs of a kernel that also writes a bf16 copy, and of an op that reads the copy.
pub type Made = Result<Vec<Vec<f32>>, Fault>;

/// A normed stream [T, K], its inverse roots, and a projection of it [T, N].
pub fn normed<D: Driver>(mut device: Cuda<D>, (t, n, k): (usize, usize, usize)) -> Made {
    let (x, gain, w) = (Mat::random(t, k, 1), Mat::random(1, k, 2), Mat::random(n, k, 3).coarse());
    let outs = [Out::Poison(t, k), Out::Poison(t, 1), Out::Poison(t, n)];
    run("rmsnorm_for_linear", &mut device, (&[&x, &gain], &outs), |d, i, o| {
        let [out, inv, y] = o else { unreachable!() };
        let w = weight(d, &w, Dtype::Bf16);
        d.rmsnorm_for_linear(out.view_mut(), inv.view_mut(), i[0], i[1], 1e-5);
        d.linear(y.view_mut(), Write::Set, out.view(), &w);
    })
}

/// The gated product [T, K], and a projection of it [T, N].
pub fn activated<D: Driver>(
    mut device: Cuda<D>,
    (t, n, k): (usize, usize, usize),
    activation: Activation,
) -> Made {
    let (gate, up) = (Mat::random(t, k, 1).map(|x| 4.0 * x), Mat::random(t, k, 2));
    let w = Mat::random(n, k, 3).coarse();
    let outs = [Out::Poison(t, k), Out::Poison(t, n)];
    run("gated_for_linear", &mut device, (&[&gate, &up], &outs), |d, i, o| {
        let [out, y] = o else { unreachable!() };
        let w = weight(d, &w, Dtype::Bf16);
        d.gated_for_linear(out.view_mut(), i[0], i[1], activation);
        d.linear(y.view_mut(), Write::Set, out.view(), &w);
    })
}

/// q and k, rotated, and the output of attention.
pub fn rotated<D: Driver>(mut device: Cuda<D>, (t, size): (usize, usize)) -> Made {
    let heads = Heads::new(2, 1, size);
    let (q, k, v) = (Mat::random(t, 2 * size, 1), Mat::random(t, size, 2), Mat::random(t, size, 3));
    // Arbitrary values of the table: values above one only make the numbers larger.
    let table = Mat::random(t, size, 4);
    let outs = [Out::Holds(q), Out::Holds(k), Out::Poison(t, 2 * size), Out::Poison(t, 2)];
    run("rope_for_attention", &mut device, (&[&v, &table], &outs), |d, i, o| {
        let [q, k, out, lse] = o else { unreachable!() };
        let tokens = tokens(d, &[0, t as u32 / 3, t as u32]);
        d.rope_for_attention(q.view_mut(), i[1], &tokens);
        d.rope_for_attention(k.view_mut(), i[1], &tokens);
        let qkv = Qkv { q: q.view(), k: k.view(), v: i[0] };
        d.attention(out.view_mut(), lse.view_mut(), qkv, heads, &tokens);
    })
}

/// The same bits as the composition of verbs, in every order.
fn like_its_composition(name: &str, made: &dyn Fn(Cuda<Box<dyn Driver>>) -> Made) {
    let on = |order| device_at((8, 0), order).bf16().unwrap();
    let want = made(on(0).spelled()).unwrap();
    for order in [0, 1, 3] {
        let got = made(on(order)).unwrap_or_else(|e| panic!("{name}, order {order}: {e}"));
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            assert!(got == want, "{name}, order {order}: other bits in output {i}");
        }
    }
}

#[test]
fn a_copy_made_on_the_way_has_the_bits_of_one_made_apart() {
    if device_at((8, 0), 0).bf16().is_err() {
        println!("skipped: no tensor cores for bf16");
        return;
    }
    for sizes in [(1, 3, 5), (5, 9, 32), (9, 130, 40), (66, 17, 300)] {
        like_its_composition(&format!("rmsnorm_for_linear {sizes:?}"), &|device| normed(device, sizes));
        for act in [Activation::SwiGlu, Activation::GeGlu] {
            let name = format!("gated_for_linear {act:?} {sizes:?}");
            like_its_composition(&name, &|device| activated(device, sizes, act));
        }
    }
    // Heads of 10 use the baseline.
    for sizes in [(1, 8), (7, 10), (33, 72), (131, 64), (5, 128)] {
        like_its_composition(&format!("rope_for_attention {sizes:?}"), &|device| rotated(device, sizes));
    }
}

fn of<M>(memory: &M) -> View<'_, M> {
    view(memory, 8, 8)
}

#[test]
fn what_is_narrowed_on_the_way_is_not_narrowed_again() {
    let launches = |mut d: Cuda<Box<dyn Driver>>| {
        let w = weight(&mut d, &Mat::random(8, 8, 1), Dtype::Bf16);
        let tokens = tokens(&mut d, &[0, 8]);
        let [a, b, mut x, mut k, mut y] = [0; 5].map(|_| {
            let mut memory = d.memory(64);
            d.upload(view_mut(&mut memory, 8, 8), &[0.5; 64]);
            memory
        });
        let mut roots = d.memory(8);
        let mut counts = Vec::new();
        let mut count = |d: &Cuda<Box<dyn Driver>>| {
            let all = d.traffic().dispatches;
            counts.push(all - counts.iter().sum::<u64>());
        };
        d.rmsnorm_for_linear(
            view_mut(&mut x, 8, 8),
            view_mut(&mut roots, 8, 1),
            of(&a),
            view(&b, 1, 8),
            1e-5,
        );
        (0..2).for_each(|_| d.linear(view_mut(&mut y, 8, 8), Write::Set, of(&x), &w));
        count(&d);
        d.gated_for_linear(view_mut(&mut x, 8, 8), of(&a), of(&b), Activation::SwiGlu);
        d.linear(view_mut(&mut y, 8, 8), Write::Set, of(&x), &w);
        count(&d);
        for m in [&mut x, &mut k] {
            d.rope_for_attention(view_mut(m, 8, 8), of(&a), &tokens);
        }
        let qkv = Qkv { q: of(&x), k: of(&k), v: of(&a) };
        let lse = ViewMut { memory: &mut roots, offset: 0, rows: 8, cols: 1 };
        d.attention(view_mut(&mut y, 8, 8), lse, qkv, Heads::new(1, 1, 8), &tokens);
        count(&d);
        d.read(of(&y), &mut [0.0; 64]).unwrap();
        counts
    };
    let Some(device) = device_bf16() else { return };
    assert_eq!(launches(device), [3, 2, 4], "nothing but v is narrowed by itself");
    assert_eq!(launches(device_at((8, 0), 0).bf16().unwrap().spelled()), [5, 3, 6]);
    assert_eq!(launches(device_at((8, 0), 0)), [3, 2, 3], "f32 narrows nothing");
}
