//! A block of scores as attention and its gradient see it: keys down, queries across, so that what belongs to one
//! query is in one lane of the vectors and is never added across lanes.
//!
//! Above the diagonal nothing is multiplied: groups of queries stop at the last key that one of them sees. A value
//! does not depend on what else is in its block: all chains are in ascending order of channels, keys or queries.
//!
//! Its products are those of f32 numbers (`block_floats.rs`) or of pairs of bf16 ones (`block_pairs.rs`).

use super::super::operands::{Strided, Target};
use super::super::runtime::math::LANES;
pub use crate::numeric::slices::KEYS;
use std::ops::Range;

/// Queries of a block: whole tiles, whether they are its rows or its columns.
pub const QUERIES: usize = KEYS;
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
    /// Of the keys up to its own a query sees only the last ones, this many.
    pub window: Option<usize>,
}

impl Seen {
    /// The end of the keys that a query sees.
    #[inline(always)]
    pub fn of(&self, query: usize) -> usize {
        (self.first + query as isize * self.step).clamp(0, self.keys as isize) as usize
    }

    /// The first key that a query sees.
    #[inline(always)]
    pub fn since(&self, query: usize) -> usize {
        let before = |window| self.first + query as isize * self.step - window as isize;
        self.window.map_or(0, |window| before(window).clamp(0, self.keys as isize) as usize)
    }

    /// The first query that sees a key.
    pub fn from(&self, key: usize) -> usize {
        let before = key as isize + 1 - self.first;
        if self.step == 0 { 0 } else { before.clamp(0, self.queries as isize) as usize }
    }

    /// Whether every query sees every key.
    pub fn all(&self) -> bool {
        self.of(0) == self.keys && self.since(self.queries - 1) == 0
    }
}

/// What the queries of one vector do not see of a block becomes `hidden`; returns the keys from the first to the last
/// that any of them sees. Keys outside those are not looked at.
#[inline(always)]
pub fn hide(block: &mut [[f32; LANES]], seen: Seen, group: usize, hidden: f32) -> Range<usize> {
    let of: [usize; LANES] = std::array::from_fn(|lane| seen.of(group * LANES + lane));
    let since: [usize; LANES] = std::array::from_fn(|lane| seen.since(group * LANES + lane));
    for key in since[0]..since[LANES - 1].min(of[LANES - 1]) {
        for (lane, s) in block[key * GROUPS + group].iter_mut().enumerate() {
            *s = if key >= since[lane] { *s } else { hidden };
        }
    }
    for key in of[0]..of[LANES - 1] {
        for (lane, s) in block[key * GROUPS + group].iter_mut().enumerate() {
            *s = if key < of[lane] { *s } else { hidden };
        }
    }
    since[0]..of[LANES - 1]
}

/// Where a product of D columns goes, and what it is multiplied by.
#[derive(Clone, Copy)]
pub struct Into<'a> {
    /// Rows are queries, or keys.
    pub target: Target<'a>,
    /// Multiplies the product.
    pub scale: f32,
}

/// A block of keys of one head.
#[derive(Debug, Clone, Copy)]
pub struct Keys<'a> {
    /// k and v, [count, D] each.
    pub x: [Strided<'a>; 2],
    /// Which key/value head.
    pub head: usize,
    /// The first key of the row of the microbatch, and how many come before this block, a multiple of [`KEYS`].
    pub from: (usize, usize),
    /// Keys of the block.
    pub count: usize,
}

/// Of the queries: q, and in the gradient also that of the output. Of the keys: k and v.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// q or k.
    First,
    /// The output's gradient, or v.
    Second,
}

/// Whether attention is computed, or its gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// First x First gives scores, those x Second the output.
    Forward,
    /// Everything is multiplied with everything.
    Backward,
}

/// The products of a block. A block of scores is [keys, QUERIES].
pub trait BlockProducts<'a> {
    /// What follows is of these `count` queries: q and, in the gradient, that of the output, [count, D] each.
    fn queries(&mut self, x: [Option<Strided<'a>>; 2], count: usize);

    /// What follows is of these keys.
    fn keys(&mut self, keys: Keys<'a>);

    /// out = scale * (k qᵀ, or v doutᵀ), wherever something is seen.
    fn scores(&mut self, out: &mut [f32], which: Which, seen: Seen, scale: f32);

    /// out[queries, D] (=|+=) scale * blockᵀ x (k or v); what is not seen is 0 in the block, which may be rounded.
    ///
    /// # Safety
    /// No other thread accesses that output during the call.
    unsafe fn to_queries(&mut self, out: Into, block: &mut [f32], which: Which, seen: Seen);

    /// out[keys, D] (=|+=) scale * block x (q or dout); what is not seen is 0 in the block, which may be rounded.
    ///
    /// # Safety
    /// As [`BlockProducts::to_queries`].
    unsafe fn to_keys(&mut self, out: Into, block: &mut [f32], which: Which, seen: Seen);
}
