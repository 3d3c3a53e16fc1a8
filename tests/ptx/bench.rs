//! One op of a test that is no case of tests/op_cases: outputs that are overwritten start as NaN, and every matrix is at
//! an odd offset between guard words.

pub use crate::op_cases::GUARD;
use crate::op_cases::{Guarded, frozen};
use finetune::backend::{Backend, Fault, Frozen, View, Write};
use finetune::numeric::dtype::Dtype;
use finetune::numeric::rng::Stream;

/// Guard words before an output that begins at a multiple of 16 bytes, where whole tiles are stored in vectors.
pub const ALIGNED: usize = 20;

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

/// An output that is overwritten or added to.
pub fn held(write: Write, rows: usize, cols: usize) -> Out {
    match write {
        Write::Set => Out::Poison(rows, cols),
        Write::Add => Out::Holds(Mat::random(rows, cols, 99)),
    }
}

pub fn weight<B: Backend>(b: &mut B, w: &Mat, dtype: Dtype) -> B::Weight {
    b.weight(Frozen { rows: w.rows, cols: w.cols, dtype, bytes: &frozen(&w.v, dtype)[1..] }).unwrap()
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
    let held: Vec<Guarded<B>> =
        inputs.iter().map(|m| Guarded::new(backend, (m.rows, m.cols), &m.v, guard)).collect();
    let start = |o: &Out| match o {
        Out::Poison(rows, cols) => Guarded::new(backend, (*rows, *cols), &vec![f32::NAN; rows * cols], guard),
        Out::Holds(m) => Guarded::new(backend, (m.rows, m.cols), &m.v, guard),
    };
    let mut outs: Vec<Guarded<B>> = outputs.iter().map(start).collect();
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
