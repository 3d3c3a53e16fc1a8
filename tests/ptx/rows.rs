//! Ops over rows of the baseline against the CPU backend.

use crate::bench::{Mat, Out};
use crate::compare;
use crate::products::{held, weight};
use finetune::backend::{Backend, DropoutKey, Norm, TokenRows, Write, view, view_mut};
use finetune::numeric::dtype::Dtype;

const SHAPES: [(usize, usize); 4] = [(1, 1), (3, 7), (5, 255), (17, 300)];

/// One row, or three uneven ones.
pub fn bounds(t: usize) -> Vec<u32> {
    let t = t as u32;
    if t < 4 { vec![0, t] } else { vec![0, 1, 1 + t / 3, t] }
}

pub fn tokens<B: Backend>(b: &mut B, bounds: &[u32]) -> B::Tokens {
    let ids: Vec<u32> = (0..*bounds.last().unwrap()).map(|i| i * 7 % 11).collect();
    b.tokens(TokenRows { ids: &ids, bounds, past: 0 })
}

#[test]
fn fill_copy_add_bias() {
    for (t, c) in SHAPES {
        let (x, y, b) = (Mat::random(t, c, 1), Mat::random(t, c, 2), Mat::random(1, c, 3));
        compare!(format!("fill {t}x{c}"), [], [Out::Poison(t, c)], |d, _i, o| d.fill(o[0].view_mut(), 2.5));
        compare!(format!("copy {t}x{c}"), [&x], [Out::Poison(t, c)], |d, i, o| d.copy(o[0].view_mut(), i[0]));
        compare!(format!("add {t}x{c}"), [&x], [Out::Holds(y.clone())], |d, i, o| d
            .add(o[0].view_mut(), i[0]));
        compare!(format!("bias {t}x{c}"), [&b], [Out::Holds(y.clone())], |d, i, o| d
            .bias(o[0].view_mut(), i[0]));
    }
}

#[test]
fn embed_reads_rows_of_the_table() {
    for c in [1, 33, 257] {
        let fine = Mat::random(11, c, 1);
        let coarse = Mat::random(11, c, 2).coarse();
        for (table, dtype) in [(&fine, Dtype::F32), (&coarse, Dtype::F16), (&coarse, Dtype::Bf16)] {
            compare!(format!("embed {c} {dtype:?}"), [], [Out::Poison(17, c)], |d, _i, o| {
                let table = weight(d, table, dtype);
                let tokens = tokens(d, &[0, 17]);
                d.embed(o[0].view_mut(), &table, &tokens);
            });
        }
    }
}

#[test]
fn rmsnorm_and_its_gradient() {
    for (t, groups, size) in [(1, 1, 1), (3, 1, 33), (5, 3, 10), (2, 5, 64), (7, 1, 300)] {
        let (x, gain) = (Mat::random(t, groups * size, 1), Mat::random(1, size, 2));
        let outs = [Out::Poison(t, groups * size), Out::Poison(t, groups)];
        let name = format!("rmsnorm {t}x{groups}x{size}");
        compare!(name, [&x, &gain], outs, |d, i, o| {
            let [out, inv] = o else { unreachable!() };
            d.rmsnorm(out.view_mut(), inv.view_mut(), i[0], i[1], 1e-5);
        });
        let (dy, inv) = (Mat::random(t, groups * size, 3), Mat::random(t, groups, 4).map(|v| v + 2.0));
        for write in [Write::Set, Write::Add] {
            let name = format!("rmsnorm_grad {t}x{groups}x{size} {write:?}");
            compare!(name, [&dy, &x, &gain, &inv], [held(write, t, groups * size)], |d, i, o| {
                d.rmsnorm_grad(o[0].view_mut(), write, i[0], i[1], Norm { gain: i[2], inv_rms: i[3] });
            });
        }
    }
}

#[test]
fn overflow_gives_a_non_finite_value() {
    let mut x = Mat::random(2, 40, 1);
    x.v[0] = 1e25; // its square is no f32 number
    let gain = Mat::random(1, 40, 2);
    let mut device = crate::device::device(0);
    let outs = [Out::Poison(2, 40), Out::Poison(2, 1)];
    let got = crate::bench::run("rmsnorm", &mut device, (&[&x, &gain], &outs), |d, i, o| {
        let [out, inv] = o else { unreachable!() };
        d.rmsnorm(out.view_mut(), inv.view_mut(), i[0], i[1], 1e-6);
    })
    .unwrap();
    assert!(got[0][..40].iter().all(|v| !v.is_finite()), "a clean zero would hide the overflow");
    assert!(got[0][40..].iter().all(|v| v.is_finite()), "the other row is fine");
}

#[test]
fn rope_rotates_and_rotates_back() {
    for (t, heads, size) in [(1, 1, 2), (3, 3, 6), (9, 2, 34), (17, 9, 64)] {
        let (x, table) = (Mat::random(t, heads * size, 1), Mat::random(t + 3, size, 2));
        let bounds = bounds(t);
        compare!(format!("rope {t}x{heads}x{size}"), [&table], [Out::Holds(x.clone())], |d, i, o| {
            let tokens = tokens(d, &bounds);
            d.rope(o[0].view_mut(), i[0], &tokens);
        });
        compare!(format!("rope_grad {t}x{heads}x{size}"), [&table], [Out::Holds(x.clone())], |d, i, o| {
            let tokens = d.tokens(TokenRows { ids: &vec![0; t], bounds: &[0, t as u32], past: 2 });
            d.rope_grad(o[0].view_mut(), i[0], &tokens);
        });
    }
}

#[test]
fn swiglu_and_its_gradient() {
    for (t, c) in SHAPES {
        let (gate, up) = (Mat::random(t, c, 1).map(|g| g * 100.0), Mat::random(t, c, 2));
        compare!(format!("swiglu {t}x{c}"), [&gate, &up], [Out::Poison(t, c)], |d, i, o| {
            d.swiglu(o[0].view_mut(), i[0], i[1]);
        });
        let dout = Mat::random(t, c, 3);
        let holds = [Out::Holds(gate.clone()), Out::Holds(up.clone())];
        compare!(format!("swiglu_grad {t}x{c}"), [&dout], holds, |d, i, o| {
            let [gate, up] = o else { unreachable!() };
            d.swiglu_grad(gate.view_mut(), up.view_mut(), i[0]);
        });
    }
}

#[test]
fn dropout_draws_the_same_integers() {
    for (t, c, p) in [(1, 1, 0.5), (17, 33, 0.1), (9, 300, 0.25), (3, 20, 0.0)] {
        let (x, bounds) = (Mat::random(t, c, 1), bounds(t));
        let ids: Vec<u64> = (1..bounds.len() as u64).map(|r| (r << 33) + 1000 - r).collect();
        let key = DropoutKey { seed: 42, step: 3, rows: &ids, module: 5, p };
        for write in [Write::Set, Write::Add] {
            compare!(format!("dropout {t}x{c} {p} {write:?}"), [&x], [held(write, t, c)], |d, i, o| {
                let tokens = tokens(d, &bounds);
                d.dropout(o[0].view_mut(), write, i[0], key, &tokens);
            });
        }
    }
}

#[test]
fn rows_are_gathered_and_scattered() {
    let (x, rows) = (Mat::random(29, 300, 1), [28u32, 0, 5, 14]);
    compare!("gather_rows", [&x], [Out::Poison(4, 300)], |d, i, o| {
        let ids = d.ids(&rows);
        d.gather_rows(o[0].view_mut(), i[0], &ids);
    });
    let dout = Mat::random(4, 300, 2);
    compare!("gather_rows_grad", [&dout], [Out::Poison(29, 300)], |d, i, o| {
        let ids = d.ids(&rows);
        d.gather_rows_grad(o[0].view_mut(), i[0], &ids);
    });
}

#[test]
fn cross_entropy_and_its_gradient() {
    for (n, v) in [(1, 1), (3, 2), (5, 255), (4, 1000)] {
        let logits = Mat::random(n, v, 1).map(|x| x * 20.0);
        let weights = Mat::random(1, v, 2).map(|x| x + 1.5);
        let targets: Vec<u32> = (0..n).map(|i| (i * 37 % v) as u32).collect();
        let outs = || [Out::Poison(n, 1), Out::Holds(logits.clone())];
        compare!(format!("cross_entropy {n}x{v}"), [], outs(), |d, _i, o| {
            let [losses, logits] = o else { unreachable!() };
            let targets = d.ids(&targets);
            d.cross_entropy(losses.view_mut(), logits.view_mut(), &targets, None);
        });
        compare!(format!("cross_entropy {n}x{v} weighted"), [&weights], outs(), |d, i, o| {
            let [losses, logits] = o else { unreachable!() };
            let targets = d.ids(&targets);
            d.cross_entropy(losses.view_mut(), logits.view_mut(), &targets, Some(i[0]));
        });
    }
}

#[test]
fn what_only_the_data_shows_is_a_fault_that_stays() {
    let mut device = crate::device::device(0);
    let table = weight(&mut device, &Mat::random(7, 5, 1), Dtype::F32);
    let tokens = device.tokens(TokenRows { ids: &[6, 7], bounds: &[0, 2], past: 0 });
    let mut out = device.memory(10);
    device.embed(view_mut(&mut out, 2, 5), &table, &tokens);
    let before = device.traffic().dispatches;
    device.fill(view_mut(&mut out, 2, 5), 1.0);
    assert_eq!(device.traffic().dispatches, before, "nothing runs after a fault");
    for _ in 0..2 {
        let said = device.read(view(&out, 2, 5), &mut [0.0; 10]).unwrap_err().to_string();
        assert!(said.ends_with("token id 7 of a table of 7"), "{said}");
    }
}

#[test]
fn memory_is_used_again_and_its_contents_mean_nothing() {
    let mut device = crate::device::device_of((7, 0), 0);
    let mut x = device.memory(8);
    device.fill(view_mut(&mut x, 1, 8), 1.0);
    device.recycle(x);
    let again = device.memory(8);
    let said = device.read(view(&again, 1, 8), &mut [0.0; 8]).unwrap_err().to_string();
    assert!(said.contains("nobody wrote"), "{said}");
}
