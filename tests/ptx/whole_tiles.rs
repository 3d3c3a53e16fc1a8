//! Whole tiles of products at aligned addresses are loaded and stored in vectors. They must have the bits of the same
//! product at addresses that allow single numbers only, which other tests compare with the CPU.

use crate::bench::{GUARD, Mat, held, run_behind, weight};
use crate::device::{Interpreted, device, device_at, device_of, device_with_at};
use crate::files;
use crate::fused::projection_behind;
use crate::mutations_sm90a::{Places, undetected};
use finetune::backend::cuda::Driver;
use finetune::backend::{Backend, Cuda, Fault, Product, Transpose, Write};
use finetune::numeric::dtype::Dtype;

/// Guard words before an output that begins at a multiple of 16 bytes.
pub const ALIGNED: usize = 20;

type Outcome = Result<Vec<Vec<f32>>, Fault>;

/// More than one tile of 64 in both directions, in rows of whole vectors.
pub fn matmul<D: Driver>(guard: usize, mut device: Cuda<D>, transpose: Transpose, write: Write) -> Outcome {
    let (m, n, k) = (65, 68, 20);
    let (a, b) = match transpose {
        Transpose::Neither => (Mat::random(m, k, 1), Mat::random(k, n, 2)),
        Transpose::Right => (Mat::random(m, k, 1), Mat::random(n, k, 2)),
        Transpose::Left => (Mat::random(k, m, 1), Mat::random(k, n, 2)),
    };
    run_behind(guard, "matmul", &mut device, (&[&a, &b], &[held(write, m, n)]), |d, i, o| {
        let product = Product { a: i[0], b: i[1], transpose, scale: 2.0 };
        d.matmul(o[0].view_mut(), write, product);
    })
}

/// Forward and backward: out [T, N] and dx [T, K].
pub fn linear<D: Driver>(
    guard: usize,
    mut device: Cuda<D>,
    (t, n, k): (usize, usize, usize),
    (dtype, write): (Dtype, Write),
) -> Outcome {
    let (w, x, dy) = (Mat::random(n, k, 2).coarse(), Mat::random(t, k, 4), Mat::random(t, n, 5));
    let outs = [held(write, t, n), held(write, t, k)];
    run_behind(guard, "linear", &mut device, (&[&x, &dy], &outs), |d, i, o| {
        let [y, dx] = o else { unreachable!() };
        let w = weight(d, &w, dtype);
        d.linear(y.view_mut(), write, i[0], &w);
        d.linear_grad(dx.view_mut(), write, i[1], &w);
    })
}

/// The same bits at aligned and other addresses, and in several orders of warps.
fn check(name: &str, run: &dyn Fn(usize, u64) -> Outcome) {
    let single = run(GUARD, 0).unwrap();
    for order in [0, 3] {
        let whole = run(ALIGNED, order).unwrap_or_else(|e| panic!("{name}, order {order}: {e}"));
        assert!(whole == single, "{name}, order {order}: other bits than one number at a time");
    }
}

#[test]
fn whole_tiles_in_f32_have_the_bits_of_single_numbers() {
    for write in [Write::Set, Write::Add] {
        for transpose in [Transpose::Neither, Transpose::Right, Transpose::Left] {
            let name = format!("matmul {transpose:?} {write:?}");
            check(&name, &|guard, order| matmul(guard, device(order), transpose, write));
        }
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            let name = format!("linear {dtype:?} {write:?}");
            check(&name, &|guard, order| linear(guard, device(order), (65, 68, 72), (dtype, write)));
        }
    }
}

#[test]
fn whole_tiles_on_tensor_cores_have_the_bits_of_single_numbers() {
    if device_at((8, 0), 0).bf16().is_err() {
        println!("skipped: no tensor cores for bf16");
        return;
    }
    let on = |order| device_at((8, 0), order).bf16().unwrap();
    for write in [Write::Set, Write::Add] {
        check(&format!("linear {write:?}"), &|guard, order| {
            linear(guard, on(order), (129, 130, 132), (Dtype::Bf16, write))
        });
        check(&format!("lora_linear {write:?}"), &|guard, order| {
            projection_behind(guard, on(order), (129, 130, 132, 5), write)
        });
    }
}

/// The outputs of whole tiles that an entry computes, or takes part in.
fn exercise(entry: &str, device: Cuda<Interpreted>) -> Outcome {
    if entry.starts_with("matmul") {
        return matmul(ALIGNED, device, Transpose::Neither, Write::Set);
    }
    let device = device.bf16().unwrap();
    match entry.starts_with("lora") {
        true => projection_behind(ALIGNED, device, (128, 128, 128, 5), Write::Set),
        false => linear(ALIGNED, device, (128, 128, 128), (Dtype::Bf16, Write::Set)),
    }
}

/// File, entry, old text, new text; the first occurrence is replaced.
const CHANGES: [(&str, &str, &str, &str); 7] = [
    ("matmul.ptx", "matmul_nn", "setp.le.u32 %full, %x, %m", "setp.ge.u32 %full, %x, %m"),
    ("matmul.ptx", "matmul_nn", "@%adding ld.global.v4", "ld.global.v4"),
    (
        "matmul.ptx",
        "matmul_nn",
        "st.global.v4.f32 [%row1], {%old4, %old5",
        "st.global.v4.f32 [%row1], {%old5, %old4",
    ),
    ("product_sm80.ptx", "product_sm80_nt", "@%adding ld.global.v2", "ld.global.v2"),
    ("product_sm80.ptx", "product_sm80_nt", "[%row0+32], {%old2, %old3}", "[%row0+32], {%old3, %old2}"),
    ("product_sm80.ptx", "product_sm80_nn", "st.global.v2.f32 [%row1+96]", "st.global.v2.f32 [%row1+64]"),
    ("lora_linear_sm80.ptx", "lora_linear_sm80_nt", "mul.f32 %v, %low63, %by", "mul.f32 %v, %low62, %by"),
];

#[test]
fn any_changed_operand_of_whole_tiles_is_detected() {
    let bits = |all: Vec<Vec<f32>>| all.concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for (file, entry, from, to) in CHANGES {
        let good = bits(exercise(entry, device_of((8, 0), 0)).unwrap());
        let detects = |changed: &str| {
            let bad = exercise(entry, device_with_at((8, 0), (file, changed), 0));
            bad.map_or(true, |bad| bits(bad) != good)
        };
        let missed = undetected((&files::read(file).text, entry), &[(from, to)], Places::First, detects);
        assert!(missed.is_empty(), "{}", missed.join("\n"));
    }
}
