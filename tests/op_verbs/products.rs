//! linear, linear_grad, matmul, bias.

use crate::bench::{Mat, Out, plus};
use crate::rig::{Rig, Rigged, each};
use finetune::backend::{Backend, Cpu, Frozen, Product, Transpose, Wgpu, Write};
use finetune::numeric::dtype::Dtype;

const SIZES: [(usize, usize, usize); 9] = [
    (1, 1, 1),
    (1, 5, 3),
    (3, 7, 33),
    (17, 65, 129),
    (129, 31, 515),
    (17, 577, 100),
    (130, 100, 1100),
    (256, 192, 48),
    (1, 576, 1536),
];

/// The matrix as bytes of a file, at an odd address.
pub fn frozen(m: &Mat, dtype: Dtype) -> Vec<u8> {
    let mut bytes = vec![0u8];
    for &x in &m.v {
        match dtype {
            Dtype::F32 => bytes.extend((x as f32).to_le_bytes()),
            Dtype::F16 => bytes.extend(half::f16::from_f64(x).to_le_bytes()),
            Dtype::Bf16 => bytes.extend(half::bf16::from_f32(x as f32).to_le_bytes()),
        }
    }
    bytes
}

/// Values that every dtype holds exactly.
fn coarse(m: Mat) -> Mat {
    m.map(|x| (x * 64.0).round() / 64.0)
}

pub fn weight<B: Backend>(cpu: &mut B, w: &Mat, dtype: Dtype) -> B::Weight {
    cpu.weight(Frozen { rows: w.rows, cols: w.cols, dtype, bytes: &frozen(w, dtype)[1..] }).unwrap()
}

fn held(write: Write, rows: usize, cols: usize) -> (Out, Mat) {
    match write {
        Write::Set => (Out::Poison(rows, cols), Mat::zeros(rows, cols)),
        Write::Add => (Out::Holds(Mat::random(rows, cols, 99)), Mat::random(rows, cols, 99)),
    }
}

fn check_linear_and_its_gradient<B: Rigged>(rig: &Rig<B>) {
    for (t, n, k) in SIZES {
        for (dtype, write) in [
            (Dtype::F32, Write::Set),
            (Dtype::Bf16, Write::Add),
            (Dtype::F16, Write::Set),
            (Dtype::Bf16, Write::Set),
        ] {
            let name = format!("linear {t}x{n}x{k} {dtype:?} {write:?}");
            let (x, w) = (Mat::random(t, k, 1), coarse(Mat::random(n, k, 2)));
            let (out, before) = held(write, t, n);
            let y = rig.run(&name, &[&x], &[out], |cpu, i, o| {
                let w = weight(cpu, &w, dtype);
                cpu.linear(o[0].view_mut(), write, i[0], &w);
            });
            rig.close(&name, &y[0], &plus(&before, &x.mul(&w.t())), 2e-6);

            let name = format!("linear_grad {t}x{n}x{k} {dtype:?} {write:?}");
            let dy = Mat::random(t, n, 3);
            let (out, before) = held(write, t, k);
            let dx = rig.run(&name, &[&dy], &[out], |cpu, i, o| {
                let w = weight(cpu, &w, dtype);
                cpu.linear_grad(o[0].view_mut(), write, i[0], &w);
            });
            rig.close(&name, &dx[0], &plus(&before, &dy.mul(&w)), 2e-6);
            if write == Write::Set && t * n * k < 100_000 {
                rig.close_grad(&name, &dx[0], (&[&x], 0), (&dy, &|i| i[0].mul(&w.t())), 1e-5);
            }
        }
    }
}

#[test]
fn linear_and_its_gradient() {
    each::<Cpu>(check_linear_and_its_gradient);
}

#[test]
fn linear_and_its_gradient_on_wgpu() {
    each::<Wgpu>(check_linear_and_its_gradient);
}

fn check_matmul_in_every_orientation<B: Rigged>(rig: &Rig<B>) {
    for (m, n, k) in
        SIZES.into_iter().chain([(16, 576, 1024), (16, 64, 1025), (192, 16, 1030), (700, 16, 576)])
    {
        for transpose in [Transpose::Neither, Transpose::Right, Transpose::Left] {
            for write in [Write::Set, Write::Add] {
                let name = format!("matmul {m}x{n}x{k} {transpose:?} {write:?}");
                let (a, b) = (Mat::random(m, k, 1), Mat::random(k, n, 2));
                let (ia, ib) = match transpose {
                    Transpose::Neither => (a.clone(), b.clone()),
                    Transpose::Right => (a.clone(), b.t()),
                    Transpose::Left => (a.t(), b.clone()),
                };
                let (out, before) = held(write, m, n);
                let got = rig.run(&name, &[&ia, &ib], &[out], |cpu, i, o| {
                    let product = Product { a: i[0], b: i[1], transpose, scale: 2.0 };
                    cpu.matmul(o[0].view_mut(), write, product);
                });
                let ab = a.mul(&b);
                let twice = Mat { v: ab.v.iter().map(|v| 2.0 * v).collect(), ..ab };
                rig.close(&name, &got[0], &plus(&before, &twice), 2e-6);
            }
        }
    }
}

#[test]
fn matmul_in_every_orientation() {
    each::<Cpu>(check_matmul_in_every_orientation);
}

#[test]
fn matmul_in_every_orientation_on_wgpu() {
    each::<Wgpu>(check_matmul_in_every_orientation);
}

fn check_bias_is_added_to_every_row<B: Rigged>(rig: &Rig<B>) {
    for (t, n) in [(1, 1), (3, 33), (129, 576), (17, 20_000)] {
        let name = format!("bias {t}x{n}");
        let (y, b) = (Mat::random(t, n, 1), Mat::random(1, n, 2));
        let got =
            rig.run(&name, &[&b], &[Out::Holds(y.clone())], |cpu, i, o| cpu.bias(o[0].view_mut(), i[0]));
        let want: Vec<f64> = (0..t * n).map(|i| y.v[i] + b.v[i % n]).collect();
        rig.close(&name, &got[0], &want, 1e-7);
    }
}

#[test]
fn bias_is_added_to_every_row() {
    each::<Cpu>(check_bias_is_added_to_every_row);
}

#[test]
fn bias_is_added_to_every_row_on_wgpu() {
    each::<Wgpu>(check_bias_is_added_to_every_row);
}

#[test]
fn a_weight_of_the_wrong_length_is_a_fault() {
    let fault = Cpu::new(1).weight(Frozen { rows: 3, cols: 5, dtype: Dtype::Bf16, bytes: &[0; 29] });
    assert!(fault.err().unwrap().to_string().contains("3 x 5 matrix takes 30 bytes, not 29"));
}
