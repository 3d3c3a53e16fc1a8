//! The training loop on a model of one line of arithmetic: order, faults, signals, events.

mod train_fake;

use finetune::model::stage::Model;
use finetune::train::event::Event;
use finetune::train::stop::{Stop, Urgency};
use finetune::train::{Compute, Local};
use std::sync::Arc;
use std::time::{Duration, Instant};
use train_fake::{Fake, Outcome, Rows, Setup};

fn train(model: &mut dyn Model, work: Rows, stop: &Stop) -> Outcome {
    let out = tempfile::tempdir().unwrap();
    Setup { work, ..Setup::new(0, stop, out.path()) }.run(model)
}

fn train_by(compute: &mut dyn Compute, work: Rows, stop: &Stop) -> Outcome {
    let out = tempfile::tempdir().unwrap();
    Setup { work, ..Setup::new(0, stop, out.path()) }.run_by(compute)
}

#[test]
fn the_order_of_microbatches_does_not_change_a_bit() {
    let stop = Stop::new();
    let a = train(&mut Fake::new(), Rows::new(9), &stop);
    let b = train(&mut Fake::new(), Rows { order: [2, 0, 3, 1], ..Rows::new(9) }, &stop);
    assert_eq!(a.bits(), b.bits());
    assert_eq!(a.losses(), b.losses());
    assert!(a.losses()[8] < a.losses()[0] * 0.9, "it learns: {:?}", a.losses());
    assert_ne!(a.bits(), Fake::new().start().iter().map(|p| p.to_bits()).collect::<Vec<_>>());
}

#[test]
fn events_come_in_order() {
    let outcome = train(&mut Fake::new(), Rows::new(4), &Stop::new());
    let want = "run0 eval0 step1 step2 step3 eval3 step4 eval4 speed4 checkpoint4";
    assert_eq!(outcome.kinds(), want);
}

#[test]
fn bad_value_names_step_tensor_rows_and_changes_nothing() {
    // The second microbatch of step 3: forward pass 10, rows 18 and 19; element 16 belongs to B.
    for value in [f32::NAN, f32::INFINITY, -3e6] {
        let mut model = Fake::new();
        model.plant = Some(Box::new(move |n, _, gradient| {
            if n == 10 {
                gradient[16] = value;
            }
        }));
        let (stop, out) = (Stop::new(), tempfile::tempdir().unwrap());
        let outcome = Setup::new(9, &stop, out.path()).run(&mut model);
        let resumed = Setup { resume: true, ..Setup::new(9, &stop, out.path()) }.run(&mut Fake::new());
        assert_eq!(resumed.losses().len(), 7, "step 2 was saved, and the run goes on from it");
        assert_eq!(resumed.bits(), train(&mut Fake::new(), Rows::new(9), &stop).bits());
        let error = outcome.end.unwrap_err();
        assert_eq!(error.exit_code(), 3);
        let text = error.to_string();
        for part in ["step 3", "q.lora_B.weight", "microbatch 1", "18, 19", "step 2"] {
            assert!(text.contains(part), "{text} should name {part}");
        }
        assert!(!text.contains('\n'));
        let Some(Event::Fault(halt)) = outcome.events.last() else { panic!("a fault is an event") };
        assert_eq!((halt.step, &halt.reason), (2, &text));
    }
}

#[test]
fn stopping_now_drops_the_partial_sums() {
    let stop = Stop::new();
    let mut model = Fake::new();
    // After two microbatches of step 3.
    model.plant = Some(Box::new(|n, _, _| {
        if n == 10 {
            stop.ask(Urgency::Now);
        }
    }));
    let outcome = train(&mut model, Rows::new(9), &stop);
    let end = outcome.end.unwrap();
    assert_eq!((end.complete, end.state.step), (false, 2));
    let whole = train(&mut Fake::new(), Rows::new(9), &Stop::new());
    let Some(Event::Step(second)) = whole.events.iter().rfind(|e| matches!(e, Event::Step(s) if s.step == 2))
    else {
        panic!()
    };
    let Some(Event::Step(last)) = outcome.events.iter().rfind(|e| matches!(e, Event::Step(_))) else {
        panic!()
    };
    assert_eq!((last.loss, last.grad_norm), (second.loss, second.grad_norm));
}

#[test]
fn stopping_after_the_step_finishes_it() {
    let stop = Stop::new();
    let mut model = Fake::new();
    model.plant = Some(Box::new(|n, _, _| {
        if n == 10 {
            assert_eq!(stop.ask(Urgency::AfterStep), Urgency::Run);
        }
    }));
    let outcome = train(&mut model, Rows::new(9), &stop);
    let end = outcome.end.unwrap();
    assert_eq!((end.complete, end.state.step, model.forwards), (false, 3, 12));
    let kinds = "run0 eval0 step1 step2 step3 speed3 checkpoint3";
    assert_eq!(
        Outcome { end: Ok(end), events: outcome.events }.kinds(),
        kinds,
        "step 3's evaluation is left"
    );
    assert_eq!(
        stop.ask(Urgency::AfterStep),
        Urgency::AfterStep,
        "a second SIGINT is distinguished from the first"
    );
}

#[test]
fn a_model_on_its_own_thread_gives_the_same_bits() {
    let stop = Stop::new();
    let here = train(&mut Fake::new(), Rows::new(9), &stop);
    let there = train_by(&mut Local::apart(Box::new(Fake::new()), &stop), Rows::new(9), &stop);
    assert_eq!(here.bits(), there.bits());
    assert_eq!(here.kinds(), there.kinds());
}

#[test]
fn stopping_now_does_not_wait_for_a_microbatch() {
    let stop = Arc::new(Stop::new());
    let mut model = Fake::new();
    let flag = Arc::clone(&stop);
    model.plant = Some(Box::new(move |n, _, _| {
        if n == 10 {
            flag.ask(Urgency::Now);
            std::thread::sleep(Duration::from_secs(30));
        }
    }));
    let began = Instant::now();
    let outcome = train_by(&mut Local::apart(Box::new(model), &stop), Rows::new(9), &stop);
    let contract: serde_json::Value =
        serde_yaml::from_str(include_str!("../contracts/F-FT-004.yaml")).unwrap();
    let allowed = Duration::from_secs_f64(contract["tolerance"]["seconds"].as_f64().unwrap());
    assert!(began.elapsed() < allowed, "{:?}", began.elapsed());
    assert_eq!(outcome.kinds(), "run0 eval0 step1 step2 speed2 checkpoint2");
    assert!(!outcome.end.unwrap().complete);
}

#[test]
fn a_model_that_panics_is_a_fault() {
    let stop = Stop::new();
    let mut model = Fake::new();
    model.plant = Some(Box::new(|n, _, _| assert!(n < 10, "planted")));
    let outcome = train_by(&mut Local::apart(Box::new(model), &stop), Rows::new(9), &stop);
    let error = outcome.end.unwrap_err();
    assert!(error.to_string().contains("its thread died"), "{error}");
    assert_eq!(error.exit_code(), 1);
}
