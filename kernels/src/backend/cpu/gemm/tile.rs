//! Tiles of matrix products: at most [`ROWS`] x [`COLS`] outputs that are added up in registers, whatever kernel does it:
//! `avx512.rs`, or `tile_avx2_neon.rs` where vectors are shorter.
//!
//! A tile's value is one chain of multiply-adds over k in ascending order per slice of K; slices are added in order. So
//! all of these kernels give the same bits, but for the one that has no fused multiply-add.

use super::super::operands::{Part, Place};
use super::super::runtime::isa::{self, Isa};
use super::tile_avx2_neon;

/// What will be read next: that many runs of bytes, evenly apart.
#[derive(Debug, Clone, Copy)]
pub struct Ahead {
    /// The first byte.
    pub at: *const u8,
    /// Bytes of a run.
    pub run: usize,
    /// How many.
    pub runs: usize,
    /// Bytes from one to the next.
    pub stride: usize,
}

impl Ahead {
    /// Asks for the `i`-th of `of` equal parts of it to come to L2.
    pub fn fetch(&self, i: usize, of: usize) {
        let lines = self.run.div_ceil(64).max(1);
        let all = lines * self.runs;
        let (first, end) = (all * i / of, all * (i + 1) / of);
        // A division for each line would take as long as a twentieth of a tile.
        let (mut run, mut line) = (self.at.wrapping_add(first / lines * self.stride), first % lines);
        for _ in first..end {
            soon(run.wrapping_add(line * 64));
            line += 1;
            if line == lines {
                (run, line) = (run.wrapping_add(self.stride), 0);
            }
        }
    }
}

/// Asks for the line at `at` to come to L2.
#[inline(always)]
pub fn soon(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which no address can make fault.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
    let _ = at;
}

/// Whether [`tile`] reads no more of a row of the right factor than the columns of its tile: else it reads a multiple of
/// 16 numbers, which panels have.
pub fn reads_columns_alone() -> bool {
    isa::best() == Isa::Avx512
}

/// out = [out +] scale * (sum of the parts), by the processor's kernel.
///
/// # Safety
/// Every element that the sizes and strides name is inside its allocation, as is what [`reads_columns_alone`] says of b,
/// and no other thread accesses the output during the call.
#[inline]
pub unsafe fn tile(parts: &[Part], place: Place) {
    // SAFETY: the caller's promise, and the processor was asked.
    unsafe {
        match isa::best() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => super::avx512::tile(parts, place),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => tile_avx2_neon::avx2(parts, place),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => tile_avx2_neon::neon(parts, place),
            _ => tile_avx2_neon::generic(parts, place),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::operands::{COLS, ROWS};
    use super::*;
    use crate::numeric::rng::Stream;

    type Kernel = unsafe fn(&[Part], Place);

    /// How a multiply-add rounds.
    #[derive(Clone, Copy, PartialEq)]
    enum Rounds {
        Once,
        Twice,
    }

    /// Those that this processor has.
    fn kernels() -> Vec<(&'static str, Kernel, Rounds)> {
        let mut kernels: Vec<(_, Kernel, _)> = vec![("generic", tile_avx2_neon::generic, Rounds::Twice)];
        #[cfg(target_arch = "x86_64")]
        {
            let fused = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let longer = is_x86_feature_detected!("avx512f");
            kernels.extend(fused.then_some(("avx2", tile_avx2_neon::avx2 as Kernel, Rounds::Once)));
            kernels.extend(longer.then_some(("avx512", super::super::avx512::tile as Kernel, Rounds::Once)));
        }
        #[cfg(target_arch = "aarch64")]
        kernels.push(("neon", tile_avx2_neon::neon, Rounds::Once));
        kernels
    }

    /// Layout of left factors: one row after the other, or one column after the other.
    #[derive(Clone, Copy, PartialEq)]
    enum Layout {
        RowMajor,
        ColumnMajor,
    }

    /// A sum of two products [12, 32], and their terms.
    struct Case {
        left: [Vec<f32>; 2],
        right: [Vec<f32>; 2],
        terms: [usize; 2],
        layout: Layout,
    }

    impl Case {
        fn new(terms: [usize; 2], layout: Layout, draws: &mut Stream) -> Self {
            let mut numbers = |n: usize| (0..n).map(|_| draws.unit() - 0.5).collect::<Vec<_>>();
            let left = terms.map(|k| numbers(ROWS * (k + 3)));
            Case { left, right: terms.map(|k| numbers(k * COLS)), terms, layout }
        }

        fn parts(&self) -> [Part; 2] {
            [0, 1].map(|i| {
                let (k, wide) = (self.terms[i], self.terms[i] + 3);
                let (row, col) = if self.layout == Layout::ColumnMajor { (1, ROWS) } else { (wide, 1) };
                Part { k, a: self.left[i].as_ptr(), row, col, b: self.right[i].as_ptr(), stride: COLS }
            })
        }

        /// One output, by a chain of scalars.
        fn value(&self, (r, c): (usize, usize), old: Option<f32>, scale: f32, rounds: Rounds) -> f32 {
            let plus = |a: f32, b: f32, sum: f32| match rounds {
                Rounds::Once => a.mul_add(b, sum),
                Rounds::Twice => a * b + sum,
            };
            let mut sum = 0.0;
            for (i, &k) in self.terms.iter().enumerate() {
                for t in 0..k {
                    let at = if self.layout == Layout::ColumnMajor { t * ROWS + r } else { r * (k + 3) + t };
                    sum = plus(self.left[i][at], self.right[i][t * COLS + c], sum);
                }
            }
            old.map_or(sum * scale, |old| plus(sum, scale, old))
        }
    }

    #[test]
    fn tiles_equal_scalar_chains_and_write_nothing_outside() {
        let mut draws = Stream::new(&[11]);
        let stride = COLS + 5;
        let (by_rows, by_columns) = (Layout::RowMajor, Layout::ColumnMajor);
        for (terms, layout) in
            [([7, 3], by_rows), ([1, 0], by_columns), ([0, 0], by_rows), ([5, 1], by_columns)]
        {
            let case = Case::new(terms, layout, &mut draws);
            let before: Vec<f32> = (0..(ROWS + 1) * stride).map(|_| draws.unit()).collect();
            for (name, kernel, rounds) in kernels() {
                for (rows, cols) in (1..=ROWS).flat_map(|r| (1..=COLS).map(move |c| (r, c))) {
                    for (add, scale) in [(false, 1.0), (true, 0.3)] {
                        let mut out = before.clone();
                        let at = out.as_mut_ptr();
                        // SAFETY: the processor was asked; factors have 12 rows and 32 columns, and so has `out`.
                        unsafe {
                            kernel(&case.parts(), Place { at, stride, rows, cols, scale, add, short: false });
                        }
                        for (i, (&got, &old)) in out.iter().zip(&before).enumerate() {
                            let (r, c) = (i / stride, i % stride);
                            let inside = r < rows && c < cols;
                            let sum = || case.value((r, c), add.then_some(old), scale, rounds);
                            let want = if inside { sum() } else { old };
                            assert_eq!(
                                got.to_bits(),
                                want.to_bits(),
                                "{name}, {rows} x {cols}, {terms:?}, {add}: {r}, {c}"
                            );
                        }
                    }
                }
            }
        }
    }
}
