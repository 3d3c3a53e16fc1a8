//! Cases of causal short convolutions between two gates.

use crate::op_cases::rows::rows_of;
use crate::op_cases::*;
use finetune::backend::{Gates, GatesGrad};

/// Tokens, channels, taps.
const SIZES: [(usize, usize, usize); 11] = [
    (0, 4, 3),
    (1, 1, 2),
    (1, 4, 3),
    (3, 33, 3),
    (5, 10, 4),
    (9, 3, 7),
    (17, 1, 2),
    (17, 33, 3),
    (40, 300, 3),
    (129, 5, 4),
    (129, 257, 3),
];
const MODEL: [(usize, usize, usize); 1] = [(1024, 576, 3)];
/// Tokens after `past` ones, of which the last of as many as taps are above them.
const CONTINUED: [(usize, usize, usize, u32); 5] =
    [(1, 33, 3, 1), (1, 257, 3, 5), (2, 5, 4, 2), (6, 10, 4, 1), (3, 4, 2, 9)];

/// after * the convolution of before * x.
fn convolved([before, after, x, taps]: [&Mat; 4], (bounds, past): (&[u32], u32)) -> Mat {
    let (cols, above) = (taps.cols, x.rows - after.rows);
    let mut out = Mat::zeros(after.rows, cols);
    for row in bounds.windows(2) {
        for t in row[0] as usize..row[1] as usize {
            let position = t - row[0] as usize + past as usize;
            for c in 0..cols {
                let product = |j: usize| {
                    let at = (above + t - j) * cols + c;
                    taps.v[j * cols + c] * before.v[at] * x.v[at]
                };
                let sum: f64 = (0..taps.rows.min(position + 1)).map(product).sum();
                out.v[t * cols + c] = after.v[t * cols + c] * sum;
            }
        }
    }
    out
}

pub fn convolution<B: Device>(set: Set) -> Cases<B> {
    let whole = set.of(&SIZES, &MODEL).into_iter().map(|(t, c, taps)| (t, c, taps, 0));
    let sizes = whole.chain(set.of(&CONTINUED, &[])).collect();
    each(sizes, move |(t, c, taps, past)| {
        let bounds = if past == 0 { rows_of(set, t) } else { vec![0, t as u32] };
        let above = if past == 0 { 0 } else { taps - 1 };
        let mut inputs = [above + t, t, above + t].map(|rows| Mat::random(rows, c, rows as u64 + 1)).to_vec();
        inputs.push(Mat::random(taps, c, 4));
        // Rows before the first token of the text are not read.
        let unread = above.saturating_sub(past as usize) * c;
        [0, 2].into_iter().for_each(|i| inputs[i].v[..unread].fill(1e12));
        let name = format!("{t}x{c}, {taps} taps after {past}");
        Case::new(name, inputs, [Out::Poison(t, c)])
            .tokens(&bounds, past)
            .verb(|b: &mut B, g, o| {
                let gates = Gates { before: g.i[0], after: g.i[1], x: g.i[2] };
                b.convolution(o[0].view_mut(), gates, g.i[3], g.tokens());
            })
            .want(&[1e-6], move |k| {
                let [before, after, x, taps] = k.i else { unreachable!() };
                vec![convolved([before, after, x, taps], (&bounds, past))]
            })
    })
}

/// Gradients of before, after and x.
fn gradients(dout: &Mat, [before, after, x, taps]: [&Mat; 4], bounds: &[u32]) -> Vec<Mat> {
    let cols = taps.cols;
    let mut grads = [x.rows; 3].map(|rows| Mat::zeros(rows, cols));
    for row in bounds.windows(2) {
        for t in row[0] as usize..row[1] as usize {
            for j in 0..taps.rows.min(t - row[0] as usize + 1) {
                for c in 0..cols {
                    let (here, there, tap) = (t * cols + c, (t - j) * cols + c, taps.v[j * cols + c]);
                    grads[0].v[there] += dout.v[here] * after.v[here] * tap * x.v[there];
                    grads[1].v[here] += dout.v[here] * tap * before.v[there] * x.v[there];
                    grads[2].v[there] += dout.v[here] * after.v[here] * tap * before.v[there];
                }
            }
        }
    }
    grads.into()
}

pub fn convolution_grad<B: Device>(set: Set) -> Cases<B> {
    each(set.of(&SIZES, &MODEL), move |(t, c, count)| {
        let bounds = rows_of(set, t);
        let [dout, before, after, x] = [1, 2, 3, 4].map(|seed| Mat::random(t, c, seed));
        let taps = Mat::random(count, c, 5);
        let inputs = [dout.clone(), before.clone(), after.clone(), x.clone(), taps.clone()];
        let own = bounds.clone();
        let mut case =
            Case::new(format!("{t}x{c}, {count} taps"), inputs, [(); 3].map(|()| Out::Poison(t, c)))
                .tokens(&bounds, 0)
                .verb(|b: &mut B, g, o| {
                    let [before, after, x] = o else { unreachable!() };
                    let grad =
                        GatesGrad { before: before.view_mut(), after: after.view_mut(), x: x.view_mut() };
                    let gates = Gates { before: g.i[1], after: g.i[2], x: g.i[3] };
                    b.convolution_grad(grad, g.i[0], gates, g.i[4], g.tokens());
                })
                .want(&[1e-6; 3], move |k| {
                    let [dout, before, after, x, taps] = k.i else { unreachable!() };
                    gradients(dout, [before, after, x, taps], &own)
                });
        for which in 0..3 {
            let (bounds, taps) = (bounds.clone(), taps.clone());
            let formula = Box::new(move |i: &[Mat]| convolved([&i[0], &i[1], &i[2], &taps], (&bounds, 0)));
            let (x, dy) = (vec![before.clone(), after.clone(), x.clone()], dout.clone());
            case = case.gradient(Gradient { out: which, from: 0, x, which, dy, formula, bound: 1e-6 });
        }
        case
    })
}
