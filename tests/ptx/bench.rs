//! One op on two backends: outputs that are overwritten start as NaN, every matrix is at an odd offset between guard
//! words, and the interpreter runs warps and blocks in several orders, which must give the same bits.

use finetune::backend::{Backend, Fault, View, ViewMut};
use finetune::numeric::rng::Stream;

/// Values before and after every matrix; odd, so that nothing is aligned.
pub const GUARD: usize = 19;
const WORD: f32 = -1234.5;

#[derive(Debug, Clone)]
pub struct Mat {
    pub rows: usize,
    pub cols: usize,
    pub v: Vec<f32>,
}

impl Mat {
    /// Uniform in -1..1, by a key.
    pub fn random(rows: usize, cols: usize, key: u64) -> Mat {
        let mut s = Stream::new(&[key, rows as u64, cols as u64]);
        Mat { rows, cols, v: (0..rows * cols).map(|_| s.unit() * 2.0 - 1.0).collect() }
    }
    pub fn map(mut self, f: impl Fn(f32) -> f32) -> Mat {
        self.v.iter_mut().for_each(|x| *x = f(*x));
        self
    }
    /// Values that every dtype represents exactly.
    pub fn coarse(self) -> Mat {
        self.map(|x| (x * 64.0).round() / 64.0)
    }
}

/// The contents of an output before the op.
pub enum Out {
    Poison(usize, usize),
    Holds(Mat),
}

pub struct Guarded<B: Backend> {
    memory: B::Memory,
    rows: usize,
    cols: usize,
    guard: usize,
}

impl<B: Backend> Guarded<B> {
    fn new(backend: &mut B, m: &Mat, guard: usize) -> Self {
        let mut all = vec![WORD; guard];
        all.extend_from_slice(&m.v);
        all.resize(m.v.len() + 2 * guard, WORD);
        let mut memory = backend.memory(all.len());
        let len = all.len();
        backend.upload(ViewMut { memory: &mut memory, offset: 0, rows: 1, cols: len }, &all);
        Guarded { memory, rows: m.rows, cols: m.cols, guard }
    }
    pub fn view(&self) -> View<'_, B::Memory> {
        View { memory: &self.memory, offset: self.guard, rows: self.rows, cols: self.cols }
    }
    pub fn view_mut(&mut self) -> ViewMut<'_, B::Memory> {
        ViewMut { memory: &mut self.memory, offset: self.guard, rows: self.rows, cols: self.cols }
    }
    fn take(self, backend: &mut B, name: &str) -> Result<Vec<f32>, Fault> {
        let len = self.rows * self.cols + 2 * self.guard;
        let mut all = vec![0.0; len];
        backend.read(View { memory: &self.memory, offset: 0, rows: 1, cols: len }, &mut all)?;
        let (before, rest) = all.split_at(self.guard);
        let (inside, after) = rest.split_at(self.rows * self.cols);
        assert!(before.iter().chain(after).all(|&g| g == WORD), "{name}: guard words were written");
        backend.recycle(self.memory);
        Ok(inside.to_vec())
    }
}

/// Runs an op and returns its outputs, or the first fault.
pub fn run<B: Backend>(
    name: &str,
    backend: &mut B,
    matrices: (&[&Mat], &[Out]),
    verb: impl FnOnce(&mut B, &[View<B::Memory>], &mut [Guarded<B>]),
) -> Result<Vec<Vec<f32>>, Fault> {
    run_behind(GUARD, name, backend, matrices, verb)
}

/// The same with a given number of guard words.
pub fn run_behind<B: Backend>(
    guard: usize,
    name: &str,
    backend: &mut B,
    (inputs, outputs): (&[&Mat], &[Out]),
    verb: impl FnOnce(&mut B, &[View<B::Memory>], &mut [Guarded<B>]),
) -> Result<Vec<Vec<f32>>, Fault> {
    let held: Vec<Guarded<B>> = inputs.iter().map(|m| Guarded::new(backend, m, guard)).collect();
    let start = |o: &Out| match o {
        Out::Poison(rows, cols) => Mat { rows: *rows, cols: *cols, v: vec![f32::NAN; rows * cols] },
        Out::Holds(m) => m.clone(),
    };
    let mut outs: Vec<Guarded<B>> = outputs.iter().map(|o| Guarded::new(backend, &start(o), guard)).collect();
    let views: Vec<View<B::Memory>> = held.iter().map(Guarded::view).collect();
    verb(backend, &views, &mut outs);
    let got = outs.into_iter().map(|o| o.take(backend, name)).collect::<Result<_, _>>()?;
    for (input, held) in inputs.iter().zip(held) {
        assert!(held.take(backend, name)? == input.v, "{name}: an input was written");
    }
    Ok(got)
}

/// |got - want| <= bound * (largest |want|, at least 0.02)
pub fn close(name: &str, got: &[f32], want: &[f32], bound: f64) {
    assert_eq!(got.len(), want.len(), "{name}");
    let largest = want.iter().fold(0.02f64, |m, v| m.max(f64::from(v.abs())));
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let off = (f64::from(g) - f64::from(w)).abs();
        // written so that NaN fails
        assert!(off <= bound * largest, "{name}: element {i} is {g}, want {w}: off {off:e} of {largest:e}");
    }
}

/// Runs the op on the CPU and on the interpreter in several orders of warps; outputs must be within 1e-4 of their
/// scale.
#[macro_export]
macro_rules! compare {
    ($name:expr, $inputs:expr, $outputs:expr, |$b:ident, $i:ident, $o:ident| $body:expr) => {{
        let name: &str = &$name;
        let (inputs, outputs): (&[&$crate::bench::Mat], &[$crate::bench::Out]) = (&$inputs, &$outputs);
        let mut cpu = finetune::backend::Cpu::new(1);
        let want = $crate::bench::run(name, &mut cpu, (inputs, outputs), |$b, $i, $o| $body).unwrap();
        let mut first: Option<Vec<Vec<f32>>> = None;
        for seed in [0, 1, 7] {
            let mut device = $crate::device::device(seed);
            let got = $crate::bench::run(name, &mut device, (inputs, outputs), |$b, $i, $o| $body);
            let got = got.unwrap_or_else(|e| panic!("{name}, order {seed}: {e}"));
            match &first {
                None => {
                    want.iter().zip(&got).for_each(|(w, g)| $crate::bench::close(name, g, w, 1e-4));
                    first = Some(got);
                }
                Some(first) => assert!(*first == got, "{name}: order {seed} gives other bits"),
            }
        }
    }};
}
