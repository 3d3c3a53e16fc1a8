//! What attention reads: queries, keys and values, and the rows of the microbatch.

use super::super::operands::Strided;
use super::block::Keys;
use crate::backend::Heads;

/// One row of the microbatch: `queries` tokens from `from`, which see the keys from `keys_from`; query i sees
/// the first `past + i + 1` of them.
#[derive(Debug, Clone, Copy)]
pub struct Segment {
    /// Its first query token.
    pub from: usize,
    /// How many query tokens.
    pub queries: usize,
    /// Its first key.
    pub keys_from: usize,
    /// Keys before that of the first query.
    pub past: usize,
}

/// q [T, H*D]; k, v [keys, G*D].
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Queries.
    pub q: &'a [f32],
    /// Keys.
    pub k: &'a [f32],
    /// Values.
    pub v: &'a [f32],
    /// Their heads.
    pub heads: Heads,
}

impl<'a> Inputs<'a> {
    /// Columns of q.
    pub fn wide(&self) -> usize {
        self.heads.query * self.heads.size
    }
    /// Columns of k and v.
    pub fn narrow(&self) -> usize {
        self.heads.kv * self.heads.size
    }
    /// Query head h of a matrix like q, from token t.
    pub fn query(&self, x: &'a [f32], h: usize, t: usize) -> Strided<'a> {
        Strided::rows(x, self.wide()).from(t, h * self.heads.size)
    }
    /// Key/value head g of a matrix like k, from token t.
    pub fn shared(&self, x: &'a [f32], g: usize, t: usize) -> Strided<'a> {
        Strided::rows(x, self.narrow()).from(t, g * self.heads.size)
    }
    /// `count` keys of a row that query head h uses, `past` of which come before.
    pub fn keys(&self, h: usize, (row, past): (usize, usize), count: usize) -> Keys<'a> {
        let head = h / (self.heads.query / self.heads.kv);
        Keys { x: [self.k, self.v].map(|x| self.shared(x, head, row + past)), head, from: (row, past), count }
    }
    /// 1/sqrt(D)
    pub fn scale(&self) -> f32 {
        1.0 / (self.heads.size as f32).sqrt()
    }
}
