//! The tier sm_70: products of frozen matrices on the f16 tensor cores of Volta and Turing, which have none for bf16.
//! Factors are rounded to f16 on their way to shared memory, sums are f32. All else stays in the f32 class, including
//! an adapter's own products. The tier is used on capability 7.x, if no dtype was typed and a trial on the device
//! itself succeeds: some cards of 7.5 have no tensor cores. The tier has not run on a card yet.

use super::frozen::Direction;
use super::launches::Shape;
use super::memory::Stored;
use super::trial::{Case, Trial, uniform};
use super::{Arg, Cuda, Driver, Launch, Memory, Tier, blocks};
use crate::backend::{Checked, Write};
use half::{bf16, f16};

/// Edge of the tile.
const TILE: usize = 128;
/// Gradients are multiplied by this factor before rounding, as in wgpu's f16 variants: 2^8 leaves room for values up to
/// 255, and numbers down to 2.3e-10 are not lost.
const LIFT: f32 = 256.0;
/// Products that are compared: no multiples of anything, more than a tile each way, and eleven steps.
const COMPARED: (usize, usize, usize) = (133, 270, 331);

impl<D: Driver> Checked<Cuda<D>> {
    /// The same device in the f16 class, if its tensor cores have f16 and no bf16; otherwise unchanged. There is no
    /// trial: a verdict allows it, or a test examines the kernels themselves.
    pub fn f16(mut self) -> Self {
        if self.may_round() {
            self.tier = Tier::Sm70;
        }
        self
    }

    /// The same device in the f16 class, if products agree with those of the f32 class and are faster; otherwise
    /// unchanged, and [`Cuda::below`] says why. On other capabilities than 7.x, or in another class, there is no trial.
    pub fn sm70(mut self, trial: Trial) -> Self {
        if !self.may_round() || self.fault.is_some() {
            return self;
        }
        self.undecided = false;
        let result = self.tried(|d| d.agrees_in_f16().and_then(|()| d.gains_by_f16(trial)));
        self.tier = if result.is_ok() { Tier::Sm70 } else { Tier::F32 };
        self.below = result.err();
        self
    }
}

impl<D: Driver> Cuda<D> {
    fn may_round(&self) -> bool {
        self.driver.capability().0 == 7 && self.tier == Tier::F32
    }

    /// The product of an f32 operand and a matrix of this storage format.
    pub(super) fn product_f16(
        &mut self,
        out: (Arg, Write),
        ab: (Arg, Arg),
        s: Shape,
        (direction, stored): (Direction, Stored),
    ) {
        let (way, lift) = match direction {
            Direction::Forward => ("nt", 1.0),
            Direction::Backward => ("nn", LIFT),
        };
        let mut args = s.args(out, ab, 1.0 / lift).to_vec();
        args.push(Arg::F32(lift));
        let grid = [blocks(s.n, TILE), blocks(s.m, TILE), 1];
        let entry = format!("product_sm70_{way}_{}", stored.name());
        self.launch(Launch { file: "product_sm70.ptx", entry: &entry, grid, threads: 256, args: &args });
    }

    /// Compares both directions for every storage format.
    fn agrees_in_f16(&mut self) -> Result<(), String> {
        let (m, n, _) = COMPARED;
        for stored in [Stored::F32, Stored::Bf16, Stored::F16] {
            for direction in [Direction::Forward, Direction::Backward] {
                let case = self.of_f16(COMPARED, (direction, stored));
                let mut computed = |tier| {
                    let out = self.numbers(m * n, 5);
                    self.one_of_both(tier, (Arg::Address(out.at(0)), Write::Add), &case, stored);
                    self.fetched(&out, m * n).map_err(|e| e.to_string())
                };
                let [old, new] = [computed(Tier::F32)?, computed(Tier::Sm70)?];
                case.same([&old, &new], |row, col| case.terms(row, col))?;
            }
        }
        Ok(())
    }

    fn gains_by_f16(&mut self, trial: Trial) -> Result<(), String> {
        let stored = Stored::Bf16;
        let case = self.of_f16(trial.timed, (Direction::Forward, stored));
        self.gains(&case, trial.faster, |d, new, out| {
            let tier = if new { Tier::Sm70 } else { Tier::F32 };
            d.one_of_both(tier, (out, Write::Set), &case, stored);
        })
    }

    fn one_of_both(&mut self, tier: Tier, out: (Arg, Write), case: &Case, stored: Stored) {
        let how = (case.direction, stored);
        if tier == Tier::Sm70 {
            self.product_f16(out, case.ab(), case.s, how);
        } else {
            self.product_f32(out, case.ab(), case.s, how);
        }
    }

    /// Operands that f16 represents exactly, and b bf16 as well, so that both classes multiply the same numbers.
    fn of_f16(&mut self, (m, n, k): (usize, usize, usize), (direction, stored): (Direction, Stored)) -> Case {
        let ldb = if direction == Direction::Forward { k } else { n };
        let s = Shape { m, n, k, lda: k, ldb, ldo: n };
        let x: Vec<f32> = uniform(m * k, 1).into_iter().map(|x| f16::from_f32(x).to_f32()).collect();
        let y: Vec<f32> = uniform(n * k, 2).into_iter().map(|y| (64.0 * y).round() / 64.0).collect();
        let bytes: Vec<u8> = match stored {
            Stored::F32 | Stored::Blocks(_) => bytemuck::cast_slice(&y).to_vec(),
            Stored::Bf16 => y.iter().flat_map(|y| bf16::from_f32(*y).to_le_bytes()).collect(),
            Stored::F16 => y.iter().flat_map(|y| f16::from_f32(*y).to_le_bytes()).collect(),
        };
        let device = [bytemuck::cast_slice(&x), &bytes].map(|bytes| self.holding(bytes));
        Case { s, direction, device, host: [x, y], names: ["f16", "f32"] }
    }

    fn holding(&mut self, bytes: &[u8]) -> Memory {
        let memory = self.take(bytes.len());
        self.write(memory.at(0), bytes);
        memory
    }
}
