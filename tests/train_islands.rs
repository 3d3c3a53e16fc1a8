//! Islands on a model of one line of arithmetic: what an exchange computes, and that faults and signals change nothing.

mod train_fake;

use finetune::numeric::fixed;
use finetune::train::checkpoint::State;
use finetune::train::island::{self, Islands, Outer};
use finetune::train::optim::Options;
use finetune::train::stop::{Stop, Urgency};
use finetune::train::sum::Sums;
use serde_json::Value;
use train_fake::{Fake, Outcome, Rows, Setup};

fn train(model: &mut Fake, work: Rows, islands: Option<(usize, u64)>, stop: &Stop) -> Outcome {
    let out = tempfile::tempdir().unwrap();
    let islands = islands.map(|(count, inner)| Islands { count, inner, outer: Outer::MEAN });
    Setup { work, islands, ..Setup::new(0, stop, out.path()) }.run(model)
}

fn state(outcome: Outcome) -> State {
    outcome.end.unwrap().state
}

/// The distance of a value from the mean of two others.
fn off(mean: f32, of: (f32, f32)) -> f32 {
    (mean - (of.0 + of.1) / 2.0).abs()
}

#[test]
fn an_exchange_is_the_mean_of_two_runs_apart() {
    let stop = Stop::new();
    let apart = |i| state(train(&mut Fake::new(), Rows { every: (2, i), ..Rows::new(3) }, None, &stop));
    let (a, b) = (apart(0), apart(1));
    let both = state(train(&mut Fake::new(), Rows::new(3), Some((2, 3)), &stop));
    assert_eq!((both.step, both.optimizer.step), (3, 3));
    for i in 0..both.parameters.len() {
        let (p, m) = (&both.parameters, &both.optimizer.exp_avg);
        assert!(off(p[i], (a.parameters[i], b.parameters[i])) < 1e-6, "parameter {i}");
        assert!(off(m[i], (a.optimizer.exp_avg[i], b.optimizer.exp_avg[i])) < 1e-6, "first moment {i}");
        let root = |state: &State| state.optimizer.exp_avg_sq[i].sqrt();
        assert!(off(root(&both), (root(&a), root(&b))) < 1e-6, "second moment {i}");
        assert!((a.parameters[i] - b.parameters[i]).abs() > 1e-5, "the two runs differ");
    }
}

/// Without rounding of what travels an exchange would change nothing.
#[test]
fn one_island_takes_the_steps_of_a_run() {
    let stop = Stop::new();
    let run = state(train(&mut Fake::new(), Rows::new(9), None, &stop));
    let island = state(train(&mut Fake::new(), Rows::new(9), Some((1, 4)), &stop));
    let values = run.parameters.iter().zip(&island.parameters);
    let off = values.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(off > 0.0 && off < 2e-6, "{off}");
}

#[test]
fn steps_are_reported_by_exchanges() {
    let outcome = train(&mut Fake::new(), Rows::new(7), Some((2, 2)), &Stop::new());
    let want = "run0 eval0 step2 step4 eval4 step6 eval6 step7 eval7 checkpoint7";
    assert_eq!(outcome.kinds(), want);
    let losses = outcome.losses();
    assert!(losses[3] < losses[0], "it learns: {losses:?}");
}

/// More islands than microbatches: some take no step.
#[test]
fn an_island_without_microbatches_stays() {
    let stop = Stop::new();
    let four = state(train(&mut Fake::new(), Rows::new(1), Some((4, 1)), &stop));
    let five = state(train(&mut Fake::new(), Rows::new(1), Some((5, 1)), &stop));
    let start = Fake::new().start();
    for ((start, four), five) in start.iter().zip(&four.parameters).zip(&five.parameters) {
        assert!(((five - start) - (four - start) * 0.8).abs() < 1e-6);
    }
}

/// The outer optimizer of DiLoCo.
const NESTEROV: Outer = Outer { rate: 0.7, momentum: 0.9 };

#[test]
fn outer_steps_are_torch_to_the_bit() {
    let numbers = |value: &Value| -> Vec<f32> {
        value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
    };
    let cases: Vec<Value> = serde_json::from_str(include_str!("golden/train/outer.json")).unwrap();
    assert_eq!(cases.len(), 4);
    for case in cases {
        let number = |name: &str| case[name].as_f64().unwrap();
        let outer = Outer { rate: number("rate"), momentum: number("momentum") };
        let mut state = State::new(numbers(&case["start"]), Options::default());
        let len = state.parameters.len();
        state.velocity = outer.velocity(len);
        for (index, step) in case["steps"].as_array().unwrap().iter().enumerate() {
            let change = numbers(&step["change"]);
            // Two islands whose mean is the change, with moments of 1 and 3, and roots of 1 and 3.
            let mut sums = Sums::new(island::VECTORS * len);
            for (apart, moment) in [(0.5, 1.0), (1.5, 3.0)] {
                let changes = change.iter().map(|change| change * apart);
                let vectors: Vec<f32> = changes.chain(vec![moment; 2 * len]).collect();
                sums.add_gradient(&vectors, fixed::cap(2)).unwrap();
            }
            let norm = island::merge(&mut state, &sums, (Islands { count: 2, inner: 5, outer }, 5));
            assert_eq!(state.parameters, numbers(&step["parameters"]), "{outer:?}, step {index}");
            let squares = change.iter().map(|change| f64::from(*change).powi(2)).sum::<f64>();
            assert!((norm - squares.sqrt()).abs() < 1e-12, "{norm}");
        }
        assert_eq!(state.velocity, numbers(&case["velocity"]));
        assert_eq!((state.optimizer.exp_avg, state.optimizer.exp_avg_sq), (vec![2.0; len], vec![4.0; len]));
    }
}

/// The first exchange moves by rate * (1 + momentum) times the mean change.
#[test]
fn the_outer_step_of_a_run_moves_further_than_the_mean() {
    let stop = Stop::new();
    let run = |outer| {
        let (islands, out) = (Some(Islands { count: 2, inner: 3, outer }), tempfile::tempdir().unwrap());
        state(Setup { islands, ..Setup::new(3, &stop, out.path()) }.run(&mut Fake::new()))
    };
    let (mean, outer) = (run(Outer::MEAN), run(NESTEROV));
    assert_eq!((mean.velocity.len(), outer.velocity.len()), (0, mean.parameters.len()));
    for ((start, mean), outer) in Fake::new().start().iter().zip(&mean.parameters).zip(&outer.parameters) {
        assert!((outer - start - (mean - start) * 0.7 * 1.9).abs() < 1e-6, "{start} {mean} {outer}");
    }
    assert_eq!(mean.optimizer, outer.optimizer, "moments are the means");
}

#[test]
fn a_stopped_exchange_is_taken_again() {
    for outer in [Outer::MEAN, NESTEROV] {
        let islands = Some(Islands { count: 2, inner: 2, outer });
        let (stop, out, whole) = (Stop::new(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let want = Setup { islands, ..Setup::new(8, &stop, whole.path()) }.run(&mut Fake::new());
        let mut model = Fake::new();
        // In the second island of the third exchange.
        model.plant = Some(Box::new(|n, _, _| {
            if n == 22 {
                stop.ask(Urgency::Now);
            }
        }));
        let outcome = Setup { islands, ..Setup::new(8, &stop, out.path()) }.run(&mut model);
        let end = outcome.end.unwrap();
        assert_eq!((end.complete, end.state.step), (false, 4));
        let on = Stop::new();
        let resume =
            |islands| Setup { islands, resume: true, ..Setup::new(8, &on, out.path()) }.run(&mut Fake::new());
        // A checkpoint without velocity resumes only without momentum, and the other way round.
        let other = if outer == Outer::MEAN { NESTEROV } else { Outer::MEAN };
        let refused = resume(Some(Islands { count: 2, inner: 2, outer: other })).end.unwrap_err();
        assert_eq!(refused.exit_code(), 78);
        assert!(refused.to_string().contains("outer_momentum was"), "{refused}");
        let resumed = resume(islands);
        assert_eq!(resumed.bits(), want.bits());
        assert_eq!(state(resumed).velocity, state(want).velocity);
    }
}

#[test]
fn a_bad_value_names_its_island_and_changes_nothing() {
    // Each exchange has 12 passes, the second island's second step the last two of its six: pass 21 is of step 5.
    for value in [f32::NAN, f32::NEG_INFINITY, 9e6] {
        let mut model = Fake::new();
        model.plant = Some(Box::new(move |n, _, gradient| {
            if n >= 21 && n % 12 == 9 {
                gradient[16] = value;
            }
        }));
        let (stop, out) = (Stop::new(), tempfile::tempdir().unwrap());
        let islands = Some(Islands { count: 2, inner: 3, outer: Outer::MEAN });
        let outcome = Setup { islands, ..Setup::new(9, &stop, out.path()) }.run(&mut model);
        let error = outcome.end.unwrap_err();
        assert_eq!(error.exit_code(), 3);
        let text = error.to_string();
        let place = "steps 4 to 6: the gradient of q.lora_B.weight in step 5 became";
        for part in [place, "in island 1 (rows", "the parameters of step 3 stand"] {
            assert!(text.contains(part), "{text} should name {part}");
        }
        let on = Stop::new();
        let again = Setup { islands, resume: true, ..Setup::new(9, &on, out.path()) }.run(&mut Fake::new());
        assert_eq!(again.bits(), train(&mut Fake::new(), Rows::new(9), Some((2, 3)), &on).bits());
    }
}
