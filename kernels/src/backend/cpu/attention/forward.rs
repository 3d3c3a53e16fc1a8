//! Causal attention, blocked (Dao et al. 2022, arXiv:2205.14135): a task is a block of queries of one head of
//! one row of the microbatch, or one token's queries of all heads that share their keys; it walks over blocks of keys
//! with a running maximum and sum. Nothing is larger than QUERIES x KEYS.

use super::super::operands::{Context, Strided, Target};
use super::super::runtime::isa::kernel;
use super::super::runtime::math::{self, LANES};
use super::super::runtime::threads::Shared;
use super::block::{BlockProducts, Each, GROUPS, Into, KEYS, Pass, QUERIES, Seen, Which, hide};
use super::block_pairs::PairedKeys;
use super::block_products::with_products;
use super::inputs::{Inputs, Segment};
use crate::backend::Write;

/// What the queries have seen so far: the largest score, the sum of e^(score - largest).
struct Running {
    largest: Each,
    sum: Each,
}

#[inline(always)]
fn raise(most: &mut [f32; LANES], x: &[f32; LANES]) {
    most.iter_mut().zip(x).for_each(|(m, &x)| *m = if x > *m { x } else { *m });
}

/// The largest score of each query of one vector and `most`, over that many keys.
#[inline(always)]
fn largest(block: &[[f32; LANES]], (group, keys): (usize, usize), most: [f32; LANES]) -> [f32; LANES] {
    // Four chains side by side: a comparison takes as long as four begin.
    let mut part = [most; 4];
    let whole = keys / 4 * 4;
    for key in (0..whole).step_by(4) {
        part.iter_mut().enumerate().for_each(|(i, part)| raise(part, &block[(key + i) * GROUPS + group]));
    }
    (whole..keys).for_each(|key| raise(&mut part[0], &block[key * GROUPS + group]));
    let [mut most, rest @ ..] = part;
    rest.iter().for_each(|part| raise(&mut most, part));
    most
}

kernel! {
    /// A block of scores: they become e^(score - largest so far), 0 where not seen. Says into `shrink` what each
    /// query's output so far is multiplied by.
    fn soften<L>(block: &mut [[f32; LANES]], seen: Seen, running: &mut Running, shrink: &mut Each) {
        for group in 0..seen.queries.div_ceil(LANES) {
            let keys = hide(block, seen, group, f32::NEG_INFINITY);
            let before = running.largest[group];
            let most = largest(&block[keys.start * GROUPS..], (group, keys.len()), before);
            // A query that has seen no key yet: e^(-inf - 0) is 0.
            let from = most.map(|most| if most == f32::NEG_INFINITY { 0.0 } else { most });
            let mut sum = [0.0; LANES];
            (0..keys.start).for_each(|key| block[key * GROUPS + group] = [0.0; LANES]);
            for key in keys.clone() {
                let scores = &mut block[key * GROUPS + group];
                for lane in 0..LANES {
                    let e = math::exp_below::<L>(scores[lane] - from[lane]);
                    scores[lane] = e;
                    sum[lane] += e;
                }
            }
            (keys.end..seen.keys).for_each(|key| block[key * GROUPS + group] = [0.0; LANES]);
            for lane in 0..LANES {
                let by = math::exp_below::<L>(before[lane] - from[lane]);
                shrink[group][lane] = by;
                running.sum[group][lane] = L::fma(running.sum[group][lane], by, sum[lane]);
            }
            running.largest[group] = most;
        }
    }
}

/// Queries of a task, all of which use one key/value head.
#[derive(Debug, Clone, Copy)]
struct Queries {
    segment: Segment,
    /// The first, in the segment.
    from: usize,
    count: usize,
    /// The head of the first one.
    head: usize,
    /// Distances from one to the next: in the rows of q and out, and of logsumexp; and how many more keys it sees.
    step: (usize, usize, isize),
}

/// Tasks of all segments, those that see most last.
fn tasks(x: &Inputs, segments: &[Segment]) -> Vec<Queries> {
    let (heads, size) = (x.heads.query, x.heads.size);
    let group = heads / x.heads.kv;
    let mut tasks = Vec::new();
    for &segment in segments {
        if segment.queries == 1 && group <= QUERIES {
            let of =
                |g: usize| Queries { segment, from: 0, count: group, head: g * group, step: (size, 1, 0) };
            tasks.extend((0..x.heads.kv).map(of));
            continue;
        }
        for from in (0..segment.queries).step_by(QUERIES) {
            let (count, step) = (QUERIES.min(segment.queries - from), (x.wide(), heads, 1));
            tasks.extend((0..heads).map(|head| Queries { segment, from, count, head, step }));
        }
    }
    tasks
}

/// out[T, H*D] and logsumexp[T, H]; `room` as [`PairedKeys::room`] says.
pub fn forward(
    cx: Context,
    (out, logsumexp): (&mut [f32], &mut [f32]),
    x: Inputs,
    segments: &[Segment],
    room: &mut [f32],
) {
    let tasks = tasks(&x, segments);
    let keys = PairedKeys::new(cx, (&x, segments), Pass::Forward, room);
    let (out, lse) = (Shared::new(out), Shared::new(logsumexp));
    cx.threads.each(tasks.len(), |i| {
        // The longest first, so that no thread waits for them at the end.
        let q = tasks[tasks.len() - 1 - i];
        with_products(cx, x.heads.size, keys.as_ref(), |products, [block, _]| {
            let running = attend(cx, (&out, products, block), &x, q);
            let (t, size) = (q.segment.from + q.from, x.heads.size);
            for r in 0..q.count {
                let (m, sum) = (running.largest.as_flattened()[r], running.sum.as_flattened()[r]);
                // SAFETY: the queries of this task belong to it alone, in out and in logsumexp.
                unsafe {
                    math::scale_row(
                        cx.isa,
                        out.slice(t * x.wide() + q.head * size + r * q.step.0, size),
                        1.0 / sum,
                    );
                    lse.slice(t * x.heads.query + q.head + r * q.step.1, 1)[0] = m + libm::logf(sum);
                }
            }
        });
    });
}

/// The sums of a task over all keys, not divided yet, and what to divide them by.
fn attend<'a>(
    cx: Context,
    (out, products, block): (&Shared, &mut dyn BlockProducts<'a>, &mut [f32]),
    x: &Inputs<'a>,
    q: Queries,
) -> Running {
    let (t, size) = (q.segment.from + q.from, x.heads.size);
    let stride = q.step.0;
    products.queries([Some(Strided { row: stride, ..x.query(x.q, q.head, t) }), None], q.count);
    let at = t * x.wide() + q.head * size;
    let mut running = Running { largest: [[f32::NEG_INFINITY; LANES]; GROUPS], sum: Each::default() };
    let first = q.segment.past + q.from + 1;
    let visible = first + (q.count - 1) * q.step.2 as usize;
    let window = x.heads.window;
    let start = window.map_or(0, |window| first.saturating_sub(window) / KEYS * KEYS);
    for j in (start..visible).step_by(KEYS) {
        let keys = KEYS.min(visible - j);
        let seen =
            Seen { queries: q.count, keys, first: first as isize - j as isize, step: q.step.2, window };
        products.keys(x.keys(q.head, (q.segment.keys_from, j), keys));
        products.scores(block, Which::First, seen, x.scale());
        let mut shrink = Each::default();
        soften(cx.isa, block.as_chunks_mut().0, seen, &mut running, &mut shrink);
        let old = shrink.as_flattened().iter().enumerate().take(q.count);
        for (r, &by) in old.filter(|(_, by)| j > start && **by != 1.0) {
            // SAFETY: these columns of out belong to this task.
            math::scale_row(cx.isa, unsafe { out.slice(at + r * stride, size) }, by);
        }
        let write = if j == start { Write::Set } else { Write::Add };
        let to = Into { target: Target { at, ..Target::rows(out, stride, write) }, scale: 1.0 };
        // SAFETY: as above.
        unsafe { products.to_queries(to, block, Which::Second, seen) };
    }
    running
}
