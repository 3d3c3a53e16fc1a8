//! Cases of adapters, alone and beside a frozen product.

use crate::op_cases::*;
use finetune::backend::{LoraGrad, LoraPart, ViewMut};
use finetune::numeric::block::Block;
use finetune::numeric::dtype::Dtype;
use std::rc::Rc;

const SCALE: f32 = 2.0;

/// Tokens, inputs, rank, outputs.
type Size = (usize, usize, usize, usize);

const SIZES: [Size; 7] = [
    (0, 3, 1, 5),
    (1, 3, 1, 5),
    (5, 40, 33, 7),
    (17, 64, 8, 33),
    (129, 65, 16, 192),
    (129, 576, 16, 192),
    (3, 576, 16, 1536),
];
/// The same beside a frozen product: more ranks, and more rows than a block has.
const BESIDE: [Size; 10] = [
    (0, 3, 1, 5),
    (1, 3, 1, 5),
    (1, 5, 1, 3),
    (7, 40, 16, 30),
    (17, 64, 8, 33),
    (65, 40, 16, 130),
    (130, 100, 33, 70),
    (129, 577, 16, 192),
    (600, 100, 3, 800),
    (9, 40, 800, 50),
];
const MODEL: [Size; 2] = [(1024, 576, 16, 1536), (1024, 1536, 16, 576)];

/// x, A, B.
fn factors((t, k, r, n): Size) -> [Mat; 3] {
    [Mat::random(t, k, 1), Mat::random(r, k, 2), Mat::random(n, r, 3)]
}

fn name((t, k, r, n): Size) -> String {
    format!("{t}x{k}x{r}x{n}")
}

fn terms((t, k, r, n): Size) -> usize {
    t * r * (k + n)
}

/// scale * (x aᵀ) bᵀ
fn adapted(i: &[Mat]) -> Mat {
    i[0].mul(&i[1].t()).mul(&i[2].t()).times(f64::from(SCALE))
}

pub fn lora_down<B: Device>(set: Set) -> Cases<B> {
    each(set.of(&SIZES, &MODEL), |size| {
        let ([x, a, _], (t, k, r, _)) = (factors(size), size);
        Case::new(name(size), [x, a], [Out::Poison(t, r)])
            .verb(|b: &mut B, g, o| b.lora_down(o[0].view_mut(), g.i[0], g.i[1]))
            .want(&[2e-6], |k| vec![k.i[0].mul(&k.i[1].t())])
            .product(t * k * r)
    })
}

pub fn lora<B: Device>(set: Set) -> Cases<B> {
    each(set.of(&SIZES, &MODEL), |size| {
        let (t, _, r, n) = size;
        let outs = [Out::Holds(Mat::random(t, n, 4)), Out::Poison(t, r)];
        Case::new(name(size), factors(size), outs)
            .verb(|b: &mut B, g, o| {
                let [y, h] = o else { unreachable!() };
                b.lora(y.view_mut(), h.view_mut(), g.i[0], (g.i[1], g.i[2]), SCALE);
            })
            .want(&[3e-6, 2e-6], |k| vec![k.old[0].plus(&adapted(k.i)), k.i[0].mul(&k.i[1].t())])
            .product(terms(size))
    })
}

/// dA and dB in one row, and what the adapter adds to dx; x, A, B, dy, h are given.
fn adapted_grad(i: &[Mat]) -> (Mat, Mat) {
    let scale = f64::from(SCALE);
    let [x, a, b, dy, h] = i else { unreachable!() };
    let dh = dy.mul(b).times(scale);
    let v = [dh.t().mul(x).v, dy.t().mul(h).times(scale).v].concat();
    (Mat { rows: 1, cols: v.len(), v }, dh.mul(a))
}

/// The gradient of A, of B, and of x in that output, if it is given.
fn gradients<B: Device>(
    case: Case<B>,
    (dab, dx): (usize, Option<usize>),
    beside: Option<Rc<Mat>>,
    size: Size,
) -> Case<B> {
    let (_, k, r, _) = size;
    let x = case.inputs[..3].to_vec();
    let gradient = |out, from, which| {
        let beside = beside.clone();
        let formula = move |i: &[Mat]| {
            let own = adapted(i);
            beside.as_ref().map_or(own.clone(), |w| own.plus(&i[0].mul(&w.t())))
        };
        let (x, dy) = (x.clone(), case.inputs[3].clone());
        Gradient { out, from, x, which, dy, formula: Box::new(formula), bound: 1e-5 }
    };
    let mut all = vec![gradient(dab, 0, 1), gradient(dab, r * k, 2)];
    all.extend(dx.map(|dx| gradient(dx, 0, 0)));
    Case { gradients: all, ..case }
}

/// x, A, B, dy and h.
fn given_to_gradients(size: Size) -> [Mat; 5] {
    let [x, a, b] = factors(size);
    let h = x.mul(&a.t()).stored();
    [x, a, b, Mat::random(size.0, size.3, 4), h]
}

fn args<'a, B: Device>(g: &Given<'a, B>, dab: ViewMut<'a, B::Memory>) -> LoraGrad<'a, B::Memory> {
    let (x, ab, dy, h) = (g.i[0], (g.i[1], g.i[2]), g.i[3], g.i[4]);
    LoraGrad { dab, dy, x, h, ab, scale: SCALE }
}

pub fn lora_grad<B: Device>(set: Set) -> Cases<B> {
    each(set.of(&SIZES, &MODEL), |size| {
        let (t, k, r, n) = size;
        let dab = || Out::Poison(1, r * (k + n));
        let outs = [dab(), Out::Poison(t, k), Out::Holds(Mat::random(t, k, 5)), dab()];
        let case = Case::new(name(size), given_to_gradients(size), outs)
            .verb(|b: &mut B, g, o| {
                let [dab, dx, onto, alone] = o else { unreachable!() };
                b.lora_grad(Some((dx.view_mut(), Write::Set)), args(g, dab.view_mut()));
                b.lora_grad(None, args(g, alone.view_mut()));
                // The gradients of A and B are computed again, to the same bits.
                b.lora_grad(Some((onto.view_mut(), Write::Add)), args(g, dab.view_mut()));
            })
            .want(&[1e-5, 1e-5, 3e-6, 1e-5], |k| {
                let (dab, dx) = adapted_grad(k.i);
                vec![dab.clone(), dx.clone(), k.old[2].plus(&dx), dab]
            })
            .same(0, 3)
            .product(3 * terms(size));
        if terms(size) > 1_000_000 { case } else { gradients(case, (0, Some(1)), None, size) }
    })
}

const STORED: [(Stored, Write); 2] =
    [(Stored::Coarse(Dtype::Bf16), Write::Set), (Stored::Coarse(Dtype::F32), Write::Add)];

/// Sizes with their matrices; each block type at one size.
fn beside(set: Set) -> Vec<(Size, (Stored, Write))> {
    let blocks: Vec<_> = Block::ALL.iter().map(|block| (Stored::Blocks(*block), Write::Set)).collect();
    let mut all = cross(set.of(&BESIDE, &MODEL), &set.of(&STORED, &STORED[..1]));
    all.extend(cross(set.of(&[(37, 256, 5, 131)], &[]), &blocks));
    all
}

pub fn lora_linear<B: Device>(set: Set) -> Cases<B> {
    // The adapter's input is the projection's, or another one as dropout leaves it.
    each(cross(beside(set), &set.of(&[0, 3], &[0])), |((size, (stored, write)), adapters)| {
        let (t, k, r, n) = size;
        let [x, a, b] = factors(size);
        let inputs = [x, a, b, Mat::random(t, k, 7)];
        let name = format!("{} {stored:?} {write:?} input {adapters}", name(size));
        Case::new(name, inputs, [held(write, t, n), Out::Poison(t, r), Out::Poison(t, r)])
            .frozen(Matrix::draw(n, k, 5, stored))
            .verb(move |b: &mut B, g, o| {
                let [y, h, down] = o else { unreachable!() };
                let (h, x) = (h.view_mut(), g.i[adapters]);
                let lora = LoraPart { h, x, ab: (g.i[1], g.i[2]), scale: SCALE };
                b.lora_linear((y.view_mut(), write), g.i[0], &g.w[0], lora);
                b.lora_down(down.view_mut(), g.i[adapters], g.i[1]);
            })
            .want(&[4e-6; 3], move |k| {
                let own = adapted(&[k.i[adapters].clone(), k.i[1].clone(), k.i[2].clone()]);
                let y = k.old[0].plus(&k.i[0].mul(&k.w[0].t())).plus(&own);
                let h = k.i[adapters].mul(&k.i[1].t());
                vec![y, h.clone(), h]
            })
            .same(1, 2)
            .product(t * n * k + terms(size))
    })
}

pub fn lora_linear_grad<B: Device>(set: Set) -> Cases<B> {
    each(beside(set), |(size, (stored, write))| {
        let (t, k, r, n) = size;
        let w = Matrix::draw(n, k, 5, stored);
        let values = w.values.clone();
        let outs = [held(write, t, k), Out::Poison(1, r * (k + n))];
        let name = format!("{} {stored:?} {write:?}", name(size));
        let case = Case::new(name, given_to_gradients(size), outs)
            .frozen(w)
            .verb(move |b: &mut B, g, o| {
                let [dx, dab] = o else { unreachable!() };
                b.lora_linear_grad((dx.view_mut(), write), &g.w[0], args(g, dab.view_mut()));
            })
            .want(&[4e-6, 4e-6], |k| {
                let (dab, dx) = adapted_grad(k.i);
                vec![k.old[0].plus(&k.i[3].mul(&k.w[0])).plus(&dx), dab]
            })
            .product(t * n * k + 2 * terms(size));
        if t * n * k + terms(size) > 1_000_000 {
            return case;
        }
        let dx = (write == Write::Set).then_some(0);
        gradients(case, (1, dx), Some(values), size)
    })
}
