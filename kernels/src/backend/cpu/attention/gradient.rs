//! The gradient of attention. A row of the microbatch is cut into stretches, and a task is a stretch of queries of
//! one head against a stretch of keys: all tasks whose stretches are equally far apart run at a time, because no two of
//! them write to the same tokens, and nearer ones come first. A head has parts of dk and dv of its own, which are
//! added up afterwards over the query heads that share a key/value head, in order. Probabilities are recomputed
//! from the saved logsumexp, block by block.

use super::super::operands::{Context, Target};
use super::super::runtime::isa::kernel;
use super::super::runtime::math::{self, LANES};
use super::super::runtime::threads::Shared;
use super::block::{BlockProducts, Each, GROUPS, Into, KEYS, Pass, QUERIES, Seen, Which, hide};
use super::block_pairs::PairedKeys;
use super::block_products::with_products;
use super::inputs::{Inputs, Segment};
use crate::backend::Write;
use crate::numeric::slices::STRETCH;

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

kernel! {
    /// p := e^(p - logsumexp); ds := p * (ds - delta); both 0 where not seen.
    fn probabilities<L>(p: &mut [[f32; LANES]], ds: &mut [[f32; LANES]], seen: Seen, of: &Rows) {
        for group in 0..seen.queries.div_ceil(LANES) {
            let (logsumexp, delta) = (of.logsumexp[group], of.delta[group]);
            let keys = seen.since(group * LANES)..seen.of(group * LANES + LANES - 1);
            for key in keys.clone() {
                let at = key * GROUPS + group;
                for lane in 0..LANES {
                    let e = math::exp_below::<L>(p[at][lane] - logsumexp[lane]);
                    p[at][lane] = e;
                    ds[at][lane] = e * (ds[at][lane] - delta[lane]);
                }
            }
            for block in [&mut *p, &mut *ds] {
                hide(block, seen, group, 0.0);
                let outside = (0..keys.start).chain(keys.end..seen.keys);
                outside.for_each(|key| block[key * GROUPS + group] = [0.0; LANES]);
            }
        }
    }
}

/// Of the queries of a block: logsumexp, and dout . out.
#[derive(Default)]
struct Rows {
    logsumexp: Each,
    delta: Each,
}

/// A square of a row of the microbatch: queries of one stretch, keys of that or an earlier one.
#[derive(Debug, Clone, Copy)]
struct Task {
    segment: Segment,
    head: usize,
    queries: usize,
    keys: usize,
}

impl Task {
    /// From which token to which before the segment's end.
    fn stretch(self, from: usize) -> std::ops::Range<usize> {
        from..(from + STRETCH).min(self.segment.queries)
    }
}

/// The tasks that are `apart` stretches apart, of all segments and heads: no two of them share queries or keys.
fn wave(segments: &[Segment], heads: usize, apart: usize) -> Vec<Task> {
    let mut tasks = Vec::new();
    for &segment in segments {
        for queries in (apart * STRETCH..segment.queries).step_by(STRETCH) {
            let keys = queries - apart * STRETCH;
            tasks.extend((0..heads).map(|head| Task { segment, head, queries, keys }));
        }
    }
    tasks
}

/// dq, and dk and dv in parts; `room` as [`PairedKeys::room`] says.
pub fn grad(cx: Context, out: Outputs, saved: Saved, (x, segments): (Inputs, &[Segment]), room: &mut [f32]) {
    let keys = PairedKeys::new(cx, (&x, segments), Pass::Backward, room);
    let out = (Shared::new(out.dq), Shared::new(out.dk), Shared::new(out.dv));
    let longest = segments.iter().map(|s| s.queries).max().unwrap_or(0);
    // A query sees no key of a stretch that ends before its window.
    let within = x.heads.window.map_or(usize::MAX, |window| 1 + (window - 1).div_ceil(STRETCH));
    for apart in 0..longest.div_ceil(STRETCH).min(within) {
        let tasks = wave(segments, x.heads.query, apart);
        cx.threads.each(tasks.len(), |i| {
            with_products(cx, x.heads.size, keys.as_ref(), |products, blocks| {
                square(cx, (&out, products, blocks), saved, &x, tasks[i]);
            });
        });
    }
}

/// dq, and the parts of dk and dv.
type Gradients<'s> = (Shared<'s>, Shared<'s>, Shared<'s>);

/// One task. The first write to a token's gradient sets it: the squares on the diagonal.
fn square<'a>(
    cx: Context,
    ((dq, dk, dv), products, [p, ds]): (&Gradients, &mut dyn BlockProducts<'a>, [&mut [f32]; 2]),
    saved: Saved<'a>,
    x: &Inputs<'a>,
    task: Task,
) {
    let (Task { segment, head, .. }, size, scale) = (task, x.heads.size, x.scale());
    let place = |t: usize| (segment.from + t) * x.wide() + head * size;
    let window = x.heads.window;
    let to = |out, t: usize, first, scale| {
        let write = if first && task.queries == task.keys { Write::Set } else { Write::Add };
        Into { target: Target { at: place(t), ..Target::rows(out, x.wide(), write) }, scale }
    };
    for i in task.stretch(task.queries).step_by(QUERIES) {
        let rows = QUERIES.min(segment.queries - i);
        products.queries([x.q, saved.dout].map(|of| Some(x.query(of, head, segment.from + i))), rows);
        let mut of = Rows::default();
        for r in 0..rows {
            let t = place(i + r)..place(i + r) + size;
            of.logsumexp.as_flattened_mut()[r] =
                saved.logsumexp[(segment.from + i + r) * x.heads.query + head];
            of.delta.as_flattened_mut()[r] = math::dot_rows(cx.isa, &saved.dout[t.clone()], &saved.out[t]);
        }
        let since = window.map_or(0, |window| (i + 1).saturating_sub(window) / KEYS * KEYS).max(task.keys);
        for j in (since..task.stretch(task.keys).end).step_by(KEYS).take_while(|&j| j < i + rows) {
            let keys = KEYS.min(segment.queries - j);
            products.keys(x.keys(head, (segment.keys_from, j), keys));
            let seen = Seen { queries: rows, keys, first: (i + 1) as isize - j as isize, step: 1, window };
            products.scores(p, Which::First, seen, scale);
            products.scores(ds, Which::Second, seen, 1.0);
            probabilities(cx.isa, p.as_chunks_mut().0, ds.as_chunks_mut().0, seen, &of);
            // SAFETY: this head of these tokens, in dq and in the parts of dk and dv, belongs to this task.
            unsafe {
                products.to_keys(to(dv, j, i == j / QUERIES * QUERIES, 1.0), p, Which::Second, seen);
                products.to_keys(to(dk, j, i == j / QUERIES * QUERIES, scale), ds, Which::First, seen);
                products.to_queries(to(dq, i, j == since, scale), ds, Which::First, seen);
            }
        }
    }
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
                parts[size..].chunks_exact(size).for_each(|p| math::add_row(cx.isa, out, p));
            }
        }
    });
}
