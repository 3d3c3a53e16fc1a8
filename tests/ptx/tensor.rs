//! The bf16 class on tensor cores against the CPU backend on inputs rounded in the same way, and against f32.

use crate::bench::{Mat, close, held, run, weight};
use crate::device::{device_at, device_of};
use finetune::backend::{Backend, Cpu, Write};
use finetune::numeric::dtype::Dtype;

/// (T, N, K): less than a tile and its pieces, their edges, more than one tile.
const SIZES: [(usize, usize, usize); 5] =
    [(1, 1, 1), (3, 9, 17), (128, 128, 32), (130, 70, 100), (65, 137, 40)];

fn rounded(m: Mat) -> Mat {
    m.map(|x| half::bf16::from_f32(x).to_f32())
}

#[test]
fn products_on_tensor_cores_are_those_of_rounded_inputs() {
    if device_at((8, 0), 0).bf16().is_err() {
        // A named card may be older; the interpreter has the configured capability.
        println!("skipped: no tensor cores for bf16");
        return;
    }
    for (t, n, k) in SIZES {
        for (dtype, write) in [(Dtype::Bf16, Write::Set), (Dtype::F32, Write::Add), (Dtype::F16, Write::Set)]
        {
            let (w, x, dy) = (Mat::random(n, k, 2).coarse(), Mat::random(t, k, 4), Mat::random(t, n, 5));
            let name = format!("linear {t}x{n}x{k} {dtype:?} {write:?}");
            let mut sides = Vec::new();
            for order in [0, 1, 3] {
                let mut device = device_at((8, 0), order).bf16().unwrap();
                let y = run(&name, &mut device, (&[&x], &[held(write, t, n)]), |d, i, o| {
                    let w = weight(d, &w, dtype);
                    d.linear(o[0].view_mut(), write, i[0], &w);
                });
                let dx = run(&name, &mut device, (&[&dy], &[held(write, t, k)]), |d, i, o| {
                    let w = weight(d, &w, dtype);
                    d.linear_grad(o[0].view_mut(), write, i[0], &w);
                });
                sides.push((y.unwrap(), dx.unwrap()));
            }
            assert!(sides.iter().all(|s| *s == sides[0]), "{name}: the order of warps changes bits");
            let mut cpu = Cpu::new(1);
            for (x, bound) in [(rounded(x.clone()), 1e-4), (x, 1.5e-2)] {
                let want = run(&name, &mut cpu, (&[&x], &[held(write, t, n)]), |d, i, o| {
                    let w = weight(d, &w, dtype);
                    d.linear(o[0].view_mut(), write, i[0], &w);
                });
                close(&name, &sides[0].0[0], &want.unwrap()[0], bound);
            }
            for (dy, bound) in [(rounded(dy.clone()), 1e-4), (dy, 1.5e-2)] {
                let name = format!("{name} gradient");
                let want = run(&name, &mut cpu, (&[&dy], &[held(write, t, k)]), |d, i, o| {
                    let w = weight(d, &w, dtype);
                    d.linear_grad(o[0].view_mut(), write, i[0], &w);
                });
                close(&name, &sides[0].1[0], &want.unwrap()[0], bound);
            }
        }
    }
}

#[test]
fn bf16_is_refused_by_name_where_there_is_none() {
    let said = device_of((7, 5), 0).bf16().err().unwrap().to_string();
    assert_eq!(
        said,
        "interpreter: bf16 needs compute capability 8.0, and this has 7.5: leave --dtype out, or use --dtype f32"
    );
    assert_eq!(device_of((9, 0), 0).bf16().unwrap().class(), "cuda-sm90-bf16");
    assert_eq!(device_of((7, 0), 0).class(), "cuda-sm70-f32");
}
