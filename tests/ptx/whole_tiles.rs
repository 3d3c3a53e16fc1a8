//! Whole tiles of products at aligned addresses are loaded and stored in vectors. They must have the bits of the same
//! product at addresses that allow single numbers only, which other tests compare with the CPU.

use crate::bench::{ALIGNED, GUARD, Mat, held, run_behind, weight};
use crate::device::{Interpreted, device, device_at, device_of, device_with_at};
use crate::files;
use crate::fused::projection_behind;
use crate::mutations_sm90a::{Places, undetected};
use finetune::backend::cuda::Driver;
use finetune::backend::{Backend, Cuda, Fault, Product, Transpose, Write};
use finetune::numeric::dtype::Dtype;

type Outcome = Result<Vec<Vec<f32>>, Fault>;

/// out [M, N]
fn matmul<D: Driver>(
    guard: usize,
    mut device: Cuda<D>,
    (m, n, k): (usize, usize, usize),
    (transpose, write): (Transpose, Write),
) -> Outcome {
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
fn linear<D: Driver>(
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
            check(&name, &|guard, order| matmul(guard, device(order), (65, 68, 20), (transpose, write)));
        }
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            let name = format!("linear {dtype:?} {write:?}");
            check(&name, &|guard, order| linear(guard, device(order), (65, 68, 72), (dtype, write)));
        }
        // Rows of a multiple of 8 bytes, and not of 16.
        check(&format!("linear of narrow rows {write:?}"), &|guard, order| {
            linear(guard, device(order), (65, 66, 70), (Dtype::F32, write))
        });
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
        // Rows of a multiple of 4 bytes, and not of 8.
        check(&format!("linear of narrow rows {write:?}"), &|guard, order| {
            linear(guard, on(order), (129, 129, 131), (Dtype::Bf16, write))
        });
        check(&format!("lora_linear {write:?}"), &|guard, order| {
            // A narrow adapter's own products depend on the alignment.
            projection_behind(guard, on(order), (129, 130, 132, 68), write)
        });
    }
}

/// The outputs of whole tiles that an entry computes, or takes part in; then, of products, tiles at an aligned address
/// in rows that are not.
fn exercise(entry: &str, device: &dyn Fn() -> Cuda<Interpreted>) -> Outcome {
    if entry.starts_with("lora") {
        return projection_behind(ALIGNED, device().bf16().unwrap(), (128, 128, 128, 5), Write::Set);
    }
    let mut all = Vec::new();
    if entry.starts_with("matmul") {
        for n in [68, 66] {
            all.extend(matmul(ALIGNED, device(), (65, n, 20), (Transpose::Neither, Write::Set))?);
        }
    } else {
        for n in [128, 129] {
            let device = device().bf16().unwrap();
            all.extend(linear(ALIGNED, device, (128, n, n), (Dtype::Bf16, Write::Set))?);
        }
    }
    Ok(all)
}

/// File, entry, old text, new text; the first occurrence is replaced.
const CHANGES: [(&str, &str, &str, &str); 11] = [
    ("matmul.ptx", "matmul_nn", "setp.le.u32 %full, %x, %m", "setp.ge.u32 %full, %x, %m"),
    ("matmul.ptx", "matmul_nn", "or.b32 %x, %x, %y;", ""),
    ("matmul.ptx", "matmul_nn", "and.b32 %x, %x, 15", "and.b32 %x, %x, 7"),
    ("matmul.ptx", "matmul_nn", "@%adding ld.global.v4", "ld.global.v4"),
    (
        "matmul.ptx",
        "matmul_nn",
        "st.global.v4.f32 [%row1], {%old4, %old5",
        "st.global.v4.f32 [%row1], {%old5, %old4",
    ),
    ("product_sm80.ptx", "product_sm80_nt", "or.b32 %x, %x, %y;", ""),
    ("product_sm80.ptx", "product_sm80_nt", "and.b32 %x, %x, 7", "and.b32 %x, %x, 3"),
    ("product_sm80.ptx", "product_sm80_nt", "@%adding ld.global.v2", "ld.global.v2"),
    ("product_sm80.ptx", "product_sm80_nt", "[%row0+32], {%old2, %old3}", "[%row0+32], {%old3, %old2}"),
    ("product_sm80.ptx", "product_sm80_nn", "st.global.v2.f32 [%row1+96]", "st.global.v2.f32 [%row1+64]"),
    ("lora_linear_sm80.ptx", "lora_linear_sm80_nt", "mul.f32 %v, %low63, %by", "mul.f32 %v, %low62, %by"),
];

#[test]
fn any_changed_operand_of_whole_tiles_is_detected() {
    let bits = |all: Vec<Vec<f32>>| all.concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for (file, entry, from, to) in CHANGES {
        let good = bits(exercise(entry, &|| device_of((8, 0), 0)).unwrap());
        let detects = |changed: &str| {
            let bad = exercise(entry, &|| device_with_at((8, 0), (file, changed), 0));
            bad.map_or(true, |bad| bits(bad) != good)
        };
        let missed = undetected((&files::read(file).text, entry), &[(from, to)], Places::First, detects);
        assert!(missed.is_empty(), "{}", missed.join("\n"));
    }
}
