//! attention, attention_grad, attention_cached.

use crate::bench::{Mat, Out};
use crate::rig::{Rig, Rigged, each};
use crate::rows::{bounds, tokens};
use finetune::backend::{AttentionSaved, Cpu, Heads, Qkv, QkvGrad, Wgpu};

/// (out, logsumexp): query i of a row sees keys 0 ..= past + i of the same row.
fn formula(x: &[Mat], heads: Heads, bounds: &[u32], past: usize) -> (Mat, Mat) {
    let (q, k, v) = (&x[0], &x[1], &x[2]);
    let (d, group) = (heads.size, heads.query / heads.kv);
    let (mut out, mut lse) = (Mat::zeros(q.rows, q.cols), Mat::zeros(q.rows, heads.query));
    for w in bounds.windows(2) {
        for i in w[0] as usize..w[1] as usize {
            for h in 0..heads.query {
                let (qo, ko) = (h * d, h / group * d);
                let keys: Vec<usize> = (w[0] as usize..=i + past).collect();
                let score = |&j: &usize| {
                    (0..d).map(|c| q.at(i, qo + c) * k.at(j, ko + c)).sum::<f64>() / (d as f64).sqrt()
                };
                let s: Vec<f64> = keys.iter().map(score).collect();
                let m = s.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
                let sum: f64 = s.iter().map(|s| (s - m).exp()).sum();
                *lse.at_mut(i, h) = m + sum.ln();
                for (&j, s) in keys.iter().zip(&s) {
                    let p = (s - m).exp() / sum;
                    for c in 0..d {
                        *out.at_mut(i, qo + c) += p * v.at(j, ko + c);
                    }
                }
            }
        }
    }
    (out, lse)
}

const HEADS: [(usize, usize, usize); 6] =
    [(1, 1, 4), (2, 1, 6), (3, 3, 34), (9, 3, 64), (4, 2, 128), (2, 2, 10)];

fn check_attention_and_its_gradient<B: Rigged>(rig: &Rig<B>) {
    for t in [1, 3, 17, 129, 200] {
        for (query, kv, size) in HEADS {
            if t > 100 && query * size > 300 {
                continue; // the formula is slow
            }
            let heads = Heads { query, kv, size };
            let name = format!("attention T={t} {query}/{kv}x{size}");
            let bounds = bounds(t);
            // large scores, so that the softmax is not flat
            let q = Mat::random(t, query * size, 1).map(|v| v * 4.0);
            let (k, v) = (Mat::random(t, kv * size, 2), Mat::random(t, kv * size, 3));
            let all = [q.clone(), k.clone(), v.clone()];
            let (want, lse) = formula(&all, heads, &bounds, 0);
            let outs = [Out::Poison(t, query * size), Out::Poison(t, query)];
            let got = rig.run(&name, &[&q, &k, &v], &outs, |cpu, i, o| {
                let tokens = tokens(cpu, &bounds);
                let [out, lse] = o else { unreachable!() };
                let qkv = Qkv { q: i[0], k: i[1], v: i[2] };
                cpu.attention(out.view_mut(), lse.view_mut(), qkv, heads, &tokens);
            });
            rig.close(&name, &got[0], &want.v, 3e-6);
            rig.close(&name, &got[1], &lse.v, 3e-6);

            let dout = Mat::random(t, query * size, 4);
            let (saved, lse) = (want.map(|v| v), lse.map(|v| v));
            let outs = [Out::Poison(t, query * size), Out::Poison(t, kv * size), Out::Poison(t, kv * size)];
            let inputs = [&q, &k, &v, &saved, &lse, &dout];
            let got = rig.run(&name, &inputs, &outs, |cpu, i, o| {
                let tokens = tokens(cpu, &bounds);
                let [dq, dk, dv] = o else { unreachable!() };
                let grad = QkvGrad { dq: dq.view_mut(), dk: dk.view_mut(), dv: dv.view_mut() };
                let qkv = Qkv { q: i[0], k: i[1], v: i[2] };
                let saved = AttentionSaved { qkv, out: i[3], logsumexp: i[4] };
                cpu.attention_grad(grad, i[5], saved, heads, &tokens);
            });
            let f = |x: &[Mat]| formula(x, heads, &bounds, 0).0;
            for (which, got) in got.iter().enumerate() {
                let name = format!("{name} gradient of input {which}");
                rig.close_grad(&name, got, (&[&q, &k, &v], which), (&dout, &f), 3e-5);
            }
        }
    }
}

#[test]
fn attention_and_its_gradient() {
    each::<Cpu>(check_attention_and_its_gradient);
}

#[test]
fn attention_and_its_gradient_on_wgpu() {
    each::<Wgpu>(check_attention_and_its_gradient);
}

fn check_cached_attention_sees_the_past<B: Rigged>(rig: &Rig<B>) {
    for (t, past) in [(1, 0), (1, 1), (1, 63), (1, 64), (1, 300), (5, 0), (17, 129), (70, 61)] {
        for (query, kv, size) in [(2, 1, 6), (9, 3, 64)] {
            let heads = Heads { query, kv, size };
            let name = format!("attention_cached T={t} past={past} {query}/{kv}x{size}");
            let q = Mat::random(t, query * size, 1).map(|v| v * 4.0);
            let (k, v) = (Mat::random(past + t, kv * size, 2), Mat::random(past + t, kv * size, 3));
            let want = formula(&[q.clone(), k.clone(), v.clone()], heads, &[0, t as u32], past).0;
            let got = rig.run(&name, &[&q, &k, &v], &[Out::Poison(t, query * size)], |cpu, i, o| {
                cpu.attention_cached(o[0].view_mut(), Qkv { q: i[0], k: i[1], v: i[2] }, heads);
            });
            rig.close(&name, &got[0], &want.v, 3e-6);
        }
    }
}

#[test]
fn cached_attention_sees_the_past() {
    each::<Cpu>(check_cached_attention_sees_the_past);
}

#[test]
fn cached_attention_sees_the_past_on_wgpu() {
    each::<Wgpu>(check_cached_attention_sees_the_past);
}
