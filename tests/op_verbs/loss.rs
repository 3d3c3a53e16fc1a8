//! cross_entropy.

use crate::bench::{Mat, Out};
use crate::rig::{Rig, Rigged, each};
use finetune::backend::{Cpu, Wgpu};

fn losses(logits: &Mat, targets: &[u32], weights: Option<&Mat>) -> Mat {
    let mut out = Mat::zeros(logits.rows, 1);
    for (i, row) in logits.v.chunks(logits.cols).enumerate() {
        let m = row.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
        let lse = m + row.iter().map(|v| (v - m).exp()).sum::<f64>().ln();
        let target = targets[i] as usize;
        out.v[i] = weights.map_or(1.0, |w| w.v[target]) * (lse - row[target]);
    }
    out
}

fn check_cross_entropy_and_its_gradient<B: Rigged>(rig: &Rig<B>) {
    for n in [1, 3, 17, 129] {
        for (vocab, spread) in [(2, 1.0), (7, 30.0), (131, 5.0), (1537, 80.0)] {
            for weighted in [None, Some(Mat::random(1, vocab, 9).map(|v| v + 1.5))] {
                let name = format!("cross_entropy {n}x{vocab} weighted {}", weighted.is_some());
                let logits = Mat::random(n, vocab, 1).map(|v| v * spread);
                let targets: Vec<u32> = (0..n).map(|i| (i * 13 % vocab) as u32).collect();
                let inputs: Vec<&Mat> = weighted.iter().collect();
                let outs = [Out::Poison(n, 1), Out::Holds(logits.clone())];
                let got = rig.run(&name, &inputs, &outs, |cpu, i, o| {
                    let ids = cpu.ids(&targets);
                    let [losses, logits] = o else { unreachable!() };
                    cpu.cross_entropy(losses.view_mut(), logits.view_mut(), &ids, i.first().copied());
                });
                rig.close(&name, &got[0], &losses(&logits, &targets, weighted.as_ref()).v, 1e-6);
                let ones = Mat { rows: n, cols: 1, v: vec![1.0; n] };
                let f = |x: &[Mat]| losses(&x[0], &targets, weighted.as_ref());
                rig.close_grad(&name, &got[1], (&[&logits], 0), (&ones, &f), 1e-5);
            }
        }
    }
}

#[test]
fn cross_entropy_and_its_gradient() {
    each::<Cpu>(check_cross_entropy_and_its_gradient);
}

#[test]
fn cross_entropy_and_its_gradient_on_wgpu() {
    each::<Wgpu>(check_cross_entropy_and_its_gradient);
}

fn check_non_finite_values_stay_visible<B: Rigged>(rig: &Rig<B>) {
    for bad in [f64::NAN, f64::INFINITY] {
        let mut logits = Mat::random(1, 131, 1);
        logits.v[77] = bad;
        let outs = [Out::Poison(1, 1), Out::Holds(logits)];
        let got = rig.run("cross_entropy", &[], &outs, |cpu, _, o| {
            let ids = cpu.ids(&[3]);
            let [losses, logits] = o else { unreachable!() };
            cpu.cross_entropy(losses.view_mut(), logits.view_mut(), &ids, None);
        });
        assert!(!got[0][0].is_finite());
    }
}

#[test]
fn non_finite_values_stay_visible() {
    each::<Cpu>(check_non_finite_values_stay_visible);
}

#[test]
fn non_finite_values_stay_visible_on_wgpu() {
    each::<Wgpu>(check_non_finite_values_stay_visible);
}
