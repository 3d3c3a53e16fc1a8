//! Each fused operation against its formula; if the CPU overrides one, also against the separate verbs.

use crate::bench::{Mat, Out, close, plus};
use crate::products::weight;
use crate::rig::{Rig, Rigged, each};
use finetune::backend::{
    Backend, Cpu, Fused, LmHeadLoss, LoraGrad, LoraPart, View, Wgpu, Write, view, view_mut,
};
use finetune::numeric::dtype::Dtype;

fn check_lora_adds_its_product<B: Rigged>(rig: &Rig<B>) {
    for (t, k, r, n) in [(1, 3, 1, 5), (17, 64, 8, 33), (129, 576, 16, 192), (3, 576, 16, 1536)] {
        let name = format!("lora {t}x{k}x{r}x{n}");
        let (x, a, b) = (Mat::random(t, k, 1), Mat::random(r, k, 2), Mat::random(n, r, 3));
        let y = Mat::random(t, n, 4);
        let outs = [Out::Holds(y.clone()), Out::Poison(t, r), Out::Poison(t, r)];
        let got = rig.run(&name, &[&x, &a, &b], &outs, |cpu, i, o| {
            let [y, h, down] = o else { unreachable!() };
            cpu.lora(y.view_mut(), h.view_mut(), i[0], (i[1], i[2]), 2.0);
            cpu.lora_down(down.view_mut(), i[0], i[1]);
        });
        assert_eq!(got[1], got[2], "{name}: h alone");
        let h = x.mul(&a.t());
        let want: Vec<f64> = h.mul(&b.t()).v.iter().zip(&y.v).map(|(v, y)| y + 2.0 * v).collect();
        rig.close(&name, &got[1], &h.v, 2e-6);
        rig.close(&name, &got[0], &want, 3e-6);
    }
}

#[test]
fn lora_adds_its_product() {
    each::<Cpu>(check_lora_adds_its_product);
}

#[test]
fn lora_adds_its_product_on_wgpu() {
    each::<Wgpu>(check_lora_adds_its_product);
}

fn check_lora_grad_gives_the_gradients_of_a_b_and_x<B: Rigged>(rig: &Rig<B>) {
    for (t, k, r, n) in [(1, 3, 1, 5), (17, 64, 8, 33), (129, 65, 16, 192)] {
        let name = format!("lora_grad {t}x{k}x{r}x{n}");
        let (x, a, b) = (Mat::random(t, k, 1), Mat::random(r, k, 2), Mat::random(n, r, 3));
        let (dy, before) = (Mat::random(t, n, 4), Mat::random(t, k, 5));
        let h = x.mul(&a.t()).map(|v| v);
        let outs = [
            Out::Poison(1, r * k + n * r),
            Out::Poison(t, k),
            Out::Holds(before.clone()),
            Out::Poison(1, r * k + n * r),
        ];
        let got = rig.run(&name, &[&x, &a, &b, &dy, &h], &outs, |cpu, i, o| {
            let [dab, dx, onto, alone] = o else { unreachable!() };
            let (x, ab, dy, h, scale) = (i[0], (i[1], i[2]), i[3], i[4], 2.0);
            cpu.lora_grad(
                Some((dx.view_mut(), Write::Set)),
                LoraGrad { dab: dab.view_mut(), dy, x, h, ab, scale },
            );
            cpu.lora_grad(None, LoraGrad { dab: alone.view_mut(), dy, x, h, ab, scale });
            // The gradients of A and B are computed a second time, to the same bits.
            let dab = dab.view_mut();
            cpu.lora_grad(Some((onto.view_mut(), Write::Add)), LoraGrad { dab, dy, x, h, ab, scale });
        });
        let f = |i: &[Mat]| i[0].mul(&i[1].t()).mul(&i[2].t()).times(2.0);
        let inputs = [&x, &a, &b];
        rig.close_grad(&name, &got[0][..r * k], (&inputs, 1), (&dy, &f), 1e-5);
        rig.close_grad(&name, &got[0][r * k..], (&inputs, 2), (&dy, &f), 1e-5);
        rig.close_grad(&name, &got[1], (&inputs, 0), (&dy, &f), 1e-5);
        assert_eq!(got[0], got[3], "{name}: A and B do not depend on whether dx is asked for");
        let dx = dy.mul(&b).mul(&a).times(2.0);
        rig.close(&name, &got[2], &plus(&dx, &before), 3e-6);
    }
}

#[test]
fn lora_grad_gives_the_gradients_of_a_b_and_x() {
    each::<Cpu>(check_lora_grad_gives_the_gradients_of_a_b_and_x);
}

#[test]
fn lora_grad_gives_the_gradients_of_a_b_and_x_on_wgpu() {
    each::<Wgpu>(check_lora_grad_gives_the_gradients_of_a_b_and_x);
}

fn check_lm_head_loss_in_chunks<B: Rigged>(rig: &Rig<B>) {
    for (n, c, vocab, chunk) in
        [(1, 5, 7, 4), (17, 33, 131, 5), (129, 64, 515, 64), (40, 64, 100, 1000), (301, 9, 2600, 64)]
    {
        let name = format!("lm_head_loss {n}x{c}x{vocab} by {chunk}");
        let (x, w) = (Mat::random(n, c, 1), Mat::random(vocab, c, 2));
        let targets: Vec<u32> = (0..n).map(|i| (i * 13 % vocab) as u32).collect();
        let outs = [Out::Poison(n, 1), Out::Poison(n, c), Out::Poison(n, 1)];
        let got = rig.run(&name, &[&x], &outs, |cpu, i, o| {
            let head = &weight(cpu, &w, Dtype::F32);
            let [losses, dx, alone] = o else { unreachable!() };
            let args = || LmHeadLoss { x: i[0], head, vocab, targets: &targets, chunk };
            cpu.lm_head_loss(losses.view_mut(), Some(dx.view_mut()), args());
            cpu.lm_head_loss(alone.view_mut(), None, args());
        });
        let f = |i: &[Mat]| {
            let logits = i[0].mul(&w.t());
            let mut out = Mat::zeros(n, 1);
            for (i, row) in logits.v.chunks(vocab).enumerate() {
                let lse = row.iter().map(|v| v.exp()).sum::<f64>().ln();
                out.v[i] = lse - row[targets[i] as usize];
            }
            out
        };
        rig.close(&name, &got[0], &f(std::slice::from_ref(&x)).v, 2e-6);
        assert_eq!(got[0], got[2], "{name}: the loss does not depend on whether a gradient is asked for");
        let ones = Mat { rows: n, cols: 1, v: vec![1.0; n] };
        rig.close_grad(&name, &got[1], (&[&x], 0), (&ones, &f), 1e-5);
    }
}

#[test]
fn lm_head_loss_in_chunks() {
    each::<Cpu>(check_lm_head_loss_in_chunks);
}

#[test]
fn lm_head_loss_in_chunks_on_wgpu() {
    each::<Wgpu>(check_lm_head_loss_in_chunks);
}

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
fn fused_projection_equals_separate_verbs_and_formula() {
    for (t, k, r, n) in
        [(1, 3, 1, 5), (17, 64, 8, 33), (129, 577, 16, 192), (600, 100, 3, 800), (9, 40, 800, 50)]
    {
        for (dtype, write) in [(Dtype::Bf16, Write::Set), (Dtype::F32, Write::Add)] {
            let name = format!("lora_linear {t}x{k}x{r}x{n} {dtype:?} {write:?}");
            let (x, a, b) = (Mat::random(t, k, 1), Mat::random(r, k, 2), Mat::random(n, r, 3));
            let (dy, before) = (Mat::random(t, n, 4), Mat::random(t, k, 6));
            let w = Mat::random(n, k, 5).map(|x| (x * 64.0).round() / 64.0);
            let all = [&x, &a, &b, &dy, &before, &w];
            let got = projected(&mut Cpu::new(2).poisoning(), &all, dtype, write);
            let slow = projected(&mut Cpu::twin(1).poisoning(), &all, dtype, write);
            for threads in [1, 3, 7] {
                assert!(
                    projected(&mut Cpu::new(threads).poisoning(), &all, dtype, write) == got,
                    "{name}: bits"
                );
            }
            let twice = |m: Mat| m.map(|v| v * 2.0);
            let h = x.mul(&a.t());
            let dh = twice(dy.mul(&b));
            let old = |m: &Mat| if write == Write::Add { m.clone() } else { Mat::zeros(m.rows, m.cols) };
            let sum = |a: Mat, b: Mat, c: Mat| -> Vec<f64> {
                (0..a.v.len()).map(|i| a.v[i] + b.v[i] + c.v[i]).collect()
            };
            let want = [
                sum(old(&dy), x.mul(&w.t()), twice(h.mul(&b.t()))),
                h.v.clone(),
                sum(old(&before), dy.mul(&w), dh.mul(&a)),
                dh.t().mul(&x).v,
                twice(dy.t().mul(&h)).v,
            ];
            for (i, want) in want.iter().enumerate() {
                close(&format!("{name} output {i}"), &got[i], want, 4e-6);
                close(&format!("{name} output {i} spelled"), &slow[i], want, 4e-6);
            }
        }
    }
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
        let (own, slow) = (go(Cpu::new(2).poisoning()), go(Cpu::twin(2).poisoning()));
        let wide = |v: &[f32]| v.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        close("linear against its twin", &own.0, &wide(&slow.0), 2e-6);
        close("linear_grad against its twin", &own.1, &wide(&slow.1), 4e-6);
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
            let slow = headed(&mut Cpu::twin(1).poisoning(), (&x, &w), &targets);
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
