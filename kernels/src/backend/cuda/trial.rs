//! Trials of a higher tier of products, sm_90a or f16 (`sm70.rs`): on the device itself, its products must agree with
//! those of the tier below and be faster. Tests run them on the interpreter; an H200 passed those of sm_90a.

use super::frozen::{Added, Direction};
use super::launches::Shape;
use super::tensor::padded;
use super::{Arg, Cuda, Driver, Memory, Tier};
use crate::backend::{Checked, Fault, Write};
use crate::numeric::rng::Stream;
use half::bf16;
use std::time::Instant;

/// The requirements of a trial.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Trial {
    /// M, N and K of the product that is timed.
    pub timed: (usize, usize, usize),
    /// The required speed relative to the tier below.
    pub faster: f64,
}

impl Default for Trial {
    fn default() -> Self {
        Trial { timed: (4096, 4096, 4096), faster: 1.03 }
    }
}

/// Products that are compared: no multiples of anything, more than a tile each way, and ten steps, so that the ring of
/// four stages wraps twice and the second tile of a block begins in its middle.
const COMPARED: (usize, usize, usize) = (133, 270, 587);
/// Few enough blocks that each has two tiles.
const FEW: u32 = 2;
/// Rank of the adapter's part, which is read in parts of 16.
const RANK: usize = 17;
/// Tolerance relative to the sum of the magnitudes of a sum's terms: both tiers multiply the same numbers exactly.
const BOUND: f64 = 1e-4;
/// Products timed at a time, and rounds per tier.
const TIMES: (u32, usize) = (4, 3);

/// The operands of a product, on the device and on the host.
pub(super) struct Case {
    pub s: Shape,
    pub direction: Direction,
    pub device: [Memory; 2],
    pub host: [Vec<f32>; 2],
    /// The tier on trial and the tier it is compared with.
    pub names: [&'static str; 2],
}

impl Case {
    pub fn ab(&self) -> (Arg, Arg) {
        let [a, b] = &self.device;
        (Arg::Address(a.at(0)), Arg::Address(b.at(0)))
    }

    /// The lengths of the rows of a and, in the forward direction, of b. The product of two lengths is at least the sum
    /// of |a| |b|.
    fn lengths(&self) -> [Vec<f64>; 2] {
        let length = |row: &[f32]| row.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
        self.host.each_ref().map(|x| x.chunks(self.s.k).map(length).collect())
    }

    /// The first output at which two tiers differ by more than [`BOUND`] of its terms.
    pub fn same(&self, [old, new]: [&[f32]; 2], terms: impl Fn(usize, usize) -> f64) -> Result<(), String> {
        let Shape { n, k, .. } = self.s;
        let off = |i: usize| f64::from((old[i] - new[i]).abs()) / terms(i / n, i % n);
        // NaN is reported as well.
        let Some(i) = (0..old.len()).find(|&i| off(i).is_nan() || off(i) > BOUND) else { return Ok(()) };
        let (row, col, off, direction, [new, _]) = (i / n, i % n, off(i), self.direction, self.names);
        Err(format!("{new}: output {row}, {col} is off by {off:.1e} ({direction:?}, {k} terms)"))
    }

    /// The sum of |a| |b| of an output.
    pub fn terms(&self, row: usize, col: usize) -> f64 {
        let (Shape { n, k, .. }, [a, b]) = (self.s, &self.host);
        let right = |c: usize| match self.direction {
            Direction::Forward => b[col * k + c],
            Direction::Backward => b[c * n + col],
        };
        (0..k).map(|c| f64::from((a[row * k + c] * right(c)).abs())).sum()
    }
}

impl<D: Driver> Checked<Cuda<D>> {
    /// The same device with large products by wgmma, if they agree and are faster; otherwise unchanged, and
    /// [`Cuda::below`] says why. Without the bf16 class, or on another capability than 9.0, there is no trial.
    pub fn sm90a(mut self, trial: Trial) -> Self {
        let may = self.driver.sm90a().filter(|_| self.tier == Tier::Sm80 && self.fault.is_none());
        let Some(processors) = may else { return self };
        self.undecided = false;
        let result = self.tried(|d| {
            d.agrees(processors)?;
            let case = d.case(trial.timed, Direction::Forward);
            d.gains(&case, trial.faster, |d, new, out| {
                d.sm90a = new.then_some(processors);
                d.product_bf16((out, Write::Set), case.ab(), case.s, (case.direction, None));
            })
        });
        self.sm90a = result.is_ok().then_some(processors);
        self.below = result.err();
        self
    }
}

impl<D: Driver> Cuda<D> {
    /// Runs a trial. Its traffic and memory are not counted, and its memory is freed.
    pub(super) fn tried(
        &mut self,
        trial: impl FnOnce(&mut Self) -> Result<(), String>,
    ) -> Result<(), String> {
        let (traffic, counts) = (self.traffic, self.pool.counts());
        let result = trial(self);
        // After a fault the waiting launches are dropped.
        self.send();
        self.copies.clear();
        // A fault of the device itself occurs again at the next use.
        let fault = self.fault.take();
        self.undecided |= matches!(fault, Some(Fault::OutOfMemory { .. }));
        self.traffic = traffic;
        self.pool.restore(&mut self.driver, counts);
        fault.map_or(result, |fault| Err(fault.to_string()))
    }

    /// Whether the last trial ended for lack of memory. This says nothing about the kernels, so another trial may
    /// succeed.
    pub fn undecided(&self) -> bool {
        self.undecided
    }

    /// Why products stay with the tier below on a device that could run the higher one.
    pub fn below(&self) -> Option<&str> {
        self.below.as_deref()
    }

    /// Compares both directions, with and without an adapter's part, on all multiprocessors and on few.
    fn agrees(&mut self, processors: u32) -> Result<(), String> {
        let (m, n, _) = COMPARED;
        for direction in [Direction::Forward, Direction::Backward] {
            let case = self.case(COMPARED, direction);
            let (left, right) = (self.numbers(m * RANK, 3), self.numbers(n * RANK, 4));
            let between = if direction == Direction::Forward { RANK } else { n };
            let (left, right) = (Arg::Address(left.at(0)), Arg::Address(right.at(0)));
            for added in [None, Some(Added { left, right, rank: RANK, between, by: 0.5 })] {
                let mut computed = |tier| {
                    self.sm90a = tier;
                    let out = self.numbers(m * n, 5);
                    let at = (Arg::Address(out.at(0)), Write::Add);
                    self.product_bf16(at, case.ab(), case.s, (direction, added));
                    self.fetched(&out, m * n).map_err(|e| e.to_string())
                };
                let old = computed(None)?;
                for processors in [processors, FEW] {
                    let new = computed(Some(processors))?;
                    case.same([&old, &new], |row, col| case.terms(row, col))?;
                }
            }
        }
        Ok(())
    }

    /// Times one large product and compares all its outputs, because rows of tiles are in groups at this size.
    /// `product` takes true for the tier on trial, false for the tier below.
    pub(super) fn gains(
        &mut self,
        case: &Case,
        faster: f64,
        product: impl Fn(&mut Self, bool, Arg),
    ) -> Result<(), String> {
        let Shape { m, n, k, .. } = case.s;
        // The outputs start as random numbers, so that an unwritten output differs from a computed one.
        let outs = [5, 5].map(|key| self.numbers(m * n, key));
        let mut least = [f64::INFINITY; 2];
        for turn in 0..2 * TIMES.1 {
            let seconds = self.seconds(&outs[turn % 2], |d, out| product(d, turn % 2 == 1, out));
            let seconds = seconds.map_err(|e| e.to_string())?;
            least[turn % 2] = seconds.min(least[turn % 2]);
        }
        let [old, new] = outs.each_ref().map(|out| self.fetched(out, m * n).map_err(|e| e.to_string()));
        let [a, b] = case.lengths();
        case.same([&old?, &new?], |row, col| a[row] * b[col])?;
        let gain = least[0] / least[1];
        if gain >= faster {
            return Ok(());
        }
        let [new, old] = case.names;
        Err(format!("{new}: {gain:.2} times as fast as {old} at {m} x {n} x {k}, and {faster:.2} is asked"))
    }

    /// Times some products, after one that compiles and wakes the device.
    fn seconds(&mut self, out: &Memory, product: impl Fn(&mut Self, Arg)) -> Result<f64, Fault> {
        let at = Arg::Address(out.at(0));
        product(self, at);
        self.fetched(out, 1)?;
        let began = Instant::now();
        (0..TIMES.0).for_each(|_| product(self, at));
        self.fetched(out, 1)?;
        Ok(began.elapsed().as_secs_f64())
    }

    fn case(&mut self, (m, n, k): (usize, usize, usize), direction: Direction) -> Case {
        let b = if direction == Direction::Forward { (n, k) } else { (k, n) };
        let s = Shape { m, n, k, lda: padded(k), ldb: padded(b.1), ldo: n };
        let [(a, x), (b, y)] = [((m, k), 1), (b, 2)].map(|(size, key)| self.rows_of_bf16(size, key));
        Case { s, direction, device: [a, b], host: [x, y], names: ["wgmma", "mma"] }
    }

    /// Numbers in -1 .. 1 by key, in rows of [`padded`] numbers.
    fn rows_of_bf16(&mut self, (rows, cols): (usize, usize), key: u64) -> (Memory, Vec<f32>) {
        let numbers: Vec<bf16> = uniform(rows * cols, key).into_iter().map(bf16::from_f32).collect();
        let mut all = vec![bf16::ZERO; rows * padded(cols)];
        for (to, from) in all.chunks_mut(padded(cols)).zip(numbers.chunks(cols)) {
            to[..cols].copy_from_slice(from);
        }
        let memory = self.take(2 * all.len());
        self.write(memory.at(0), bytemuck::cast_slice(&all));
        (memory, numbers.into_iter().map(bf16::to_f32).collect())
    }

    pub(super) fn numbers(&mut self, len: usize, key: u64) -> Memory {
        let memory = self.take(4 * len);
        self.write(memory.at(0), bytemuck::cast_slice(&uniform(len, key)));
        memory
    }

    /// Reads memory, after all earlier work.
    pub(super) fn fetched(&mut self, from: &Memory, len: usize) -> Result<Vec<f32>, Fault> {
        let mut out = vec![0.0f32; len];
        self.fetch(from.at(0), bytemuck::cast_slice_mut(&mut out))?;
        Ok(out)
    }
}

/// Uniform numbers; long lists repeat a prime number of them, so that no two rows at a tile's edge are equal.
pub(super) fn uniform(len: usize, key: u64) -> Vec<f32> {
    let mut s = Stream::new(&[key]);
    let some: Vec<f32> = (0..len.min(65_521)).map(|_| 2.0 * s.unit() - 1.0).collect();
    some.into_iter().cycle().take(len).collect()
}
