//! Fused verbs against the compositions that they replace, on the same device: the same operations in the same order,
//! so the same bits.

use crate::bench::{GUARD, Mat, Out, run_behind};
use crate::device::device_at;
use crate::products::{held, weight};
use finetune::backend::cuda::{Cuda, Driver};
use finetune::backend::{Backend, Fault, Fused, LoraGrad, LoraPart, Write, view, view_mut};
use finetune::numeric::block::{Block, Blocks, quantise};
use finetune::numeric::dtype::Dtype;

/// (T, N, K, R): less than a tile, its edges, more than one; ranks within a part of 32 and beyond.
const SIZES: [(usize, usize, usize, usize); 4] =
    [(1, 3, 5, 1), (65, 130, 40, 16), (130, 70, 100, 33), (9, 256, 256, 8)];

/// y, h, the adapter's gradient, dx.
pub fn projection<D: Driver>(
    device: Cuda<D>,
    sizes: (usize, usize, usize, usize),
    write: Write,
) -> Result<Vec<Vec<f32>>, Fault> {
    projection_behind(GUARD, device, sizes, write)
}

/// The same with so many guard words.
pub fn projection_behind<D: Driver>(
    guard: usize,
    mut device: Cuda<D>,
    (t, n, k, r): (usize, usize, usize, usize),
    write: Write,
) -> Result<Vec<Vec<f32>>, Fault> {
    let (w, blocks) = (Mat::random(n, k, 2).coarse(), k.is_multiple_of(256));
    let (a, b) = (Mat::random(r, k, 6), Mat::random(n, r, 7));
    let (x, dy) = (Mat::random(t, k, 4), Mat::random(t, n, 5));
    let outs = [held(write, t, n), Out::Poison(t, r), Out::Poison(1, r * (n + k)), held(write, t, k)];
    run_behind(guard, "lora", &mut device, (&[&x, &dy, &a, &b], &outs), |d, i, o| {
        let [y, h, dab, dx] = o else { unreachable!() };
        let w = if blocks { in_blocks(d, &w) } else { weight(d, &w, Dtype::Bf16) };
        let (x, dy, ab) = (i[0], i[1], (i[2], i[3]));
        let lora = LoraPart { h: h.view_mut(), x, ab, scale: 0.5 };
        d.lora_linear((y.view_mut(), write), x, &w, lora);
        let args = LoraGrad { dab: dab.view_mut(), dy, x, h: h.view(), ab, scale: 0.5 };
        d.lora_linear_grad((dx.view_mut(), write), &w, args);
    })
}

/// In blocks, so that a matrix comes in several parts.
fn in_blocks<D: Driver>(d: &mut Cuda<D>, w: &Mat) -> <Cuda<D> as Backend>::Weight {
    let bytes = quantise(Block::Q8_0, &w.v).unwrap();
    d.weight_of_blocks(&Blocks::new((w.rows, w.cols), Block::Q8_0, bytes.into()).unwrap()).unwrap()
}

#[test]
fn an_adapter_in_the_epilogue_has_the_bits_of_its_own_product() {
    if device_at((8, 0), 0).bf16().is_err() {
        println!("skipped: no tensor cores for bf16");
        return;
    }
    for sizes in SIZES {
        for write in [Write::Set, Write::Add] {
            let on = |order| device_at((8, 0), order).bf16().unwrap().slab(128 * 256);
            let want = projection(on(0).spelled(), sizes, write).unwrap();
            for order in [0, 1, 3] {
                let got = projection(on(order), sizes, write).unwrap_or_else(|e| panic!("{sizes:?}: {e}"));
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    assert!(got == want, "{sizes:?} {write:?}, order {order}: other bits in output {i}");
                }
            }
        }
    }
}

#[test]
fn a_fused_projection_does_not_read_its_output_again() {
    let launches = |mut device: Cuda<Box<dyn Driver>>| {
        let w = weight(&mut device, &Mat::random(8, 8, 1), Dtype::Bf16);
        let mut memory = device.memory(200);
        device.upload(view_mut(&mut memory, 25, 8), &vec![0.5; 200]);
        let (mut y, mut h) = (device.memory(32), device.memory(8));
        let before = device.traffic().dispatches;
        let at = |rows, cols| view(&memory, rows, cols);
        let h = view_mut(&mut h, 4, 2);
        let lora = LoraPart { h, x: at(4, 8), ab: (at(2, 8), at(8, 2)), scale: 1.0 };
        device.lora_linear((view_mut(&mut y, 4, 8), Write::Set), at(4, 8), &w, lora);
        let launched = device.traffic().dispatches - before;
        // Nobody wrote y before: on the interpreter a kernel that reads it is a fault, which this read tells.
        device.read(view(&y, 4, 8), &mut [0.0; 32]).unwrap();
        launched
    };
    let Ok(device) = device_at((8, 0), 0).bf16() else { return };
    assert_eq!(launches(device), 3, "x is narrowed, h, the projection with its adapter");
    assert_eq!(launches(device_at((8, 0), 0).bf16().unwrap().spelled()), 4);
    assert_eq!(launches(device_at((8, 0), 0)), 3, "f32 narrows nothing");
}
