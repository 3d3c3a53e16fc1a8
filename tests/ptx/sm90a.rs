//! The tier sm_90a: products by wgmma and the copy engine against the CPU on inputs rounded in the same way, the
//! conditions of their use, and an adapter's part in their epilogue against its composition.

use crate::bench::{GUARD, Mat, close, held, run, run_behind, weight};
use crate::device::{Interpreted, device_at, device_of, device_with_at};
use crate::files;
use crate::fused::projection_behind;
use finetune::backend::cuda::{Driver, Trial, kernels};
use finetune::backend::{Backend, Cpu, Cuda, Write};
use finetune::numeric::dtype::Dtype;

/// (T, N, K), large enough in at least one direction: exact tiles and steps, one more of each, more tiles than the
/// interpreter has multiprocessors, more steps than stages.
const SIZES: [(usize, usize, usize); 4] = [(128, 256, 64), (129, 257, 65), (300, 530, 264), (140, 270, 340)];

/// A card of another capability, which does not use this tier.
fn device(order: u64) -> Option<Cuda<Box<dyn Driver>>> {
    let device = device_at((9, 0), order).bf16().ok().map(|device| device.untried());
    let device = device.filter(|device| device.class().contains("-wgmma"));
    if device.is_none() {
        println!("skipped: no sm_90a");
    }
    device
}

#[test]
fn products_by_wgmma_are_those_of_rounded_inputs() {
    let rounded = |m: &Mat| m.clone().map(|x| half::bf16::from_f32(x).to_f32());
    for (i, (t, n, k)) in SIZES.into_iter().enumerate() {
        // Outputs at multiples of 8 bytes are stored in pairs, others not.
        let (write, guard) =
            [(Write::Set, 20), (Write::Add, GUARD), (Write::Add, 20), (Write::Set, GUARD)][i];
        let (w, x, dy) = (Mat::random(n, k, 2).coarse(), Mat::random(t, k, 4), Mat::random(t, n, 5));
        let name = format!("linear {t}x{n}x{k} {write:?}");
        let mut sides = Vec::new();
        for order in [0, 1, 3] {
            let Some(mut device) = device(order) else { return };
            let y = run_behind(guard, &name, &mut device, (&[&x], &[held(write, t, n)]), |d, i, o| {
                let w = weight(d, &w, Dtype::Bf16);
                d.linear(o[0].view_mut(), write, i[0], &w);
            });
            let dx = run_behind(guard, &name, &mut device, (&[&dy], &[held(write, t, k)]), |d, i, o| {
                let w = weight(d, &w, Dtype::Bf16);
                d.linear_grad(o[0].view_mut(), write, i[0], &w);
            });
            let of = |r: Result<Vec<Vec<f32>>, _>| r.unwrap_or_else(|e| panic!("{name}, order {order}: {e}"));
            sides.push((of(y), of(dx)));
        }
        assert!(sides.iter().all(|s| *s == sides[0]), "{name}: the order of warps changes bits");
        let mut cpu = Cpu::new(1);
        for (x, dy, bound) in [(&rounded(&x), &rounded(&dy), 1e-4), (&x, &dy, 1.5e-2)] {
            let y = run(&name, &mut cpu, (&[x], &[held(write, t, n)]), |d, i, o| {
                let w = weight(d, &w, Dtype::Bf16);
                d.linear(o[0].view_mut(), write, i[0], &w);
            });
            let dx = run(&name, &mut cpu, (&[dy], &[held(write, t, k)]), |d, i, o| {
                let w = weight(d, &w, Dtype::Bf16);
                d.linear_grad(o[0].view_mut(), write, i[0], &w);
            });
            close(&name, &sides[0].0[0], &y.unwrap()[0], bound);
            close(&format!("{name} gradient"), &sides[0].1[0], &dx.unwrap()[0], bound);
        }
    }
}

#[test]
fn an_adapter_in_the_epilogue_has_the_bits_of_its_own_product() {
    // A weight in blocks is widened in two parts; the second is narrower than a tile.
    for sizes in [(129, 270, 260, 5), (140, 380, 256, 33)] {
        for (write, guard) in [(Write::Set, GUARD), (Write::Add, 20)] {
            let on = |order| Some(device(order)?.slab(256 * 380));
            let Some(spelled) = on(0) else { return };
            let want = projection_behind(guard, spelled.spelled(), sizes, write).unwrap();
            for order in [0, 1, 3] {
                let got = projection_behind(guard, on(order).unwrap(), sizes, write);
                let got = got.unwrap_or_else(|e| panic!("{sizes:?}, order {order}: {e}"));
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    assert!(got == want, "{sizes:?} {write:?}, order {order}: other bits in output {i}");
                }
            }
        }
    }
}

/// A trial small enough for the interpreter, with the speed-up that the card must have.
fn trial(faster: f64) -> Trial {
    Trial { timed: (128, 256, 64), faster }
}

#[test]
fn it_is_taken_where_it_agrees_and_is_faster() {
    let device = device_of((9, 0), 0).bf16().unwrap();
    assert_eq!(device.class(), "cuda-sm90-bf16", "nothing is taken that was not tried");
    let device = device.sm90a(trial(0.0));
    assert_eq!((device.below(), &device.class()[..]), (None, "cuda-sm90-bf16-wgmma"));
    let device = device_of((9, 0), 0).bf16().unwrap().sm90a(trial(f64::INFINITY));
    let why = device.below().unwrap();
    assert!(why.starts_with("wgmma: ") && why.ends_with("at 128 x 256 x 64, and inf is asked"), "{why}");
    assert_eq!(device.class(), "cuda-sm90-bf16");
}

#[test]
fn a_trial_without_memory_decides_and_leaves_nothing() {
    // The first operands fit, their results do not.
    let device = device_of((9, 0), 0).bf16().unwrap().within(600_000);
    let mut device = device.sm90a(trial(0.0));
    assert!(device.undecided() && device.below().unwrap().contains("out of memory"), "{:?}", device.below());
    assert_eq!((&device.class()[..], device.driver().held()), ("cuda-sm90-bf16", 0));
    let mut device = device.within(u64::MAX).sm90a(trial(0.0));
    assert_eq!((device.undecided(), device.below()), (false, None));
    assert_eq!(&device.class()[..], "cuda-sm90-bf16-wgmma", "the next trial is one of its own");
    assert_eq!((device.driver().held(), device.traffic().made, device.peak()), (0, 0, Some(0)));
    let device = device.sm90a(trial(f64::INFINITY));
    assert!(!device.undecided() && device.below().is_some(), "one that was decided");
}

#[test]
fn a_file_says_what_runs_it() {
    let runs = |file: &str, capability, reads| kernels::find(file).unwrap().runs_on(capability, reads);
    let cases = [
        ((9, 0), 80, true),
        ((9, 0), 87, true),
        ((9, 0), 78, false),
        ((8, 9), 87, false),
        ((10, 0), 87, false),
    ];
    for (capability, reads, takes) in cases {
        assert_eq!(runs("product_sm90a.ptx", capability, reads), takes, "{capability:?}, PTX {reads}");
    }
    assert!(runs("product_sm80.ptx", (12, 1), 70) && !runs("product_sm80.ptx", (7, 5), 87));
}

/// Few rows or columns waste a tile, short sums the pipeline.
#[test]
fn small_products_stay_with_mma() {
    // The kernels of sm_90a are wrong here, so that their use is visible.
    let text =
        files::read("product_sm90a.ptx").text.replace("add.f32 %old0, %acc0, %old0", "neg.f32 %old0, %acc0");
    for ((t, n, k), taken) in
        [((128, 256, 64), true), ((127, 256, 64), false), ((128, 255, 64), false), ((128, 256, 63), false)]
    {
        let (x, w) = (Mat::random(t, k, 1), Mat::random(n, k, 2).coarse());
        let y = |device: Cuda<Interpreted>| {
            let mut device = device.bf16().unwrap().untried();
            let y = run("linear", &mut device, (&[&x], &[held(Write::Set, t, n)]), |d, i, o| {
                let w = weight(d, &w, Dtype::Bf16);
                d.linear(o[0].view_mut(), Write::Set, i[0], &w);
            });
            y.unwrap()
        };
        let changed = y(device_with_at((9, 0), ("product_sm90a.ptx", &text), 0));
        assert_eq!(changed != y(device_of((8, 0), 0)), taken, "{t} x {n} x {k}");
    }
}

#[test]
fn other_devices_are_not_asked() {
    for capability in [(8, 0), (8, 9), (10, 0), (12, 1)] {
        let device = device_of(capability, 0).bf16().unwrap().sm90a(trial(0.0));
        let class = format!("cuda-sm{}{}-bf16", capability.0, capability.1);
        assert_eq!((device.below(), device.class()), (None, class.clone()));
        assert_eq!(device.untried().class(), class);
    }
    let device = device_of((9, 0), 0).sm90a(trial(0.0));
    assert_eq!((device.below(), &device.class()[..]), (None, "cuda-sm90-f32"));
}

/// Rows of tiles are in groups of eight: an error from the ninth row on shows in the comparison of the large product.
#[test]
fn a_large_product_is_compared_as_well() {
    let text = files::read("product_sm90a.ptx").text;
    // The first occurrence is in the code that fills stages.
    let (from, to) = ("shl.b32 %m0, %x, 3;", "mov.u32 %m0, %x;");
    assert!(text.contains(from));
    let on = |text: &str| device_with_at((9, 0), ("product_sm90a.ptx", text), 0).bf16().unwrap();
    let trial = Trial { timed: (1030, 256, 64), faster: 0.0 };
    assert_eq!(on(&text).sm90a(trial).below(), None);
    let device = on(&text.replacen(from, to, 1)).sm90a(trial);
    let why = device.below().unwrap();
    assert!(why.starts_with("wgmma: output ") && why.ends_with("(Forward, 64 terms)"), "{why}");
}

/// A defect of a kernel, and the device's message; the device then computes with product_sm80.
#[test]
fn one_that_disagrees_is_named_and_left_aside() {
    let changes = [
        ("product_sm90a.ptx", "add.f32 %old3, %acc5, %old3", "mov.f32 %old3, %acc5", "wgmma: output "),
        ("lora_linear_sm90a.ptx", "min.u32 %chunk, %rest, 16", "min.u32 %chunk, %rest, 1", "(Forward, "),
        ("product_sm90a.ptx", "wgmma.fence.sync.aligned;", "", "wgmma without wgmma.fence"),
        // When the ring wraps, a block has a second tile, and a rank a second part.
        ("product_sm90a.ptx", "selp.u32 %x, 1, 0, %p", "selp.u32 %x, 0, 0, %p", "more arrivals"),
        (
            "product_sm90a.ptx",
            "mov.u32 %step, 0;",
            "mov.u32 %step, 0; mov.u32 %stage, 0;",
            "interpreter: product",
        ),
        ("lora_linear_sm90a.ptx", "min.u32 %chunk, %rest, 16", "min.u32 %chunk, %rest, 8", "(Forward, "),
    ];
    for (file, from, to, says) in changes {
        let text = files::read(file).text;
        assert!(text.contains(from), "{file} has {from}");
        let device = device_with_at((9, 0), (file, &text.replace(from, to)), 0).bf16().unwrap();
        let mut device = device.sm90a(trial(0.0));
        let why = device.below().unwrap_or("nothing").to_string();
        assert!(why.contains(says), "{file}: {why}");
        assert_eq!(device.class(), "cuda-sm90-bf16");
        let (x, w) = (Mat::random(128, 64, 1), Mat::random(256, 64, 2).coarse());
        let y = run("after", &mut device, (&[&x], &[held(Write::Set, 128, 256)]), |d, i, o| {
            let w = weight(d, &w, Dtype::Bf16);
            d.linear(o[0].view_mut(), Write::Set, i[0], &w);
        });
        assert!(y.is_ok(), "{file}: {:?}", y.err());
    }
}
