//! Matrices beyond one binding: a device with artificially small bindings gives the same numbers.

use crate::{devices, tested_adapters};
use finetune::backend::wgpu::Options;
use finetune::backend::{
    Backend, Frozen, Fused, LmHeadLoss, Norm, Product, TokenRows, Transpose, View, Wgpu, Write, view,
    view_mut,
};
use finetune::numeric::dtype::Dtype;
use finetune::numeric::rng::Stream;

fn random(len: usize, key: u64) -> Vec<f32> {
    let mut draws = Stream::new(&[key]);
    (0..len).map(|_| draws.unit() * 2.0 - 1.0).collect()
}

fn read(gpu: &mut Wgpu, memory: &finetune::backend::wgpu::Memory, len: usize) -> Vec<f32> {
    let mut out = vec![0.0; len];
    gpu.read(view(memory, 1, len), &mut out).unwrap();
    out
}

const T: usize = 200;
const C: usize = 96;
const N: usize = 130;

/// Results of many verbs on matrices of 75 KiB; sums that a small binding splits come last.
pub fn results(gpu: &mut Wgpu) -> [Vec<f32>; 8] {
    let [mut x, mut y, mut sum] = [T * C, T * N, T * C].map(|len| gpu.memory(len));
    let upload = |gpu: &mut Wgpu, m: &mut _, cols: usize, key| {
        gpu.upload(view_mut(m, T, cols), &random(T * cols, key));
    };
    upload(gpu, &mut x, C, 1);
    upload(gpu, &mut sum, C, 2);
    let bytes = Dtype::Bf16.narrow(&random(N * C, 3));
    let w = gpu.weight(Frozen { rows: N, cols: C, dtype: Dtype::Bf16, bytes: &bytes }).unwrap();
    gpu.linear(view_mut(&mut y, T, N), Write::Set, view(&x, T, C), &w);
    gpu.add(view_mut(&mut sum, T, C), view(&x, T, C));
    let [mut gain, mut inv, mut normed] = [C, T, T * C].map(|len| gpu.memory(len));
    gpu.upload(view_mut(&mut gain, 1, C), &random(C, 4));
    let out = (view_mut(&mut normed, T, C), view_mut(&mut inv, T, 1));
    gpu.rmsnorm(out.0, out.1, view(&x, T, C), view(&gain, 1, C), 1e-5);
    let norm = Norm { gain: view(&gain, 1, C), inv_rms: view(&inv, T, 1) };
    gpu.rmsnorm_grad(view_mut(&mut sum, T, C), Write::Add, view(&normed, T, C), view(&x, T, C), norm);
    let ids: Vec<u32> = (0..T as u32).map(|i| i * 7 % N as u32).collect();
    let tokens = gpu.tokens(TokenRows { ids: &ids, bounds: &[0, T as u32], past: 0, short: u32::MAX });
    let mut embedded = gpu.memory(T * C);
    gpu.embed(view_mut(&mut embedded, T, C), &w, &tokens, 1.0);
    let [mut losses, mut dx, mut back, mut square] = [T, T * C, T * C, C * N].map(|len| gpu.memory(len));
    let args = LmHeadLoss { x: view(&x, T, C), head: &w, vocab: N, targets: &ids, chunk: 1000 };
    gpu.lm_head_loss(view_mut(&mut losses, T, 1), Some(view_mut(&mut dx, T, C)), args);
    gpu.linear_grad(view_mut(&mut back, T, C), Write::Set, view(&y, T, N), &w);
    let (a, b): (View<_>, View<_>) = (view(&x, T, C), view(&y, T, N));
    let product = Product { a, b, transpose: Transpose::Left, scale: 0.5 };
    gpu.matmul(view_mut(&mut square, C, N), Write::Set, product);
    [
        (&y, T * N),
        (&sum, T * C),
        (&normed, T * C),
        (&embedded, T * C),
        (&losses, T),
        (&dx, T * C),
        (&back, T * C),
        (&square, C * N),
    ]
    .map(|(m, len)| read(gpu, m, len))
}

#[test]
fn matrix_beyond_one_binding_is_computed_in_parts() {
    let small = Options { binding_limit: Some(16 << 10), poison: true, ..Options::default() };
    let whole = Options { poison: true, ..Options::default() };
    for (mut small, mut whole) in devices(small).into_iter().zip(devices(whole)) {
        let (few, all) = (results(&mut small), results(&mut whole));
        for (i, (few, all)) in few.iter().zip(&all).enumerate() {
            let largest = all.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            // Rows are split anywhere without a change; a sum over the rows of a weight is split at the ends of its
            // parts.
            let bound = if i < 5 { 0.0 } else { 2e-6 * largest };
            let off =
                few.iter().zip(all).fold(0.0f32, |m, (a, b)| if a == b { m } else { m.max((a - b).abs()) });
            assert!(largest > 0.1 && off <= bound, "{} result {i}: off {off:e} of {largest}", small.class());
            assert!(few.iter().all(|v| v.is_finite()), "result {i}");
        }
    }
}

/// Where bindings end changes no bit of the portable class.
#[test]
fn small_bindings_change_no_bit_of_the_portable_class() {
    let Some(tested) = tested_adapters::one() else { return };
    let options =
        |binding_limit| Options { portable: true, poison: true, binding_limit, ..Options::default() };
    let [small, whole] =
        [Some(24 << 10), None].map(|limit| results(&mut tested.open(options(limit)).unwrap()));
    for (i, (small, whole)) in small.iter().zip(&whole).enumerate() {
        assert!(small.iter().map(|x| x.to_bits()).eq(whole.iter().map(|x| x.to_bits())), "result {i}");
        assert!(small.iter().all(|x| x.is_finite()), "result {i}");
    }
}

/// Only the last rows are not zero: beyond 128 MiB on a software driver, beyond 1 GiB on a card.
#[test]
fn last_rows_of_a_large_matrix_are_right() {
    let (t, k, few) = (3, 2048, 5);
    for tested in tested_adapters::all() {
        let n = if tested.adapter.is_software() { 36_000 } else { 300_000 };
        let mut gpu = tested.open(Options::default()).unwrap();
        let (x, dy, last) = (random(t * k, 1), random(t * few, 2), Dtype::Bf16.narrow(&random(few * k, 3)));
        let mut bytes = vec![0; n * k * 2];
        bytes[(n - few) * k * 2..].copy_from_slice(&last);
        let w = gpu.weight(Frozen { rows: n, cols: k, dtype: Dtype::Bf16, bytes: &bytes }).unwrap();
        let [mut mx, mut y, mut dx] = [t * k, t * n, t * k].map(|len| gpu.memory(len));
        gpu.upload(view_mut(&mut mx, t, k), &x);
        gpu.linear(view_mut(&mut y, t, n), Write::Set, view(&mx, t, k), &w);
        let got = read(&mut gpu, &y, t * n);
        let mut padded = vec![0.0; t * n];
        for (row, part) in padded.chunks_exact_mut(n).zip(dy.chunks_exact(few)) {
            row[n - few..].copy_from_slice(part);
        }
        gpu.upload(view_mut(&mut y, t, n), &padded);
        gpu.linear_grad(view_mut(&mut dx, t, k), Write::Set, view(&y, t, n), &w);
        let (dx, w) = (read(&mut gpu, &dx, t * k), Dtype::Bf16.widen(&last));
        let sum = |terms: &mut dyn Iterator<Item = (f32, f32)>| {
            terms.map(|(a, b)| f64::from(a) * f64::from(b)).sum::<f64>()
        };
        for (i, got) in got.chunks_exact(n).enumerate() {
            assert!(got[..n - few].iter().all(|v| *v == 0.0), "{}: rows before the last", gpu.class());
            for j in 0..few {
                let want = sum(&mut (0..k).map(|c| (x[i * k + c], w[j * k + c])));
                assert!((f64::from(got[n - few + j]) - want).abs() < 1e-3, "{}: y {i}, {j}", gpu.class());
            }
        }
        for (at, got) in dx.iter().enumerate() {
            let want = sum(&mut (0..few).map(|j| (dy[at / k * few + j], w[j * k + at % k])));
            assert!((f64::from(*got) - want).abs() < 1e-4, "{}: dx {at}", gpu.class());
        }
    }
}
