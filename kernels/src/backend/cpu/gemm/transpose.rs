//! Sixteen rows of a factor into sixteen columns of a panel.

use super::super::operands::COLS;
#[cfg(target_arch = "x86_64")]
use super::super::runtime::isa::{self, Isa};
#[cfg(target_arch = "x86_64")]
use super::transpose_avx512;

/// out[j * COLS + i] = scale * x[i * from + j], for i in 0..rows (at most 16) and j in 0..cols (at most 16).
/// Sixteen values are written in each row of out, those from `rows` on 0.
pub fn transpose(out: &mut [f32], (x, from): (&[f32], usize), (rows, cols): (usize, usize), scale: f32) {
    assert!(
        rows <= 16 && cols <= 16 && cols > 0 && (cols - 1) * COLS + 16 <= out.len(),
        "room for the columns"
    );
    assert!(rows == 0 || (rows - 1) * from + cols <= x.len(), "the rows are there");
    #[cfg(target_arch = "x86_64")]
    if isa::best() == Isa::Avx512 {
        let (out, x) = ((out.as_mut_ptr(), COLS), (x.as_ptr(), from));
        // SAFETY: the processor was asked, and the sizes checked.
        return unsafe { transpose_avx512::transpose(out, x, (rows, cols), scale) };
    }
    for (j, out) in out.chunks_mut(COLS).enumerate().take(cols) {
        for (i, out) in out.iter_mut().enumerate().take(16) {
            *out = if i < rows { scale * x[i * from + j] } else { 0.0 };
        }
    }
}
