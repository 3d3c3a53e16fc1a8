//! Runs cases on devices: outputs between guard words, over NaN, with equal bits on every variant of a device, against
//! the formula and, for gradients, against central differences; and prints which device has run which op.

use crate::op_cases::*;
use finetune::backend::Fault;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Smaller expected values count as this large: inputs are of size one, and terms that cancel leave their rounding
/// errors.
const FLOOR: f64 = 0.02;

/// The same in a class that rounds factors to bf16: terms of size one are off by 2^-8, which is the bound of this.
const ROUNDED_FLOOR: f64 = 0.25;

/// Lends a backend.
pub type Lend<B> = Box<dyn Fn(&mut dyn FnMut(&mut B)) + Send + Sync>;

/// One device, in variants that give the same bits.
pub struct Rig<B> {
    pub name: String,
    pub variants: Vec<Lend<B>>,
    /// The tightest bound that is checked, relative to the largest value.
    pub least: f64,
    /// The bound of ops whose factors the class rounds to 16 bits, if it does.
    pub rounded: Option<f64>,
    /// Cases above this cost are left out.
    pub most: usize,
}

/// The expected numbers of a case, computed once for all devices.
struct Reference {
    want: Vec<Mat>,
    /// For each gradient, its expected values at some elements of its output.
    gradients: Vec<Vec<(usize, f64)>>,
    /// Sums of magnitudes of terms, or nothing.
    terms: Vec<Mat>,
}

/// Runs the cases of every op on every device, and prints a table of ops and devices: cases that ran, of how many, and
/// the largest error as a part of its bound, and seconds. Panics with the name of every op that fails.
pub fn check<B: Device>(rigs: &[Rig<B>]) {
    let (next, lines, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    let worker = || {
        while let Some(&op) = Op::ALL.get(next.fetch_add(1, Ordering::Relaxed)) {
            let began = Instant::now();
            match catch_unwind(AssertUnwindSafe(|| check_op(op, rigs))) {
                Ok(cells) => {
                    let seconds = began.elapsed().as_secs_f64();
                    let line = format!("{:<20}{cells} {seconds:>8.1} s", format!("{op:?}"));
                    lines.lock().unwrap().push(line);
                }
                Err(_) => failed.lock().unwrap().push(op),
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(worker))));
    let (mut lines, failed) = (lines.into_inner().unwrap(), failed.into_inner().unwrap());
    lines.sort();
    rigs.iter().enumerate().for_each(|(i, rig)| println!("column {}: {}", i + 1, rig.name));
    println!("{}", lines.join("\n"));
    assert!(failed.is_empty(), "ops with a failing case: {failed:?}");
}

/// A cell for each device.
fn check_op<B: Device>(op: Op, rigs: &[Rig<B>]) -> String {
    let (mut ran, mut worst, mut all) = (vec![0; rigs.len()], vec![0.0f64; rigs.len()], 0);
    for case in cases::<B>(op, Set::Odd) {
        let mut references = [None, None];
        for (i, rig) in rigs.iter().enumerate().filter(|(_, rig)| rig.takes(&case)) {
            let rounded = rig.rounded.is_some();
            let reference = &mut references[usize::from(rounded)];
            let reference = reference.get_or_insert_with(|| Reference::of(&case, rounded));
            worst[i] = worst[i].max(rig.check(op, &case, reference));
            ran[i] += 1;
        }
        all += 1;
    }
    let used = USED_BY_ALL.contains(&op);
    let cell =
        |i: usize| if used { "used by all".into() } else { format!("{}/{all} {:.2}", ran[i], worst[i]) };
    assert!(used || ran.iter().all(|n| *n > 0), "{op:?}: a device runs no case");
    (0..rigs.len()).map(|i| format!("{:>16}", cell(i))).collect()
}

impl Reference {
    /// With factors that a class rounds to bf16, or as they are.
    fn of<B: Device>(case: &Case<B>, rounded: bool) -> Reference {
        let round = |m: &Mat| m.map(|x| half::bf16::from_f32(x as f32).to_f64());
        let factors = rounded && matches!(case.rounds, Rounds::Factors);
        let kept = |m: &Mat| if factors { round(m) } else { m.clone() };
        let old: Vec<Mat> = case.outs.iter().map(Out::old).collect();
        let w: Vec<Mat> = case.frozen.iter().map(|w| kept(&w.values)).collect();
        let i: Vec<Mat> = case.inputs.iter().map(kept).collect();
        let known = Known { i: &i, w: &w, old: &old };
        let terms = match &case.rounds {
            Rounds::Terms(terms) if rounded => terms(&known),
            _ => Vec::new(),
        };
        // The differences are those of numbers that are not rounded.
        let exact = !factors && terms.is_empty();
        let gradients = case.gradients.iter().filter(|_| exact).map(Gradient::differences).collect();
        Reference { want: (case.want)(&known), gradients, terms }
    }
}

impl Gradient {
    /// Central differences of sum(dy * formula(x)), at a sample of elements.
    fn differences(&self) -> Vec<(usize, f64)> {
        let (mut x, n) = (self.x.clone(), self.x[self.which].v.len());
        let mut draws = finetune::numeric::rng::Stream::new(&[n as u64, self.which as u64]);
        let places: Vec<usize> = match n {
            0..=24 => (0..n).collect(),
            _ => (0..24).map(|_| draws.below(n as u32) as usize).collect(),
        };
        let loss = |x: &[Mat]| (self.formula)(x).v.iter().zip(&self.dy.v).map(|(a, b)| a * b).sum::<f64>();
        let h = 1e-4;
        let mut at = |i: usize| {
            let old = x[self.which].v[i];
            x[self.which].v[i] = old + h;
            let above = loss(&x);
            x[self.which].v[i] = old - h;
            let below = loss(&x);
            x[self.which].v[i] = old;
            (self.from + i, (above - below) / (2.0 * h))
        };
        places.into_iter().map(&mut at).collect()
    }
}

impl<B: Device> Rig<B> {
    fn takes(&self, case: &Case<B>) -> bool {
        case.cost <= self.most
    }

    /// The largest error, as a part of its bound.
    fn check(&self, op: Op, case: &Case<B>, reference: &Reference) -> f64 {
        let name = format!("{op:?} {} on {}", case.name, self.name);
        let got = self.run(&name, case);
        let mut worst = 0.0f64;
        assert_eq!(got.len(), reference.want.len(), "{name}: a formula for every output");
        for (i, (got, want)) in got.iter().zip(&reference.want).enumerate() {
            let name = format!("{name}, output {i}");
            let usual = self.bound(case, case.bounds[i], &want.v);
            let terms = reference.terms.get(i).filter(|terms| !terms.v.is_empty());
            let allowed = |i: usize| terms.map_or(usual, |terms| terms.v[i] / 256.0 + 1e-5);
            worst = worst.max(within(&name, got, &want.v, &allowed));
        }
        for (gradient, places) in case.gradients.iter().zip(&reference.gradients) {
            let from: Vec<f32> = places.iter().map(|(i, _)| got[gradient.out][*i]).collect();
            let want: Vec<f64> = places.iter().map(|(_, want)| *want).collect();
            let name = format!("{name}, gradient of input {}", gradient.which);
            let bound = self.bound(case, gradient.bound, &want);
            worst = worst.max(within(&name, &from, &want, &|_| bound));
        }
        for &(a, b) in &case.same {
            assert!(bits(&got[a]) == bits(&got[b]), "{name}: outputs {a} and {b} have other bits");
        }
        worst
    }

    /// The outputs, after checks of guard words, of inputs, and of equal bits on every variant.
    pub fn run(&self, name: &str, case: &Case<B>) -> Vec<Vec<f32>> {
        let mut first: Option<Vec<Vec<f32>>> = None;
        for variant in &self.variants {
            let mut got = Vec::new();
            variant(&mut |b| got = case.run(b, name).unwrap_or_else(|fault| panic!("{name}: {fault}")));
            let all = |x: &Vec<Vec<f32>>| -> Vec<u32> { x.iter().flat_map(|x| bits(x)).collect() };
            match &first {
                None => first = Some(got),
                Some(first) => assert!(all(first) == all(&got), "{name}: another variant gives other bits"),
            }
        }
        first.unwrap()
    }

    /// The largest error, in the unit of the values.
    fn bound(&self, case: &Case<B>, bound: f64, want: &[f64]) -> f64 {
        match self.rounded {
            Some(rounded) if matches!(case.rounds, Rounds::Parts) => {
                rounded * largest(want).max(ROUNDED_FLOOR)
            }
            _ if bound == 0.0 || case.strict => bound * largest(want).max(FLOOR),
            _ => bound.max(self.least) * largest(want).max(FLOOR),
        }
    }
}

impl<B: Device> Case<B> {
    /// Runs the op once, checks guard words and inputs, and returns its outputs.
    pub fn run(&self, b: &mut B, name: &str) -> Result<Vec<Vec<f32>>, Fault> {
        let (w, tokens, ids) = self.prepare(b);
        let held: Vec<Guarded<B>> =
            self.inputs.iter().map(|m| Guarded::new(b, (m.rows, m.cols), &m.f32s(), GUARD)).collect();
        let start = |o: &Out| {
            let (shape, values) = o.start();
            Guarded::new(b, shape, &values, GUARD)
        };
        let mut outs: Vec<Guarded<B>> = self.outs.iter().map(start).collect();
        let i: Vec<View<B::Memory>> = held.iter().map(Guarded::view).collect();
        (self.verb)(b, &Given { i: &i, w: &w, tokens: &tokens, ids: &ids }, &mut outs);
        let got = outs.into_iter().map(|o| o.take(b, name)).collect::<Result<_, _>>()?;
        for (input, held) in self.inputs.iter().zip(held) {
            assert!(held.take(b, name)? == input.f32s(), "{name}: an input was written");
        }
        Ok(got)
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

fn largest(want: &[f64]) -> f64 {
    want.iter().fold(0.0, |m, v| m.max(v.abs()))
}

/// |got - want| <= bound * (largest |want|, at least FLOOR)
pub fn close(name: &str, got: &[f32], want: &[f64], bound: f64) {
    let bound = bound * largest(want).max(FLOOR);
    within(name, got, want, &|_| bound);
}

/// Checks each error, and returns the largest one as a part of what is allowed.
fn within(name: &str, got: &[f32], want: &[f64], allowed: &dyn Fn(usize) -> f64) -> f64 {
    assert_eq!(got.len(), want.len(), "{name}");
    let mut worst = 0.0f64;
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let (off, allowed) = ((f64::from(g) - w).abs(), allowed(i));
        // written so that NaN fails
        assert!(off <= allowed, "{name}: element {i} is {g}, want {w}: off {off:e}, allowed {allowed:e}");
        worst = worst.max(if off > 0.0 { off / allowed } else { 0.0 });
    }
    worst
}
