//! Cases of gated delta rules and of the convolution with a silu before them.

use crate::op_cases::rows::rows_of;
use crate::op_cases::*;
use finetune::backend::{Delta, DeltaGrad, DeltaHeads, DeltaSaved};

/// Tokens, channels, taps, and tokens before.
const SIZES: [(usize, usize, usize, u32); 10] = [
    (0, 4, 3, 0),
    (1, 1, 2, 0),
    (3, 33, 4, 0),
    (9, 3, 7, 0),
    (17, 1, 2, 0),
    (40, 300, 4, 0),
    (129, 257, 3, 0),
    (1, 257, 3, 5),
    (6, 10, 4, 1),
    (3, 4, 2, 9),
];
const MODEL: [(usize, usize, usize, u32); 1] = [(1024, 6144, 4, 0)];

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// silu, in f64.
fn silu(mut u: Mat) -> Mat {
    u.v.iter_mut().for_each(|u| *u *= sigmoid(*u));
    u
}

/// The sums of the taps, before the silu.
fn sums(x: &Mat, taps: &Mat, (bounds, past): (&[u32], u32)) -> Mat {
    let (cols, tokens) = (taps.cols, *bounds.last().unwrap() as usize);
    let (above, mut out) = (x.rows - tokens, Mat::zeros(tokens, cols));
    for row in bounds.windows(2) {
        for t in row[0] as usize..row[1] as usize {
            let position = t - row[0] as usize + past as usize;
            for c in 0..cols {
                let product = |j: usize| taps.at(j, c) * x.at(above + t - j, c);
                *out.at_mut(t, c) = (0..taps.rows.min(position + 1)).map(product).sum();
            }
        }
    }
    out
}

pub fn convolution_silu<B: Device>(set: Set) -> Cases<B> {
    each(set.of(&SIZES, &MODEL), move |(t, c, taps, past)| {
        let bounds = if past == 0 { rows_of(set, t) } else { vec![0, t as u32] };
        let above = if past == 0 { 0 } else { taps - 1 };
        let mut x = Mat::random(above + t, c, 1).map(|x| 3.0 * x);
        // Rows before the first token of the text are not read.
        x.v[..above.saturating_sub(past as usize) * c].fill(1e12);
        let name = format!("{t}x{c}, {taps} taps after {past}");
        Case::new(name, [x, Mat::random(taps, c, 4)], [Out::Poison(t, c)])
            .tokens(&bounds, past)
            .verb(|b: &mut B, g, o| b.convolution_silu(o[0].view_mut(), g.i[0], g.i[1], g.tokens()))
            .want(&[1e-6], move |k| vec![silu(sums(&k.i[0], &k.i[1], (&bounds, past)))])
    })
}

pub fn convolution_silu_grad<B: Device>(set: Set) -> Cases<B> {
    let sizes = set.of(&SIZES, &MODEL).into_iter().filter(|size| size.3 == 0).collect();
    each(sizes, move |(t, c, count, _)| {
        let bounds = rows_of(set, t);
        let (dout, x, taps) =
            (Mat::random(t, c, 1), Mat::random(t, c, 2).map(|x| 3.0 * x), Mat::random(count, c, 5));
        let (own, of, known) = (bounds.clone(), bounds.clone(), taps.clone());
        let formula = move |i: &[Mat]| silu(sums(&i[0], &known, (&of, 0)));
        let gradient = Gradient {
            out: 0,
            from: 0,
            x: vec![x.clone()],
            which: 0,
            dy: dout.clone(),
            formula: Box::new(formula),
            bound: 1e-5,
        };
        Case::new(format!("{t}x{c}, {count} taps"), [dout, x, taps], [Out::Poison(t, c)])
            .tokens(&bounds, 0)
            .verb(|b: &mut B, g, o| {
                b.convolution_silu_grad(o[0].view_mut(), g.i[0], g.i[1], g.i[2], g.tokens());
            })
            .want(&[2e-6], move |k| {
                let [dout, x, taps] = k.i else { unreachable!() };
                let u = sums(x, taps, (&own, 0));
                let mut dx = Mat::zeros(x.rows, x.cols);
                for row in own.windows(2) {
                    for t in row[0] as usize..row[1] as usize {
                        for j in 0..taps.rows.min(t - row[0] as usize + 1) {
                            for c in 0..x.cols {
                                let s = sigmoid(u.at(t, c));
                                let slope = s * (1.0 + u.at(t, c) * (1.0 - s));
                                *dx.at_mut(t - j, c) += dout.at(t, c) * slope * taps.at(j, c);
                            }
                        }
                    }
                }
                vec![dx]
            })
            .gradient(gradient)
    })
}

/// Tokens, value heads, key heads, value size, key size.
type Size = (usize, usize, usize, usize, usize);
const RULES: [Size; 9] = [
    (0, 2, 1, 4, 4),
    (1, 1, 1, 1, 1),
    (3, 2, 2, 5, 3),
    (9, 4, 2, 8, 16),
    (17, 3, 1, 33, 7),
    (40, 2, 1, 6, 33),
    (129, 6, 3, 16, 4),
    (70, 1, 1, 64, 128),
    (130, 2, 2, 40, 20),
];
const MODEL_RULES: [Size; 1] = [(1024, 16, 16, 128, 128)];

fn heads_of((_, values, keys, value_size, key_size): Size) -> DeltaHeads {
    DeltaHeads { values, keys, value_size, key_size }
}

/// q, k (both about as long as 1), v, beta, decay, rates.
fn inputs(size: Size) -> Vec<Mat> {
    let (t, h, g, v, k) = size;
    let root = (k as f64).sqrt();
    vec![
        Mat::random(t, g * k, 1).map(|x| 1.5 * x / root),
        Mat::random(t, g * k, 2).map(|x| 1.5 * x / root),
        Mat::random(t, h * v, 3),
        Mat::random(t, h, 4).map(|x| 3.0 * x),
        Mat::random(t, h, 5).map(|x| 2.0 * x),
        Mat::random(2, h, 6).map(|x| if x > 0.0 { -x } else { 4.0 * x }),
    ]
}

fn given<'a, M>(i: &[View<'a, M>], heads: DeltaHeads) -> Delta<'a, M> {
    Delta { q: i[0], k: i[1], v: i[2], beta: i[3], decay: i[4], rates: i[5], heads }
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// Outputs, errors and last states, from a first state of one row or from 0.
fn ruled(x: &[Mat], heads: DeltaHeads, bounds: &[u32], first: Option<&Mat>) -> [Mat; 3] {
    let DeltaHeads { values, keys, value_size: v, key_size: k } = heads;
    let mut out = Mat::zeros(x[2].rows, x[2].cols);
    let mut errors = out.clone();
    let mut states = Mat::zeros(values * k, v);
    for (row, h) in bounds.windows(2).flat_map(|row| (0..values).map(move |h| (row, h))) {
        let mut s = first.map_or(vec![0.0; k * v], |first| first.v[h * k * v..][..k * v].to_vec());
        let g = h / (values / keys);
        for t in row[0] as usize..row[1] as usize {
            let decay = (x[5].at(0, h) * softplus(x[4].at(t, h) + x[5].at(1, h))).exp();
            let beta = sigmoid(x[3].at(t, h));
            s.iter_mut().for_each(|s| *s *= decay);
            // The values that the state has for a key, or a query.
            let read = |s: &[f64], by: &Mat| {
                let mut of = vec![0.0; v];
                for (i, s) in s.chunks(v).enumerate() {
                    let by = by.at(t, g * k + i);
                    of.iter_mut().zip(s).for_each(|(of, s)| *of += s * by);
                }
                of
            };
            let e: Vec<f64> =
                read(&s, &x[1]).iter().enumerate().map(|(j, m)| x[2].at(t, h * v + j) - m).collect();
            for (i, s) in s.chunks_mut(v).enumerate() {
                let by = x[1].at(t, g * k + i) * beta;
                s.iter_mut().zip(&e).for_each(|(s, e)| *s += by * e);
            }
            errors.v[t * values * v + h * v..][..v].copy_from_slice(&e);
            out.v[t * values * v + h * v..][..v].copy_from_slice(&read(&s, &x[0]));
        }
        states.v[h * k * v..][..k * v].copy_from_slice(&s);
    }
    [out, errors, states]
}

/// About the number of multiplications of a token.
fn cost(size: Size) -> usize {
    3 * size.0 * size.1 * size.3 * size.4
}

pub fn delta_rule<B: Device>(set: Set) -> Cases<B> {
    let whole = each(set.of(&RULES, &MODEL_RULES), move |size: Size| {
        let (t, heads, bounds) = (size.0, heads_of(size), rows_of(set, size.0));
        let n = size.1 * size.3;
        Case::new(format!("{size:?}"), inputs(size), [Out::Poison(t, n), Out::Poison(t, n)])
            .tokens(&bounds, 0)
            .verb(move |b: &mut B, g, o| {
                let [out, errors] = o else { unreachable!() };
                b.delta_rule(out.view_mut(), errors.view_mut(), None, given(g.i, heads), g.tokens());
            })
            .want(&[2e-6; 2], move |k| {
                let [out, errors, _] = ruled(k.i, heads, &bounds, None);
                vec![out, errors]
            })
            .product(cost(size))
            .rounds(Rounds::Nothing)
    });
    let continued: &[Size] = &[(1, 2, 1, 5, 3), (6, 4, 2, 40, 16), (1, 1, 1, 33, 128)];
    let continued = each(set.of(continued, &[]), move |size: Size| {
        let (t, heads, n, bounds) = (size.0, heads_of(size), size.1 * size.3, [0, size.0 as u32]);
        let outs =
            [Out::Poison(t, n), Out::Poison(t, n), Out::Holds(Mat::random(size.1 * size.4, size.3, 9))];
        Case::new(format!("{size:?} continued"), inputs(size), outs)
            .tokens(&bounds, 3)
            .verb(move |b: &mut B, g, o| {
                let [out, errors, state] = o else { unreachable!() };
                let state = Some(state.view_mut());
                b.delta_rule(out.view_mut(), errors.view_mut(), state, given(g.i, heads), g.tokens());
            })
            .want(&[2e-6; 3], move |k| ruled(k.i, heads, &bounds, Some(&k.old[2])).into())
            .product(cost(size))
            .rounds(Rounds::Nothing)
    });
    Box::new(whole.chain(continued))
}

/// Gradients of q, k, v, beta and decay, by the states of all tokens.
fn gradients(dout: &Mat, x: &[Mat], heads: DeltaHeads, bounds: &[u32]) -> Vec<Mat> {
    let DeltaHeads { values, keys, value_size: v, key_size: k } = heads;
    let mut d: Vec<Mat> = x[..5].iter().map(|x| Mat::zeros(x.rows, x.cols)).collect();
    let [_, errors, _] = ruled(x, heads, bounds, None);
    for (row, h) in bounds.windows(2).flat_map(|row| (0..values).map(move |h| (row, h))) {
        let g = h / (values / keys);
        let tokens = row[0] as usize..row[1] as usize;
        let decay = |t: usize| (x[5].at(0, h) * softplus(x[4].at(t, h) + x[5].at(1, h))).exp();
        let mut states = vec![vec![0.0; k * v]];
        for t in tokens.clone() {
            let (beta, last) = (sigmoid(x[3].at(t, h)), &states[states.len() - 1]);
            let next = |at: usize| {
                let (i, j) = (at / v, at % v);
                decay(t) * last[at] + x[1].at(t, g * k + i) * beta * errors.at(t, h * v + j)
            };
            let next = (0..k * v).map(next).collect();
            states.push(next);
        }
        let mut r = vec![0.0; k * v];
        for (n, t) in tokens.enumerate().rev() {
            let (beta, a) = (sigmoid(x[3].at(t, h)), decay(t));
            let [q, key] = [0, 1].map(|i| (0..k).map(|c| x[i].at(t, g * k + c)).collect::<Vec<f64>>());
            let [of, e] = [dout, &errors].map(|m| (0..v).map(|j| m.at(t, h * v + j)).collect::<Vec<f64>>());
            (0..k * v).for_each(|at| r[at] += q[at / v] * of[at % v]);
            let y: Vec<f64> = (0..v).map(|j| (0..k).map(|i| r[i * v + j] * key[i]).sum()).collect();
            for i in 0..k {
                let row = |m: &[f64], by: &[f64]| (0..v).map(|j| m[i * v + j] * by[j]).sum::<f64>();
                *d[0].at_mut(t, g * k + i) += row(&states[n + 1], &of);
                *d[1].at_mut(t, g * k + i) += beta * (row(&r, &e) - a * row(&states[n], &y));
            }
            (0..v).for_each(|j| *d[2].at_mut(t, h * v + j) = beta * y[j]);
            let dbeta: f64 = y.iter().zip(&e).map(|(y, e)| y * e).sum();
            *d[3].at_mut(t, h) = dbeta * beta * (1.0 - beta);
            (0..k * v).for_each(|at| r[at] -= beta * key[at / v] * y[at % v]);
            let through: f64 = r.iter().zip(&states[n]).map(|(r, s)| r * s).sum();
            *d[4].at_mut(t, h) = a * through * x[5].at(0, h) * sigmoid(x[4].at(t, h) + x[5].at(1, h));
            r.iter_mut().for_each(|r| *r *= a);
        }
    }
    d
}

pub fn delta_rule_grad<B: Device>(set: Set) -> Cases<B> {
    each(set.of(&RULES, &MODEL_RULES), move |size: Size| {
        let (heads, bounds) = (heads_of(size), rows_of(set, size.0));
        let (x, dout) = (inputs(size), Mat::random(size.0, size.1 * size.3, 7));
        let [out, errors, _] = ruled(&x, heads, &bounds, None);
        let outs: Vec<Out> = x[..5].iter().map(|x| Out::Poison(x.rows, x.cols)).collect();
        let given_all = [vec![dout.clone(), out, errors], x.clone()].concat();
        let own = bounds.clone();
        let mut case = Case::new(format!("{size:?}"), given_all, outs)
            .tokens(&bounds, 0)
            .verb(move |b: &mut B, g, o| {
                let [dq, dk, dv, dbeta, ddecay] = o else { unreachable!() };
                let grad = DeltaGrad {
                    dq: dq.view_mut(),
                    dk: dk.view_mut(),
                    dv: dv.view_mut(),
                    dbeta: dbeta.view_mut(),
                    ddecay: ddecay.view_mut(),
                };
                let saved = DeltaSaved { out: g.i[1], errors: g.i[2] };
                b.delta_rule_grad(grad, g.i[0], saved, given(&g.i[3..], heads), g.tokens());
            })
            .want(&[5e-6; 5], move |k| gradients(&k.i[0], &k.i[3..], heads, &own))
            .product(3 * cost(size))
            .rounds(Rounds::Nothing);
        for which in 0..5 {
            let (bounds, dy) = (bounds.clone(), dout.clone());
            let formula = Box::new(move |x: &[Mat]| ruled(x, heads, &bounds, None)[0].clone());
            let x = x.clone();
            case = case.gradient(Gradient { out: which, from: 0, x, which, dy, formula, bound: 1e-5 });
        }
        case
    })
}
