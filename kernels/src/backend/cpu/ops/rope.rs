//! Rotary positions, half-split pairs (i, i + D/2), in place; tasks are blocks of rows.

use super::super::operands::Context;
use super::super::runtime::isa::kernel;

/// Rows per task.
const ROWS: usize = 16;

/// Which way to rotate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// By the angle.
    Forth,
    /// Back: the gradient.
    Back,
}

kernel! {
    fn rotate<L>(row: &mut [f32], cos: &[f32], sin: &[f32], turn: Turn) {
        let half = cos.len();
        let sign = if turn == Turn::Forth { 1.0 } else { -1.0 };
        for head in row.chunks_exact_mut(2 * half) {
            let (first, second) = head.split_at_mut(half);
            for (((a, b), &c), &s) in first.iter_mut().zip(second).zip(cos).zip(sin) {
                let s = sign * s;
                let (x, y) = (*a, *b);
                *a = L::fma(x, c, -(y * s));
                *b = L::fma(y, c, x * s);
            }
        }
    }
}

/// x[T, cols], table rows [cos, sin] of `size` = D, one position per token.
pub fn rope(cx: Context, x: (&mut [f32], usize), table: (&[f32], usize), positions: &[u32], turn: Turn) {
    let ((x, cols), (table, size)) = (x, table);
    cx.threads.chunks(x, ROWS * cols, |i, x| {
        for (row, &position) in x.chunks_exact_mut(cols).zip(&positions[i * ROWS..]) {
            let angles = &table[position as usize * size..][..size];
            let (cos, sin) = angles.split_at(size / 2);
            rotate(cx.isa, row, cos, sin, turn);
        }
    });
}
