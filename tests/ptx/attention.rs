//! Attention of the baseline, its gradient and its cached form against the CPU backend.

use crate::bench::{Mat, Out};
use crate::compare;
use crate::rows::{bounds, tokens};
use finetune::backend::{AttentionSaved, Backend, Heads, Qkv, QkvGrad};

/// Heads of every kernel size, shared and not shared, and odd sizes between.
const HEADS: [(usize, usize, usize); 6] =
    [(1, 1, 4), (2, 1, 6), (3, 3, 34), (2, 1, 64), (2, 2, 100), (2, 1, 130)];

#[test]
fn attention_and_its_gradient() {
    for t in [1, 3, 17, 70] {
        for (query, kv, size) in HEADS {
            if t > 60 && size > 64 {
                continue; // the same tiles, four times the time
            }
            let heads = Heads { query, kv, size };
            let name = format!("attention T={t} {query}/{kv}x{size}");
            let bounds = bounds(t);
            // scores of moderate size, so that the softmax is not flat
            let q = Mat::random(t, query * size, 1).map(|v| v * 4.0);
            let (k, v) = (Mat::random(t, kv * size, 2), Mat::random(t, kv * size, 3));
            let outs = || [Out::Poison(t, query * size), Out::Poison(t, query)];
            compare!(name, [&q, &k, &v], outs(), |d, i, o| {
                let [out, lse] = o else { unreachable!() };
                let tokens = tokens(d, &bounds);
                let qkv = Qkv { q: i[0], k: i[1], v: i[2] };
                d.attention(out.view_mut(), lse.view_mut(), qkv, heads, &tokens);
            });
            let dout = Mat::random(t, query * size, 4);
            let grads =
                || [Out::Poison(t, query * size), Out::Poison(t, kv * size), Out::Poison(t, kv * size)];
            let outs: Vec<Out> = outs().into_iter().chain(grads()).collect();
            compare!(format!("{name} gradient"), [&q, &k, &v, &dout], outs, |d, i, o| {
                let [out, lse, dq, dk, dv] = o else { unreachable!() };
                let tokens = tokens(d, &bounds);
                let qkv = Qkv { q: i[0], k: i[1], v: i[2] };
                d.attention(out.view_mut(), lse.view_mut(), qkv, heads, &tokens);
                let saved = AttentionSaved { qkv, out: out.view(), logsumexp: lse.view() };
                let grad = QkvGrad { dq: dq.view_mut(), dk: dk.view_mut(), dv: dv.view_mut() };
                d.attention_grad(grad, i[3], saved, heads, &tokens);
            });
        }
    }
}

#[test]
fn cached_attention_sees_the_past() {
    for (t, past) in [(1, 0), (1, 1), (1, 40), (5, 0), (17, 29), (35, 31)] {
        for (query, kv, size) in [(2, 1, 6), (3, 3, 64)] {
            let heads = Heads { query, kv, size };
            let q = Mat::random(t, query * size, 1).map(|v| v * 4.0);
            let (k, v) = (Mat::random(past + t, kv * size, 2), Mat::random(past + t, kv * size, 3));
            let name = format!("attention_cached T={t} past={past} {query}/{kv}x{size}");
            compare!(name, [&q, &k, &v], [Out::Poison(t, query * size)], |d, i, o| {
                d.attention_cached(o[0].view_mut(), Qkv { q: i[0], k: i[1], v: i[2] }, heads);
            });
        }
    }
}
