//! Islands on a model of one line of arithmetic: what an exchange computes, and that faults and signals change nothing.

mod train_fake;

use finetune::train::checkpoint::State;
use finetune::train::island::Islands;
use finetune::train::stop::{Stop, Urgency};
use train_fake::{Fake, Outcome, Rows, Setup};

fn train(model: &mut Fake, work: Rows, islands: Option<(usize, u64)>, stop: &Stop) -> Outcome {
    let out = tempfile::tempdir().unwrap();
    let islands = islands.map(|(count, inner)| Islands { count, inner });
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

#[test]
fn a_stopped_exchange_is_taken_again() {
    let want = train(&mut Fake::new(), Rows::new(8), Some((2, 2)), &Stop::new()).bits();
    let (stop, out) = (Stop::new(), tempfile::tempdir().unwrap());
    let islands = Some(Islands { count: 2, inner: 2 });
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
    let resumed = Setup { islands, resume: true, ..Setup::new(8, &on, out.path()) }.run(&mut Fake::new());
    assert_eq!(resumed.bits(), want);
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
        let islands = Some(Islands { count: 2, inner: 3 });
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
