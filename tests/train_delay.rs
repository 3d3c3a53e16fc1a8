//! Delayed gradients on a model of one line of arithmetic: the definition, and that stops and faults change nothing.

mod train_fake;

use finetune::model::layout::Layout;
use finetune::model::stage::{Microbatch, Sampling};
use finetune::numeric::rng::Stream;
use finetune::train::event::Event;
use finetune::train::island::Island;
use finetune::train::schedule::Schedule;
use finetune::train::stop::{Stop, Urgency};
use finetune::train::sum::Sums;
use finetune::train::{Compute, Effort, Local, Say, Scoring, TrainError};
use std::path::Path;
use train_fake::{Fake, Outcome, Setup};

fn setup<'a>(steps: u64, stop: &'a Stop, out: &Path) -> Setup<'a> {
    Setup { delay: 1, ..Setup::new(steps, stop, out) }
}

fn train(steps: u64, delay: u64) -> Outcome {
    let (stop, out) = (Stop::new(), tempfile::tempdir().unwrap());
    Setup { delay, ..Setup::new(steps, &stop, out.path()) }.run(&mut Fake::new())
}

fn point(row: u64, len: usize) -> Vec<f64> {
    let mut draw = Stream::new(&[3, row]);
    (0..len).map(|_| f64::from(draw.unit())).collect()
}

/// The mean over rows of p - point(row).
fn gradient(p: &[f64], rows: std::ops::Range<u64>) -> Vec<f64> {
    let count = (rows.end - rows.start) as f64;
    let mut mean = vec![0.0; p.len()];
    for row in rows {
        let point = point(row, p.len());
        mean.iter_mut().zip(p).zip(point).for_each(|((mean, p), point)| *mean += (p - point) / count);
    }
    mean
}

/// The parameters after each of `steps` steps, in f64 and by the textbook: step s has the gradient of the parameters after
/// step s - 1 - delay, or of the initial ones.
fn by_hand(steps: usize, delay: usize) -> Vec<Vec<f64>> {
    let schedule = Schedule { peak: 0.05, warmup: 1, total: steps as u64, ..Schedule::default() };
    let mut all: Vec<Vec<f64>> = vec![Fake::new().start().into_iter().map(f64::from).collect()];
    let len = all[0].len();
    let (mut m, mut v) = (vec![0.0; len], vec![0.0; len]);
    for step in 1..=steps {
        let with = &all[(step - 1).saturating_sub(delay)];
        let first = (step as u64 - 1) % 4 * 8;
        let mut g = gradient(with, first..first + 8);
        let norm = g.iter().map(|g| g * g).sum::<f64>().sqrt();
        g.iter_mut().for_each(|g| *g /= norm.max(1.0));
        let (rate, t) = (schedule.rate(step as u64), step as i32);
        let mut next = all[step - 1].clone();
        for i in 0..len {
            m[i] = 0.9 * m[i] + 0.1 * g[i];
            v[i] = 0.999 * v[i] + 0.001 * g[i] * g[i];
            let (m, v) = (m[i] / (1.0 - 0.9f64.powi(t)), v[i] / (1.0 - 0.999f64.powi(t)));
            next[i] -= rate * m / (v.sqrt() + 1e-8);
        }
        all.push(next);
    }
    all
}

fn off(run: &[f32], hand: &[f64]) -> f64 {
    run.iter().zip(hand).map(|(run, hand)| (f64::from(*run) - hand).abs()).fold(0.0, f64::max)
}

#[test]
fn gradients_are_those_of_two_steps_before() {
    for steps in [1, 2, 3, 9] {
        for delay in [0, 1] {
            let state = train(steps, delay).end.unwrap().state;
            let own = by_hand(steps as usize, delay as usize);
            let last = off(&state.parameters, own.last().unwrap());
            assert!(last < 2e-6, "{last} after {steps} steps, delay {delay}");
            // The first step is the same with and without delay, and the rate of the last one is 0.
            let other = off(&state.parameters, by_hand(steps as usize, 1 - delay as usize).last().unwrap());
            assert_eq!(other > 1e-3, steps > 2, "{other} after {steps} steps");
        }
    }
}

#[test]
fn evaluations_see_the_newest_parameters() {
    let outcome = train(3, 1);
    let hand = by_hand(3, 1);
    let eval = |event: &Event| match event {
        Event::Eval(eval) => Some((eval.step, eval.eval_loss)),
        _ => None,
    };
    let seen: Vec<(u64, f64)> = outcome.events.iter().filter_map(eval).collect();
    assert_eq!(seen.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [0, 3]);
    for (step, loss) in seen {
        let p = &hand[step as usize];
        let row = |row| p.iter().zip(point(row, p.len())).map(|(p, x)| (p - x).powi(2) / 2.0).sum::<f64>();
        let want = (100..106).map(row).sum::<f64>() / 6.0;
        assert!((loss - want).abs() < 1e-5, "{loss} after step {step}, not {want}");
    }
}

#[test]
fn a_resumed_run_has_the_parameters_before() {
    let whole = train(8, 1);
    for last in 1..8 {
        let (stop, out) = (Stop::new(), tempfile::tempdir().unwrap());
        let mut model = Fake::new();
        model.plant = Some(Box::new(|n, _, _| {
            if n == 4 * last {
                stop.ask(Urgency::AfterStep);
            }
        }));
        let end = setup(8, &stop, out.path()).run(&mut model).end.unwrap();
        assert_eq!((end.complete, end.state.step), (false, last as u64));
        let on = Stop::new();
        let undelayed = Setup { delay: 0, resume: true, ..setup(8, &on, out.path()) };
        let refused = undelayed.run(&mut Fake::new()).end.unwrap_err();
        assert!(refused.to_string().contains("delay was 1, is unset"), "{refused}");
        let resumed = Setup { resume: true, ..setup(8, &on, out.path()) }.run(&mut Fake::new());
        assert_eq!(resumed.bits(), whole.bits(), "stopped after step {last}");
    }
}

#[test]
fn a_bad_value_leaves_both_parameters_of_the_step_before() {
    let (stop, out) = (Stop::new(), tempfile::tempdir().unwrap());
    let mut model = Fake::new();
    model.plant = Some(Box::new(|n, _, values| {
        if n == 14 {
            values[5] = f32::NAN;
        }
    }));
    let error = setup(8, &stop, out.path()).run(&mut model).end.unwrap_err();
    assert!(matches!(error, TrainError::NonFinite { step: 4, microbatch: 1, .. }), "{error}");
    let resumed = Setup { resume: true, ..setup(8, &stop, out.path()) }.run(&mut Fake::new());
    assert!(resumed.kinds().starts_with("run3 "), "{}", resumed.kinds());
    assert_eq!(resumed.bits(), train(8, 1).bits());
}

/// Notes the steps that are announced before the one before them is complete.
struct Announced<'a> {
    local: Local<'a>,
    steps: Vec<u64>,
}

impl Compute for Announced<'_> {
    fn layout(&self) -> &Layout {
        self.local.layout()
    }
    fn classes(&self) -> Vec<String> {
        self.local.classes()
    }
    fn set_parameters(&mut self, step: u64, flat: &[f32]) -> Result<Option<()>, TrainError> {
        self.local.set_parameters(step, flat)
    }
    fn ahead(&mut self, work: Vec<Microbatch>) {
        assert_eq!(work.len(), 4);
        self.steps.push(work[0].step);
    }
    fn gradients(
        &mut self,
        step: u64,
        work: &[Microbatch],
        sums: &mut Sums,
        say: Say,
    ) -> Result<Option<Effort>, TrainError> {
        self.local.gradients(step, work, sums, say)
    }
    fn islands(
        &mut self,
        last: u64,
        work: &[Island],
        sums: &mut Sums,
        say: Say,
    ) -> Result<Option<Effort>, TrainError> {
        self.local.islands(last, work, sums, say)
    }
    fn losses(&mut self, step: u64, scoring: Scoring, say: Say) -> Result<Option<()>, TrainError> {
        self.local.losses(step, scoring, say)
    }
    fn answer(
        &mut self,
        step: u64,
        prompt: &[u32],
        sampling: &Sampling,
        say: Say,
    ) -> Result<Option<Vec<u32>>, TrainError> {
        self.local.answer(step, prompt, sampling, say)
    }
}

#[test]
fn steps_are_announced_unless_something_comes_between() {
    let announced = |delay| {
        let (stop, out) = (Stop::new(), tempfile::tempdir().unwrap());
        let mut model = Fake::new();
        let mut compute =
            Announced { local: Local::new(&mut model, &stop).delayed(delay), steps: Vec::new() };
        Setup { delay, ..Setup::new(7, &stop, out.path()) }.run_by(&mut compute).end.unwrap();
        compute.steps
    };
    // The loss is evaluated after steps 3, 6 and 7.
    assert_eq!(announced(1), [2, 3, 5, 6]);
    assert!(announced(0).is_empty());
}
