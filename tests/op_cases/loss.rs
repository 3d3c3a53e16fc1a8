//! Cases of cross_entropy, and of the head with its loss.

use crate::op_cases::*;
use finetune::backend::LmHeadLoss;
use finetune::numeric::block::Block;
use finetune::numeric::dtype::Dtype;

fn targets(n: usize, vocab: usize) -> Vec<u32> {
    (0..n).map(|i| (i * 37 % vocab) as u32).collect()
}

/// Losses, and the gradient of their sum in the logits.
fn losses(logits: &Mat, targets: &[u32], weights: Option<&Mat>) -> (Mat, Mat) {
    let (mut out, mut grad) = (Mat::zeros(logits.rows, 1), logits.clone());
    for (i, row) in grad.v.chunks_mut(logits.cols).enumerate() {
        let most = row.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
        let target = targets[i] as usize;
        let (weight, logit) = (weights.map_or(1.0, |w| w.v[target]), row[target]);
        row.iter_mut().for_each(|v| *v = (*v - most).exp());
        let sum: f64 = row.iter().sum();
        out.v[i] = weight * (most + sum.ln() - logit);
        row.iter_mut().for_each(|v| *v *= weight / sum);
        row[target] -= weight;
    }
    (out, grad)
}

/// Rows, vocabulary, size of logits.
const SIZES: [(usize, usize, f64); 14] = [
    (0, 2, 1.0),
    (1, 1, 20.0),
    (1, 2, 1.0),
    (3, 2, 1.0),
    (3, 7, 30.0),
    (5, 255, 20.0),
    (4, 1000, 20.0),
    (17, 131, 5.0),
    (3, 1537, 80.0),
    (129, 2, 1.0),
    (129, 7, 30.0),
    (129, 131, 5.0),
    (17, 1537, 80.0),
    (129, 1537, 80.0),
];

fn ones(n: usize) -> Mat {
    Mat { rows: n, cols: 1, v: vec![1.0; n] }
}

pub fn cross_entropy<B: Device>(set: Set) -> Cases<B> {
    let weights: &[Option<u64>] = &set.of(&[None, Some(9)], &[None]);
    each(cross(set.of(&SIZES, &[(256, 49_152, 20.0)]), weights), |((n, vocab, size), key)| {
        let weights: Option<Mat> = key.map(|key| Mat::random(1, vocab, key).map(|v| v + 1.5));
        let logits = Mat::random(n, vocab, 1).map(|v| v * size);
        let targets = targets(n, vocab);
        let (of, known) = (targets.clone(), weights.clone());
        let formula = Box::new(move |x: &[Mat]| losses(&x[0], &of, known.as_ref()).0);
        let (x, dy) = (vec![logits.clone()], ones(n));
        let inputs: Vec<Mat> = weights.into_iter().collect();
        let name = format!("{n}x{vocab}{}", if inputs.is_empty() { "" } else { " weighted" });
        Case::new(name, inputs, [Out::Poison(n, 1), Out::Holds(logits)])
            .ids(&targets)
            .verb(|b: &mut B, g, o| {
                let [losses, logits] = o else { unreachable!() };
                b.cross_entropy(losses.view_mut(), logits.view_mut(), g.ids(), g.i.first().copied());
            })
            .want(&[1e-6, 1e-5], move |k| {
                let (losses, grad) = losses(&k.old[1], &targets, k.i.first());
                vec![losses, grad]
            })
            .gradient(Gradient { out: 1, from: 0, x, which: 0, dy, formula, bound: 1e-5 })
    })
}

/// Rows, channels, vocabulary, rows of a chunk.
type Head = ((usize, usize, usize, usize), Stored);
const FINE: [Head; 5] = [
    ((1, 5, 7, 4), Stored::Fine),
    ((17, 33, 131, 5), Stored::Fine),
    ((40, 64, 100, 1000), Stored::Fine),
    ((129, 64, 515, 64), Stored::Fine),
    ((301, 9, 2600, 64), Stored::Fine),
];

pub fn lm_head_loss<B: Device>(set: Set) -> Cases<B> {
    let mut all = set.of(&FINE, &[((256, 576, 49_152, 64), Stored::Coarse(Dtype::Bf16))]);
    let blocks: Vec<Stored> = Block::ALL.iter().map(|block| Stored::Blocks(*block)).collect();
    all.extend(cross(set.of(&[(5, 256, 70, 3)], &[]), &blocks));
    each(all, |((n, c, vocab, chunk), stored)| {
        let (x, head, targets) = (Mat::random(n, c, 1), Matrix::draw(vocab, c, 2, stored), targets(n, vocab));
        let (of, known, values) = (targets.clone(), targets.clone(), head.values.t());
        let formula = Box::new(move |x: &[Mat]| losses(&x[0].mul(&values), &of, None).0);
        let outs = [Out::Poison(n, 1), Out::Poison(n, c), Out::Poison(n, 1)];
        Case::new(format!("{n}x{c}x{vocab} by {chunk} {stored:?}"), [x.clone()], outs)
            .frozen(head)
            .verb(move |b: &mut B, g, o| {
                let [losses, dx, alone] = o else { unreachable!() };
                let args = || LmHeadLoss { x: g.i[0], head: &g.w[0], vocab, targets: &targets, chunk };
                b.lm_head_loss(losses.view_mut(), Some(dx.view_mut()), args());
                b.lm_head_loss(alone.view_mut(), None, args());
            })
            .want(&[2e-6, 1e-5, 2e-6], move |k| {
                let (losses, grad) = losses(&k.i[0].mul(&k.w[0].t()), &known, None);
                vec![losses.clone(), grad.mul(&k.w[0]), losses]
            })
            .same(0, 2)
            .product(2 * n * c * vocab)
            .gradient(Gradient { out: 1, from: 0, x: vec![x], which: 0, dy: ones(n), formula, bound: 1e-5 })
    })
}
