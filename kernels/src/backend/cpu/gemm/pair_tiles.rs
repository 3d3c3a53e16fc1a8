//! Tiles of pairs of bf16 numbers: the rows of a panel, and a right factor of f32 numbers as such tiles read it.

use super::super::operands::{COLS, Pairs, ROWS, Strided, Target};
use super::super::runtime::bf16::together;
use super::avx512_bf16;
use super::product_tiles;
use super::tile::Ahead;

/// As [`product_tiles::rows_of_tiles`].
///
/// # Safety
/// As there; and the processor has AVX-512 BF16.
pub unsafe fn rows_of_pair_tiles(
    target: Target,
    (m, cols): (usize, usize),
    (pairs, second): (Pairs, Option<Pairs>),
    scale: f32,
    ahead: Option<Ahead>,
) {
    for i in (0..m).step_by(ROWS) {
        if let Some(ahead) = ahead {
            ahead.fetch(i / ROWS, m.div_ceil(ROWS));
        }
        let from = |pairs: Pairs| Pairs { a: pairs.a.wrapping_add(i * pairs.row), ..pairs };
        let place = product_tiles::place(target, i, (ROWS.min(m - i), cols), scale);
        // SAFETY: the caller's promise.
        unsafe { avx512_bf16::tile(from(pairs), second.map(from), place) };
    }
}

/// A right factor [k, n] of pairs along k, as tiles read it: panel[k / 2][32] of `size` = (k, columns), rounded; zeros
/// beyond its columns, and beside a last single row.
///
/// # Safety
/// AVX-512 BF16.
pub unsafe fn lay_out(panel: &mut [u32], b: Strided, (k, cols): (usize, usize)) {
    let panel = &mut panel[..k.div_ceil(2) * COLS];
    assert!(b.holds(k, cols) && cols <= COLS, "the factor is as large as the product says");
    if b.row == 1 {
        for i in [0, COLS / 2] {
            for j in (0..k).step_by(32) {
                let from = b.from(j, i).data.as_ptr();
                let (rows, numbers) = (cols.saturating_sub(i).min(16), (k - j).min(32));
                // SAFETY: the caller's promise; sizes were checked above, and a row of the panel holds 16 words from i on.
                unsafe {
                    let out = panel.as_mut_ptr().add(j / 2 * COLS + i);
                    avx512_bf16::pair_and_turn(out, (from, b.col), (rows, numbers));
                }
            }
        }
        return;
    }
    let row = |i: usize| if i < k { &b.from(i, 0).data[..cols] } else { &[] };
    for (w, out) in panel.chunks_exact_mut(COLS).enumerate() {
        assert_eq!(b.col, 1, "rows or columns of the factor are contiguous");
        let (even, odd) = (row(2 * w), row(2 * w + 1));
        let whole = odd.len() / 16 * 16;
        // SAFETY: the caller's promise.
        unsafe { avx512_bf16::interleave(&mut out[..whole], &even[..whole], &odd[..whole]) };
        for (j, out) in out.iter_mut().enumerate().skip(whole) {
            let number = |row: &[f32]| row.get(j).copied().unwrap_or(0.0);
            *out = together(number(even), number(odd));
        }
    }
}
