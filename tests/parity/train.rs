//! Training of a case: every loss, every gradient norm and the final adapter are compared with PEFT's.

#![allow(dead_code)] // Each test file uses its own part.

use super::case::Case;
use finetune::model::stage::{Output, Stage, Ticket, Want};
use finetune::train::optim::{self, AdamW, Options};
use finetune::train::schedule::Schedule;

/// Largest deviations from PEFT: of each loss and gradient norm (relative), and of each value of the adapter
/// (absolute).
pub struct Bounds {
    pub loss: f64,
    pub norm: f64,
    pub adapter: f32,
}

pub const CPU: Bounds = Bounds { loss: 1e-4, norm: 1e-3, adapter: 2e-4 };
/// The bound of the loss is wider; the others equal the CPU's.
pub const WGPU: Bounds = Bounds { loss: 1e-3, norm: 1e-3, adapter: 2e-4 };

/// The worst deviations of one case on a stage with its model: loss, norm (relative), adapter (absolute).
pub fn train(case: &Case, stage: &mut dyn Stage, bounds: &Bounds) -> (f64, f64, f32) {
    trained(case, stage, bounds).0
}

/// The same, and the final adapter.
pub fn trained(case: &Case, stage: &mut dyn Stage, bounds: &Bounds) -> ((f64, f64, f32), Vec<f32>) {
    let dir = &case.dir;
    let mut parameters = case.adapter("adapter_init");
    let mut adamw = AdamW::new(Options::default(), parameters.len());
    let (steps, batch) = (case.number("steps") as u64, case.number("batch") as usize);
    let schedule = Schedule {
        peak: case.number("lr"),
        warmup: case.number("warmup_steps") as u64,
        total: steps,
        ..Schedule::default()
    };
    let mut worst = (0f64, 0f64, 0f32);
    for step in 0..steps as usize {
        let want = &case.expected["log"][step];
        stage.set_parameters(&parameters).unwrap();
        let (mut gradient, mut loss, mut weight) = (vec![0f32; parameters.len()], 0.0, 0.0);
        for (from, n) in [(0, batch / 2), (batch / 2, batch - batch / 2)] {
            let mut part = vec![f32::NAN; parameters.len()];
            let microbatch = case.microbatch(step * batch + from, n);
            let Output::Loss(sums) = stage.forward(&microbatch, None, Want::Gradient(Ticket(0))).unwrap()
            else {
                panic!("a whole model gives a loss");
            };
            assert_eq!(stage.backward(Ticket(0), None, &mut part).unwrap(), None);
            loss += sums.loss;
            weight += sums.weight;
            gradient.iter_mut().zip(part).for_each(|(g, p)| *g += p);
        }
        gradient.iter_mut().for_each(|g| *g = (f64::from(*g) / weight) as f32);
        let norm = optim::norm(&gradient);
        optim::clip(&mut gradient, norm, case.number("clip"));
        adamw.update(&mut parameters, &gradient, schedule.rate(step as u64 + 1));

        let relative = |got: f64, key: &str| (got / want[key].as_f64().unwrap() - 1.0).abs();
        let (l, n) = (relative(loss / weight, "loss"), relative(norm, "grad_norm"));
        assert!(l <= bounds.loss, "{dir:?} step {}: loss {} off by {l:e}", step + 1, loss / weight);
        assert!(n <= bounds.norm, "{dir:?} step {}: gradient norm {norm} off by {n:e}", step + 1);
        assert_eq!(want["tokens"].as_f64(), Some(weight), "{dir:?} step {}: token count", step + 1);
        worst = (worst.0.max(l), worst.1.max(n), worst.2);
    }
    for (index, (got, want)) in parameters.iter().zip(case.adapter("adapter_final")).enumerate() {
        let off = (got - want).abs();
        let name = || case.layout.at(index).map(|e| e.name.clone());
        assert!(off <= bounds.adapter, "{dir:?} {:?}: {got} for {want}", name());
        worst.2 = worst.2.max(off);
    }
    (worst, parameters)
}
