//! Causal attention, blocked (Dao et al. 2022, arXiv:2205.14135): a task is a block of queries of one head of
//! one row of the microbatch; it walks over blocks of keys with a running maximum and sum. Nothing is larger
//! than QUERIES x KEYS.

use super::Context;
use super::isa::{Lanes, kernel};
use super::math;
use super::product::{Factors, Sizes, Strided, Target, tile};
use super::threads::Shared;
use crate::backend::{Heads, Write};

/// Queries per block.
pub const QUERIES: usize = 64;
/// Keys per block.
pub const KEYS: usize = 64;

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
    /// The key/value head that query head h uses, of a matrix like k, from token t.
    pub fn shared(&self, x: &'a [f32], h: usize, t: usize) -> Strided<'a> {
        let g = h / (self.heads.query / self.heads.kv);
        Strided::rows(x, self.narrow()).from(t, g * self.heads.size)
    }
    /// 1/sqrt(D)
    pub fn scale(&self) -> f32 {
        1.0 / (self.heads.size as f32).sqrt()
    }
}

/// What a row of queries has seen so far: the largest score, the sum of e^(score - largest).
type Running = (f32, f32);

/// One row of scores against a block of keys, of which `seen` are visible: scores become e^(s - m) with the new
/// running maximum m, those not visible 0. Returns (m, new running sum, what the old is multiplied by).
#[inline(always)]
fn soften<L: Lanes>(scores: &mut [f32], seen: usize, running: Running) -> (f32, f32, f32) {
    let (scores, hidden) = scores.split_at_mut(seen);
    hidden.fill(0.0);
    if seen == 0 {
        return (running.0, running.1, 1.0);
    }
    let m = math::max(scores).max(running.0);
    let shrink = math::exp::<L>(running.0 - m);
    let mut part = [0.0; math::LANES];
    let mut chunks = scores.chunks_exact_mut(math::LANES);
    for c in &mut chunks {
        for lane in 0..math::LANES {
            let e = math::exp::<L>(c[lane] - m);
            c[lane] = e;
            part[lane] += e;
        }
    }
    for (lane, v) in chunks.into_remainder().iter_mut().enumerate() {
        *v = math::exp::<L>(*v - m);
        part[lane] += *v;
    }
    (m, L::fma(running.1, shrink, math::tree(part)), shrink)
}

kernel! {
    /// All rows of a block of scores: row r sees `seen + r` of the keys, at most all. Says into `shrink` what each
    /// row of the output so far is multiplied by.
    fn soften_rows<L>(
        scores: &mut [f32],
        keys: usize,
        seen: isize,
        running: &mut [Running],
        shrink: &mut [f32],
    ) {
        let rows = scores.chunks_exact_mut(KEYS).zip(running).zip(shrink);
        for (r, ((row, state), shrink)) in rows.enumerate() {
            let seen = (seen + r as isize).clamp(0, keys as isize) as usize;
            let (m, sum, by) = soften::<L>(&mut row[..keys], seen, *state);
            (*state, *shrink) = ((m, sum), by);
        }
    }
}

kernel! {
    fn multiply<L>(row: &mut [f32], by: f32) {
        row.iter_mut().for_each(|v| *v *= by);
    }
}

/// Blocks of queries of all segments, as (segment, first query, queries).
fn blocks(segments: &[Segment]) -> Vec<(Segment, usize, usize)> {
    let of = |s: &Segment| {
        let s = *s;
        (0..s.queries).step_by(QUERIES).map(move |i| (s, i, QUERIES.min(s.queries - i)))
    };
    segments.iter().flat_map(of).collect()
}

/// out[T, H*D] and logsumexp[T, H].
pub fn forward(cx: Context, out: &mut [f32], logsumexp: Option<&mut [f32]>, x: Inputs, segments: &[Segment]) {
    let blocks = blocks(segments);
    let (out, lse) = (Shared::new(out), logsumexp.map(Shared::new));
    let (wide, size) = (x.wide(), x.heads.size);
    cx.threads.each(blocks.len() * x.heads.query, |task| {
        let (segment, i, rows) = blocks[task / x.heads.query];
        let h = task % x.heads.query;
        let at = (segment.from + i) * wide + h * size;
        let mut running = [(f32::NEG_INFINITY, 0.0f32); QUERIES];
        let mut scores = [0.0f32; QUERIES * KEYS];
        let visible = segment.past + i + rows;
        for j in (0..visible).step_by(KEYS) {
            let keys = KEYS.min(visible - j);
            let q = x.query(x.q, h, segment.from + i);
            let k = x.shared(x.k, h, segment.keys_from + j).transposed();
            let s = Sizes { m: rows, n: keys, k: size };
            let f = Factors { a: q, b: k, scale: x.scale() };
            super::product::small(cx, (&mut scores, KEYS), Write::Set, s, f);
            let seen = (segment.past + i + 1) as isize - j as isize;
            let mut shrink = [1.0; QUERIES];
            soften_rows(cx.isa, &mut scores[..rows * KEYS], keys, seen, &mut running[..rows], &mut shrink);
            for (r, &shrink) in shrink.iter().enumerate().take(rows).filter(|(_, s)| j > 0 && **s != 1.0) {
                // SAFETY: the columns of head h of this token belong to this task.
                multiply(cx.isa, unsafe { out.slice(at + r * wide, size) }, shrink);
            }
            let v = x.shared(x.v, h, segment.keys_from + j);
            let s = Sizes { m: rows, n: size, k: keys };
            let f = Factors { a: Strided::rows(&scores, KEYS), b: v, scale: 1.0 };
            let write = if j == 0 { Write::Set } else { Write::Add };
            // SAFETY: head h of these tokens belongs to this task.
            unsafe { tile(cx, Target { out: &out, at, stride: wide, write }, s, f) };
        }
        for (r, &(m, sum)) in running.iter().enumerate().take(rows) {
            // SAFETY: as above; logsumexp [t, h] too.
            unsafe {
                multiply(cx.isa, out.slice(at + r * wide, size), 1.0 / sum);
                if let Some(lse) = &lse {
                    lse.slice((segment.from + i + r) * x.heads.query + h, 1)[0] = m + libm::logf(sum);
                }
            }
        }
    });
}
