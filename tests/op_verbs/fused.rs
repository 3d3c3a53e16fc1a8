//! Each fused operation against its formula; where the CPU overrides one, against its spelling in verbs too.

use crate::bench::{Mat, Out, close, close_grad, plus, run};
use crate::products::weight;
use finetune::backend::{Fused, LmHeadLoss, LoraGrad, Write};
use finetune::numeric::dtype::Dtype;

#[test]
fn lora_adds_its_product() {
    for (t, k, r, n) in [(1, 3, 1, 5), (17, 64, 8, 33), (129, 576, 16, 192), (3, 576, 16, 1536)] {
        let name = format!("lora {t}x{k}x{r}x{n}");
        let (x, a, b) = (Mat::random(t, k, 1), Mat::random(r, k, 2), Mat::random(n, r, 3));
        let y = Mat::random(t, n, 4);
        let outs = [Out::Holds(y.clone()), Out::Poison(t, r)];
        let got = run(&name, &[&x, &a, &b], &outs, |cpu, i, o| {
            let [y, h] = o else { unreachable!() };
            cpu.lora(y.view_mut(), h.view_mut(), i[0], (i[1], i[2]), 2.0);
        });
        let h = x.mul(&a.t());
        let want: Vec<f64> = h.mul(&b.t()).v.iter().zip(&y.v).map(|(v, y)| y + 2.0 * v).collect();
        close(&name, &got[1], &h.v, 2e-6);
        close(&name, &got[0], &want, 3e-6);
    }
}

#[test]
fn lora_grad_gives_a_b_and_x_theirs() {
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
        let got = run(&name, &[&x, &a, &b, &dy, &h], &outs, |cpu, i, o| {
            let [dab, dx, onto, alone] = o else { unreachable!() };
            let (x, ab, dy, h, scale) = (i[0], (i[1], i[2]), i[3], i[4], 2.0);
            cpu.lora_grad(
                Some((dx.view_mut(), Write::Set)),
                LoraGrad { dab: dab.view_mut(), dy, x, h, ab, scale },
            );
            cpu.lora_grad(None, LoraGrad { dab: alone.view_mut(), dy, x, h, ab, scale });
            // The gradients of A and B are written again, to the same bits.
            let dab = dab.view_mut();
            cpu.lora_grad(Some((onto.view_mut(), Write::Add)), LoraGrad { dab, dy, x, h, ab, scale });
        });
        let f = |i: &[Mat]| i[0].mul(&i[1].t()).mul(&i[2].t()).times(2.0);
        let inputs = [&x, &a, &b];
        close_grad(&name, &got[0][..r * k], (&inputs, 1), &dy, f, 1e-5);
        close_grad(&name, &got[0][r * k..], (&inputs, 2), &dy, f, 1e-5);
        close_grad(&name, &got[1], (&inputs, 0), &dy, f, 1e-5);
        assert_eq!(got[0], got[3], "{name}: A and B do not depend on whether dx is asked for");
        let dx = dy.mul(&b).mul(&a).times(2.0);
        close(&name, &got[2], &plus(&dx, &before), 3e-6);
    }
}

#[test]
fn lm_head_loss_in_chunks() {
    for (n, c, vocab, chunk) in [(1, 5, 7, 4), (17, 33, 131, 5), (129, 64, 515, 64), (40, 64, 100, 1000)] {
        let name = format!("lm_head_loss {n}x{c}x{vocab} by {chunk}");
        let (x, w) = (Mat::random(n, c, 1), Mat::random(vocab, c, 2));
        let targets: Vec<u32> = (0..n).map(|i| (i * 13 % vocab) as u32).collect();
        let outs = [Out::Poison(n, 1), Out::Poison(n, c), Out::Poison(n, 1)];
        let got = run(&name, &[&x], &outs, |cpu, i, o| {
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
        close(&name, &got[0], &f(&[x.clone()]).v, 2e-6);
        assert_eq!(got[0], got[2], "{name}: the loss does not depend on whether a gradient is asked for");
        let ones = Mat { rows: n, cols: 1, v: vec![1.0; n] };
        close_grad(&name, &got[1], (&[&x], 0), &ones, f, 1e-5);
    }
}
