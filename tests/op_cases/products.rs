//! Cases of linear, linear_grad, matmul.

use crate::op_cases::*;
use finetune::backend::{Product, Transpose};
use finetune::numeric::block::Block;
use finetune::numeric::dtype::Dtype;

type Size = (usize, usize, usize);

/// Rows, outputs, terms of a sum: less than a tile, its borders, more than one, no row.
const SIZES: [Size; 16] = [
    (0, 5, 3),
    (1, 1, 1),
    (1, 5, 3),
    (3, 5, 7),
    (3, 7, 33),
    (64, 64, 16),
    (65, 33, 17),
    (70, 16, 100),
    (17, 130, 50),
    (17, 65, 129),
    (129, 31, 515),
    (17, 577, 100),
    (130, 100, 1100),
    (300, 192, 48),
    (2, 1537, 576),
    (1, 576, 1536),
];
const MODEL: [Size; 6] = [
    (1024, 1536, 576),
    (1024, 576, 1536),
    (1024, 192, 576),
    (256, 1536, 576),
    (256, 49_152, 576),
    (1, 1536, 576),
];
const BF16: (Stored, Write) = (Stored::Coarse(Dtype::Bf16), Write::Set);
const STORED: [(Stored, Write); 5] = [
    BF16,
    (Stored::Coarse(Dtype::Bf16), Write::Add),
    (Stored::Coarse(Dtype::F16), Write::Set),
    (Stored::Coarse(Dtype::F32), Write::Add),
    (Stored::Fine, Write::Set),
];
/// Few rows, and more than a tile of rows, odd outputs, several blocks in a row.
const OF_BLOCKS: [Size; 2] = [(3, 70, 256), (37, 131, 512)];

fn blocks() -> Vec<(Stored, Write)> {
    Block::ALL.iter().map(|block| (Stored::Blocks(*block), Write::Set)).collect()
}

fn forward<B: Device>(((t, n, k), (stored, write)): (Size, (Stored, Write))) -> Case<B> {
    Case::new(format!("{t}x{n}x{k} {stored:?} {write:?}"), [Mat::random(t, k, 1)], [held(write, t, n)])
        .frozen(Matrix::draw(n, k, 2, stored))
        .verb(move |b: &mut B, g, o| b.linear(o[0].view_mut(), write, g.i[0], &g.w[0]))
        .want(&[2e-6], |k| vec![k.old[0].plus(&k.i[0].mul(&k.w[0].t()))])
        .product(t * n * k)
        .rounds(Rounds::Factors)
}

pub fn linear<B: Device>(set: Set) -> Cases<B> {
    each(cross(set.of(&SIZES, &MODEL), &set.of(&STORED, &[BF16])), forward)
}

/// [`linear`] from blocks of every type.
pub fn linear_of_blocks<B: Device>(set: Set) -> Cases<B> {
    each(cross(set.of(&OF_BLOCKS, &[(1024, 1536, 512)]), &blocks()), forward)
}

pub fn linear_grad<B: Device>(set: Set) -> Cases<B> {
    let mut all = cross(set.of(&SIZES, &MODEL), &set.of(&STORED, &[BF16]));
    all.extend(cross(set.of(&OF_BLOCKS, &[]), &blocks()));
    each(all, |((t, n, k), (stored, write))| {
        let (dy, w) = (Mat::random(t, n, 3), Matrix::draw(n, k, 2, stored));
        let transposed = w.values.t();
        let name = format!("{t}x{n}x{k} {stored:?} {write:?}");
        let case = Case::new(name, [dy.clone()], [held(write, t, k)])
            .frozen(w)
            .verb(move |b: &mut B, g, o| b.linear_grad(o[0].view_mut(), write, g.i[0], &g.w[0]))
            .want(&[2e-6], |k| vec![k.old[0].plus(&k.i[0].mul(&k.w[0]))])
            .product(t * n * k)
            .rounds(Rounds::Factors);
        if write == Write::Add || t * n * k >= 100_000 {
            return case;
        }
        let formula = Box::new(move |x: &[Mat]| x[0].mul(&transposed));
        let x = vec![Mat::random(t, k, 1)];
        case.gradient(Gradient { out: 0, from: 0, x, which: 0, dy, formula, bound: 1e-5 })
    })
}

const ALL: [Transpose; 3] = [Transpose::Neither, Transpose::Right, Transpose::Left];

pub fn matmul<B: Device>(set: Set) -> Cases<B> {
    let more = [(3, 5, 0), (16, 576, 1024), (16, 64, 1025), (192, 16, 1030), (700, 16, 576)];
    let mut all = cross(set.of(&[SIZES.as_slice(), &more].concat(), &[]), &ALL);
    // The products of an adapter: h = x a', dh = dy b, dB = dy' h, dA = dh' x.
    let (neither, right, left) = (Transpose::Neither, Transpose::Right, Transpose::Left);
    let of = |k, n| {
        [((1024, 16, k), right), ((1024, 16, n), neither), ((n, 16, 1024), left), ((16, k, 1024), left)]
    };
    all.extend(set.of(&[], &[of(576, 1536), of(1536, 576)].concat()));
    each(cross(all, &set.of(&[Write::Set, Write::Add], &[Write::Set])), |(((m, n, k), transpose), write)| {
        let (a, b) = (Mat::random(m, k, 1), Mat::random(k, n, 2));
        let inputs = match transpose {
            Transpose::Neither => [a, b],
            Transpose::Right => [a, b.t()],
            Transpose::Left => [a.t(), b],
        };
        Case::new(format!("{m}x{n}x{k} {transpose:?} {write:?}"), inputs, [held(write, m, n)])
            .verb(move |b: &mut B, g, o| {
                let product = Product { a: g.i[0], b: g.i[1], transpose, scale: 2.0 };
                b.matmul(o[0].view_mut(), write, product);
            })
            .want(&[2e-6], move |k| {
                let [a, b] = k.i else { unreachable!() };
                let product = match transpose {
                    Transpose::Neither => a.mul(b),
                    Transpose::Right => a.mul(&b.t()),
                    Transpose::Left => a.t().mul(b),
                };
                vec![k.old[0].plus(&product.times(2.0))]
            })
            .product(m * n * k)
    })
}
