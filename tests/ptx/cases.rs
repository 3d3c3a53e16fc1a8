//! The cases of tests/op_cases on the interpreter or a card, in f32 and on tensor cores, and what no case describes:
//! overflow, faults that only the data shows, memory that is used again.

use crate::bench::{Mat, Out, weight};
use crate::device::{device, device_at};
use crate::op_cases::{Lend, ROUNDED, Rig, check};
use finetune::backend::cuda::Driver;
use finetune::backend::{Backend, Cuda, TokenRows, view, view_mut};
use finetune::numeric::dtype::Dtype;

type Device = Cuda<Box<dyn Driver>>;

/// Several orders of warps and blocks, which give the same bits.
fn rig(name: &str, rounded: Option<f64>, open: fn(u64) -> Device) -> Rig<Device> {
    let lend = |seed| -> Lend<Device> { Box::new(move |give| give(&mut open(seed))) };
    // The interpreter takes a second for a few million multiplications.
    let interpreted = std::env::var_os("FINETUNE_PTX_DEVICE").is_none();
    let most = if interpreted { 180_000 } else { usize::MAX };
    let variants = [0, 1, 7].map(lend).into();
    Rig { name: name.into(), variants, least: 1e-4, rounded, most }
}

#[test]
fn every_op_case_holds_in_ptx() {
    let mut rigs = vec![rig("f32", None, device)];
    match device_at((8, 0), 0).bf16() {
        Ok(_) => rigs.push(rig("bf16", Some(ROUNDED), |seed| device_at((8, 0), seed).bf16().unwrap())),
        Err(why) => println!("skipped: {why}"),
    }
    check(&rigs);
}

#[test]
fn overflow_gives_a_non_finite_value() {
    let mut x = Mat::random(2, 40, 1);
    x.v[0] = 1e25; // its square is no f32 number
    let gain = Mat::random(1, 40, 2);
    let mut device = crate::device::device(0);
    let outs = [Out::Poison(2, 40), Out::Poison(2, 1)];
    let got = crate::bench::run("rmsnorm", &mut device, (&[&x, &gain], &outs), |d, i, o| {
        let [out, inv] = o else { unreachable!() };
        d.rmsnorm(out.view_mut(), inv.view_mut(), i[0], i[1], 1e-6);
    })
    .unwrap();
    assert!(got[0][..40].iter().all(|v| !v.is_finite()), "a clean zero would hide the overflow");
    assert!(got[0][40..].iter().all(|v| v.is_finite()), "the other row is fine");
}

#[test]
fn what_only_the_data_shows_is_a_fault_that_stays() {
    let mut device = crate::device::device(0);
    let table = weight(&mut device, &Mat::random(7, 5, 1), Dtype::F32);
    let tokens = device.tokens(TokenRows { ids: &[6, 7], bounds: &[0, 2], past: 0, short: u32::MAX });
    let mut out = device.memory(10);
    device.embed(view_mut(&mut out, 2, 5), &table, &tokens, 1.0);
    let before = device.traffic().dispatches;
    device.fill(view_mut(&mut out, 2, 5), 1.0);
    assert_eq!(device.traffic().dispatches, before, "nothing runs after a fault");
    for _ in 0..2 {
        let said = device.read(view(&out, 2, 5), &mut [0.0; 10]).unwrap_err().to_string();
        assert!(said.ends_with("token id 7 of a table of 7"), "{said}");
    }
}

#[test]
fn memory_is_used_again_and_its_contents_mean_nothing() {
    let mut device = crate::device::device_of((7, 0), 0);
    let mut x = device.memory(8);
    device.fill(view_mut(&mut x, 1, 8), 1.0);
    device.recycle(x);
    let again = device.memory(8);
    let said = device.read(view(&again, 1, 8), &mut [0.0; 8]).unwrap_err().to_string();
    assert!(said.contains("never written"), "{said}");
}
