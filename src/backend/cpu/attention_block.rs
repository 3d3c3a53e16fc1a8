//! A block of scores as attention and its gradient see it: keys down, queries across, so that what belongs to one
//! query lies in one lane of the vectors and is never added across lanes. Keys and values are read where they lie;
//! only queries are turned, once for all blocks of keys.
//!
//! Above the diagonal nothing is multiplied: groups of queries stop at the last key that one of them sees. A value
//! does not depend on what else is in its block: all chains are in ascending order of channels, keys or queries.

use super::Context;
use super::avx512::{COLS, ROWS};
use super::math::LANES;
use super::memory::Memory;
use super::product::{Factors, Products, Sizes, Strided, Target, small, tile};
use super::product_own;
use crate::backend::Write;
use std::cell::RefCell;

/// Queries of a block: whole tiles, whether they are its rows or its columns.
pub const QUERIES: usize = 96;
/// Keys of a block: as many, so that both fit where a core has them at hand.
pub const KEYS: usize = 96;
/// Vectors of queries.
pub const GROUPS: usize = QUERIES / LANES;

/// One number for each query, in vectors.
pub type Each = [[f32; LANES]; GROUPS];

/// What is seen of a block.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    /// Queries in the block.
    pub queries: usize,
    /// Keys in the block.
    pub keys: usize,
    /// How many of its keys the first query sees, if there were enough (none, if negative).
    pub first: isize,
    /// How many more every further query sees: 1, or 0 where all stand at one position.
    pub step: isize,
}

impl Seen {
    /// Keys that a query sees.
    #[inline(always)]
    pub fn of(&self, query: usize) -> usize {
        (self.first + query as isize * self.step).clamp(0, self.keys as isize) as usize
    }

    /// The first query that sees a key.
    fn from(&self, key: usize) -> usize {
        let before = key as isize + 1 - self.first;
        if self.step == 0 { 0 } else { before.clamp(0, self.queries as isize) as usize }
    }

    /// Whether every query sees every key.
    pub fn all(&self) -> bool {
        self.of(0) == self.keys
    }
}

/// What the queries of one vector do not see of a block becomes `hidden`; returns how many keys any of them sees.
/// Keys beyond those are not looked at.
#[inline(always)]
pub fn hide(block: &mut [[f32; LANES]], seen: Seen, group: usize, hidden: f32) -> usize {
    let of: [usize; LANES] = std::array::from_fn(|lane| seen.of(group * LANES + lane));
    for key in of[0]..of[LANES - 1] {
        for (lane, s) in block[key * GROUPS + group].iter_mut().enumerate() {
            *s = if key < of[lane] { *s } else { hidden };
        }
    }
    of[LANES - 1]
}

thread_local! {
    static ROOM: RefCell<Memory> = RefCell::new(Memory::default());
}

/// Runs `work` with this thread's room for N times `turned` queries of D channels, and N blocks of scores.
pub fn with_room<const N: usize>(size: usize, work: impl FnOnce([&mut [f32]; N], [&mut [f32]; N])) {
    let (turned, block) = (QUERIES * size, QUERIES * KEYS);
    ROOM.with_borrow_mut(|room| {
        if room.values().len() < N * (turned + block) {
            *room = Memory::zeros(N * (turned + block));
        }
        let (all_turned, blocks) = room.values_mut().split_at_mut(N * turned);
        let mut parts = all_turned.chunks_exact_mut(turned.max(1));
        let mut blocks = blocks.chunks_exact_mut(block);
        let all_turned = std::array::from_fn(|_| parts.next().unwrap_or_default());
        work(all_turned, std::array::from_fn(|_| blocks.next().unwrap_or_default()));
    });
}

/// turned[queries / 32][D][32] = scale * x[queries, D], as the right factor of tiles.
pub fn turn(cx: Context, turned: &mut [f32], x: Strided, queries: usize, scale: f32) {
    let size = turned.len() / QUERIES;
    for (p, panel) in turned.chunks_exact_mut(size * COLS).enumerate().take(queries.div_ceil(COLS)) {
        let (x, n) = (x.from(p * COLS, 0), COLS.min(queries - p * COLS));
        match cx.products {
            Products::Own => product_own::lay_out(panel, x.transposed(), (size, n), scale),
            Products::Crate => {
                for (i, out) in panel.iter_mut().enumerate().filter(|(i, _)| i % COLS < n) {
                    *out = scale * x.data[i % COLS * x.row + i / COLS];
                }
            }
        }
    }
}

/// out[keys, QUERIES] = x[keys, D] turned, wherever something is seen.
pub fn scores(cx: Context, out: &mut [f32], x: Strided, turned: &[f32], seen: Seen) {
    let size = turned.len() / QUERIES;
    for c in (0..seen.queries).step_by(COLS) {
        let n = COLS.min(seen.queries - c);
        let sizes = Sizes { m: seen.of(c + n - 1), n, k: size };
        let f = Factors { a: x, b: Strided::rows(&turned[c * size..], COLS), scale: 1.0 };
        small(cx, (&mut out[c..], QUERIES), Write::Set, sizes, f);
    }
}

/// Where a product goes, what it is multiplied by, and how many columns it has.
#[derive(Clone, Copy)]
pub struct Into<'a> {
    /// Rows are queries, or keys.
    pub target: Target<'a>,
    /// Multiplies the product.
    pub scale: f32,
    /// D
    pub size: usize,
}

/// out[queries, D] (=|+=) scale * block[keys, QUERIES]ᵀ x[keys, D]; what is not seen is 0 in the block.
///
/// # Safety
/// As [`tile`].
pub unsafe fn to_queries(cx: Context, out: Into, block: &[f32], x: Strided, seen: Seen) {
    let step = if seen.all() { seen.queries } else { ROWS };
    for c in (0..seen.queries).step_by(step) {
        let m = step.min(seen.queries - c);
        let sizes = Sizes { m, n: out.size, k: seen.of(c + m - 1) };
        let a = Strided::rows(&block[c..], QUERIES).transposed();
        // SAFETY: the caller's promise.
        unsafe { tile(cx, out.target.from(c, 0), sizes, Factors { a, b: x, scale: out.scale }) };
    }
}

/// out[keys, D] (=|+=) scale * block[keys, QUERIES] x[queries, D]; what is not seen is 0 in the block.
///
/// # Safety
/// As [`tile`].
pub unsafe fn to_keys(cx: Context, out: Into, block: &[f32], x: Strided, seen: Seen) {
    let step = if seen.all() { seen.keys } else { ROWS };
    for r in (0..seen.keys).step_by(step) {
        let (m, from) = (step.min(seen.keys - r), seen.from(r));
        let sizes = Sizes { m, n: out.size, k: seen.queries - from };
        let a = Strided::rows(block, QUERIES).from(r, from);
        // SAFETY: the caller's promise.
        unsafe {
            tile(cx, out.target.from(r, 0), sizes, Factors { a, b: x.from(from, 0), scale: out.scale })
        };
    }
}
