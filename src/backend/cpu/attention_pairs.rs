//! The products of a block of attention on pairs of bf16 numbers, by `avx512_bf16.rs`. All that a block needs is
//! paired when it is needed, in L2: along the channels for scores, along keys or queries for what is added up over
//! those. Each output is the chain that `attention_floats.rs` computes of the same rounded numbers.

use super::attention_block::{Into, KEYS, Pass, Products, QUERIES, Seen, Which};
use super::avx512::{COLS, ROWS};
use super::avx512_bf16::{self, Pairs};
use super::product::{Strided, Target};
use super::threads::Shared;
use super::tiled::rows_of_pair_tiles;
use crate::backend::Write;

/// Words of D channels: in pairs, and one by one in whole panels.
#[derive(Clone, Copy)]
struct Wide {
    pairs: usize,
    panels: usize,
}

impl Wide {
    fn of(size: usize) -> Self {
        Wide { pairs: size.div_ceil(2), panels: size.next_multiple_of(COLS) }
    }
}

/// What is multiplied.
pub struct InPairs<'r> {
    size: usize,
    wide: Wide,
    pass: Pass,
    /// q and dout as the right factor of scores, [queries / 32][D / 2][32]: pairs along the channels.
    turned: [&'r mut [u32]; 2],
    /// The same as the right factor of what is added up over queries, [D / 32][queries / 2][32].
    over_queries: [&'r mut [u32]; 2],
    /// k and v as the left factor of scores, [keys][D / 2].
    rows: [&'r mut [u32]; 2],
    /// v, in the gradient k, as the right factor of what is added up over keys, [D / 32][keys / 2][32].
    over_keys: &'r mut [u32],
    /// A block of scores, as a left factor.
    block: &'r mut [u32],
}

impl<'r> InPairs<'r> {
    /// Words that [`InPairs::new`] takes for heads of `size` channels.
    pub fn room(size: usize) -> usize {
        let Wide { pairs, panels } = Wide::of(size);
        2 * (QUERIES + KEYS) * pairs + (QUERIES + KEYS / 2) * panels + KEYS * QUERIES / 2
    }

    /// With that much room.
    pub fn new((size, pass): (usize, Pass), room: &'r mut [f32]) -> Self {
        let wide = Wide::of(size);
        let mut rest: &'r mut [u32] = bytemuck::cast_slice_mut(room);
        let mut part = |len: usize| rest.split_off_mut(..len).unwrap_or_default();
        InPairs {
            size,
            wide,
            pass,
            turned: [QUERIES * wide.pairs; 2].map(&mut part),
            over_queries: [QUERIES / 2 * wide.panels; 2].map(&mut part),
            rows: [KEYS * wide.pairs; 2].map(&mut part),
            over_keys: part(KEYS / 2 * wide.panels),
            block: part(KEYS * QUERIES / 2),
        }
    }
}

/// out[queries / 32][D / 2][32] = x[count, D]
fn turn(out: &mut [u32], x: Strided, (count, size): (usize, usize)) {
    let pairs = size.div_ceil(2);
    assert!(x.col == 1 && x.holds(count, size) && out.len() == QUERIES * pairs, "queries in rows");
    for i in (0..count).step_by(16) {
        for d in (0..size).step_by(32) {
            let from = (x.data.as_ptr().wrapping_add(i * x.row + d), x.row);
            // SAFETY: the precision was chosen by `Cpu`, which asked the processor; rows were checked, and a panel
            // has 32 words for each pair.
            unsafe {
                let to = out.as_mut_ptr().add(i / COLS * COLS * pairs + d / 2 * COLS + i % COLS);
                avx512_bf16::pair_and_turn(to, from, (16.min(count - i), 32.min(size - d)));
            }
        }
    }
}

/// out[D / 32][most / 2][32] = x[count, D], pairs along the rows; a last single row gets 0.
fn stack(out: &mut [u32], x: Strided, (count, size): (usize, usize), most: usize) {
    assert!(x.col == 1 && x.holds(count, size) && count <= most, "rows");
    let mut pads = [[0.0; COLS]; 2];
    for (p, panel) in out.chunks_exact_mut(most / 2 * COLS).enumerate() {
        let cols = COLS.min(size - p * COLS);
        for (pair, out) in panel.chunks_exact_mut(COLS).enumerate().take(count.div_ceil(2)) {
            let row = |i: usize| (i < count).then(|| &x.data[i * x.row + p * COLS..][..cols]);
            let mut whole = [2 * pair, 2 * pair + 1].map(row);
            if cols < COLS || whole[1].is_none() {
                for (pad, row) in pads.iter_mut().zip(&whole) {
                    *pad = [0.0; COLS];
                    row.iter().for_each(|row| pad[..cols].copy_from_slice(row));
                }
                whole = [Some(&pads[0][..]), Some(&pads[1][..])];
            }
            let [Some(even), Some(odd)] = whole else { unreachable!("both were filled") };
            // SAFETY: as in `turn`.
            unsafe { avx512_bf16::interleave(out, even, odd) };
        }
    }
}

impl<'a> Products<'a> for InPairs<'_> {
    fn queries(&mut self, x: [Option<Strided<'a>>; 2], count: usize) {
        for (i, x) in x.into_iter().enumerate() {
            let Some(x) = x else { continue };
            turn(self.turned[i], x, (count, self.size));
            if self.pass == Pass::Backward {
                stack(self.over_queries[i], x, (count, self.size), QUERIES);
            }
        }
    }

    fn keys(&mut self, [k, v]: [Strided<'a>; 2], count: usize) {
        let backward = self.pass == Pass::Backward;
        let rows = if backward { vec![k, v] } else { vec![k] };
        for (out, x) in self.rows.iter_mut().zip(rows) {
            for (i, out) in out.chunks_exact_mut(self.wide.pairs.max(1)).take(count).enumerate() {
                // SAFETY: as in `turn`.
                unsafe { avx512_bf16::pair_up(out, &x.data[i * x.row..][..self.size]) };
            }
        }
        stack(self.over_keys, if backward { k } else { v }, (count, self.size), KEYS);
    }

    fn scores(&mut self, out: &mut [f32], which: Which, seen: Seen, scale: f32) {
        let (pairs, which) = (self.wide.pairs, which as usize);
        let out = Shared::new(out);
        for c in (0..seen.queries).step_by(COLS) {
            let n = COLS.min(seen.queries - c);
            let keys = seen.of(c + n - 1);
            if keys == 0 {
                continue;
            }
            let target = Target { out: &out, at: c, stride: QUERIES, write: Write::Set };
            let panel = &self.turned[which][c * pairs..];
            let left = Pairs { k: pairs, a: self.rows[which].as_ptr(), row: pairs, col: 1, b: panel.as_ptr() };
            target.pointer(keys, n);
            // SAFETY: the output is ours and was checked; there are as many rows of keys, and panels of queries.
            unsafe { rows_of_pair_tiles(target, (keys, n), (left, None), scale, None) };
        }
    }

    unsafe fn to_queries(&mut self, out: Into, block: &mut [f32], which: Which, seen: Seen) {
        let kept = if self.pass == Pass::Backward { Which::First } else { Which::Second };
        assert!(which == kept, "what is added up over keys was paired");
        for (out, rows) in
            self.block.chunks_exact_mut(QUERIES).zip(block.chunks_exact(2 * QUERIES)).take(seen.keys.div_ceil(2))
        {
            let (even, odd) = rows.split_at(QUERIES);
            // SAFETY: as in `turn`.
            unsafe { avx512_bf16::interleave(out, even, odd) };
        }
        if !seen.keys.is_multiple_of(2) {
            // What stands in the row after the last is of another block.
            let last = &mut self.block[seen.keys / 2 * QUERIES..][..QUERIES];
            last.iter_mut().for_each(|pair| *pair &= 0xffff_0000);
        }
        let step = if seen.all() { seen.queries } else { ROWS };
        for c in (0..seen.queries).step_by(step) {
            let m = step.min(seen.queries - c);
            let k = seen.of(c + m - 1).div_ceil(2);
            let left = Pairs { k, a: self.block[c..].as_ptr(), row: 1, col: QUERIES, b: self.over_keys.as_ptr() };
            // SAFETY: the caller's promise; pairs of keys were made of both factors.
            unsafe { self.columns(out, (c, m), left, KEYS) };
        }
    }

    unsafe fn to_keys(&mut self, out: Into, block: &mut [f32], which: Which, seen: Seen) {
        const PAIRS: usize = QUERIES / 2;
        let rows = self.block.chunks_exact_mut(PAIRS).zip(block.chunks_exact(QUERIES));
        // SAFETY: as in `turn`.
        rows.take(seen.keys).for_each(|(out, row)| unsafe { avx512_bf16::pair_up(out, row) });
        let pairs = seen.queries.div_ceil(2);
        if !seen.queries.is_multiple_of(2) {
            // What stands beyond the last query is of no query.
            let lasts = self.block.iter_mut().skip(pairs - 1).step_by(PAIRS);
            lasts.take(seen.keys).for_each(|pair| *pair &= 0xffff_0000);
        }
        let right = self.over_queries[which as usize].as_ptr();
        let step = if seen.all() { seen.keys } else { ROWS };
        for r in (0..seen.keys).step_by(step) {
            let (m, from) = (step.min(seen.keys - r), seen.from(r) / 2);
            let a = self.block[r * PAIRS + from..].as_ptr();
            let left = Pairs { k: pairs - from, a, row: PAIRS, col: 1, b: right.wrapping_add(from * COLS) };
            // SAFETY: the caller's promise; pairs of queries were made of both factors.
            unsafe { self.columns(out, (r, m), left, QUERIES) };
        }
    }
}

impl InPairs<'_> {
    /// Rows r .. r + m of an output of D columns; panels of the right factor have `most` / 2 rows.
    ///
    /// # Safety
    /// As [`Products::to_queries`]; the factors have what `pairs` says.
    unsafe fn columns(&self, out: Into, (r, m): (usize, usize), pairs: Pairs, most: usize) {
        for d in (0..self.size).step_by(COLS) {
            let (target, n) = (out.target.from(r, d), COLS.min(self.size - d));
            let here = Pairs { b: pairs.b.wrapping_add(d * most / 2), ..pairs };
            target.pointer(m, n);
            // SAFETY: the caller's promise; the output was checked.
            unsafe { rows_of_pair_tiles(target, (m, n), (here, None), out.scale, None) };
        }
    }
}
