//! The reference of attention in f64 with the roundings of the kernels on tensor cores: probabilities are rounded to
//! bf16 under the running maximum of their tile, and so are the gradients of scores. A number so near the middle of
//! two bf16 numbers that f32 may round it the other way counts as a tie, and the value records the possible
//! difference.

use crate::bench::Mat;
use finetune::backend::Heads;

/// The largest difference of f32 and approximate functions from f64, relative to the terms.
const NEAR: f64 = 2e-5;

/// A sum of products.
#[derive(Debug, Clone, Copy, Default)]
pub struct Value {
    pub value: f64,
    /// Sum of the magnitudes of its terms.
    pub terms: f64,
    /// The possible difference by ties.
    pub ties: f64,
}

impl Value {
    /// += a coefficient times x.
    fn add(&mut self, by: Value, x: f64) {
        self.value += by.value * x;
        self.terms += by.terms * x.abs();
        self.ties += by.ties * x.abs();
    }

    /// A coefficient rounded to bf16. `terms`: the sum of the magnitudes of its terms.
    fn rounded(coefficient: f64, terms: f64) -> Value {
        let round = |x: f64| f64::from(half::bf16::from_f32(x as f32).to_f32());
        let e = NEAR * terms;
        let ties = round(coefficient + e) - round(coefficient - e);
        Value { value: round(coefficient), terms, ties }
    }

    fn times(self, by: f64) -> Value {
        Value { value: self.value * by, terms: self.terms * by, ties: self.ties * by }
    }
}

/// q, k, v and dout, all bf16 numbers.
pub struct Case<'a> {
    pub x: &'a [Mat; 4],
    pub heads: Heads,
    pub bounds: &'a [u32],
    /// Keys of a tile.
    pub step: usize,
}

impl Case<'_> {
    fn row(&self, which: usize, token: usize, head: usize) -> &[f32] {
        let m = &self.x[which];
        &m.v[token * m.cols + head * self.heads.size..][..self.heads.size]
    }

    fn scale(&self) -> f64 {
        f64::from(1.0 / (self.heads.size as f32).sqrt())
    }

    fn kv(&self, head: usize) -> usize {
        head / (self.heads.query / self.heads.kv)
    }

    /// The keys that query `i` of the row from `start` on sees.
    fn seen(&self, start: usize, i: usize) -> std::ops::RangeInclusive<usize> {
        self.heads.window.map_or(start, |w| start.max((i + 1).saturating_sub(w)))..=i
    }

    /// The start of the row, for every query and head.
    fn queries(&self) -> impl Iterator<Item = (usize, usize, usize)> + '_ {
        let tokens =
            self.bounds.windows(2).flat_map(|w| (w[0]..w[1]).map(move |i| (w[0] as usize, i as usize)));
        tokens.flat_map(|(start, i)| (0..self.heads.query).map(move |h| (start, i, h)))
    }

    /// out and logsumexp.
    pub fn forward(&self) -> [Vec<Value>; 2] {
        let (mut outs, mut lses) = (Vec::new(), Vec::new());
        for (start, i, h) in self.queries() {
            let (mut m, mut l) = (f64::NEG_INFINITY, 0.0);
            let mut acc = vec![Value::default(); self.heads.size];
            let seen: Vec<usize> = self.seen(start, i).collect();
            let tile = |j: &usize| (j - start) / self.step;
            for keys in seen.chunk_by(|a, b| tile(a) == tile(b)) {
                let s = |j: &usize| dot(self.row(0, i, h), self.row(1, *j, self.kv(h))) * self.scale();
                let scores: Vec<f64> = keys.iter().map(s).collect();
                let big = scores.iter().fold(m, |m, s| m.max(*s));
                let shrink = (m - big).exp();
                (m, l) = (big, l * shrink);
                acc.iter_mut().for_each(|a| *a = a.times(shrink));
                for (j, s) in keys.iter().zip(scores) {
                    let p = (s - m).exp();
                    l += p;
                    let (p, v) = (Value::rounded(p, p), self.row(2, *j, self.kv(h)));
                    acc.iter_mut().zip(v).for_each(|(a, v)| a.add(p, f64::from(*v)));
                }
            }
            outs.extend(acc.iter().map(|a| a.times(1.0 / l)));
            lses.push(Value { value: m + l.ln(), terms: 1.0 + m.abs(), ties: 0.0 });
        }
        [outs, lses]
    }

    /// dq, dk and dv, from the results of the forward pass.
    pub fn backward(&self, out: &[f32], lse: &[f32]) -> [Vec<Value>; 3] {
        let Heads { query, kv, size, .. } = self.heads;
        let t = self.x[0].rows;
        let mut grads = [query, kv, kv].map(|heads| vec![Value::default(); t * heads * size]);
        for (start, i, h) in self.queries() {
            let (q, dout, g) = (self.row(0, i, h), self.row(3, i, h), self.kv(h));
            let out = &out[(i * query + h) * size..][..size];
            let (delta, delta_terms) = (dot(dout, out), dot_terms(dout, out));
            for j in self.seen(start, i) {
                let (k, v) = (self.row(1, j, g), self.row(2, j, g));
                let p = (dot(q, k) * self.scale() - f64::from(lse[i * query + h])).exp();
                let ds = p * (dot(dout, v) - delta);
                let terms = p * (dot_terms(dout, v) + delta_terms);
                let (ds, p) = (Value::rounded(ds, terms), Value::rounded(p, p));
                let (at_q, at_k) = ((i * query + h) * size, (j * kv + g) * size);
                for c in 0..size {
                    grads[0][at_q + c].add(ds, f64::from(k[c]));
                    grads[1][at_k + c].add(ds, f64::from(q[c]));
                    grads[2][at_k + c].add(p, f64::from(dout[c]));
                }
            }
        }
        let [dq, dk, dv] = grads;
        let scaled = |g: Vec<Value>| g.into_iter().map(|x| x.times(self.scale())).collect();
        [scaled(dq), scaled(dk), dv]
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

fn dot_terms(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (f64::from(*a) * f64::from(*b)).abs()).sum()
}
