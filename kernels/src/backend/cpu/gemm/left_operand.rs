//! The left factor of a frozen product, as its kernel reads it: f32 numbers as they are or rounded to bf16, or bf16
//! numbers in pairs. It is rounded once, before the product, for all tasks, and for all matrices that share it.

use super::super::operands::{Context, Precision};
use super::super::runtime::bf16::round;
use super::super::runtime::isa::kernel;
use super::{avx512_bf16, gemv};

/// Values per task.
pub const CHUNK: usize = 16 * 1024;

kernel! {
    fn round_values<L>(out: &mut [f32], x: &[f32]) {
        out.iter_mut().zip(x).for_each(|(o, &x)| *o = round(x));
    }
}

/// Few rows are multiplied one number at a time, to the same bits.
pub fn in_pairs(cx: Context, rows: usize) -> bool {
    cx.precision == Precision::Bf16Dot && rows > gemv::ROWS
}

/// Writes rows of x as products read them.
pub fn write(cx: Context, out: &mut [f32], x: &[f32], cols: usize) {
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
