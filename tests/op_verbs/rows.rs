//! Verbs over rows: fill, copy, add, embed, rmsnorm, rope, swiglu, dropout, gather_rows, views of rows.

use crate::bench::{Mat, Out, plus};
use crate::products::weight;
use crate::rig::{Rig, Rigged, each};
use finetune::backend::{Backend, Cpu, DropoutKey, Norm, TokenRows, View, Wgpu, Write, view, view_mut};
use finetune::numeric::dtype::Dtype;
use finetune::numeric::rng;

const T: [usize; 4] = [1, 3, 17, 129];

/// Row bounds: one row, or three uneven ones.
pub fn bounds(t: usize) -> Vec<u32> {
    let t = t as u32;
    if t < 4 { vec![0, t] } else { vec![0, 1, 1 + t / 3, t] }
}

pub fn tokens<B: Backend>(cpu: &mut B, bounds: &[u32]) -> B::Tokens {
    let t = *bounds.last().unwrap();
    let ids: Vec<u32> = (0..t).map(|i| i * 7 % 11).collect();
    cpu.tokens(TokenRows { ids: &ids, bounds, past: 0 })
}

fn check_fill_copy_and_add<B: Rigged>(rig: &Rig<B>) {
    for (t, c) in [(1, 1), (3, 7), (129, 300)] {
        let (x, y) = (Mat::random(t, c, 1), Mat::random(t, c, 2));
        let got = rig.run("fill", &[], &[Out::Poison(t, c)], |cpu, _, o| cpu.fill(o[0].view_mut(), 2.5));
        assert!(got[0].iter().all(|&v| v == 2.5));
        let got = rig.run("copy", &[&x], &[Out::Poison(t, c)], |cpu, i, o| cpu.copy(o[0].view_mut(), i[0]));
        assert_eq!(got[0], x.f32s());
        let got = rig.run("add", &[&x], &[Out::Holds(y.clone())], |cpu, i, o| cpu.add(o[0].view_mut(), i[0]));
        rig.close("add", &got[0], &plus(&x, &y), 1e-7);
    }
}

#[test]
fn fill_copy_and_add() {
    each::<Cpu>(check_fill_copy_and_add);
}

#[test]
fn fill_copy_and_add_on_wgpu() {
    each::<Wgpu>(check_fill_copy_and_add);
}

fn check_embed_reads_rows_of_the_table<B: Rigged>(rig: &Rig<B>) {
    for (vocab, c) in [(11, 1), (11, 33), (100, 64), (131, 129)] {
        let table = Mat::random(vocab, c, 1).map(|x| (x * 64.0).round() / 64.0);
        let ids: Vec<u32> = (0..17).map(|i| i * 7 % vocab as u32).collect();
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let got = rig.run("embed", &[], &[Out::Poison(17, c)], |cpu, _, o| {
                let w = weight(cpu, &table, dtype);
                let tokens = cpu.tokens(TokenRows { ids: &ids, bounds: &[0, 17], past: 0 });
                cpu.embed(o[0].view_mut(), &w, &tokens);
            });
            let want: Vec<f64> = ids
                .iter()
                .flat_map(|&i| (0..c).map(move |j| (i, j)))
                .map(|(i, j)| table.at(i as usize, j))
                .collect();
            rig.close("embed", &got[0], &want, 0.0);
        }
    }
}

#[test]
fn embed_reads_rows_of_the_table() {
    each::<Cpu>(check_embed_reads_rows_of_the_table);
}

#[test]
fn embed_reads_rows_of_the_table_on_wgpu() {
    each::<Wgpu>(check_embed_reads_rows_of_the_table);
}

fn rmsnorm(x: &Mat, gain: &Mat, eps: f64) -> (Mat, Mat) {
    let group = gain.cols;
    let (mut out, mut inv) = (x.clone(), Mat::zeros(x.rows, x.cols / group));
    for (i, chunk) in out.v.chunks_mut(group).enumerate() {
        let s = 1.0 / (chunk.iter().map(|v| v * v).sum::<f64>() / group as f64 + eps).sqrt();
        inv.v[i] = s;
        chunk.iter_mut().zip(&gain.v).for_each(|(v, g)| *v *= s * g);
    }
    (out, inv)
}

fn check_rmsnorm_and_its_gradient<B: Rigged>(rig: &Rig<B>) {
    for t in T {
        for (groups, size) in [(1, 4), (1, 33), (3, 10), (5, 64), (1, 576)] {
            let c = groups * size;
            let name = format!("rmsnorm {t}x{groups}x{size}");
            let (x, gain, eps) = (Mat::random(t, c, 1), Mat::random(1, size, 2), 1e-5f32);
            let (want, inv) = rmsnorm(&x, &gain, f64::from(eps));
            let got =
                rig.run(&name, &[&x, &gain], &[Out::Poison(t, c), Out::Poison(t, groups)], |cpu, i, o| {
                    let [out, inv] = o else { unreachable!() };
                    cpu.rmsnorm(out.view_mut(), inv.view_mut(), i[0], i[1], eps);
                });
            rig.close(&name, &got[0], &want.v, 1e-6);
            rig.close(&name, &got[1], &inv.v, 1e-6);
            let dy = Mat::random(t, c, 3);
            let inv = inv.map(|v| v);
            let mut set = Vec::new();
            for write in [Write::Set, Write::Add] {
                let before = Mat::random(t, c, 4);
                let out = if write == Write::Set { Out::Poison(t, c) } else { Out::Holds(before.clone()) };
                let dx = rig.run(&name, &[&dy, &x, &gain, &inv], &[out], |cpu, i, o| {
                    cpu.rmsnorm_grad(o[0].view_mut(), write, i[0], i[1], Norm { gain: i[2], inv_rms: i[3] });
                });
                if write == Write::Set {
                    let f = |i: &[Mat]| rmsnorm(&i[0], &gain, f64::from(eps)).0;
                    rig.close_grad(&name, &dx[0], (&[&x], 0), (&dy, &f), 1e-5);
                    set = dx[0].clone();
                } else {
                    let want: Vec<f64> = set.iter().zip(&before.v).map(|(&a, b)| f64::from(a) + b).collect();
                    rig.close(&name, &dx[0], &want, 1e-6);
                }
            }
        }
    }
}

#[test]
fn rmsnorm_and_its_gradient() {
    each::<Cpu>(check_rmsnorm_and_its_gradient);
}

#[test]
fn rmsnorm_and_its_gradient_on_wgpu() {
    each::<Wgpu>(check_rmsnorm_and_its_gradient);
}

fn rope(x: &Mat, table: &Mat, bounds: &[u32], sign: f64) -> Mat {
    let (size, half) = (table.cols, table.cols / 2);
    let mut out = x.clone();
    for w in bounds.windows(2) {
        for t in w[0]..w[1] {
            for head in 0..x.cols / size {
                for i in 0..half {
                    let (t, p) = (t as usize, (t - w[0]) as usize);
                    let (c, s) = (table.at(p, i), sign * table.at(p, i + half));
                    let (a, b) = (x.at(t, head * size + i), x.at(t, head * size + half + i));
                    *out.at_mut(t, head * size + i) = a * c - b * s;
                    *out.at_mut(t, head * size + half + i) = b * c + a * s;
                }
            }
        }
    }
    out
}

fn check_rope_rotates_and_rotates_back<B: Rigged>(rig: &Rig<B>) {
    for t in T {
        for (heads, size) in [(1, 2), (3, 6), (2, 34), (9, 64), (1, 128)] {
            let name = format!("rope {t}x{heads}x{size}");
            let (x, bounds) = (Mat::random(t, heads * size, 1), bounds(t));
            let mut table = Mat::zeros(t + 3, size);
            for p in 0..t + 3 {
                for i in 0..size / 2 {
                    let angle = p as f64 * 1e4f64.powf(-2.0 * i as f64 / size as f64);
                    *table.at_mut(p, i) = f64::from(angle.cos() as f32);
                    *table.at_mut(p, i + size / 2) = f64::from(angle.sin() as f32);
                }
            }
            let go = |back: f64| {
                rig.run(&name, &[&table], &[Out::Holds(x.clone())], |cpu, i, o| {
                    let tokens = tokens(cpu, &bounds);
                    if back > 0.0 {
                        cpu.rope(o[0].view_mut(), i[0], &tokens);
                    } else {
                        cpu.rope_grad(o[0].view_mut(), i[0], &tokens);
                    }
                })
            };
            rig.close(&name, &go(1.0)[0], &rope(&x, &table, &bounds, 1.0).v, 1e-6);
            let back = go(-1.0);
            rig.close(&name, &back[0], &rope(&x, &table, &bounds, -1.0).v, 1e-6);
            // x is used as dy: the gradient of sum(dy * rope(z)) for any z
            let z = Mat::random(t, heads * size, 5);
            rig.close_grad(&name, &back[0], (&[&z], 0), (&x, &|i| rope(&i[0], &table, &bounds, 1.0)), 1e-5);
        }
    }
}

#[test]
fn rope_rotates_and_rotates_back() {
    each::<Cpu>(check_rope_rotates_and_rotates_back);
}

#[test]
fn rope_rotates_and_rotates_back_on_wgpu() {
    each::<Wgpu>(check_rope_rotates_and_rotates_back);
}

fn check_positions_continue_after_the_past<B: Rigged>(rig: &Rig<B>) {
    let table = Mat::random(9, 4, 1);
    let x = Mat::random(2, 4, 2);
    let got = rig.run("rope past", &[&table], &[Out::Holds(x.clone())], |cpu, i, o| {
        let tokens = cpu.tokens(TokenRows { ids: &[1, 2], bounds: &[0, 2], past: 7 });
        cpu.rope(o[0].view_mut(), i[0], &tokens);
    });
    let late = Mat { rows: 2, cols: 4, v: table.v[28..36].to_vec() };
    rig.close("rope past", &got[0], &rope(&x, &late, &[0, 2], 1.0).v, 1e-6);
}

#[test]
fn positions_continue_after_the_past() {
    each::<Cpu>(check_positions_continue_after_the_past);
}

#[test]
fn positions_continue_after_the_past_on_wgpu() {
    each::<Wgpu>(check_positions_continue_after_the_past);
}

fn check_swiglu_and_its_gradient<B: Rigged>(rig: &Rig<B>) {
    let f = |i: &[Mat]| {
        let v = i[0].v.iter().zip(&i[1].v).map(|(&g, &u)| g / (1.0 + (-g).exp()) * u).collect();
        Mat { v, ..i[0].clone() }
    };
    for t in T {
        for c in [1, 33, 1536] {
            let name = format!("swiglu {t}x{c}");
            let (gate, up) = (Mat::random(t, c, 1).map(|g| g * 20.0), Mat::random(t, c, 2));
            let got = rig.run(&name, &[&gate, &up], &[Out::Poison(t, c)], |cpu, i, o| {
                cpu.swiglu(o[0].view_mut(), i[0], i[1]);
            });
            rig.close(&name, &got[0], &f(&[gate.clone(), up.clone()]).v, 1e-6);
            let dout = Mat::random(t, c, 3);
            let holds = [Out::Holds(gate.clone()), Out::Holds(up.clone())];
            let got = rig.run(&name, &[&dout], &holds, |cpu, i, o| {
                let [gate, up] = o else { unreachable!() };
                cpu.swiglu_grad(gate.view_mut(), up.view_mut(), i[0]);
            });
            for which in [0, 1] {
                rig.close_grad(&name, &got[which], (&[&gate, &up], which), (&dout, &f), 1e-5);
            }
        }
    }
    let extreme = Mat { rows: 1, cols: 4, v: vec![-200.0, 200.0, -88.8, 0.0] };
    let one = Mat { rows: 1, cols: 4, v: vec![1.0; 4] };
    let got = rig.run("swiglu", &[&extreme, &one], &[Out::Poison(1, 4)], |cpu, i, o| {
        cpu.swiglu(o[0].view_mut(), i[0], i[1]);
    });
    rig.close("swiglu extremes", &got[0], &[0.0, 200.0, 0.0, 0.0], 1e-6);
}

#[test]
fn swiglu_and_its_gradient() {
    each::<Cpu>(check_swiglu_and_its_gradient);
}

#[test]
fn swiglu_and_its_gradient_on_wgpu() {
    each::<Wgpu>(check_swiglu_and_its_gradient);
}

fn check_dropout_masks_by_its_key<B: Rigged>(rig: &Rig<B>) {
    for (t, c, p) in [(1, 1, 0.5), (17, 33, 0.1), (129, 576, 0.25), (3, 20_000, 0.0)] {
        let (x, bounds) = (Mat::random(t, c, 1), bounds(t));
        let ids: Vec<u64> = (0..bounds.len() as u64 - 1).map(|r| 1000 - r).collect();
        let key = DropoutKey { seed: 42, step: 3, rows: &ids, module: 5, p };
        let mut want = Mat::zeros(t, c);
        for (row, w) in bounds.windows(2).enumerate() {
            for i in w[0]..w[1] {
                let base = rng::hash(&[42, 3, ids[row], 5, u64::from(i - w[0])]);
                for j in 0..c {
                    let keep = f64::from(rng::mix(base, j as u32)) >= f64::from(p) * 4_294_967_296.0 - 1.0;
                    *want.at_mut(i as usize, j) =
                        if keep { x.at(i as usize, j) / (1.0 - f64::from(p)) } else { 0.0 };
                }
            }
        }
        for write in [Write::Set, Write::Add] {
            let before = Mat::random(t, c, 4);
            let (out, old) = match write {
                Write::Set => (Out::Poison(t, c), Mat::zeros(t, c)),
                Write::Add => (Out::Holds(before.clone()), before),
            };
            let got = rig.run("dropout", &[&x], &[out], |cpu, i, o| {
                let tokens = tokens(cpu, &bounds);
                cpu.dropout(o[0].view_mut(), write, i[0], key, &tokens);
            });
            rig.close("dropout", &got[0], &plus(&old, &want), 1e-6);
        }
        let dropped = want.v.iter().filter(|&&v| v == 0.0).count() as f64;
        let n = (t * c) as f64;
        let deviation = (n * f64::from(p) * (1.0 - f64::from(p))).sqrt();
        assert!(n < 100.0 || (dropped - n * f64::from(p)).abs() <= 6.0 * deviation + 2.0, "{dropped} of {n}");
    }
}

#[test]
fn dropout_masks_by_its_key() {
    each::<Cpu>(check_dropout_masks_by_its_key);
}

#[test]
fn dropout_masks_by_its_key_on_wgpu() {
    each::<Wgpu>(check_dropout_masks_by_its_key);
}

fn check_rows_are_gathered_and_scattered<B: Rigged>(rig: &Rig<B>) {
    let (x, rows) = (Mat::random(129, 33, 1), [128u32, 0, 5, 64]);
    let got = rig.run("gather_rows", &[&x], &[Out::Poison(4, 33)], |cpu, i, o| {
        let ids = cpu.ids(&rows);
        cpu.gather_rows(o[0].view_mut(), i[0], &ids);
    });
    let want: Vec<f64> = rows.iter().flat_map(|&r| x.v[r as usize * 33..][..33].to_vec()).collect();
    rig.close("gather_rows", &got[0], &want, 0.0);
    let dout = Mat { rows: 4, cols: 33, v: want };
    let got = rig.run("gather_rows_grad", &[&dout], &[Out::Poison(129, 33)], |cpu, i, o| {
        let ids = cpu.ids(&rows);
        cpu.gather_rows_grad(o[0].view_mut(), i[0], &ids);
    });
    let kept = |i: usize| if rows.contains(&((i / 33) as u32)) { x.v[i] } else { 0.0 };
    rig.close("gather_rows_grad", &got[0], &(0..129 * 33).map(kept).collect::<Vec<_>>(), 0.0);
}

#[test]
fn rows_are_gathered_and_scattered() {
    each::<Cpu>(check_rows_are_gathered_and_scattered);
}

#[test]
fn rows_are_gathered_and_scattered_on_wgpu() {
    each::<Wgpu>(check_rows_are_gathered_and_scattered);
}

fn check_overflow_gives_a_non_finite_value<B: Rigged>(rig: &Rig<B>) {
    for cols in [5, 16, 40] {
        let mut x = Mat::random(2, cols, 1);
        x.v[0] = f64::from(1e25f32); // its square exceeds the range of f32
        let (gain, dy) = (Mat::random(1, cols, 2), Mat::random(2, cols, 3));
        let outs = [Out::Poison(2, cols), Out::Poison(2, 1), Out::Holds(Mat::zeros(2, cols))];
        let got = rig.run("rmsnorm", &[&x, &gain, &dy], &outs, |cpu, i, o| {
            let [out, inv, dx] = o else { unreachable!() };
            cpu.rmsnorm(out.view_mut(), inv.view_mut(), i[0], i[1], 1e-6);
            let norm = Norm { gain: i[1], inv_rms: inv.view() };
            cpu.rmsnorm_grad(dx.view_mut(), Write::Set, i[2], i[0], norm);
        });
        for values in [&got[0], &got[2]] {
            assert!(values[..cols].iter().all(|v| !v.is_finite()), "a clean zero would hide the overflow");
            assert!(values[cols..].iter().all(|v| v.is_finite()), "the other row is fine");
        }
    }
}

#[test]
fn overflow_gives_a_non_finite_value() {
    each::<Cpu>(check_overflow_gives_a_non_finite_value);
}

#[test]
fn overflow_gives_a_non_finite_value_on_wgpu() {
    each::<Wgpu>(check_overflow_gives_a_non_finite_value);
}

#[test]
fn views_of_rows_address_those_rows() {
    let mut cpu = Cpu::new(2);
    let mut m = cpu.memory(12);
    cpu.fill(view_mut(&mut m, 4, 3), 1.0);
    cpu.fill(view_mut(&mut m, 4, 3).rows(1, 2), 7.0);
    let mut out = [0.0; 12];
    cpu.read(view(&m, 4, 3), &mut out).unwrap();
    assert_eq!(out, [1., 1., 1., 7., 7., 7., 7., 7., 7., 1., 1., 1.]);
    let part: View<_> = view(&m, 4, 3).rows(2, 2);
    let mut out = [0.0; 6];
    cpu.read(part, &mut out).unwrap();
    assert_eq!(out, [7., 7., 7., 1., 1., 1.]);
    let scalar = format!("cpu-{}-f32", std::env::consts::ARCH);
    let class = cpu.class();
    assert!(["cpu-avx512-f32", "cpu-avx2-f32", "cpu-neon-f32", &scalar].contains(&class.as_str()), "{class}");
    // The reference sums its products in another order: its bits are of another class.
    assert_eq!(Cpu::twin(1).class(), class.replace("-f32", "-plain-f32"));
}

fn check_several_views_are_read_at_once<B: Rigged>(rig: &Rig<B>) {
    rig.run("fill", &[], &[Out::Poison(1, 1)], |device, _, o| {
        let (mut a, mut b) = (device.memory(12), device.memory(301));
        device.upload(view_mut(&mut a, 4, 3), &(0..12).map(|i| i as f32).collect::<Vec<_>>());
        device.fill(view_mut(&mut b, 1, 301), 0.5);
        let (mut rows, mut all, mut none) = ([f32::NAN; 6], vec![f32::NAN; 301], []);
        let views = [view(&a, 4, 3).rows(1, 2), view(&b, 1, 301), view(&a, 0, 3)];
        let [x, y, z] = views;
        device.read_all(&mut [(x, &mut rows[..]), (y, &mut all), (z, &mut none)]).unwrap();
        assert_eq!(rows, [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        assert!(all.iter().all(|v| *v == 0.5));
        device.fill(o[0].view_mut(), 0.0);
    });
}

#[test]
fn several_views_are_read_at_once() {
    each::<Cpu>(check_several_views_are_read_at_once);
    each::<Wgpu>(check_several_views_are_read_at_once);
}
