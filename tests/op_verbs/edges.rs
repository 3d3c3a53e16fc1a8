//! What no formula describes: numbers that are not finite, views, lengths, classes.

use crate::op_cases::{Case, Device, Mat, Out, Rig};
use crate::rig;
use finetune::backend::{Backend, Cpu, Frozen, Norm, View, Write, view, view_mut};
use finetune::numeric::dtype::Dtype;

fn check_overflow_gives_a_non_finite_value<B: Device>(rig: &Rig<B>) {
    for cols in [5, 16, 40] {
        let mut x = Mat::random(2, cols, 1);
        x.v[0] = f64::from(1e25f32); // its square exceeds the range of f32
        let inputs = [x, Mat::random(1, cols, 2), Mat::random(2, cols, 3)];
        let outs = [Out::Poison(2, cols), Out::Poison(2, 1), Out::Poison(2, cols)];
        let case = Case::new("rmsnorm".into(), inputs, outs).verb(|b: &mut B, g, o| {
            let [out, inv, dx] = o else { unreachable!() };
            b.rmsnorm(out.view_mut(), inv.view_mut(), g.i[0], g.i[1], 1e-6);
            let norm = Norm { gain: g.i[1], inv_rms: inv.view() };
            b.rmsnorm_grad(dx.view_mut(), Write::Set, g.i[2], g.i[0], norm);
        });
        let got = rig.run(&rig.name, &case);
        for values in [&got[0], &got[2]] {
            assert!(values[..cols].iter().all(|v| !v.is_finite()), "a clean zero would hide the overflow");
            assert!(values[cols..].iter().all(|v| v.is_finite()), "the other row is fine");
        }
    }
}

#[test]
fn overflow_gives_a_non_finite_value() {
    rig::cpu().iter().for_each(check_overflow_gives_a_non_finite_value);
}

#[test]
fn overflow_gives_a_non_finite_value_on_wgpu() {
    rig::wgpu().iter().for_each(check_overflow_gives_a_non_finite_value);
}

fn check_non_finite_values_stay_visible<B: Device>(rig: &Rig<B>) {
    for bad in [f64::NAN, f64::INFINITY] {
        let mut logits = Mat::random(1, 131, 1);
        logits.v[77] = bad;
        let outs = [Out::Poison(1, 1), Out::Holds(logits)];
        let case = Case::new("cross_entropy".into(), [], outs).ids(&[3]).verb(|b: &mut B, g, o| {
            let [losses, logits] = o else { unreachable!() };
            b.cross_entropy(losses.view_mut(), logits.view_mut(), g.ids(), None);
        });
        assert!(!rig.run(&rig.name, &case)[0][0].is_finite());
    }
}

#[test]
fn non_finite_values_stay_visible() {
    rig::cpu().iter().for_each(check_non_finite_values_stay_visible);
}

#[test]
fn non_finite_values_stay_visible_on_wgpu() {
    rig::wgpu().iter().for_each(check_non_finite_values_stay_visible);
}

#[test]
fn views_of_rows_address_those_rows() {
    let mut cpu = Cpu::new(2);
    let mut m = cpu.memory(12);
    cpu.fill(view_mut(&mut m, 4, 3), 1.0);
    cpu.fill(view_mut(&mut m, 4, 3).rows(1, 2), 7.0);
    let mut out = [0.0; 12];
    cpu.read(view(&m, 4, 3), &mut out).unwrap();
    assert_eq!(out, [1., 1., 1., 7., 7., 7., 7., 7., 7., 1., 1., 1.]);
    let part: View<_> = view(&m, 4, 3).rows(2, 2);
    let mut out = [0.0; 6];
    cpu.read(part, &mut out).unwrap();
    assert_eq!(out, [7., 7., 7., 1., 1., 1.]);
    let scalar = format!("cpu-{}-f32", std::env::consts::ARCH);
    let class = cpu.class();
    assert!(["cpu-avx512-f32", "cpu-avx2-f32", "cpu-neon-f32", &scalar].contains(&class.as_str()), "{class}");
    // The reference sums its products in another order: its bits are of another class.
    assert_eq!(Cpu::reference(1).class(), class.replace("-f32", "-plain-f32"));
}

#[test]
fn a_weight_of_the_wrong_length_is_a_fault() {
    let fault = Cpu::new(1).weight(Frozen { rows: 3, cols: 5, dtype: Dtype::Bf16, bytes: &[0; 29] });
    assert!(fault.err().unwrap().to_string().contains("3 x 5 matrix takes 30 bytes, not 29"));
}
