//! The products of a block of attention on f32 numbers. Keys and values are read in place; only queries are
//! transposed, once for all blocks of keys. In bf16 it multiplies rounded copies: the reference of `block_pairs.rs`,
//! to the bit, and what computes bf16 where there is no fast instruction for it.

use super::super::gemm::product::{small, tile};
use super::super::gemm::product_tiles;
use super::super::operands::{COLS, Context, Factors, Precision, ROWS, Sizes, Strided};
use super::super::runtime::bf16::{round, round_here};
use super::block::{BlockProducts, Into, KEYS, Keys, QUERIES, Seen, Which};
use crate::backend::Write;

/// Of one kind, in f32: its numbers in place, or a rounded copy.
struct Matrix<'a, 'r> {
    there: Option<Strided<'a>>,
    copy: Option<&'r mut [f32]>,
    size: usize,
}

impl<'a> Matrix<'a, '_> {
    fn set(&mut self, x: Strided<'a>, rows: usize) {
        self.there = Some(x);
        if let Some(copy) = &mut self.copy {
            for (r, out) in copy.chunks_exact_mut(self.size.max(1)).take(rows).enumerate() {
                let x = &x.data[r * x.row..][..out.len()];
                out.iter_mut().zip(x).for_each(|(out, x)| *out = round(*x));
            }
        }
    }

    /// [rows, D]
    fn get(&self) -> Strided<'_> {
        match (&self.copy, self.there) {
            (Some(copy), _) => Strided::rows(copy, self.size),
            (None, Some(there)) => there,
            (None, None) => unreachable!("it was said what is multiplied"),
        }
    }
}

/// What is multiplied.
pub struct Floats<'a, 'c, 'r> {
    cx: Context<'c>,
    size: usize,
    queries: [Matrix<'a, 'r>; 2],
    keys: [Matrix<'a, 'r>; 2],
    /// [queries / 32][D][32] of each kind, as the right factor of tiles.
    transposed: [&'r mut [f32]; 2],
}

impl<'a, 'c, 'r> Floats<'a, 'c, 'r> {
    /// Values that [`Floats::new`] takes for heads of `size` channels.
    pub fn room(size: usize) -> usize {
        (4 * QUERIES + 2 * KEYS) * size
    }

    /// With that much room.
    pub fn new(cx: Context<'c>, size: usize, room: &'r mut [f32]) -> Self {
        let mut parts = room.chunks_exact_mut((QUERIES * size).max(1));
        const { assert!(QUERIES == KEYS, "all parts are of one length") };
        let mut part = || parts.next().unwrap_or_default();
        let transposed = [part(), part()];
        let rounded = cx.precision != Precision::F32;
        let mut matrix = || Matrix { there: None, copy: rounded.then(&mut part), size };
        let (queries, keys) = ([matrix(), matrix()], [matrix(), matrix()]);
        Floats { cx, size, queries, keys, transposed }
    }

    fn settle(&self, block: &mut [f32], seen: Seen) {
        if self.cx.precision != Precision::F32 {
            round_here(self.cx.isa, &mut block[..seen.keys * QUERIES]);
        }
    }
}

/// transposed[queries / 32][D][32] = x[queries, D]
fn transpose(transposed: &mut [f32], x: Strided, queries: usize) {
    let size = transposed.len() / QUERIES;
    for (p, panel) in
        transposed.chunks_exact_mut((size * COLS).max(1)).enumerate().take(queries.div_ceil(COLS))
    {
        let (x, n) = (x.from(p * COLS, 0), COLS.min(queries - p * COLS));
        product_tiles::lay_out(panel, x.transposed(), (size, n), 1.0);
    }
}

impl<'a> BlockProducts<'a> for Floats<'a, '_, '_> {
    fn queries(&mut self, x: [Option<Strided<'a>>; 2], count: usize) {
        for ((matrix, transposed), x) in self.queries.iter_mut().zip(&mut self.transposed).zip(x) {
            let Some(x) = x else { continue };
            matrix.set(x, count);
            transpose(transposed, matrix.get(), count);
        }
    }

    fn keys(&mut self, keys: Keys<'a>) {
        self.keys.iter_mut().zip(keys.x).for_each(|(matrix, x)| matrix.set(x, keys.count));
    }

    fn scores(&mut self, out: &mut [f32], which: Which, seen: Seen, scale: f32) {
        let (x, transposed) = (self.keys[which as usize].get(), &self.transposed[which as usize]);
        for c in (0..seen.queries).step_by(COLS) {
            let n = COLS.min(seen.queries - c);
            let sizes = Sizes { m: seen.of(c + n - 1), n, k: self.size };
            let f = Factors { a: x, b: Strided::rows(&transposed[c * self.size..], COLS), scale };
            small(self.cx, (&mut out[c..], QUERIES), Write::Set, sizes, f);
        }
    }

    unsafe fn to_queries(&mut self, out: Into, block: &mut [f32], which: Which, seen: Seen) {
        self.settle(block, seen);
        let b = self.keys[which as usize].get();
        let step = if seen.all() { seen.queries } else { ROWS };
        for c in (0..seen.queries).step_by(step) {
            let m = step.min(seen.queries - c);
            let sizes = Sizes { m, n: self.size, k: seen.of(c + m - 1) };
            let a = Strided::rows(&block[c..], QUERIES).transposed();
            // SAFETY: the caller's promise.
            unsafe { tile(self.cx, out.target.from(c, 0), sizes, Factors { a, b, scale: out.scale }) };
        }
    }

    unsafe fn to_keys(&mut self, out: Into, block: &mut [f32], which: Which, seen: Seen) {
        self.settle(block, seen);
        let x = self.queries[which as usize].get();
        let step = if seen.all() { seen.keys } else { ROWS };
        for r in (0..seen.keys).step_by(step) {
            let (m, from) = (step.min(seen.keys - r), seen.from(r));
            let sizes = Sizes { m, n: self.size, k: seen.queries - from };
            let f = Factors {
                a: Strided::rows(block, QUERIES).from(r, from),
                b: x.from(from, 0),
                scale: out.scale,
            };
            // SAFETY: the caller's promise.
            unsafe { tile(self.cx, out.target.from(r, 0), sizes, f) };
        }
    }
}
