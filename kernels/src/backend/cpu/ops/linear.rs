//! Products with frozen matrices: their left factors, rounded and paired where the precision wants it, and their outputs,
//! in f32 or in pairs.

use super::super::device::Cpu;
use super::super::gemm::added::Added;
use super::super::gemm::left_operand::{CHUNK, in_pairs, write};
use super::super::operands::{Context, Left, Precision};
use super::super::runtime::memory::Memory;
use super::super::weights::weight::{Out, Weight};
use crate::backend::{View, ViewMut, Write};

/// Which of both products of a frozen matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// y is x wᵀ.
    Forward,
    /// dx is dy w.
    Backward,
}

/// A left factor and what was made of it for products to read, to be given back.
pub struct Factor<'a> {
    x: View<'a, Memory>,
    made: Option<Memory>,
}

impl<'a> Factor<'a> {
    /// f32 numbers as they are.
    pub(super) fn plain(x: View<'a, Memory>) -> Self {
        Factor { x, made: None }
    }

    /// As products read it.
    pub(super) fn left(&self, cx: Context) -> Left<'_> {
        let (rows, cols) = (self.x.rows, self.x.cols);
        match &self.made {
            Some(m) if in_pairs(cx, rows) => Left::pairs(bytemuck::cast_slice(m.values()), (rows, cols)),
            Some(m) => Left { rows, ..Left::floats(m.values(), cols) },
            None if self.x.memory.is_short() => Left::pairs(self.x.pairs(), (rows, cols)),
            None => Left { rows, ..Left::floats(self.x.values(), cols) },
        }
    }
}

impl Cpu {
    /// x as a left factor.
    pub(super) fn factor<'a>(&mut self, x: View<'a, Memory>) -> Factor<'a> {
        let pairs = in_pairs(self.context(), x.rows);
        let made = match self.precision {
            Precision::F32 => None,
            _ if x.memory.is_short() => {
                if pairs {
                    None
                } else {
                    self.widened(&x)
                }
            }
            _ => {
                let words = if pairs { x.cols.div_ceil(2) } else { x.cols };
                let mut memory = self.recycling.take(x.rows * words);
                write(self.context(), memory.values_mut(), x.values(), x.cols);
                Some(memory)
            }
        };
        Factor { x, made }
    }

    /// scale * x as a left factor.
    pub(super) fn factor_of<'a>(&mut self, x: View<'a, Memory>, scale: f32) -> Factor<'a> {
        if scale == 1.0 || self.precision == Precision::F32 {
            return self.factor(x);
        }
        let mut scaled = self.recycling.take(x.len());
        let values = x.values();
        self.threads.chunks(scaled.values_mut(), CHUNK, |i, out| {
            out.iter_mut().zip(&values[i * CHUNK..]).for_each(|(o, &x)| *o = scale * x);
        });
        let made = self.factor(View { memory: &scaled, offset: 0, ..x }).made;
        self.recycling.give(scaled);
        Factor { x, made }
    }

    /// Gives back what was made for it.
    pub(super) fn done(&mut self, factor: Factor) {
        factor.made.into_iter().for_each(|m| self.recycling.give(m));
    }

    /// y (=|+=) x wᵀ, or dx (=|+=) dy w, in the numbers that the output holds.
    pub(super) fn frozen(
        &mut self,
        (mut out, write): (ViewMut<Memory>, Write),
        (w, way): (&Weight, Way),
        left: Left,
        low: Option<Added>,
    ) {
        let terms = if way == Way::Backward { w.rows() } else { w.cols() };
        let whole = Weight::writes_pairs(left, terms, low.as_ref());
        let run = |cpu: &Cpu, out: Out| match way {
            Way::Forward => w.forward(cpu.context(), out, left, low),
            Way::Backward => w.backward(cpu.context(), out, left, low),
        };
        if out.memory.is_short() {
            assert_eq!(write, Write::Set, "numbers in 16 bits are set");
            if whole {
                return run(self, Out::Pairs(out.pairs_mut()));
            }
        }
        self.through(&mut out, |cpu, values| run(cpu, Out::Values(values, write)));
    }
}
