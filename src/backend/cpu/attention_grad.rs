//! The gradient of attention. A task is one query head of one row of the microbatch: it owns that head's part
//! of dq, and parts of dk and dv of its own, which are added up afterwards over the query heads that share a
//! key/value head, in order. Probabilities are computed anew from the saved logsumexp, block by block.

use super::Context;
use super::attention::{Inputs, KEYS, QUERIES, Segment};
use super::isa::kernel;
use super::math;
use super::product::{Factors, Sizes, Strided, Target, small, tile};
use super::threads::Shared;
use crate::backend::Write;

/// What the forward pass left, and the gradient that comes in.
#[derive(Debug, Clone, Copy)]
pub struct Saved<'a> {
    /// [T, H*D]
    pub out: &'a [f32],
    /// [T, H]
    pub logsumexp: &'a [f32],
    /// [T, H*D]
    pub dout: &'a [f32],
}

/// Where gradients go: dq like q, dk and dv like q too (one part per query head).
pub struct Outputs<'a> {
    /// Gradient of q.
    pub dq: &'a mut [f32],
    /// Parts of the gradient of k.
    pub dk: &'a mut [f32],
    /// Parts of the gradient of v.
    pub dv: &'a mut [f32],
}

/// Of one query: its logsumexp, and dout . out.
#[derive(Debug, Clone, Copy)]
struct Row {
    logsumexp: f32,
    delta: f32,
}

kernel! {
    fn dot<L>(a: &[f32], b: &[f32]) -> f32 { math::dot::<L>(a, b) }
}

kernel! {
    /// Of rows of a block, row r of which sees `seen + r` of the keys, at most all:
    /// p := e^(p - logsumexp), 0 where not visible; ds := p * (ds - delta) * scale
    fn probabilities<L>(p: &mut [f32], ds: &mut [f32], keys: (usize, isize), rows: &[Row], scale: f32) {
        let (keys, first) = keys;
        let blocks = p.chunks_exact_mut(KEYS).zip(ds.chunks_exact_mut(KEYS));
        for (r, (row, (p, ds))) in rows.iter().zip(blocks).enumerate() {
            let seen = (first + r as isize).clamp(0, keys as isize) as usize;
            p[seen..keys].fill(0.0);
            ds[seen..keys].fill(0.0);
            for (p, ds) in p[..seen].iter_mut().zip(&mut ds[..seen]) {
                *p = math::exp::<L>(*p - row.logsumexp);
                *ds = *p * (*ds - row.delta) * scale;
            }
        }
    }
}

kernel! {
    fn add_values<L>(out: &mut [f32], x: &[f32]) {
        out.iter_mut().zip(x).for_each(|(o, &x)| *o += x);
    }
}

/// dq, and dk and dv in parts.
pub fn grad(cx: Context, out: Outputs, saved: Saved, x: Inputs, segments: &[Segment]) {
    let (dq, dk, dv) = (Shared::new(out.dq), Shared::new(out.dk), Shared::new(out.dv));
    let (wide, size, heads) = (x.wide(), x.heads.size, x.heads.query);
    cx.threads.each(segments.len() * heads, |task| {
        let (segment, h) = (segments[task / heads], task % heads);
        let n = segment.queries;
        let place = |t: usize| (segment.from + t) * wide + h * size;
        let row = |x: &'_ [f32], t: usize| -> std::ops::Range<usize> {
            debug_assert!(place(t) + size <= x.len());
            place(t)..place(t) + size
        };
        let of = |t: usize| Row {
            logsumexp: saved.logsumexp[(segment.from + t) * heads + h],
            delta: dot(cx.isa, &saved.dout[row(saved.dout, t)], &saved.out[row(saved.out, t)]),
        };
        let saved_rows: Vec<Row> = (0..n).map(of).collect();
        let (mut p, mut ds) = ([0.0f32; QUERIES * KEYS], [0.0f32; QUERIES * KEYS]);
        for j in (0..n).step_by(KEYS) {
            let keys = KEYS.min(n - j);
            let k = x.shared(x.k, h, segment.keys_from + j);
            let v = x.shared(x.v, h, segment.keys_from + j);
            for i in (j / QUERIES * QUERIES..n).step_by(QUERIES) {
                let rows = QUERIES.min(n - i);
                let q = x.query(x.q, h, segment.from + i);
                let dout = x.query(saved.dout, h, segment.from + i);
                let square = Sizes { m: rows, n: keys, k: size };
                let f = Factors { a: q, b: k.transposed(), scale: x.scale() };
                small(cx, (&mut p, KEYS), Write::Set, square, f);
                let f = Factors { a: dout, b: v.transposed(), scale: 1.0 };
                small(cx, (&mut ds, KEYS), Write::Set, square, f);
                let seen = (keys, (i + 1) as isize - j as isize);
                probabilities(cx.isa, &mut p, &mut ds, seen, &saved_rows[i..i + rows], x.scale());
                let first = |yes| if yes { Write::Set } else { Write::Add };
                let to_keys = Sizes { m: keys, n: size, k: rows };
                let (p, ds) = (Strided::rows(&p, KEYS), Strided::rows(&ds, KEYS));
                let own = i == j / QUERIES * QUERIES;
                let to = |out, at, write| Target { out, at, stride: wide, write };
                // SAFETY: head h of this segment, in dq and in the parts of dk and dv, belongs to this task.
                unsafe {
                    let f = Factors { a: p.transposed(), b: dout, scale: 1.0 };
                    tile(cx, to(&dv, place(j), first(own)), to_keys, f);
                    let f = Factors { a: ds.transposed(), b: q, scale: 1.0 };
                    tile(cx, to(&dk, place(j), first(own)), to_keys, f);
                    let to_queries = Sizes { m: rows, n: size, k: keys };
                    let f = Factors { a: ds, b: k, scale: 1.0 };
                    tile(cx, to(&dq, place(i), first(j == 0)), to_queries, f);
                }
            }
        }
    });
}

/// out[T, G*D] = the sum of parts[T, H*D] over the query heads of each key/value head, in order.
pub fn gather_heads(cx: Context, out: &mut [f32], parts: &[f32], heads: crate::backend::Heads) {
    let (wide, narrow, size) = (heads.query * heads.size, heads.kv * heads.size, heads.size);
    let group = heads.query / heads.kv;
    cx.threads.chunks(out, 16 * narrow, |i, out| {
        for (r, out) in out.chunks_exact_mut(narrow).enumerate() {
            let parts = &parts[(i * 16 + r) * wide..][..wide];
            for (out, parts) in out.chunks_exact_mut(size).zip(parts.chunks_exact(group * size)) {
                out.copy_from_slice(&parts[..size]);
                parts[size..].chunks_exact(size).for_each(|p| add_values(cx.isa, out, p));
            }
        }
    });
}
