//! matmul, linear and linear_grad of the baseline against the CPU backend.

use crate::bench::{Mat, Out};
use crate::compare;
use finetune::backend::{Backend, Frozen, Product, Transpose, Write};
use finetune::numeric::dtype::Dtype;

/// (M, N, K): less than a tile, its edges, more than one tile.
pub const SIZES: [(usize, usize, usize); 6] =
    [(1, 1, 1), (3, 5, 7), (64, 64, 16), (65, 33, 17), (17, 130, 50), (70, 16, 100)];

pub fn held(write: Write, rows: usize, cols: usize) -> Out {
    match write {
        Write::Set => Out::Poison(rows, cols),
        Write::Add => Out::Holds(Mat::random(rows, cols, 99)),
    }
}

/// The bytes of a file, at an odd address.
pub fn frozen(m: &Mat, dtype: Dtype) -> Vec<u8> {
    let mut bytes = vec![0u8];
    for &x in &m.v {
        match dtype {
            Dtype::F32 => bytes.extend(x.to_le_bytes()),
            Dtype::F16 => bytes.extend(half::f16::from_f32(x).to_le_bytes()),
            Dtype::Bf16 => bytes.extend(half::bf16::from_f32(x).to_le_bytes()),
        }
    }
    bytes
}

pub fn weight<B: Backend>(b: &mut B, w: &Mat, dtype: Dtype) -> B::Weight {
    b.weight(Frozen { rows: w.rows, cols: w.cols, dtype, bytes: &frozen(w, dtype)[1..] }).unwrap()
}

#[test]
fn matmul_in_every_orientation() {
    for (m, n, k) in SIZES {
        for transpose in [Transpose::Neither, Transpose::Right, Transpose::Left] {
            for write in [Write::Set, Write::Add] {
                let name = format!("matmul {m}x{n}x{k} {transpose:?} {write:?}");
                let a = if transpose == Transpose::Left { (k, m) } else { (m, k) };
                let b = if transpose == Transpose::Right { (n, k) } else { (k, n) };
                let (a, b) = (Mat::random(a.0, a.1, 1), Mat::random(b.0, b.1, 2));
                compare!(name, [&a, &b], [held(write, m, n)], |device, i, o| {
                    let product = Product { a: i[0], b: i[1], transpose, scale: 2.0 };
                    device.matmul(o[0].view_mut(), write, product);
                });
            }
        }
    }
}

#[test]
fn linear_and_its_gradient() {
    for (t, n, k) in SIZES {
        // one value in the last place keeps f32 weights from being bf16 numbers
        let fine = Mat::random(n, k, 2);
        let coarse = Mat::random(n, k, 3).coarse();
        for (w, dtype, write) in [
            (&fine, Dtype::F32, Write::Set),
            (&coarse, Dtype::F32, Write::Add),
            (&coarse, Dtype::Bf16, Write::Set),
            (&coarse, Dtype::F16, Write::Add),
        ] {
            let name = format!("linear {t}x{n}x{k} {dtype:?} {write:?}");
            let (x, dy) = (Mat::random(t, k, 4), Mat::random(t, n, 5));
            compare!(name, [&x], [held(write, t, n)], |device, i, o| {
                let w = weight(device, w, dtype);
                device.linear(o[0].view_mut(), write, i[0], &w);
            });
            compare!(name, [&dy], [held(write, t, k)], |device, i, o| {
                let w = weight(device, w, dtype);
                device.linear_grad(o[0].view_mut(), write, i[0], &w);
            });
        }
    }
}
