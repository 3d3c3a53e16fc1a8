//! Cases of attention, its gradient and its cached form.

use crate::op_cases::rows::rows_of;
use crate::op_cases::*;
use finetune::backend::{AttentionSaved, Heads, Qkv, QkvGrad};

/// Where queries and keys are: bounds of rows, and the number of keys before the first query.
#[derive(Clone)]
struct Rows {
    bounds: Vec<u32>,
    past: usize,
}

impl Rows {
    /// Each query of each head: its head, its row, the columns of its head in q and in k, and the keys in its window.
    fn queries(
        &self,
        heads: Heads,
    ) -> impl Iterator<Item = (usize, usize, (usize, usize), std::ops::RangeInclusive<usize>)> {
        let (rows, past) = (self.bounds.clone(), self.past);
        let starts = rows.windows(2).flat_map(|w| (w[0]..w[1]).map(move |i| (w[0] as usize, i as usize)));
        let all: Vec<(usize, usize)> = starts.collect();
        all.into_iter().flat_map(move |(start, i)| {
            let columns = move |h| (h * heads.size, h / (heads.query / heads.kv) * heads.size);
            let first = heads.window.map_or(start, |w| start.max((i + past + 1).saturating_sub(w)));
            (0..heads.query).map(move |h| (h, i, columns(h), first..=i + past))
        })
    }
}

fn dot(d: usize, (a, i, ao): (&Mat, usize, usize), (b, j, bo): (&Mat, usize, usize)) -> f64 {
    head(d, a, i, ao).iter().zip(head(d, b, j, bo)).map(|(a, b)| a * b).sum()
}

/// d numbers of row i, from a column on.
fn head(d: usize, m: &Mat, i: usize, from: usize) -> &[f64] {
    &m.v[i * m.cols + from..][..d]
}

/// The same, to be changed.
fn head_mut(d: usize, m: &mut Mat, i: usize, from: usize) -> &mut [f64] {
    &mut m.v[i * m.cols + from..][..d]
}

/// Probabilities of keys, and the logarithm of their sum.
fn softmax(scores: &[f64]) -> (Vec<f64>, f64) {
    let most = scores.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
    let mut p: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
    let sum: f64 = p.iter().sum();
    p.iter_mut().for_each(|p| *p /= sum);
    (p, most + sum.ln())
}

/// out and logsumexp of q, k, v: query i of a row sees keys 0 ..= past + i of the same row, of these its window.
fn attended(x: &[Mat], heads: Heads, rows: &Rows) -> (Mat, Mat) {
    let (q, k, v) = (&x[0], &x[1], &x[2]);
    let (d, scale) = (heads.size, (heads.size as f64).sqrt());
    let (mut out, mut lse) = (Mat::zeros(q.rows, q.cols), Mat::zeros(q.rows, heads.query));
    for (h, i, (qo, ko), keys) in rows.queries(heads) {
        let scores: Vec<f64> = keys.clone().map(|j| dot(d, (q, i, qo), (k, j, ko)) / scale).collect();
        let (p, log) = softmax(&scores);
        *lse.at_mut(i, h) = log;
        let out = head_mut(d, &mut out, i, qo);
        for (j, p) in keys.zip(p) {
            out.iter_mut().zip(head(d, v, j, ko)).for_each(|(out, v)| *out += p * v);
        }
    }
    (out, lse)
}

/// dq, dk, dv of q, k, v and dout, or with `size` as the magnitude the sums of the magnitudes of their terms.
fn attended_grad(
    x: &[Mat],
    dout: &Mat,
    (heads, rows): (Heads, &Rows),
    size: impl Fn(f64) -> f64,
) -> Vec<Mat> {
    let (q, k, v) = (&x[0], &x[1], &x[2]);
    let (d, scale) = (heads.size, 1.0 / (heads.size as f64).sqrt());
    let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| Mat::zeros(x.rows, x.cols));
    for (_, i, (qo, ko), keys) in rows.queries(heads) {
        let scores: Vec<f64> = keys.clone().map(|j| scale * dot(d, (q, i, qo), (k, j, ko))).collect();
        let (p, _) = softmax(&scores);
        let dp: Vec<f64> = keys.clone().map(|j| dot(d, (dout, i, qo), (v, j, ko))).collect();
        let delta: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
        for ((j, p), dp) in keys.zip(p).zip(dp) {
            let ds = scale * p * (dp - delta);
            let add = |to: &mut [f64], by: f64, of: &[f64]| {
                to.iter_mut().zip(of).for_each(|(to, of)| *to += size(by * of));
            };
            add(head_mut(d, &mut dq, i, qo), ds, head(d, k, j, ko));
            add(head_mut(d, &mut dk, j, ko), ds, head(d, q, i, qo));
            add(head_mut(d, &mut dv, j, ko), p, head(d, dout, i, qo));
        }
    }
    vec![dq, dk, dv]
}

const fn heads(query: usize, kv: usize, size: usize) -> Heads {
    Heads::new(query, kv, size)
}

/// Heads of every kernel size, shared and not shared, and odd sizes between.
const HEADS: [Heads; 9] = [
    heads(1, 1, 4),
    heads(2, 1, 6),
    heads(2, 2, 10),
    heads(3, 3, 34),
    heads(2, 1, 64),
    heads(9, 3, 64),
    heads(2, 2, 100),
    heads(4, 2, 128),
    heads(2, 1, 130),
];
const SMOLLM2: Heads = heads(9, 3, 64);

/// Tokens with their rows, and heads.
fn sizes(set: Set) -> Vec<((usize, Vec<u32>), Heads)> {
    let odd = cross(set.of(&[0, 1, 2, 3, 17, 70, 97, 129, 200], &[]), &HEADS);
    // The formula is slow.
    let odd = odd.into_iter().filter(|(t, heads)| *t < 100 || heads.size < 64);
    let model = set.of(&[], &[1024]).into_iter().map(|t| ((t, rows_of(set, t)), SMOLLM2));
    let long = set.of(&[], &[1024, 4096]).into_iter().map(|t| ((t, vec![0, t as u32]), SMOLLM2));
    let odd = odd.map(|(t, heads)| ((t, bounds(t)), heads));
    let one = set.of(&[650], &[]).into_iter().map(|t| ((t, vec![0, t as u32]), heads(2, 1, 6)));
    odd.chain(one).chain(model).chain(long).chain(windowed(set)).collect()
}

/// Tokens, windows and heads: windows of one token, within a block of keys, around its border, over several blocks,
/// and longer than the row.
const WINDOWS: [(usize, usize, Heads); 14] = [
    (0, 3, heads(1, 1, 4)),
    (1, 1, heads(1, 1, 4)),
    (3, 2, heads(2, 1, 6)),
    (17, 1, heads(2, 2, 10)),
    (70, 5, heads(2, 1, 6)),
    (70, 200, heads(3, 3, 34)),
    (70, 31, heads(9, 3, 64)),
    (97, 33, heads(4, 2, 128)),
    (97, 12, heads(2, 1, 256)),
    (200, 32, heads(2, 1, 6)),
    (200, 64, heads(2, 2, 10)),
    (200, 95, heads(2, 1, 6)),
    (200, 97, heads(3, 3, 34)),
    (200, 130, heads(2, 1, 6)),
];

/// Packed rows; and rows alone that are longer than what the CPU's gradient computes at a time.
fn windowed(set: Set) -> Vec<((usize, Vec<u32>), Heads)> {
    let windowed = |heads: Heads, w: usize| Heads { window: Some(w), ..heads };
    let packed = set.of(&WINDOWS, &[]).into_iter().map(|(t, w, heads)| ((t, bounds(t)), windowed(heads, w)));
    let alone = [1, 60, 300, 700].map(|w| (650, w, heads(2, 1, 6)));
    let alone = set.of(&alone, &[(4096, 512, SMOLLM2)]);
    let alone = alone.into_iter().map(|(t, w, heads)| ((t, vec![0, t as u32]), windowed(heads, w)));
    packed.chain(alone).collect()
}

/// Numbers that a class of 16 bits does not round.
fn in_bf16(rows: usize, cols: usize, key: u64) -> Mat {
    Mat::random(rows, cols, key).map(|x| half::bf16::from_f32(x as f32).to_f64())
}

/// Large scores, so that the softmax is not flat.
fn qkv(t: usize, keys: usize, heads: Heads) -> [Mat; 3] {
    let q = in_bf16(t, heads.query * heads.size, 1).map(|v| v * 4.0);
    [q, in_bf16(keys, heads.kv * heads.size, 2), in_bf16(keys, heads.kv * heads.size, 3)]
}

fn name((t, bounds): &(usize, Vec<u32>), Heads { query, kv, size, window }: Heads) -> String {
    let window = window.map_or(String::new(), |w| format!(", window {w}"));
    format!("T={t} in {} rows, {query}/{kv}x{size}{window}", bounds.len() - 1)
}

/// Multiplications of a pass over q kᵀ.
fn terms(rows: &Rows, heads: Heads) -> usize {
    rows.queries(heads).map(|(_, _, _, keys)| keys.count() * heads.size).sum()
}

pub fn attention<B: Device>(set: Set) -> Cases<B> {
    each(sizes(set), |(of, heads)| {
        let (t, rows) = (of.0, Rows { bounds: of.1.clone(), past: 0 });
        let (terms, of_terms) = (terms(&rows, heads), rows.clone());
        let outs = [Out::Poison(t, heads.query * heads.size), Out::Poison(t, heads.query)];
        Case::new(name(&of, heads), qkv(t, t, heads), outs)
            .tokens(&of.1, 0)
            .verb(move |b: &mut B, g, o| {
                let [out, lse] = o else { unreachable!() };
                let qkv = Qkv { q: g.i[0], k: g.i[1], v: g.i[2] };
                b.attention(out.view_mut(), lse.view_mut(), qkv, heads, g.tokens());
            })
            .want(&[3e-6, 3e-6], move |k| {
                let (out, lse) = attended(k.i, heads, &rows);
                vec![out, lse]
            })
            .product(terms)
            .rounds(Rounds::Terms(Box::new(move |k| {
                // The output of the magnitudes of v has the terms' magnitudes.
                let x = [k.i[0].clone(), k.i[1].clone(), k.i[2].map(f64::abs)];
                vec![attended(&x, heads, &of_terms).0, Mat::zeros(0, 0)]
            })))
    })
}

pub fn attention_grad<B: Device>(set: Set) -> Cases<B> {
    each(sizes(set), move |(of, heads)| {
        let (t, rows) = (of.0, Rows { bounds: of.1.clone(), past: 0 });
        let (x, dout) = (qkv(t, t, heads), in_bf16(t, heads.query * heads.size, 4));
        let (saved, lse) = match set {
            Set::Odd => attended(&x, heads, &rows),
            // Any numbers serve for speed.
            Set::Model => (dout.clone(), Mat::zeros(t, heads.query)),
        };
        let inputs = [x.to_vec(), vec![saved.stored(), lse.stored(), dout.clone()]].concat();
        let (wide, narrow) = (heads.query * heads.size, heads.kv * heads.size);
        let (terms, forward, of_terms) = (terms(&rows, heads), rows.clone(), rows.clone());
        let mut case = Case::new(name(&of, heads), inputs, [wide, narrow, narrow].map(|c| Out::Poison(t, c)))
            .tokens(&of.1, 0)
            .verb(move |b: &mut B, g, o| {
                let [dq, dk, dv] = o else { unreachable!() };
                let grad = QkvGrad { dq: dq.view_mut(), dk: dk.view_mut(), dv: dv.view_mut() };
                let qkv = Qkv { q: g.i[0], k: g.i[1], v: g.i[2] };
                let saved = AttentionSaved { qkv, out: g.i[3], logsumexp: g.i[4] };
                b.attention_grad(grad, g.i[5], saved, heads, g.tokens());
            })
            .want(&[3e-5; 3], move |k| attended_grad(&k.i[..3], &k.i[5], (heads, &rows), |x| x))
            .product(terms)
            .rounds(Rounds::Terms(Box::new(move |k| {
                attended_grad(&k.i[..3], &k.i[5], (heads, &of_terms), f64::abs)
            })));
        // The formula knows no sizes, so smaller cases prove it; larger ones are compared with it all the same.
        if terms > 200_000 {
            return case;
        }
        for which in 0..3 {
            let (x, dy, rows) = (x.to_vec(), dout.clone(), forward.clone());
            let formula = Box::new(move |x: &[Mat]| attended(x, heads, &rows).0);
            case = case.gradient(Gradient { out: which, from: 0, x, which, dy, formula, bound: 3e-5 });
        }
        case
    })
}

/// Queries, and keys before them.
const PAST: [(usize, usize); 11] =
    [(1, 0), (1, 1), (1, 40), (1, 63), (1, 64), (1, 300), (5, 0), (17, 29), (35, 31), (17, 129), (70, 61)];

pub fn attention_cached<B: Device>(set: Set) -> Cases<B> {
    let few = [heads(2, 1, 6), heads(3, 3, 64), heads(9, 3, 64)];
    let all = cross(set.of(&PAST, &[(1, 1023)]), &set.of(&few, &[SMOLLM2]));
    let windows = set.of(&[None, Some(1), Some(20), Some(64), Some(250)], &[None, Some(128)]);
    each(cross(all, &windows), |(((t, past), heads), window)| {
        let heads = Heads { window, ..heads };
        let rows = Rows { bounds: vec![0, t as u32], past };
        let terms = terms(&rows, heads);
        let name = format!("{} past {past}", name(&(t, rows.bounds.clone()), heads));
        let outs = [Out::Poison(t, heads.query * heads.size), Out::Poison(t, heads.query)];
        Case::new(name, qkv(t, past + t, heads), outs)
            .verb(move |b: &mut B, g, o| {
                let [out, lse] = o else { unreachable!() };
                let qkv = Qkv { q: g.i[0], k: g.i[1], v: g.i[2] };
                b.attention_cached(out.view_mut(), lse.view_mut(), qkv, heads);
            })
            .want(&[3e-6, 3e-6], move |k| {
                let (out, lse) = attended(k.i, heads, &rows);
                vec![out, lse]
            })
            .product(terms)
    })
}
