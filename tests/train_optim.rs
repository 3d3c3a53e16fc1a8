//! AdamW, clipping and schedules against torch and transformers (tests/golden/train/make_optim.py).

use finetune::train::optim::{self, AdamW, Options};
use finetune::train::schedule::{Decay, Schedule};
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
