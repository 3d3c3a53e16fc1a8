//! The tier sm_70: products on f16 tensor cores against sums in f64 of factors rounded in the same way and, within
//! the rounding of f16, of exact factors; and the conditions of their use.

use crate::bench::{Mat, held, run, weight};
use crate::device::{Interpreted, device_at, device_of, device_with_at};
use crate::files;
use finetune::backend::cuda::{Driver, Trial, matrix_bytes};
use finetune::backend::{Backend, Cuda, Fault, Write};
use finetune::numeric::block::Encoding;
use finetune::numeric::dtype::Dtype;
use half::f16;

/// (T, N, K): less than a tile and its pairs, their edges, more than one tile.
const SIZES: [(usize, usize, usize); 6] =
    [(1, 1, 1), (3, 9, 17), (128, 128, 32), (130, 70, 100), (65, 137, 40), (140, 261, 67)];
/// The factor of gradients before they are rounded.
const LIFT: f32 = 256.0;

/// A card of another capability, which does not use this tier.
fn device(order: u64) -> Option<Cuda<Box<dyn Driver>>> {
    let device = device_at((7, 5), order).f16();
    let takes = device.class().contains("-f16");
    if !takes {
        println!("skipped: no f16 class");
    }
    takes.then_some(device)
}

fn rounded(x: f32, lift: f32) -> f64 {
    f64::from(f16::from_f32(x * lift).to_f32()) / f64::from(lift)
}

/// x w^T, or x w: rows of w are outputs, or terms.
fn compare(
    name: &str,
    got: &[f32],
    (x, lift): (&Mat, f32),
    (w, rows_are_outputs): (&Mat, bool),
    write: Write,
) {
    let (n, k) = if rows_are_outputs { (w.rows, w.cols) } else { (w.cols, w.rows) };
    let before = Mat::random(x.rows, n, 99);
    for (i, got) in got.iter().enumerate() {
        let (row, col) = (i / n, i % n);
        let first = if write == Write::Add { f64::from(before.v[i]) } else { 0.0 };
        let (mut near, mut exact, mut terms) = (first, first, first.abs());
        for c in 0..k {
            let a = x.v[row * k + c];
            let b = w.v[if rows_are_outputs { col * k + c } else { c * n + col }];
            near += rounded(a, lift) * rounded(b, 1.0);
            exact += f64::from(a) * f64::from(b);
            terms += f64::from(a).abs() * f64::from(b).abs();
        }
        let off = |want: f64| (f64::from(*got) - want).abs();
        // Written so that NaN fails. The relative error of a factor is at most 2^-11, that of a product twice as much.
        assert!(off(near) <= 1e-4 * terms, "{name}: {row}, {col} is {got}, want {near} of {terms}");
        assert!(off(exact) <= 1e-3 * terms, "{name}: {row}, {col} is {got}, exactly {exact} of {terms}");
    }
}

#[test]
fn products_in_f16_are_those_of_rounded_factors() {
    for (t, n, k) in SIZES {
        let coarse = Mat::random(n, k, 2).coarse();
        // Numbers that bf16 does not represent, so that f32 stays f32.
        let fine = coarse.clone().map(|x| x + 1e-3);
        // Gradients that f16 without the factor would round to few bits.
        let (x, dy) = (Mat::random(t, k, 4), Mat::random(t, n, 5).map(|x| (x + x.signum()) * 1e-6));
        for (w, dtype, write) in [
            (&coarse, Dtype::Bf16, Write::Set),
            (&fine, Dtype::F32, Write::Add),
            (&coarse, Dtype::F16, Write::Set),
        ] {
            let name = format!("linear {t}x{n}x{k} {dtype:?} {write:?}");
            let mut sides = Vec::new();
            for order in [0, 1, 3] {
                let Some(mut device) = device(order) else { return };
                let y = run(&name, &mut device, (&[&x], &[held(write, t, n)]), |d, i, o| {
                    let w = weight(d, w, dtype);
                    d.linear(o[0].view_mut(), write, i[0], &w);
                });
                let dx = run(&name, &mut device, (&[&dy], &[held(Write::Set, t, k)]), |d, i, o| {
                    let w = weight(d, w, dtype);
                    d.linear_grad(o[0].view_mut(), Write::Set, i[0], &w);
                });
                let of =
                    |r: Result<Vec<Vec<f32>>, _>| r.unwrap_or_else(|e| panic!("{name}, order {order}: {e}"));
                sides.push((of(y), of(dx)));
            }
            assert!(sides.iter().all(|s| *s == sides[0]), "{name}: the order of warps changes bits");
            let (y, dx) = &sides[0];
            compare(&name, &y[0], (&x, 1.0), (w, true), write);
            compare(&format!("{name} gradient"), &dx[0], (&dy, LIFT), (w, false), Write::Set);
        }
    }
}

#[test]
fn a_gradient_is_added_to_what_is_there() {
    let (w, dy) = (Mat::random(70, 133, 2).coarse(), Mat::random(9, 70, 5));
    let Some(mut device) = device(1) else { return };
    let dx = run("added", &mut device, (&[&dy], &[held(Write::Add, 9, 133)]), |d, i, o| {
        let w = weight(d, &w, Dtype::Bf16);
        d.linear_grad(o[0].view_mut(), Write::Add, i[0], &w);
    });
    compare("added", &dx.unwrap()[0], (&dy, LIFT), (&w, false), Write::Add);
}

/// Overflow is not clipped silently: the run ends with a value that is not finite, and the error names f32.
#[test]
fn what_f16_does_not_hold_is_not_finite() {
    let w = Mat::random(5, 7, 2).coarse().map(|x| x + 2.0);
    for (largest, finite) in [(60_000.0, true), (70_000.0, false)] {
        let mut x = Mat::random(3, 7, 4);
        x.v[8] = largest;
        let mut dy = Mat::random(3, 5, 4);
        dy.v[6] = largest / LIFT;
        let Some(mut device) = device(0) else { return };
        let y = run(
            "y",
            &mut device,
            (&[&x, &dy], &[held(Write::Set, 3, 5), held(Write::Set, 3, 7)]),
            |d, i, o| {
                let [y, dx] = o else { unreachable!() };
                let w = weight(d, &w, Dtype::Bf16);
                d.linear(y.view_mut(), Write::Set, i[0], &w);
                d.linear_grad(dx.view_mut(), Write::Set, i[1], &w);
            },
        );
        for (out, cols) in y.unwrap().iter().zip([5, 7]) {
            let rows: Vec<bool> = out.chunks(cols).map(|row| row.iter().all(|v| v.is_finite())).collect();
            assert_eq!(rows, [true, finite, true], "{largest}");
        }
    }
}

/// A trial small enough for the interpreter, with the speed-up that the card must have.
fn trial(faster: f64) -> Trial {
    Trial { timed: (130, 140, 64), faster }
}

#[test]
fn it_is_taken_where_it_agrees_and_is_faster() {
    let device = device_of((7, 5), 0);
    assert_eq!(device.class(), "cuda-sm75-f32", "nothing is taken that was not tried");
    let mut device = device.sm70(trial(0.0));
    assert_eq!((device.below(), &device.class()[..]), (None, "cuda-sm75-f16"));
    assert_eq!((device.driver().held(), device.traffic().made, device.peak()), (0, 0, Some(0)));
    // A matrix takes the memory that is estimated for the f32 class.
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        let bytes = [device.weight_bytes(dtype), device.matrix_bytes(Encoding::Plain(dtype), 1)];
        assert_eq!(bytes, [matrix_bytes(Encoding::Plain(dtype), 1); 2]);
    }
    let device = device_of((7, 0), 0).sm70(trial(f64::INFINITY));
    let why = device.below().unwrap();
    assert!(why.starts_with("f16: ") && why.ends_with("as f32 at 130 x 140 x 64, and inf is asked"), "{why}");
    assert_eq!(device.class(), "cuda-sm70-f32");
}

#[test]
fn a_trial_without_memory_decides_and_leaves_nothing() {
    let mut device = device_of((7, 0), 0).within(600_000).sm70(trial(0.0));
    assert!(device.undecided() && device.below().unwrap().contains("out of memory"), "{:?}", device.below());
    assert_eq!((&device.class()[..], device.driver().held()), ("cuda-sm70-f32", 0));
    let device = device.within(u64::MAX).sm70(trial(0.0));
    assert_eq!((device.undecided(), device.below()), (false, None));
    assert_eq!(&device.class()[..], "cuda-sm70-f16", "the next trial is one of its own");
}

#[test]
fn other_devices_and_classes_are_not_asked() {
    for capability in [(8, 0), (8, 9), (9, 0), (12, 1)] {
        let (major, minor) = capability;
        let device = device_of(capability, 0).sm70(trial(0.0));
        assert_eq!((device.below(), device.class()), (None, format!("cuda-sm{major}{minor}-f32")));
        assert_eq!(device.f16().class(), format!("cuda-sm{major}{minor}-f32"));
        let bf16 = device_of(capability, 0).bf16().unwrap().sm70(trial(0.0)).f16();
        assert_eq!(bf16.class(), format!("cuda-sm{major}{minor}-bf16"));
    }
    // And sm_90a does not use this tier.
    assert_eq!(device_of((7, 5), 0).f16().sm90a(trial(0.0)).untried().class(), "cuda-sm75-f16");
}

fn product(device: &mut Cuda<Interpreted>) -> Result<Vec<Vec<f32>>, Fault> {
    let (x, w) = (Mat::random(128, 64, 1), Mat::random(140, 64, 2).coarse());
    run("after", device, (&[&x], &[held(Write::Set, 128, 140)]), |d, i, o| {
        let w = weight(d, &w, Dtype::Bf16);
        d.linear(o[0].view_mut(), Write::Set, i[0], &w);
    })
}

/// A defect of a kernel, and the device's message; the device then computes in f32.
#[test]
fn one_that_disagrees_is_named_and_left_aside() {
    let changes = [
        ("add.f32 %sum0, %sum0, %old0", "mov.f32 %old0, %sum0", "f16: output 0, 0 is off by"),
        // The last step's tile only, for one direction and one storage type.
        ("sub.s32 %left, %left, 32", "sub.s32 %left, %left, 33", "f16: output "),
        ("mov.b32 %both, {0, %b14}", "mov.b32 %both, {%b14, 0}", "(Forward, 331 terms)"),
        ("mul.f32 %sum1, %sum1, %scale", "", "(Backward, 331 terms)"),
        ("bar.sync 0;", "", "no barrier orders it"),
    ];
    let text = files::read("product_sm70.ptx").text;
    let want = product(&mut device_of((7, 0), 0)).unwrap();
    for (from, to, says) in changes {
        assert!(text.contains(from), "there is {from}");
        let from = if to.is_empty() && !from.ends_with(';') { format!("{from};") } else { from.into() };
        let changed = text.replace(&from, to);
        let mut device = device_with_at((7, 0), ("product_sm70.ptx", &changed), 0).sm70(trial(0.0));
        let why = device.below().unwrap_or("nothing").to_string();
        assert!(why.contains(says), "{from}: {why}");
        assert_eq!(device.class(), "cuda-sm70-f32");
        assert!(product(&mut device).as_ref() == Ok(&want), "{from}: afterwards");
    }
}
