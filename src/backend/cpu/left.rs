//! The left factor of a frozen product, as its kernel reads it: f32 numbers as they are or rounded to bf16, or bf16
//! numbers in pairs. It is rounded once, before the product, for all tasks, and for all matrices that share it.

use super::avx512_bf16;
use super::few;
use super::isa::kernel;
use super::memory::Memory;
use super::product::Strided;
use super::{Context, Cpu};
use crate::backend::View;
use half::bf16;

/// What the factors of a frozen product are rounded to, and which kernel multiplies them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// Nothing is rounded.
    F32,
    /// bf16, by the instruction for it.
    Bf16Dot,
    /// bf16 numbers held as f32, by the f32 kernel: the same bits.
    Bf16Widened,
}

/// Values per task.
const CHUNK: usize = 16 * 1024;

/// x [rows, cols].
#[derive(Clone, Copy)]
pub struct Left<'a> {
    /// T
    pub rows: usize,
    /// Inner dimension.
    pub cols: usize,
    /// Its numbers.
    pub side: Side<'a>,
}

/// How they lie.
#[derive(Clone, Copy)]
pub enum Side<'a> {
    /// One by one.
    Floats(Strided<'a>),
    /// In pairs: words, and how many there are in a row.
    Pairs(&'a [u32], usize),
}

impl<'a> Left<'a> {
    /// f32 numbers, row-major.
    pub fn floats(values: &'a [f32], cols: usize) -> Self {
        let side = Side::Floats(Strided::rows(values, cols));
        Left { rows: values.len() / cols.max(1), cols, side }
    }

    /// Pairs, row-major.
    fn pairs(pairs: &'a [u32], (rows, cols): (usize, usize)) -> Self {
        Left { rows, cols, side: Side::Pairs(pairs, cols.div_ceil(2)) }
    }

    /// Whether that many rows and terms are there.
    pub fn holds(&self, rows: usize, k: usize) -> bool {
        match self.side {
            Side::Floats(f) => f.holds(rows, k),
            Side::Pairs(words, stride) => {
                rows == 0 || k == 0 || (rows - 1) * stride + k.div_ceil(2) <= words.len()
            }
        }
    }

    /// Its numbers one by one, which is what they are wherever the `gemm` crate multiplies.
    pub fn numbers(self) -> Strided<'a> {
        match self.side {
            Side::Floats(numbers) => numbers,
            Side::Pairs(..) => unreachable!("pairs are for our own kernels"),
        }
    }

    /// From row `row` and term `k` on; k is even.
    pub fn from(self, row: usize, k: usize) -> Self {
        let side = match self.side {
            Side::Floats(f) => Side::Floats(f.from(row, k)),
            Side::Pairs(words, stride) => {
                Side::Pairs(&words[(row * stride + k / 2).min(words.len())..], stride)
            }
        };
        Left { rows: self.rows - row, cols: self.cols - k, side }
    }
}

kernel! {
    fn round_values<L>(out: &mut [f32], x: &[f32]) {
        out.iter_mut().zip(x).for_each(|(o, &x)| *o = round(x));
    }
}

kernel! {
    /// x = x rounded to bf16, in place.
    pub fn round_here<L>(x: &mut [f32]) {
        x.iter_mut().for_each(|x| *x = round(*x));
    }
}

/// To the nearest bf16, ties to even, as `vcvtneps2bf16` does: what is not normal becomes 0, NaN stays NaN.
#[inline(always)]
pub fn round(x: f32) -> f32 {
    let bits = x.to_bits();
    let up = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000;
    let size = bits & 0x7fff_ffff;
    let kept = if size < 0x0080_0000 { bits & 0x8000_0000 } else { up };
    f32::from_bits(if size > 0x7f80_0000 { (bits | 0x0040_0000) & 0xffff_0000 } else { kept })
}

/// The bf16 of the upper half of a number's bits: itself, where the lower half is zeros.
pub fn upper(x: f32) -> bf16 {
    bf16::from_bits((x.to_bits() >> 16) as u16)
}

/// Few rows are multiplied one number at a time, to the same bits.
fn in_pairs(cx: Context, rows: usize) -> bool {
    cx.precision == Precision::Bf16Dot && rows > few::ROWS
}

/// Writes rows of x as products read them.
fn write(cx: Context, out: &mut [f32], x: &[f32], cols: usize) {
    if in_pairs(cx, x.len() / cols.max(1)) {
        let rows = (CHUNK / cols.max(1)).max(1);
        let wide = cols.div_ceil(2);
        return cx.threads.chunks(out, rows * wide, |i, out| {
            let x = &x[i * rows * cols..];
            pair_rows(bytemuck::cast_slice_mut(out), x, cols);
        });
    }
    cx.threads.chunks(out, CHUNK, |i, out| round_values(cx.isa, out, &x[i * CHUNK..][..out.len()]));
}

/// Rows of x in pairs; as many as `out` has room for.
pub fn pair_rows(out: &mut [u32], x: &[f32], cols: usize) {
    for (out, x) in out.chunks_exact_mut(cols.div_ceil(2).max(1)).zip(x.chunks_exact(cols.max(1))) {
        // SAFETY: the precision was chosen by `Cpu`, which asked the processor.
        unsafe { avx512_bf16::pair_up(out, x) };
    }
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_matches_bf16_and_flushes_subnormals_to_zero() {
        let all = (0..u32::MAX).step_by(4099).chain([0x7f80_0000, 0xff80_0000, 0x7f7f_ffff, 0x3f80_8000]);
        for x in all.map(f32::from_bits) {
            let (got, want) = (round(x), half::bf16::from_f32(x).to_f32());
            match x.is_nan() {
                true => assert!(got.is_nan()),
                false if x.is_normal() => assert_eq!(got.to_bits(), want.to_bits(), "{x:e}"),
                false if x.is_finite() => assert_eq!(got.to_bits(), 0.0f32.copysign(x).to_bits(), "{x:e}"),
                false => assert_eq!(got, x),
            }
        }
    }
}
