//! Blocks into the right factors of tiles. What a run of a block is worth stands in [`crate::numeric::block`]; the
//! numbers are put where tiles want them, or multiplied at once where rows are few: in vectors of outputs
//! ([`super::decode`]) where the processor has AVX-512 or AVX2, by plain code elsewhere.
//!
//! Rows of the matrix are outputs.

use super::super::gemm::gemv::{AT_ONCE, PANELS, Sums};
use super::super::operands::COLS;
use super::super::runtime::bf16::round;
#[cfg(target_arch = "x86_64")]
use super::super::runtime::isa::Isa;
use super::super::runtime::isa::{self, kernel};
use super::block_rows::{Rounded, Rows};
#[cfg(target_arch = "x86_64")]
use super::block_unpack_avx512 as vectors;
#[cfg(target_arch = "x86_64")]
use super::{decode, simd_avx2::Avx2, simd_avx512::Avx512};
use crate::numeric::block::{Packed, RUN, Visitor};
use std::ops::Range;

/// out[k][32] = the runs of 32 rows; columns of missing rows are unspecified.
pub struct Upright<'a> {
    /// 32 numbers for each term.
    pub out: &'a mut [f32],
    /// At most 32.
    pub rows: Rows<'a>,
    /// Runs of each row.
    pub runs: Range<usize>,
}

/// The same in pairs of bf16 numbers: out[k / 2][32].
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub struct UprightPairs<'a> {
    /// 32 words for two terms.
    pub out: &'a mut [u32],
    /// At most 32.
    pub rows: Rows<'a>,
    /// Runs of each row.
    pub runs: Range<usize>,
}

/// out[n][32] = one run of each row.
pub struct Transposed<'a> {
    /// 32 numbers for each row.
    pub out: &'a mut [f32],
    /// As many as there are terms.
    pub rows: Rows<'a>,
    /// Which run.
    pub run: usize,
}

/// The same in pairs of bf16 numbers: out[n / 2][32].
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub struct TransposedPairs<'a> {
    /// 32 words for two rows.
    pub out: &'a mut [u32],
    /// As many as there are terms.
    pub rows: Rows<'a>,
    /// Which run.
    pub run: usize,
}

/// The chains over rows of x of at most four times 32 rows, see [`Chains`](super::super::gemm::gemv::Chains).
pub struct InPlace<'a> {
    /// For each row of x.
    pub sums: &'a mut [Sums],
    /// Whole runs, the same number in each row.
    pub x: &'a [&'a [f32]],
    /// At most 4 x 32.
    pub rows: Rows<'a>,
    /// First run of each row.
    pub from: usize,
}

impl Visitor for Upright<'_> {
    type Result = ();
    fn visit<P: Packed>(self) {
        assert_eq!(self.out.len(), self.runs.len() * RUN * COLS, "a panel of whole runs");
        check::<P>(&self.rows, self.runs.end);
        #[cfg(target_arch = "x86_64")]
        match isa::best() {
            // SAFETY: the processor was asked; sizes were checked.
            Isa::Avx512 => return unsafe { upright_avx512::<P>(self.out, self.rows, self.runs) },
            // SAFETY: as above.
            Isa::Avx2 => return unsafe { upright_avx2::<P>(self.out, self.rows, self.runs) },
            Isa::Neon | Isa::Generic => {}
        }
        for (out, run) in self.out.as_chunks_mut::<{ RUN * COLS }>().0.iter_mut().zip(self.runs) {
            upright::<P>(out, &self.rows, run);
        }
    }
}

impl Visitor for UprightPairs<'_> {
    type Result = ();
    fn visit<P: Packed>(self) {
        assert_eq!(self.out.len(), self.runs.len() * RUN / 2 * COLS, "a panel of whole runs");
        check::<P>(&self.rows, self.runs.end);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: factors are pairs where the processor has AVX-512 BF16; sizes were checked.
        return unsafe { pairs_avx512::<P>(self.out, self.rows, self.runs) };
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!("pairs are for AVX-512 BF16");
    }
}

impl Visitor for Transposed<'_> {
    type Result = ();
    fn visit<P: Packed>(self) {
        #[cfg(target_arch = "x86_64")]
        if isa::best() == Isa::Avx512 {
            // SAFETY: the processor was asked.
            return unsafe { vectors::transposed_run::<P>(self.out, self.rows, self.run) };
        }
        for (n, out) in self.out.as_chunks_mut::<COLS>().0.iter_mut().enumerate() {
            unpack::<P>(out, &self.rows, n, self.run);
        }
    }
}

impl Visitor for TransposedPairs<'_> {
    type Result = ();
    fn visit<P: Packed>(self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: factors are pairs where the processor has AVX-512 BF16.
        return unsafe { vectors::transposed_pairs::<P>(self.out, self.rows, self.run) };
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!("pairs are for AVX-512 BF16");
    }
}

impl Visitor for InPlace<'_> {
    type Result = ();
    fn visit<P: Packed>(self) {
        let InPlace { sums, x, rows, from } = self;
        assert!(sums.len() == x.len() && (1..=AT_ONCE).contains(&x.len()), "some rows of x");
        let runs = x[0].len() / RUN;
        assert!(x.iter().all(|x| x.len() == runs * RUN), "whole runs, the same number in each row");
        check::<P>(&rows, from + runs);
        assert!(rows.count <= PANELS * COLS, "four panels");
        #[cfg(target_arch = "x86_64")]
        match isa::best() {
            // SAFETY: the processor was asked; sizes were checked.
            Isa::Avx512 => return unsafe { chains_avx512::<P>(sums, x, rows, from) },
            // SAFETY: as above.
            Isa::Avx2 => return unsafe { chains_avx2::<P>(sums, x, rows, from) },
            Isa::Neon | Isa::Generic => {}
        }
        sums.iter_mut().zip(x).for_each(|(sums, x)| *sums = plain_chains::<P>(x, &rows, from));
    }
}

/// [`InPlace`] in plain code.
fn plain_chains<P: Packed>(x: &[f32], rows: &Rows, from: usize) -> Sums {
    let mut sums = [[0.0; COLS]; PANELS];
    let mut wide = [[0.0; RUN]; ROWS];
    for (first, sums) in (0..rows.count).step_by(ROWS).zip(sums.as_flattened_mut().as_chunks_mut().0) {
        for (i, x) in x.as_chunks::<RUN>().0.iter().enumerate() {
            for (row, wide) in wide.iter_mut().enumerate().take(rows.count - first) {
                unpack::<P>(wide, rows, first + row, from + i);
            }
            chains(isa::best(), sums, x, &wide);
        }
    }
    sums
}

/// Some rows, all of at least that many runs.
fn check<P: Packed>(rows: &Rows, runs: usize) {
    assert!(rows.count > 0, "some rows");
    assert!(runs.div_ceil(P::ELEMENTS / RUN) * P::BYTES <= rows.size, "runs of these rows");
    assert!(rows.count * rows.size <= rows.bytes.len(), "rows that are there");
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn upright_avx512<P: Packed>(out: &mut [f32], rows: Rows, runs: Range<usize>) {
    // SAFETY: the caller's promise, here and below.
    unsafe { decode::upright::<Avx512, P>(out, rows, runs) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn upright_avx2<P: Packed>(out: &mut [f32], rows: Rows, runs: Range<usize>) {
    // SAFETY: as above.
    unsafe { decode::upright::<Avx2, P>(out, rows, runs) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn pairs_avx512<P: Packed>(out: &mut [u32], rows: Rows, runs: Range<usize>) {
    // SAFETY: as above.
    unsafe { decode::upright_pairs::<Avx512, P>(out, rows, runs) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn chains_avx512<P: Packed>(sums: &mut [Sums], x: &[&[f32]], rows: Rows, from: usize) {
    // SAFETY: as above.
    unsafe { decode::chains::<Avx512, P>(sums, x, rows, from) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn chains_avx2<P: Packed>(sums: &mut [Sums], x: &[&[f32]], rows: Rows, from: usize) {
    // SAFETY: as above.
    unsafe { decode::chains::<Avx2, P>(sums, x, rows, from) }
}

/// Whether blocks are decoded in vectors of outputs: then rows of x share the decoding.
pub fn is_in_vectors() -> bool {
    #[cfg(target_arch = "x86_64")]
    return matches!(isa::best(), Isa::Avx512 | Isa::Avx2);
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Rows whose chains run side by side in [`plain_chains`]: as many as are under way at a time.
const ROWS: usize = 8;

kernel! {
    /// sums[row] += x[k] * wide[row][k], in ascending order of k: scalars, because turning rows takes longer.
    fn chains<L>(sums: &mut [f32; ROWS], x: &[f32; RUN], wide: &[[f32; RUN]; ROWS]) {
        let mut sum = *sums;
        for (k, &x) in x.iter().enumerate() {
            for (sum, row) in sum.iter_mut().zip(wide) {
                *sum = L::fma(x, row[k], *sum);
            }
        }
        *sums = sum;
    }
}

/// out = run `run` of row `row`.
fn unpack<P: Packed>(out: &mut [f32; RUN], rows: &Rows, row: usize, run: usize) {
    let block = &rows.bytes[row * rows.size + run * RUN / P::ELEMENTS * P::BYTES..][..P::BYTES];
    let run = run % (P::ELEMENTS / RUN);
    match isa::best() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor was asked.
        Isa::Avx2 => unsafe { unpack_avx2::<P>(out, block, run) },
        _ => unpack_plain::<P>(out, block, run),
    }
    if rows.rounded == Rounded::Bf16 {
        out.iter_mut().for_each(|x| *x = round(*x));
    }
}

/// Not inlined: beside what its callers do the compiler no longer finds vectors in it.
#[inline(never)]
fn unpack_plain<P: Packed>(out: &mut [f32; RUN], block: &[u8], run: usize) {
    P::unpack(out, block, run);
}

/// The same operations in wider vectors.
#[cfg(target_arch = "x86_64")]
#[inline(never)]
#[target_feature(enable = "avx2")]
fn unpack_avx2<P: Packed>(out: &mut [f32; RUN], block: &[u8], run: usize) {
    P::unpack(out, block, run);
}

/// out[k][32] = one run of 32 rows.
fn upright<P: Packed>(out: &mut [f32; RUN * COLS], rows: &Rows, run: usize) {
    let mut numbers = [0.0; RUN];
    for lane in 0..COLS {
        match lane < rows.count {
            true => unpack::<P>(&mut numbers, rows, lane, run),
            false => numbers.fill(0.0),
        }
        out.iter_mut().skip(lane).step_by(COLS).zip(&numbers).for_each(|(o, &x)| *o = x);
    }
}
