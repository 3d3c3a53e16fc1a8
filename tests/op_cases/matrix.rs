//! Matrices of cases: values in f64, and the same in device memory between guard words.

use finetune::backend::{Backend, Fault, View, ViewMut};
use finetune::numeric::rng::Stream;

/// Values before and after every matrix; odd, so that matrices are not aligned.
pub const GUARD: usize = 19;
const WORD: f32 = -1234.5;

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
    /// The nearest f32 values.
    pub fn stored(&self) -> Mat {
        self.map(|x| x)
    }
    /// Values that every dtype represents exactly.
    pub fn coarse(&self) -> Mat {
        self.map(|x| (x * 64.0).round() / 64.0)
    }
    /// Every value times `s`, in f64.
    pub fn times(mut self, s: f64) -> Mat {
        self.v.iter_mut().for_each(|v| *v *= s);
        self
    }
    /// self + b, in f64.
    pub fn plus(&self, b: &Mat) -> Mat {
        assert_eq!((self.rows, self.cols), (b.rows, b.cols));
        Mat { v: self.v.iter().zip(&b.v).map(|(a, b)| a + b).collect(), ..*self }
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
            let row = &mut out.v[i * b.cols..][..b.cols];
            for k in 0..self.cols {
                let a = self.at(i, k);
                row.iter_mut().zip(&b.v[k * b.cols..]).for_each(|(out, b)| *out += a * b);
            }
        }
        out
    }
    /// The transpose.
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

/// The contents of an output before the op.
#[derive(Debug, Clone)]
pub enum Out {
    /// NaN: the op overwrites.
    Poison(usize, usize),
    /// Values that the op adds to or changes in place.
    Holds(Mat),
}

impl Out {
    /// Rows, columns, and values as they are uploaded.
    pub fn start(&self) -> ((usize, usize), Vec<f32>) {
        match self {
            Out::Poison(rows, cols) => ((*rows, *cols), vec![f32::NAN; rows * cols]),
            Out::Holds(m) => ((m.rows, m.cols), m.f32s()),
        }
    }

    /// The values that a formula sees; zeros if the op overwrites.
    pub fn old(&self) -> Mat {
        match self {
            Out::Poison(rows, cols) => Mat::zeros(*rows, *cols),
            Out::Holds(m) => m.clone(),
        }
    }
}

/// A matrix in device memory, between guard words.
pub struct Guarded<B: Backend> {
    memory: B::Memory,
    rows: usize,
    cols: usize,
    guard: usize,
}

impl<B: Backend> Guarded<B> {
    pub fn new(backend: &mut B, (rows, cols): (usize, usize), values: &[f32], guard: usize) -> Self {
        let mut all = vec![WORD; guard];
        all.extend_from_slice(values);
        all.resize(values.len() + 2 * guard, WORD);
        let (mut memory, len) = (backend.memory(all.len()), all.len());
        backend.upload(ViewMut { memory: &mut memory, offset: 0, rows: 1, cols: len }, &all);
        Guarded { memory, rows, cols, guard }
    }
    pub fn view(&self) -> View<'_, B::Memory> {
        View { memory: &self.memory, offset: self.guard, rows: self.rows, cols: self.cols }
    }
    pub fn view_mut(&mut self) -> ViewMut<'_, B::Memory> {
        ViewMut { memory: &mut self.memory, offset: self.guard, rows: self.rows, cols: self.cols }
    }
    /// The values; panics if a guard word was written.
    pub fn take(self, backend: &mut B, name: &str) -> Result<Vec<f32>, Fault> {
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
