//! The products of a block of attention on pairs of bf16 numbers, by `avx512_bf16.rs`: along the channels for scores,
//! along keys or queries for what is added up over those. Keys are paired once for all queries, queries and scores
//! when they are needed, in L2. Each output is the chain that `block_floats.rs` computes of the same rounded
//! numbers.

use super::super::gemm::avx512_bf16;
use super::super::gemm::pair_tiles::rows_of_pair_tiles;
use super::super::operands::{COLS, Context, Pairs, Precision, ROWS, Strided, Target};
use super::super::runtime::threads::Shared;
use super::block::{BlockProducts, Into, KEYS, Keys, Pass, QUERIES, Seen, Which};
use super::inputs::{Inputs, Segment};
use crate::backend::{Heads, Write};

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

/// k and v of a microbatch. Of every block of keys, of every head: the rows of k and, for the gradient, of v,
/// [keys][D / 2], and v, for the gradient k, as the right factor of what is added up over keys, [D / 32][keys / 2][32].
pub struct PairedKeys<'r> {
    words: &'r [u32],
    /// The first key of every row of the microbatch, and where its words begin: keys of the rows before it, of each an
    /// even number.
    rows: Vec<(usize, usize)>,
    heads: usize,
    wide: Wide,
    pass: Pass,
}

/// The words of one block of keys of one head.
struct Words<T> {
    rows: [T; 2],
    over_keys: T,
}

impl<'r> PairedKeys<'r> {
    /// Values that [`PairedKeys::new`] takes.
    pub fn room(cx: Context, (x, segments): (&Inputs, &[Segment]), pass: Pass) -> usize {
        let keys = segments.iter().map(|s| s.queries.next_multiple_of(2)).sum();
        Self::room_of(cx.precision, keys, x.heads, pass)
    }

    /// The same of that many keys, of each row an even number.
    pub fn room_of(precision: Precision, keys: usize, heads: Heads, pass: Pass) -> usize {
        let dot = precision == Precision::Bf16Dot;
        if dot { keys * heads.kv * Self::each(Wide::of(heads.size), pass) } else { 0 }
    }

    /// Words of a key of one head.
    fn each(wide: Wide, pass: Pass) -> usize {
        wide.pairs * if pass == Pass::Backward { 2 } else { 1 } + wide.panels / 2
    }

    /// Where the instruction is used; every row sees its own keys alone.
    pub fn new(
        cx: Context,
        (x, segments): (&Inputs, &[Segment]),
        pass: Pass,
        room: &'r mut [f32],
    ) -> Option<Self> {
        if cx.precision != Precision::Bf16Dot {
            return None;
        }
        let (wide, heads, mut keys) = (Wide::of(x.heads.size), x.heads.kv, 0);
        let (mut rows, mut blocks) = (Vec::new(), Vec::new());
        for segment in segments {
            assert_eq!(segment.past, 0, "a row sees its own keys");
            rows.push((segment.keys_from, keys));
            blocks.extend((0..segment.queries).step_by(KEYS).map(|j| (segment, keys, j)));
            keys += segment.queries.next_multiple_of(2);
        }
        let words: &mut [u32] = bytemuck::cast_slice_mut(room);
        let (all, each) = (Shared::new(&mut *words), heads * Self::each(wide, pass));
        cx.threads.each(blocks.len(), |i| {
            let (segment, before, j) = blocks[i];
            let count = KEYS.min(segment.queries - j);
            // SAFETY: the words of a block belong to its task.
            let block = unsafe { all.slice((before + j) * each, count.next_multiple_of(2) * each) };
            for (head, mut words) in block.chunks_exact_mut((block.len() / heads).max(1)).enumerate() {
                let of = |from| x.shared(from, head, segment.keys_from + j);
                let mut part = |len: usize| words.split_off_mut(..len).unwrap_or_default();
                let rows = [x.k, x.v].into_iter().take(if pass == Pass::Backward { 2 } else { 1 });
                for from in rows {
                    let out = part(count.next_multiple_of(2) * wide.pairs);
                    for (i, out) in out.chunks_exact_mut(wide.pairs.max(1)).take(count).enumerate() {
                        let from: Strided = of(from);
                        // SAFETY: the precision was chosen by `Cpu`, which asked the processor.
                        unsafe { avx512_bf16::pair_up(out, &from.data[i * from.row..][..x.heads.size]) };
                    }
                }
                let over = if pass == Pass::Backward { x.k } else { x.v };
                stack(part(count.div_ceil(2) * wide.panels), of(over), (count, x.heads.size));
            }
        });
        Some(PairedKeys { words, rows, heads, wide, pass })
    }

    /// Of a block.
    fn of(&self, keys: Keys) -> Words<&[u32]> {
        let row = self.rows.partition_point(|(first, _)| *first <= keys.from.0) - 1;
        let (each, count) = (Self::each(self.wide, self.pass), keys.count.next_multiple_of(2));
        let at = ((self.rows[row].1 + keys.from.1) * self.heads + keys.head * count) * each;
        let (first, rest) = self.words[at..][..count * each].split_at(count * self.wide.pairs);
        let (second, over_keys) = rest.split_at(rest.len() - count / 2 * self.wide.panels);
        Words { rows: [first, second], over_keys }
    }
}

/// What is multiplied.
pub struct InPairs<'r> {
    size: usize,
    keys: &'r PairedKeys<'r>,
    /// The block of keys, and how many they are, made even.
    here: Words<&'r [u32]>,
    count: usize,
    /// q and dout as the right factor of scores, [queries / 32][D / 2][32]: pairs along the channels.
    transposed: [&'r mut [u32]; 2],
    /// The same as the right factor of what is added up over queries, [D / 32][queries / 2][32].
    over_queries: [&'r mut [u32]; 2],
    /// A block of scores, as a left factor.
    block: &'r mut [u32],
}

impl<'r> InPairs<'r> {
    /// Words that [`InPairs::new`] takes for heads of `size` channels.
    pub fn room(size: usize) -> usize {
        let Wide { pairs, panels } = Wide::of(size);
        QUERIES * (2 * pairs + panels) + KEYS * QUERIES / 2
    }

    /// With that much room.
    pub fn new(size: usize, keys: &'r PairedKeys, room: &'r mut [f32]) -> Self {
        let Wide { pairs, panels } = keys.wide;
        let mut rest: &'r mut [u32] = bytemuck::cast_slice_mut(room);
        let mut part = |len: usize| rest.split_off_mut(..len).unwrap_or_default();
        InPairs {
            size,
            keys,
            here: Words { rows: [&[]; 2], over_keys: &[] },
            count: 0,
            transposed: [QUERIES * pairs; 2].map(&mut part),
            over_queries: [QUERIES / 2 * panels; 2].map(&mut part),
            block: part(KEYS * QUERIES / 2),
        }
    }
}

/// out[queries / 32][D / 2][32] = x[count, D]
fn transpose(out: &mut [u32], x: Strided, (count, size): (usize, usize)) {
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

/// out[D / 32][pairs][32] = x[count, D], pairs along the rows; a last single row gets 0.
fn stack(out: &mut [u32], x: Strided, (count, size): (usize, usize)) {
    let panel = out.len() / size.div_ceil(COLS).max(1);
    assert!(x.col == 1 && x.holds(count, size) && count.div_ceil(2) * COLS <= panel, "rows");
    let mut pads = [[0.0; COLS]; 2];
    for (p, panel) in out.chunks_exact_mut(panel.max(1)).enumerate() {
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
            // SAFETY: as in `transpose`.
            unsafe { avx512_bf16::interleave(out, even, odd) };
        }
    }
}

impl<'a> BlockProducts<'a> for InPairs<'_> {
    fn queries(&mut self, x: [Option<Strided<'a>>; 2], count: usize) {
        for (i, x) in x.into_iter().enumerate() {
            let Some(x) = x else { continue };
            transpose(self.transposed[i], x, (count, self.size));
            if self.keys.pass == Pass::Backward {
                stack(self.over_queries[i], x, (count, self.size));
            }
        }
    }

    fn keys(&mut self, keys: Keys<'a>) {
        (self.here, self.count) = (self.keys.of(keys), keys.count.next_multiple_of(2));
    }

    fn scores(&mut self, out: &mut [f32], which: Which, seen: Seen, scale: f32) {
        let (pairs, which) = (self.keys.wide.pairs, which as usize);
        let out = Shared::new(out);
        for c in (0..seen.queries).step_by(COLS) {
            let n = COLS.min(seen.queries - c);
            let keys = seen.of(c + n - 1);
            if keys == 0 {
                continue;
            }
            let target = Target { at: c, ..Target::rows(&out, QUERIES, Write::Set) };
            let panel = &self.transposed[which][c * pairs..];
            let left =
                Pairs { k: pairs, a: self.here.rows[which].as_ptr(), row: pairs, col: 1, b: panel.as_ptr() };
            assert!(keys <= self.count, "keys were paired");
            target.pointer(keys, n);
            // SAFETY: the output is ours and was checked; there are as many rows of keys, and panels of queries.
            unsafe { rows_of_pair_tiles(target, (keys, n), (left, None), scale, None) };
        }
    }

    unsafe fn to_queries(&mut self, out: Into, block: &mut [f32], which: Which, seen: Seen) {
        let kept = if self.keys.pass == Pass::Backward { Which::First } else { Which::Second };
        assert!(which == kept && seen.keys <= self.count, "what is added up over keys was paired");
        for (out, rows) in self
            .block
            .chunks_exact_mut(QUERIES)
            .zip(block.chunks_exact(2 * QUERIES))
            .take(seen.keys.div_ceil(2))
        {
            let (even, odd) = rows.split_at(QUERIES);
            // SAFETY: as in `transpose`.
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
            let left = Pairs {
                k,
                a: self.block[c..].as_ptr(),
                row: 1,
                col: QUERIES,
                b: self.here.over_keys.as_ptr(),
            };
            // SAFETY: the caller's promise; pairs of keys were made of both factors.
            unsafe { self.columns(out, (c, m), left, self.count) };
        }
    }

    unsafe fn to_keys(&mut self, out: Into, block: &mut [f32], which: Which, seen: Seen) {
        const PAIRS: usize = QUERIES / 2;
        let rows = self.block.chunks_exact_mut(PAIRS).zip(block.chunks_exact(QUERIES));
        // SAFETY: as in `transpose`.
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
    /// As [`BlockProducts::to_queries`]; the factors have what `pairs` says.
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
