//! The CPU's own products and its head in one pass against the separate verbs, which round in another order.

use crate::op_cases::{Mat, close, weight};
use finetune::backend::{Backend, Cpu, Fused, LmHeadLoss, LoraGrad, LoraPart, View, Write, view, view_mut};
use finetune::numeric::dtype::Dtype;

/// The outputs of lora_linear and lora_linear_grad: y, h, dx, dA, dB.
pub fn projected(cpu: &mut Cpu, m: &[&Mat], dtype: Dtype, write: Write) -> Vec<Vec<f32>> {
    let mut held = Vec::new();
    for m in m {
        let mut memory = cpu.memory(m.v.len());
        cpu.upload(view_mut(&mut memory, m.rows, m.cols), &m.f32s());
        held.push(memory);
    }
    let at = |i: usize| View { memory: &held[i], offset: 0, rows: m[i].rows, cols: m[i].cols };
    let (t, k, n, r) = (m[0].rows, m[0].cols, m[2].rows, m[1].rows);
    let w = weight(cpu, m[5], dtype);
    let [mut y, mut h, mut dx, mut dab] = [t * n, t * r, t * k, r * (n + k)].map(|len| cpu.memory(len));
    if write == Write::Add {
        cpu.copy(view_mut(&mut y, t, n), at(3));
        cpu.copy(view_mut(&mut dx, t, k), at(4));
    }
    let part = LoraPart { h: view_mut(&mut h, t, r), x: at(0), ab: (at(1), at(2)), scale: 2.0 };
    cpu.lora_linear((view_mut(&mut y, t, n), write), at(0), &w, part);
    let args = LoraGrad {
        dab: view_mut(&mut dab, 1, r * (n + k)),
        dy: at(3),
        x: at(0),
        h: view(&h, t, r),
        ab: (at(1), at(2)),
        scale: 2.0,
    };
    cpu.lora_linear_grad((view_mut(&mut dx, t, k), write), &w, args);
    let mut read = |m, len| {
        let mut out = vec![0.0; len];
        cpu.read(view(m, 1, len), &mut out).unwrap();
        out
    };
    let (y, h, dx, dab) = (read(&y, t * n), read(&h, t * r), read(&dx, t * k), read(&dab, r * (n + k)));
    vec![y, h, dx, dab[..r * k].to_vec(), dab[r * k..].to_vec()]
}

#[test]
fn own_products_equal_those_of_the_gemm_crate() {
    for (t, n, k) in [(1, 576, 1536), (13, 33, 31), (517, 100, 769), (64, 1537, 40)] {
        let (x, w) = (Mat::random(t, k, 1), Mat::random(n, k, 2).map(|x| (x * 64.0).round() / 64.0));
        let go = |mut cpu: Cpu| {
            let mut memory = [t * k, t * n, t * k].map(|len| cpu.memory(len));
            let [mx, my, mdx] = &mut memory;
            cpu.upload(view_mut(mx, t, k), &x.f32s());
            let w = weight(&mut cpu, &w, Dtype::F16);
            cpu.linear(view_mut(my, t, n), Write::Set, view(mx, t, k), &w);
            cpu.linear_grad(view_mut(mdx, t, k), Write::Set, view(my, t, n), &w);
            let mut out = (vec![0.0; t * n], vec![0.0; t * k]);
            cpu.read(view(my, t, n), &mut out.0).unwrap();
            cpu.read(view(mdx, t, k), &mut out.1).unwrap();
            out
        };
        let (own, slow) = (go(Cpu::new(2).poisoning()), go(Cpu::reference(2).poisoning()));
        let wide = |v: &[f32]| v.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        close("linear against its reference", &own.0, &wide(&slow.0), 2e-6);
        close("linear_grad against its reference", &own.1, &wide(&slow.1), 4e-6);
    }
}

/// Losses and gradients of a head, and losses without gradients.
pub fn headed(cpu: &mut Cpu, (x, w): (&[f32], &Mat), targets: &[u32]) -> [Vec<f32>; 3] {
    let (n, c, vocab) = (targets.len(), w.cols, w.rows);
    let head = &weight(cpu, w, Dtype::Bf16);
    let [mut mx, mut losses, mut dx, mut alone] = [n * c, n, n * c, n].map(|len| cpu.memory(len));
    cpu.upload(view_mut(&mut mx, n, c), x);
    let args = || LmHeadLoss { x: view(&mx, n, c), head, vocab, targets, chunk: 100 };
    cpu.lm_head_loss(view_mut(&mut losses, n, 1), Some(view_mut(&mut dx, n, c)), args());
    cpu.lm_head_loss(view_mut(&mut alone, n, 1), None, args());
    [(losses, n), (dx, n * c), (alone, n)].map(|(memory, len)| {
        let mut out = vec![0.0; len];
        cpu.read(view(&memory, 1, len), &mut out).unwrap();
        out
    })
}

#[test]
fn one_pass_head_equals_separate_verbs_on_any_threads() {
    // Partial parts and blocks of the vocabulary, more than one block of rows, more than one slice.
    for (n, c, vocab) in [(1, 3, 33), (301, 40, 2999), (13, 800, 300), (600, 31, 2049)] {
        for size in [1.0, 80.0] {
            let name = format!("head {n}x{c}x{vocab}, logits up to {size}");
            let w = Mat::random(vocab, c, 2).map(|x| (x * 64.0).round() / 64.0);
            let x = Mat::random(n, c, 1);
            let logits = x.mul(&w.t());
            let by = size / logits.v.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
            let mut x = x.map(|v| v * by).f32s();
            let targets: Vec<u32> = (0..n).map(|i| (i * 977 % vocab) as u32).collect();
            let got = headed(&mut Cpu::new(2).poisoning(), (&x, &w), &targets);
            let slow = headed(&mut Cpu::reference(1).poisoning(), (&x, &w), &targets);
            for (a, b) in got[0].iter().zip(&slow[0]) {
                assert!((a - b).abs() <= 1e-5 * b.abs().max(1.0), "{name}: loss {a}, spelled {b}");
            }
            // An error of 1e-5 in a logit of 80 gives an error of 1e-5 in its probability, times weights of size one.
            for (a, b) in got[1].iter().zip(&slow[1]) {
                assert!((a - b).abs() <= 3e-5, "{name}: dx {a}, spelled {b}");
            }
            assert_eq!(got[0], got[2], "{name}: the loss alone");
            for threads in [1, 3, 9] {
                assert!(
                    headed(&mut Cpu::new(threads).poisoning(), (&x, &w), &targets) == got,
                    "{name}: bits"
                );
            }
            for bad in [f32::NAN, f32::INFINITY] {
                x[n / 2 * c] = bad;
                let bad = headed(&mut Cpu::new(2).poisoning(), (&x, &w), &targets);
                let finite = |i: usize| [bad[0][i], bad[2][i], bad[1][i * c]].map(f32::is_finite);
                assert!((0..n).all(|i| finite(i) == [i != n / 2; 3]), "{name}: one loss is not finite");
            }
        }
    }
}
