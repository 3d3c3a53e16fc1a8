//! Kernels with a fault put in: each must be told, as an error or by its numbers, else the tests of this folder prove
//! nothing. Every barrier of every kernel is taken away once.

use crate::bench::{Mat, Out, run};
use crate::device::{Interpreted, device_of, device_with};
use crate::files;
use crate::rows::tokens;
use crate::tensor;
use finetune::backend::cuda::Cuda;
use finetune::backend::{AttentionSaved, Backend, Fault, Heads, Product, Qkv, QkvGrad, Transpose, Write};

type Exercise = fn(Cuda<Interpreted>) -> Result<Vec<Vec<f32>>, Fault>;

fn matmul(mut device: Cuda<Interpreted>) -> Result<Vec<Vec<f32>>, Fault> {
    let (a, b) = (Mat::random(65, 40, 1), Mat::random(40, 66, 2));
    run("matmul", &mut device, (&[&a, &b], &[Out::Poison(65, 66)]), |d, i, o| {
        let product = Product { a: i[0], b: i[1], transpose: Transpose::Neither, scale: 2.0 };
        d.matmul(o[0].view_mut(), Write::Set, product);
    })
}

fn attention(mut device: Cuda<Interpreted>) -> Result<Vec<Vec<f32>>, Fault> {
    let heads = Heads { query: 2, kv: 1, size: 20 };
    let t = 70;
    let (q, k, v) = (Mat::random(t, 40, 1), Mat::random(t, 20, 2), Mat::random(t, 20, 3));
    let dout = Mat::random(t, 40, 4);
    let outs = [(t, 40), (t, 2), (t, 40), (t, 20), (t, 20)].map(|(r, c)| Out::Poison(r, c));
    run("attention", &mut device, (&[&q, &k, &v, &dout], &outs), |d, i, o| {
        let [out, lse, dq, dk, dv] = o else { unreachable!() };
        let tokens = tokens(d, &[0, t as u32]);
        let qkv = Qkv { q: i[0], k: i[1], v: i[2] };
        d.attention(out.view_mut(), lse.view_mut(), qkv, heads, &tokens);
        let saved = AttentionSaved { qkv, out: out.view(), logsumexp: lse.view() };
        let grad = QkvGrad { dq: dq.view_mut(), dk: dk.view_mut(), dv: dv.view_mut() };
        d.attention_grad(grad, i[3], saved, heads, &tokens);
    })
}

fn cross_entropy(mut device: Cuda<Interpreted>) -> Result<Vec<Vec<f32>>, Fault> {
    let logits = Mat::random(3, 700, 1);
    run("cross_entropy", &mut device, (&[], &[Out::Poison(3, 1), Out::Holds(logits)]), |d, _, o| {
        let [losses, logits] = o else { unreachable!() };
        let targets = d.ids(&[5, 699, 300]);
        d.cross_entropy(losses.view_mut(), logits.view_mut(), &targets, None);
    })
}

fn norm(mut device: Cuda<Interpreted>) -> Result<Vec<Vec<f32>>, Fault> {
    let (x, gain) = (Mat::random(5, 70, 1), Mat::random(1, 70, 2));
    run("rmsnorm", &mut device, (&[&x, &gain], &[Out::Poison(5, 70), Out::Poison(5, 1)]), |d, i, o| {
        let [out, inv] = o else { unreachable!() };
        d.rmsnorm(out.view_mut(), inv.view_mut(), i[0], i[1], 1e-5);
    })
}

/// File, the entry that is changed, and what runs it.
const WITH_BARRIERS: &[(&str, &str, Exercise)] = &[
    ("matmul.ptx", "matmul_nn", matmul),
    ("attention.ptx", "attention_64", attention),
    ("attention_grad.ptx", "attention_grad_q_64", attention),
    ("attention_grad.ptx", "attention_grad_kv_64", attention),
    ("cross_entropy.ptx", "cross_entropy", cross_entropy),
    ("product_sm80.ptx", "product_sm80_nt", tensor::exercise),
];

/// File, entry, what stands there, what comes in its place; the first such place after the entry's name.
const CHANGES: &[(&str, &str, &str, &str, Exercise)] = &[
    ("matmul.ptx", "matmul_nn", "and.b32 %tx, %t, 15", "and.b32 %tx, %t, 7", matmul),
    ("matmul.ptx", "matmul_nn", "mov.f32 %acc0, 0f00000000", "", matmul),
    ("matmul.ptx", "matmul_nn", "and.pred %q, %q, %ina0", "", matmul),
    ("matmul.ptx", "matmul_nn", "sub.s32 %left, %left, 16", "sub.s32 %left, %left, 15", matmul),
    ("matmul.ptx", "matmul_nn", "ld.shared.v4.f32 {%a0, %a1", "ld.shared.v4.f32 {%a1, %a0", matmul),
    ("matmul.ptx", "matmul_nn", "and.pred %q, %r, %col0", "and.pred %q, %r, %r", matmul),
    ("attention.ptx", "attention_64", "setp.ge.u32 %p, %c, %r", "setp.gt.u32 %p, %c, %r", attention),
    ("attention.ptx", "attention_64", "fma.rn.f32 %l0, %l0, %shrink, %v", "add.f32 %l0, %l0, %v", attention),
    ("attention.ptx", "attention_64", ", 4, 31", ", 2, 31", attention),
    (
        "attention_grad.ptx",
        "attention_grad_kv_64",
        "setp.lt.u32 %p, %head, %last",
        "setp.lt.u32 %p, %last, %head",
        attention,
    ),
    (
        "attention_grad.ptx",
        "attention_grad_delta",
        "setp.eq.u32 %p, %lane, 0",
        "setp.ge.u32 %p, %lane, 0",
        attention,
    ),
    ("cross_entropy.ptx", "cross_entropy", "add.u32 %i, %i, 256", "add.u32 %i, %i, 255", cross_entropy),
    ("cross_entropy.ptx", "cross_entropy", "@%first st", "st", cross_entropy),
    (
        "product_sm80.ptx",
        "product_sm80_nt",
        "cp.async.wait_group 1",
        "cp.async.wait_group 2",
        tensor::exercise,
    ),
    ("product_sm80.ptx", "product_sm80_nt", "cp.async.wait_group 0", "", tensor::exercise),
    (
        "product_sm80.ptx",
        "product_sm80_nt",
        "min.s32 %real, %real, %keepa1",
        "mov.u32 %real, 8",
        tensor::exercise,
    ),
    ("product_sm80.ptx", "product_sm80_nt", "{%fb0, %fb1}", "{%fb1, %fb0}", tensor::exercise),
    ("product_sm80.ptx", "product_sm80_nt", "xor.b32 %y, %y, %z", "or.b32 %y, %y, %z", tensor::exercise),
    ("rmsnorm.ptx", "rmsnorm", ", 16, 31", ", 8, 31", norm),
    ("rmsnorm.ptx", "rmsnorm", "setp.lt.u32 %more", "setp.le.u32 %more", norm),
];

/// True where the changed file gives an error, or other numbers.
fn told(file: &'static str, text: &str, exercise: Exercise) -> bool {
    let good = exercise(device_of((8, 0), 0)).unwrap();
    [0, 1].into_iter().any(|seed| match exercise(device_with(file, text, seed)) {
        Err(_) => true,
        Ok(bad) => bad.iter().flatten().map(|x| x.to_bits()).ne(good.iter().flatten().map(|x| x.to_bits())),
    })
}

#[test]
fn a_barrier_that_is_missing_is_told() {
    for (file, entry, exercise) in WITH_BARRIERS {
        let text = files::read(file).text;
        let from = text.find(&format!(".entry {entry}(")).unwrap();
        let to = text[from..].find("\n}").map_or(text.len(), |n| from + n);
        let places: Vec<usize> = text[from..to].match_indices("bar.sync 0;").map(|(i, _)| from + i).collect();
        assert!(!places.is_empty(), "{entry} has barriers");
        for (n, at) in places.into_iter().enumerate() {
            let without = format!("{}{}", &text[..at], &text[at + "bar.sync 0;".len()..]);
            assert!(told(file, &without, *exercise), "{entry}: nobody misses barrier {n}");
        }
    }
}

#[test]
fn a_change_is_told() {
    for (file, entry, from, to, exercise) in CHANGES {
        let text = files::read(file).text;
        let start = text.find(&format!(".entry {entry}(")).unwrap();
        let at = start + text[start..].find(from).unwrap_or_else(|| panic!("{entry} has {from}"));
        let end = if to.is_empty() { at + from.len() + 1 } else { at + from.len() };
        let changed = format!("{}{to}{}", &text[..at], &text[end..]);
        assert!(told(file, &changed, *exercise), "{entry}: nobody notices {to:?} for {from:?}");
    }
}
