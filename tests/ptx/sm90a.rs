//! The tier sm_90a: products by wgmma and the copy engine against the CPU on inputs rounded the same way, what takes
//! them, and an adapter's part in their epilogue against its composition.

use crate::bench::{Mat, close, run};
use crate::device::{device_at, device_of};
use crate::fused::projection;
use crate::products::{held, weight};
use finetune::backend::cpu::Cpu;
use finetune::backend::cuda::{Cuda, Driver, Trial};
use finetune::backend::{Backend, Write};
use finetune::numeric::dtype::Dtype;

/// (T, N, K) of which at least one direction is large enough: tiles and steps exactly, one more of each, more tiles than
/// the interpreter has multiprocessors, more steps than there are stages.
const SIZES: [(usize, usize, usize); 4] = [(128, 256, 64), (129, 257, 65), (300, 530, 264), (140, 270, 340)];

/// On a card of another capability, which takes nothing of this tier.
fn device(order: u64) -> Option<Cuda<Box<dyn Driver>>> {
    let device = device_at((9, 0), order).bf16().ok()?.untried();
    let takes = device.class().contains("-wgmma");
    if !takes {
        println!("skipped: no sm_90a");
    }
    takes.then_some(device)
}

#[test]
fn products_by_wgmma_are_those_of_rounded_inputs() {
    let rounded = |m: &Mat| m.clone().map(|x| half::bf16::from_f32(x).to_f32());
    for (i, (t, n, k)) in SIZES.into_iter().enumerate() {
        let write = [Write::Set, Write::Add][i % 2];
        let (w, x, dy) = (Mat::random(n, k, 2).coarse(), Mat::random(t, k, 4), Mat::random(t, n, 5));
        let name = format!("linear {t}x{n}x{k} {write:?}");
        let mut sides = Vec::new();
        for order in [0, 1, 3] {
            let Some(mut device) = device(order) else { return };
            let y = run(&name, &mut device, (&[&x], &[held(write, t, n)]), |d, i, o| {
                let w = weight(d, &w, Dtype::Bf16);
                d.linear(o[0].view_mut(), write, i[0], &w);
            });
            let dx = run(&name, &mut device, (&[&dy], &[held(write, t, k)]), |d, i, o| {
                let w = weight(d, &w, Dtype::Bf16);
                d.linear_grad(o[0].view_mut(), write, i[0], &w);
            });
            let of = |r: Result<Vec<Vec<f32>>, _>| r.unwrap_or_else(|e| panic!("{name}, order {order}: {e}"));
            sides.push((of(y), of(dx)));
        }
        assert!(sides.iter().all(|s| *s == sides[0]), "{name}: the order of warps changes bits");
        let (x, dy) = (rounded(&x), rounded(&dy));
        let mut cpu = Cpu::new(1);
        let y = run(&name, &mut cpu, (&[&x], &[held(write, t, n)]), |d, i, o| {
            let w = weight(d, &w, Dtype::Bf16);
            d.linear(o[0].view_mut(), write, i[0], &w);
        });
        let dx = run(&name, &mut cpu, (&[&dy], &[held(write, t, k)]), |d, i, o| {
            let w = weight(d, &w, Dtype::Bf16);
            d.linear_grad(o[0].view_mut(), write, i[0], &w);
        });
        close(&name, &sides[0].0[0], &y.unwrap()[0], 1e-4);
        close(&format!("{name} gradient"), &sides[0].1[0], &dx.unwrap()[0], 1e-4);
    }
}
