//! The test bench: matrices between guard words, poisoned outputs, formulas in f64, central differences.

use crate::rig::Rig;
use finetune::backend::{Backend, View, ViewMut};
use finetune::numeric::rng::Stream;

/// Values before and after every matrix; odd, so that matrices are not aligned.
const GUARD: usize = 19;
const WORD: f32 = -1234.5;
/// Smaller expected values count as this large: inputs are of size one, and terms that cancel leave their rounding
/// errors.
const FLOOR: f64 = 0.02;

/// A matrix of f64 values that are f32 values.
#[derive(Debug, Clone, PartialEq)]
pub struct Mat {
    pub rows: usize,
    pub cols: usize,
    pub v: Vec<f64>,
}

impl Mat {
    pub fn zeros(rows: usize, cols: usize) -> Mat {
        Mat { rows, cols, v: vec![0.0; rows * cols] }
    }
    /// Uniform in -1..1, keyed.
    pub fn random(rows: usize, cols: usize, key: u64) -> Mat {
        let mut s = Stream::new(&[key, rows as u64, cols as u64]);
        Mat { rows, cols, v: (0..rows * cols).map(|_| f64::from(s.unit() * 2.0 - 1.0)).collect() }
    }
    pub fn map(&self, f: impl Fn(f64) -> f64) -> Mat {
        Mat { v: self.v.iter().map(|&x| f64::from(f(x) as f32)).collect(), ..*self }
    }
    /// Every value times `s`, in f64.
    pub fn times(mut self, s: f64) -> Mat {
        self.v.iter_mut().for_each(|v| *v *= s);
        self
    }
    pub fn at(&self, i: usize, j: usize) -> f64 {
        self.v[i * self.cols + j]
    }
    pub fn at_mut(&mut self, i: usize, j: usize) -> &mut f64 {
        &mut self.v[i * self.cols + j]
    }
    pub fn f32s(&self) -> Vec<f32> {
        self.v.iter().map(|&x| x as f32).collect()
    }
    /// self * b
    pub fn mul(&self, b: &Mat) -> Mat {
        assert_eq!(self.cols, b.rows);
        let mut out = Mat::zeros(self.rows, b.cols);
        for i in 0..self.rows {
            for k in 0..self.cols {
                let a = self.at(i, k);
                for j in 0..b.cols {
                    out.v[i * b.cols + j] += a * b.at(k, j);
                }
            }
        }
        out
    }
    pub fn t(&self) -> Mat {
        let mut out = Mat::zeros(self.cols, self.rows);
        for i in 0..self.rows {
            for j in 0..self.cols {
                *out.at_mut(j, i) = self.at(i, j);
            }
        }
        out
    }
}

/// A matrix in device memory, between guard words.
pub struct Guarded<B: Backend> {
    memory: B::Memory,
    rows: usize,
    cols: usize,
}

impl<B: Backend> Guarded<B> {
    pub fn new(backend: &mut B, rows: usize, cols: usize, values: &[f32]) -> Self {
        let mut memory = backend.memory(rows * cols + 2 * GUARD);
        let mut all = vec![WORD; GUARD];
        all.extend_from_slice(values);
        all.resize(values.len() + 2 * GUARD, WORD);
        let len = all.len();
        backend.upload(ViewMut { memory: &mut memory, offset: 0, rows: 1, cols: len }, &all);
        Guarded { memory, rows, cols }
    }
    pub fn view(&self) -> View<'_, B::Memory> {
        View { memory: &self.memory, offset: GUARD, rows: self.rows, cols: self.cols }
    }
    pub fn view_mut(&mut self) -> ViewMut<'_, B::Memory> {
        ViewMut { memory: &mut self.memory, offset: GUARD, rows: self.rows, cols: self.cols }
    }
    fn take(self, backend: &mut B, name: &str) -> Vec<f32> {
        let mut all = vec![0.0; self.rows * self.cols + 2 * GUARD];
        let len = all.len();
        let whole = View { memory: &self.memory, offset: 0, rows: 1, cols: len };
        backend.read(whole, &mut all).unwrap_or_else(|fault| panic!("{name}: {fault}"));
        let inside = all[GUARD..len - GUARD].to_vec();
        let outside = all[..GUARD].iter().chain(&all[len - GUARD..]);
        assert!(outside.into_iter().all(|&g| g == WORD), "{name}: guard words were written");
        backend.recycle(self.memory);
        inside
    }
}

/// The contents of an output before the verb.
pub enum Out {
    /// NaN: the verb overwrites.
    Poison(usize, usize),
    /// Values that the verb adds to or changes in place; the formula does not see them.
    Holds(Mat),
}

/// A verb on views of inputs and guarded outputs.
pub type Verb<'a, B> = &'a dyn Fn(&mut B, &[View<<B as Backend>::Memory>], &mut [Guarded<B>]);

/// Runs a verb once, checks guard words and inputs, and returns its outputs.
fn once<B: Backend>(
    backend: &mut B,
    name: &str,
    (inputs, outputs): (&[&Mat], &[Out]),
    verb: Verb<B>,
) -> Vec<Vec<f32>> {
    let held: Vec<Guarded<B>> =
        inputs.iter().map(|m| Guarded::new(backend, m.rows, m.cols, &m.f32s())).collect();
    let mut outs: Vec<Guarded<B>> = outputs
        .iter()
        .map(|o| match o {
            Out::Poison(rows, cols) => Guarded::new(backend, *rows, *cols, &vec![f32::NAN; rows * cols]),
            Out::Holds(m) => Guarded::new(backend, m.rows, m.cols, &m.f32s()),
        })
        .collect();
    let views: Vec<View<B::Memory>> = held.iter().map(Guarded::view).collect();
    verb(backend, &views, &mut outs);
    let got: Vec<Vec<f32>> = outs.into_iter().map(|o| o.take(backend, name)).collect();
    for (input, held) in inputs.iter().zip(held) {
        assert!(held.take(backend, name) == input.f32s(), "{name}: an input was written");
    }
    got
}

impl<B: Backend> Rig<B> {
    /// Runs a verb on every variant of the rig, checks guard words and equal bits, and returns its outputs.
    pub fn run(
        &self,
        name: &str,
        inputs: &[&Mat],
        outputs: &[Out],
        verb: impl Fn(&mut B, &[View<B::Memory>], &mut [Guarded<B>]),
    ) -> Vec<Vec<f32>> {
        let name = &format!("{} {name}", self.name);
        let mut first: Option<Vec<Vec<f32>>> = None;
        for variant in &self.variants {
            let mut got = Vec::new();
            variant(&mut |backend| got = once(backend, name, (inputs, outputs), &verb));
            let bits = |x: &Vec<Vec<f32>>| -> Vec<u32> { x.iter().flatten().map(|v| v.to_bits()).collect() };
            match &first {
                None => first = Some(got),
                Some(f) => assert!(bits(f) == bits(&got), "{name}: another variant gives other bits"),
            }
        }
        first.unwrap()
    }

    /// [`close`], with the contract's bound if the backend is not the reference. An exact bound stays exact.
    pub fn close(&self, name: &str, got: &[f32], want: &[f64], bound: f64) {
        close(&format!("{} {name}", self.name), got, want, self.bound(bound));
    }

    /// [`close_grad`], with the same bound.
    pub fn close_grad(&self, name: &str, got: &[f32], at: (&[&Mat], usize), of: (&Mat, Formula), bound: f64) {
        close_grad(&format!("{} {name}", self.name), got, at, of, self.bound(bound));
    }

    fn bound(&self, bound: f64) -> f64 {
        if bound == 0.0 { 0.0 } else { bound.max(self.least) }
    }
}

/// The reference for a verb, in f64.
pub type Formula<'a> = &'a dyn Fn(&[Mat]) -> Mat;

/// |got - want| <= bound * (largest |want|, at least FLOOR)
pub fn close(name: &str, got: &[f32], want: &[f64], bound: f64) {
    assert_eq!(got.len(), want.len(), "{name}");
    let largest = want.iter().fold(0.0f64, |m, v| m.max(v.abs())).max(FLOOR);
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let off = (f64::from(g) - w).abs();
        // written so that NaN fails
        assert!(off <= bound * largest, "{name}: element {i} is {g}, want {w}: off {off:e} of {largest:e}");
    }
}

/// Compares a gradient, at a sample of places, with central differences of sum(dy * formula(inputs)).
pub fn close_grad(
    name: &str,
    got: &[f32],
    (inputs, which): (&[&Mat], usize),
    (dy, formula): (&Mat, Formula),
    bound: f64,
) {
    let mut x: Vec<Mat> = inputs.iter().map(|m| (*m).clone()).collect();
    let n = x[which].v.len();
    assert_eq!(got.len(), n, "{name}");
    let mut draws = Stream::new(&[n as u64, which as u64]);
    let places: Vec<usize> =
        if n <= 24 { (0..n).collect() } else { (0..24).map(|_| draws.below(n as u32) as usize).collect() };
    let loss = |x: &[Mat]| formula(x).v.iter().zip(&dy.v).map(|(a, b)| a * b).sum::<f64>();
    let h = 1e-4;
    let mut want = Vec::new();
    for &i in &places {
        let old = x[which].v[i];
        x[which].v[i] = old + h;
        let above = loss(&x);
        x[which].v[i] = old - h;
        let below = loss(&x);
        x[which].v[i] = old;
        want.push((above - below) / (2.0 * h));
    }
    let got: Vec<f32> = places.iter().map(|&i| got[i]).collect();
    close(name, &got, &want, bound);
}

/// The sum of two results.
pub fn plus(a: &Mat, b: &Mat) -> Vec<f64> {
    a.v.iter().zip(&b.v).map(|(a, b)| a + b).collect()
}
