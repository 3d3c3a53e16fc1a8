//! The gated delta rule and its gradient, token by token. A task has the heads of one row: a value head, or for the
//! gradient a key head with its value heads. Each keeps one state [K, V] in the cache and passes over it once for a token
//! (twice on the way back): the decay and the update of the token before are applied on the way.
//!
//! The gradient needs no state of the forward pass, because the errors are kept. On the way back the gradient R of the
//! state gives dv = b y with y = Rᵀ k, and one part of dk, b R e. On the way forth the states are made again from the
//! errors, and give dq and the rest of dk. The exponent of the decays up to token t is a factor exp(G) of out and of 1/v, so
//! that its gradient is out·dout - v·dv; that of one decay is the sum of these from its token on, in f64.

use super::super::operands::Context;
use super::super::runtime::isa::kernel;
use super::super::runtime::math;
use super::super::runtime::threads::Shared;
use crate::backend::DeltaHeads;
use std::ops::Range;

/// The inputs, as in [`Delta`](crate::backend::Delta).
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    /// [T, G*K]
    pub q: &'a [f32],
    /// [T, G*K]
    pub k: &'a [f32],
    /// [T, H*V]
    pub v: &'a [f32],
    /// [T, H]
    pub beta: &'a [f32],
    /// [T, H]
    pub decay: &'a [f32],
    /// [2, H]
    pub rates: &'a [f32],
    /// The heads.
    pub heads: DeltaHeads,
    /// Where rows begin, then T.
    pub bounds: &'a [u32],
}

/// The outputs of the gradient, shaped like the inputs.
pub struct Outputs<'a> {
    /// [T, G*K]
    pub dq: &'a mut [f32],
    /// [T, G*K]
    pub dk: &'a mut [f32],
    /// [T, H*V]
    pub dv: &'a mut [f32],
    /// [T, H]
    pub dbeta: &'a mut [f32],
    /// [T, H]
    pub ddecay: &'a mut [f32],
}

/// What a token does to the state before its own keys are read: state := d (state + k uᵀ), of the token before.
struct Pending {
    k: Vec<f32>,
    u: Vec<f32>,
}

kernel! {
    /// state := d (state + k uᵀ);  read[0] += stateᵀ key;  read[1] += stateᵀ query
    fn advance<L>(state: &mut [f32], d: f32, before: (&[f32], &[f32]), keys: (&[f32], &[f32]), read: [&mut [f32]; 2]) {
        let [m, o] = read;
        let n = m.len();
        let (u, o) = (&before.1[..n], &mut o[..n]);
        let rows = state.chunks_exact_mut(n).zip(before.0).zip(keys.0.iter().zip(keys.1));
        for ((row, &kept), (&k, &q)) in rows {
            for j in 0..n {
                let s = d * L::fma(kept, u[j], row[j]);
                row[j] = s;
                m[j] = L::fma(k, s, m[j]);
                o[j] = L::fma(q, s, o[j]);
            }
        }
    }
}

kernel! {
    /// state += k uᵀ
    fn update<L>(state: &mut [f32], k: &[f32], u: &[f32]) {
        for (row, &k) in state.chunks_exact_mut(u.len()).zip(k) {
            row.iter_mut().zip(u).for_each(|(s, &u)| *s = L::fma(k, u, *s));
        }
    }
}

/// What the gradient does at a token.
struct Step<'a> {
    /// Factor of the state.
    d: f32,
    /// Factor of a product with the errors: that of the update, or of all of it.
    b: f32,
    /// k and u of the token before, on this way.
    before: (&'a [f32], &'a [f32]),
    k: &'a [f32],
    /// Read on the way back only.
    q: &'a [f32],
    dout: &'a [f32],
    /// The errors, or on the way forth dv.
    row: &'a [f32],
}

kernel! {
    /// state := d (state - k zᵀ) + q doutᵀ;  y += stateᵀ key;  of_k += b state e
    fn recede<L>(state: &mut [f32], x: &Step, y: &mut [f32], of_k: &mut [f32]) {
        let n = y.len();
        let (z, dout) = (&x.before.1[..n], &x.dout[..n]);
        let inputs = x.before.0.iter().zip(x.k.iter().zip(x.q)).zip(of_k);
        for (row, ((&kept, (&k, &q)), of_k)) in state.chunks_exact_mut(n).zip(inputs) {
            for j in 0..n {
                let s = L::fma(q, dout[j], x.d * L::fma(-kept, z[j], row[j]));
                row[j] = s;
                y[j] = L::fma(k, s, y[j]);
            }
            *of_k = L::fma(x.b, math::dot::<L>(row, x.row), *of_k);
        }
    }
}

kernel! {
    /// state := d (state + k uᵀ);  of_k -= state dv;  of_q = state dout + b key
    fn repeat<L>(state: &mut [f32], x: &Step, of_k: &mut [f32], of_q: &mut [f32]) {
        let n = x.row.len();
        let u = &x.before.1[..n];
        let inputs = x.before.0.iter().zip(x.k).zip(of_k.iter_mut().zip(of_q));
        for (row, ((&kept, &k), (of_k, of_q))) in state.chunks_exact_mut(n).zip(inputs) {
            for j in 0..n {
                row[j] = x.d * L::fma(kept, u[j], row[j]);
            }
            *of_k -= math::dot::<L>(row, x.row);
            *of_q = L::fma(x.b, k, math::dot::<L>(row, x.dout));
        }
    }
}

impl Inputs<'_> {
    /// The tokens of row `r`.
    fn tokens(&self, r: usize) -> Range<usize> {
        self.bounds[r] as usize..self.bounds[r + 1] as usize
    }

    fn rows(&self) -> usize {
        self.bounds.len() - 1
    }

    /// Factor of the state, factor of the update, at a token.
    fn factors(&self, t: usize, h: usize) -> (f32, f32) {
        let at = t * self.heads.values + h;
        (libm::expf(self.rates[h] * softplus(self.argument(t, h))), sigmoid(self.beta[at]))
    }

    /// The argument of the softplus.
    fn argument(&self, t: usize, h: usize) -> f32 {
        self.decay[t * self.heads.values + h] + self.rates[self.heads.values + h]
    }

    /// Where the keys of a key head are.
    fn key(&self, t: usize, g: usize) -> Range<usize> {
        let n = self.heads.key_size;
        let from = (t * self.heads.keys + g) * n;
        from..from + n
    }

    /// Where the values of a value head are.
    fn value(&self, t: usize, h: usize) -> Range<usize> {
        let n = self.heads.value_size;
        let from = (t * self.heads.values + h) * n;
        from..from + n
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + libm::expf(-x))
}

fn softplus(x: f32) -> f32 {
    x.max(0.0) + libm::log1pf(libm::expf(-x.abs()))
}

impl Pending {
    fn none(heads: DeltaHeads) -> Self {
        Pending { k: vec![0.0; heads.key_size], u: vec![0.0; heads.value_size] }
    }

    fn set(&mut self, k: &[f32], u: impl Iterator<Item = f32>) {
        self.k.copy_from_slice(k);
        self.u.iter_mut().zip(u).for_each(|(to, u)| *to = u);
    }

    fn parts(&self) -> (&[f32], &[f32]) {
        (&self.k, &self.u)
    }
}

/// The outputs and errors; `state` as in [`Backend::delta_rule`](crate::backend::Backend::delta_rule).
pub fn forward(cx: Context, (out, errors): (&mut [f32], &mut [f32]), state: Option<&mut [f32]>, x: Inputs) {
    let DeltaHeads { values, keys, value_size, key_size } = x.heads;
    let (out, errors) = (Shared::new(out), Shared::new(errors));
    let kept = state.map(Shared::new);
    cx.threads.each(x.rows() * values, |task| {
        let (r, h) = (task / values, task % values);
        let size = key_size * value_size;
        let mut own = Vec::new();
        let state = match &kept {
            // SAFETY: there is one row, and head h belongs to this task alone.
            Some(kept) => unsafe { kept.slice(h * size, size) },
            None => {
                own.resize(size, 0.0);
                &mut own[..]
            }
        };
        let mut pending = Pending::none(x.heads);
        for t in x.tokens(r) {
            let (key, at) = (x.key(t, h / (values / keys)), x.value(t, h));
            let (q, k, v) = (&x.q[key.clone()], &x.k[key], &x.v[at.clone()]);
            let (d, b) = x.factors(t, h);
            // SAFETY: the columns of head h in the rows of row r belong to this task alone.
            let (o, e) = unsafe { (out.slice(at.start, value_size), errors.slice(at.start, value_size)) };
            o.fill(0.0);
            e.fill(0.0);
            advance(cx.isa, state, d, pending.parts(), (k, q), [e, o]);
            let inner = b * math::dot_rows(cx.isa, q, k);
            for ((o, e), v) in o.iter_mut().zip(e.iter_mut()).zip(v) {
                *e = v - *e;
                *o += inner * *e;
            }
            pending.set(k, e.iter().map(|e| b * e));
        }
        if kept.is_some() {
            update(cx.isa, state, &pending.k, &pending.u);
        }
    });
}

/// What the gradient is given besides the inputs [T, H*V].
#[derive(Clone, Copy)]
pub struct Known<'a> {
    /// Gradient of the output.
    pub dout: &'a [f32],
    /// The output.
    pub out: &'a [f32],
    /// The errors.
    pub errors: &'a [f32],
}

/// What a task of the gradient works on: a row and a key head.
struct Task<'a, 'b> {
    x: Inputs<'a>,
    known: Known<'a>,
    out: [Shared<'b>; 5],
}

/// The gradients.
pub fn gradient(cx: Context, out: Outputs, known: Known, x: Inputs) {
    let Outputs { dq, dk, dv, dbeta, ddecay } = out;
    let task = Task { x, known, out: [dq, dk, dv, dbeta, ddecay].map(Shared::new) };
    let keys = x.heads.keys;
    cx.threads.each(x.rows() * keys, |i| task.run(cx, i / keys, i % keys));
}

impl Task<'_, '_> {
    fn run(&self, cx: Context, r: usize, g: usize) {
        let x = &self.x;
        let shared = x.heads.values / x.heads.keys;
        for t in x.tokens(r) {
            // SAFETY: key head g of row r belongs to this task alone.
            let [dq, dk] = [0, 1].map(|i| unsafe { self.out[i].slice(x.key(t, g).start, x.heads.key_size) });
            dq.fill(0.0);
            dk.fill(0.0);
        }
        for h in g * shared..(g + 1) * shared {
            let mut weights = vec![0.0; x.tokens(r).len()];
            self.back(cx, (r, g, h), &mut weights);
            self.forth(cx, (r, g, h));
            let mut sum = 0.0;
            for (t, weight) in x.tokens(r).zip(weights).rev() {
                sum += weight;
                let slope = sigmoid(x.argument(t, h)) * x.rates[h];
                // SAFETY: value head h of row r belongs to this task alone.
                let ddecay = unsafe { self.out[4].slice(t * x.heads.values + h, 1) };
                ddecay[0] = sum as f32 * slope;
            }
        }
    }

    /// From the last token to the first: dv, dbeta, and a part of dk.
    fn back(&self, cx: Context, (r, g, h): (usize, usize, usize), weights: &mut [f64]) {
        let x = &self.x;
        let DeltaHeads { values, value_size, key_size, .. } = x.heads;
        let mut state = vec![0.0; key_size * value_size];
        let (mut pending, mut d) = (Pending::none(x.heads), 0.0);
        for (t, weight) in x.tokens(r).zip(weights).rev() {
            let (key, at) = (x.key(t, g), x.value(t, h));
            let (q, k, v) = (&x.q[key.clone()], &x.k[key.clone()], &x.v[at.clone()]);
            let (next, b) = x.factors(t, h);
            let e = &self.known.errors[at.clone()];
            // SAFETY: these heads of row r belong to this task alone.
            let (dk, dv, dbeta) = unsafe {
                let dbeta = self.out[3].slice(t * values + h, 1);
                (self.out[1].slice(key.start, key_size), self.out[2].slice(at.start, value_size), dbeta)
            };
            dv.fill(0.0);
            let dout = &self.known.dout[at.clone()];
            *weight = f64::from(math::dot_rows(cx.isa, &self.known.out[at], dout));
            let step = Step { d, b, before: pending.parts(), k, q, dout, row: e };
            recede(cx.isa, &mut state, &step, dv, dk);
            dbeta[0] = math::dot_rows(cx.isa, dv, e) * b * (1.0 - b);
            math::scale_row(cx.isa, dv, b);
            *weight -= f64::from(math::dot_rows(cx.isa, v, dv));
            pending.set(k, dv.iter().copied());
            d = next;
        }
    }

    /// From the first token to the last: dq, and the rest of dk.
    fn forth(&self, cx: Context, (r, g, h): (usize, usize, usize)) {
        let x = &self.x;
        let DeltaHeads { value_size, key_size, .. } = x.heads;
        let mut state = vec![0.0; key_size * value_size];
        let (mut pending, mut of_q) = (Pending::none(x.heads), vec![0.0; key_size]);
        for t in x.tokens(r) {
            let (key, at) = (x.key(t, g), x.value(t, h));
            let k = &x.k[key.clone()];
            let (d, b) = x.factors(t, h);
            let (e, dout) = (&self.known.errors[at.clone()], &self.known.dout[at.clone()]);
            // SAFETY: these heads of row r belong to this task alone.
            let (dq, dk, dv) = unsafe {
                let [dq, dk] = [0, 1].map(|i| self.out[i].slice(key.start, key_size));
                (dq, dk, self.out[2].slice(at.start, value_size))
            };
            let inner = b * math::dot_rows(cx.isa, e, dout);
            let step = Step { d, b: inner, before: pending.parts(), k, q: k, dout, row: dv };
            repeat(cx.isa, &mut state, &step, dk, &mut of_q);
            math::add_row(cx.isa, dq, &of_q);
            pending.set(k, e.iter().map(|e| b * e));
        }
    }
}
