//! AdamW, clipping and schedules against torch and transformers (tests/golden/train/make_optim.py).

use finetune::model::layout::Layout;
use finetune::numeric::fixed;
use finetune::train::checkpoint::State;
use finetune::train::optim::{self, AdamW, Options};
use finetune::train::optimizer_step;
use finetune::train::schedule::{Decay, Schedule};
use finetune::train::sum::{Scalars, Sums};
use serde_json::Value;

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn check(case: &Value) {
    let number = |key: &str| case[key].as_f64().unwrap();
    let decay: Decay = case["decay"].as_str().unwrap().parse().unwrap();
    let (warmup, total) = (number("warmup") as u64, number("total") as u64);
    let (floor, decay_steps) = (number("floor"), number("decay_steps") as u64);
    let schedule = Schedule { peak: number("peak"), decay, warmup, total, floor, decay_steps };
    let beta = |i: usize| case["betas"][i].as_f64().unwrap();
    let options = Options {
        beta1: beta(0),
        beta2: beta(1),
        weight_decay: number("weight_decay"),
        max_grad_norm: number("max_grad_norm"),
        ..Options::default()
    };
    let mut parameters = numbers(&case["start"]);
    let mut optimizer = AdamW::new(options, parameters.len());
    for (i, step) in case["steps"].as_array().unwrap().iter().enumerate() {
        let at = format!("{} step {}", case["decay"], i + 1);
        let rate = schedule.rate(i as u64 + 1);
        assert!((rate - step["rate"].as_f64().unwrap()).abs() <= 1e-17, "{at}: rate {rate}");

        let mut clipped = numbers(&step["gradient"]);
        let norm = optim::norm(&clipped);
        optim::clip(&mut clipped, norm, options.max_grad_norm);
        let theirs = numbers(&step["clipped"]);
        if let Some(want) = step["norm"].as_f64() {
            assert!((norm - want).abs() <= 1e-6 * want, "{at}: norm {norm}, {want}");
        }
        // torch sums the norm in f32: its coefficient differs by a few units in the last place.
        for (a, b) in clipped.iter().zip(&theirs) {
            assert!((a - b).abs() <= 1e-6 * b.abs(), "{at}: clipped {a}, {b}");
        }
        // From torch's own clipped gradient the update is equal to the bit.
        optimizer.update(&mut parameters, &theirs, rate);
        assert_eq!(bits(&parameters), bits(&numbers(&step["parameters"])), "{at}: parameters");
    }
    assert_eq!(bits(&optimizer.exp_avg), bits(&numbers(&case["exp_avg"])), "first moments");
    assert_eq!(bits(&optimizer.exp_avg_sq), bits(&numbers(&case["exp_avg_sq"])), "second moments");
}

#[test]
fn adamw_is_torch_to_the_bit() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("golden/train/optim.json")).unwrap();
    assert_eq!(cases.len(), 7);
    cases.iter().for_each(check);
}

/// A step of a run, with B at a rate of its own, against PEFT's `create_loraplus_optimizer`.
#[test]
fn b_at_its_own_rate_is_peft_to_the_bit() {
    let case: Value = serde_json::from_str(include_str!("golden/train/loraplus.json")).unwrap();
    let mut layout = Layout::default();
    for (name, values) in case["start"].as_object().unwrap() {
        layout.push(name.replace(".default", ""), 1, values.as_array().unwrap().len());
    }
    assert_eq!(layout.places().of_b.len(), 2);
    // Objects of serde_json keep the order of the file.
    let flat = |v: &Value| v.as_object().unwrap().values().flat_map(numbers).collect::<Vec<f32>>();
    let number = |key: &str| case[key].as_f64().unwrap();
    let options = Options {
        ratio_of_b: number("ratio"),
        weight_decay: number("weight_decay"),
        max_grad_norm: 0.0,
        ..Options::default()
    };
    let mut state = State::new(flat(&case["start"]), options);
    for step in case["steps"].as_array().unwrap() {
        let mut sums = Sums::new(layout.len());
        sums.add_gradient(&flat(&step["gradient"]), fixed::cap(1)).unwrap();
        sums.set_scalars(Scalars { weight: 1 << fixed::FRACTION_BITS, ..Scalars::default() });
        let rates = (1.0, number("rate"));
        optimizer_step::update(&mut state, &sums, rates, &layout.places(), &mut |_| {}).unwrap();
        assert_eq!(bits(&state.parameters), bits(&flat(&step["parameters"])));
    }
}
