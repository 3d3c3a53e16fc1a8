//! Matrices beyond one binding: a device with artificially small bindings gives the same numbers.

use crate::{devices, tested_adapters};
use finetune::backend::wgpu::Options;
use finetune::backend::{
    Backend, Cpu, Frozen, Fused, LmHeadLoss, Norm, Product, TokenRows, Transpose, View, Wgpu, Write, view,
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

/// Products with a matrix of 900 rows, of 169 KiB, and the loss over its rows.
fn tall<B: Fused>(device: &mut B) -> Vec<f32> {
    let (t, n) = (12, 900);
    let bytes = Dtype::Bf16.narrow(&random(n * C, 3));
    let w = device.weight(Frozen { rows: n, cols: C, dtype: Dtype::Bf16, bytes: &bytes }).unwrap();
    let [mut x, mut y, mut dx, mut head, mut losses] =
        [t * C, t * n, t * C, t * C, t].map(|len| device.memory(len));
    device.upload(view_mut(&mut x, t, C), &random(t * C, 1));
    device.upload(view_mut(&mut dx, t, C), &random(t * C, 2));
    device.linear(view_mut(&mut y, t, n), Write::Set, view(&x, t, C), &w);
    device.linear_grad(view_mut(&mut dx, t, C), Write::Add, view(&y, t, n), &w);
    let targets: Vec<u32> = (0..t as u32).map(|i| i * 47 % n as u32).collect();
    let args = LmHeadLoss { x: view(&x, t, C), head: &w, vocab: n, targets: &targets, chunk: 7 };
    device.lm_head_loss(view_mut(&mut losses, t, 1), Some(view_mut(&mut head, t, C)), args);
    let mut all = Vec::new();
    for (memory, len) in [(&y, t * n), (&dx, t * C), (&head, t * C), (&losses, t)] {
        let mut out = vec![0.0; len];
        device.read(view(memory, 1, len), &mut out).unwrap();
        all.extend(out);
    }
    all
}

/// The rows of a matrix are in several bindings, whose ends are inside slices of sums and parts of the vocabulary.
#[test]
fn ends_of_bindings_change_no_bit_of_the_portable_class() {
    let (Some(tested), Some(mut cpu)) = (tested_adapters::one(), Cpu::portable(2)) else { return };
    let want = tall(&mut cpu);
    for binding_limit in [None, Some(100 << 10)] {
        let options = Options { portable: true, poison: true, binding_limit, ..Options::default() };
        let got = tall(&mut tested.open(options).unwrap());
        let differs = got.iter().zip(&want).position(|(a, b)| a.to_bits() != b.to_bits());
        assert_eq!(differs, None, "{binding_limit:?}");
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
