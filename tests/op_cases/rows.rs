//! Cases of ops over rows: embed, rmsnorm, rope, gather_rows, sum_rows, scale_rows.

use crate::op_cases::*;
use finetune::backend::{Norm, ViewMut};
use finetune::numeric::block::Block;
use finetune::numeric::dtype::Dtype;

pub const EPS: f32 = 1e-5;

/// Row bounds: one row, or three uneven ones.
pub fn bounds(t: usize) -> Vec<u32> {
    let t = t as u32;
    if t < 4 { vec![0, t] } else { vec![0, 1, 1 + t / 3, t] }
}

/// The rows of that many bounds in a speed case: 4 of equal length.
pub fn rows_of(set: Set, t: usize) -> Vec<u32> {
    if set == Set::Odd { bounds(t) } else { (0..=4).map(|r| (r * t / 4) as u32).collect() }
}

pub fn embed<B: Device>(set: Set) -> Cases<B> {
    let plain = [Stored::Fine, Stored::Coarse(Dtype::F16), Stored::Coarse(Dtype::Bf16)];
    let odd = [(11, 1), (11, 33), (100, 64), (131, 129), (11, 257)];
    let mut all = cross(set.of(&odd, &[]), &plain);
    let blocks: Vec<Stored> = Block::ALL.iter().map(|block| Stored::Blocks(*block)).collect();
    all.extend(cross(set.of(&[(7, 512)], &[]), &blocks));
    all.extend(set.of(&[], &[((49_152, 576), Stored::Coarse(Dtype::Bf16))]));
    each(cross(all, &[1.0f32, 50.5]), move |(((vocab, c), stored), scale)| {
        let t = if set == Set::Odd { 17 } else { 1024 };
        let ids: Vec<u32> = (0..t as u32).map(|i| i * 7 % vocab as u32).collect();
        let mut case = Case::new(format!("{vocab}x{c} {stored:?} * {scale}"), [], [Out::Poison(t, c)])
            .frozen(Matrix::draw(vocab, c, 1, stored))
            .verb(move |b: &mut B, g, o| b.embed(o[0].view_mut(), &g.w[0], g.tokens(), scale));
        case.tokens = Some(Tokens { bounds: vec![0, t as u32], ids: ids.clone(), past: 0 });
        // An embedding of blocks is one product and one sum, a scale another product.
        let blocks = matches!(stored, Stored::Blocks(_));
        let bound = if blocks { 2e-7 } else { 0.0 } + if scale == 1.0 { 0.0 } else { 1e-7 };
        case.rounds = if blocks { Rounds::Parts } else { Rounds::Factors };
        case.strict().want(&[bound], move |k| {
            let row = |&id: &u32| &k.w[0].v[id as usize * c..][..c];
            let v = ids.iter().flat_map(row).map(|v| v * f64::from(scale)).collect();
            vec![Mat { rows: t, cols: c, v }]
        })
    })
}

/// The normed matrix and its inverse roots.
fn normed(x: &Mat, gain: &Mat) -> (Mat, Mat) {
    let group = gain.cols;
    let (mut out, mut inv) = (x.clone(), Mat::zeros(x.rows, x.cols / group));
    for (i, chunk) in out.v.chunks_mut(group).enumerate() {
        let s = 1.0 / (chunk.iter().map(|v| v * v).sum::<f64>() / group as f64 + f64::from(EPS)).sqrt();
        inv.v[i] = s;
        chunk.iter_mut().zip(&gain.v).for_each(|(v, g)| *v *= s * g);
    }
    (out, inv)
}

/// The gradient in x.
fn normed_grad(dy: &Mat, x: &Mat, gain: &Mat, inv: &Mat) -> Mat {
    let (group, mut dx) = (gain.cols, x.clone());
    for (i, dx) in dx.v.chunks_mut(group).enumerate() {
        let (s, dy) = (inv.v[i], &dy.v[i * group..][..group]);
        let sum: f64 = (0..group).map(|j| dy[j] * gain.v[j] * dx[j]).sum();
        for j in 0..group {
            dx[j] = s * gain.v[j] * dy[j] - dx[j] * s.powi(3) * sum / group as f64;
        }
    }
    dx
}

/// Tokens, groups of a token, their size.
const NORMS: [(usize, usize, usize); 15] = [
    (0, 1, 4),
    (1, 1, 1),
    (1, 1, 4),
    (3, 1, 33),
    (3, 3, 10),
    (5, 3, 10),
    (2, 5, 64),
    (7, 1, 300),
    (1, 1, 576),
    (17, 1, 33),
    (17, 5, 64),
    (17, 1, 576),
    (129, 3, 10),
    (129, 1, 4),
    (129, 1, 576),
];
const NORMS_MODEL: [(usize, usize, usize); 1] = [(1024, 1, 576)];

pub fn rmsnorm<B: Device>(
    set: Set,
    verb: impl Fn(&mut B, ViewMut<B::Memory>, ViewMut<B::Memory>, View<B::Memory>, View<B::Memory>)
    + Copy
    + 'static,
) -> Cases<B> {
    each(set.of(&NORMS, &NORMS_MODEL), move |(t, groups, size)| {
        let c = groups * size;
        let inputs = [Mat::random(t, c, 1), Mat::random(1, size, 2)];
        Case::new(format!("{t}x{groups}x{size}"), inputs, [Out::Poison(t, c), Out::Poison(t, groups)])
            .verb(move |b: &mut B, g, o| {
                let [out, inv] = o else { unreachable!() };
                verb(b, out.view_mut(), inv.view_mut(), g.i[0], g.i[1]);
            })
            .want(&[1e-6, 1e-6], |k| {
                let (out, inv) = normed(&k.i[0], &k.i[1]);
                vec![out, inv]
            })
    })
}

pub fn rmsnorm_grad<B: Device>(set: Set) -> Cases<B> {
    let sizes = set.of(&NORMS, &NORMS_MODEL);
    each(cross(sizes, &[Write::Set, Write::Add]), |((t, groups, size), write)| {
        let c = groups * size;
        let [dy, x, gain] = [Mat::random(t, c, 3), Mat::random(t, c, 1), Mat::random(1, size, 2)];
        let inv = normed(&x, &gain).1.stored();
        let name = format!("{t}x{groups}x{size} {write:?}");
        let case = Case::new(name, [dy.clone(), x.clone(), gain.clone(), inv], [held(write, t, c)])
            .verb(move |b: &mut B, g, o| {
                let norm = Norm { gain: g.i[2], inv_rms: g.i[3] };
                b.rmsnorm_grad(o[0].view_mut(), write, g.i[0], g.i[1], norm);
            })
            .want(&[1e-5], |k| vec![k.old[0].plus(&normed_grad(&k.i[0], &k.i[1], &k.i[2], &k.i[3]))]);
        if write == Write::Add {
            return case;
        }
        let formula = Box::new(move |x: &[Mat]| normed(&x[0], &gain).0);
        case.gradient(Gradient { out: 0, from: 0, x: vec![x], which: 0, dy, formula, bound: 1e-5 })
    })
}

/// Pairs of each head rotated by the angle of their position, or back.
fn rotated(x: &Mat, table: &Mat, (bounds, past): (&[u32], u32), sign: f64) -> Mat {
    let (size, half) = (table.cols, table.cols / 2);
    let mut out = x.clone();
    for w in bounds.windows(2) {
        for t in w[0]..w[1] {
            for (head, i) in (0..x.cols / size).flat_map(|head| (0..half).map(move |i| (head, i))) {
                let (t, p) = (t as usize, (t - w[0] + past) as usize);
                let (c, s) = (table.at(p, i), sign * table.at(p, i + half));
                let (a, b) = (x.at(t, head * size + i), x.at(t, head * size + half + i));
                *out.at_mut(t, head * size + i) = a * c - b * s;
                *out.at_mut(t, head * size + half + i) = b * c + a * s;
            }
        }
    }
    out
}

/// Cosines and sines of positions.
fn angles(positions: usize, size: usize) -> Mat {
    let mut table = Mat::zeros(positions, size);
    for p in 0..positions {
        for i in 0..size / 2 {
            let angle = p as f64 * 1e4f64.powf(-2.0 * i as f64 / size as f64);
            *table.at_mut(p, i) = angle.cos();
            *table.at_mut(p, i + size / 2) = angle.sin();
        }
    }
    table.stored()
}

/// Tokens, past positions, heads, their size.
const ROPES: [(usize, u32, usize, usize); 10] = [
    (0, 0, 1, 2),
    (1, 0, 1, 2),
    (2, 7, 1, 4),
    (3, 0, 3, 6),
    (9, 2, 2, 34),
    (17, 0, 9, 64),
    (17, 5, 1, 128),
    (129, 0, 3, 6),
    (129, 0, 2, 34),
    (129, 0, 9, 64),
];

pub fn rope<B: Device>(
    set: Set,
    sign: f64,
    verb: impl Fn(&mut B, ViewMut<B::Memory>, View<B::Memory>, &B::Tokens) + Copy + 'static,
) -> Cases<B> {
    each(set.of(&ROPES, &[(1024, 0, 9, 64)]), move |(t, past, heads, size)| {
        let bounds = rows_of(set, t);
        let (x, table) = (Mat::random(t, heads * size, 1), angles(t + past as usize + 3, size));
        let (of, marks) = (table.clone(), bounds.clone());
        let case = Case::new(format!("{t}x{heads}x{size} past {past}"), [table], [Out::Holds(x.clone())])
            .tokens(&bounds, past)
            .verb(move |b: &mut B, g, o| verb(b, o[0].view_mut(), g.i[0], g.tokens()))
            .want(&[1e-6], move |k| vec![rotated(&k.old[0], &k.i[0], (&bounds, past), sign)]);
        if sign > 0.0 {
            return case;
        }
        // The gradient of sum(x * rope(z)) is the same for any z.
        let z = Mat::random(t, heads * size, 5);
        let formula = Box::new(move |z: &[Mat]| rotated(&z[0], &of, (&marks, past), 1.0));
        case.gradient(Gradient { out: 0, from: 0, x: vec![z], which: 0, dy: x, formula, bound: 1e-5 })
    })
}

/// Rows and columns of the whole, and the rows that are taken.
const TAKEN: [(usize, usize, &[u32]); 4] =
    [(1, 1, &[0]), (29, 300, &[28, 0, 5, 14]), (129, 33, &[128, 0, 5, 64]), (4, 7, &[3, 2, 1, 0])];
const TAKEN_MODEL: [(usize, usize, &[u32]); 1] = [(1024, 576, &[1023, 0, 5, 64, 300, 301, 302, 303])];

pub fn gather_rows<B: Device>(set: Set) -> Cases<B> {
    each(set.of(&TAKEN, &TAKEN_MODEL), |(t, c, rows)| {
        let n = rows.len();
        Case::new(format!("{n} of {t}x{c}"), [Mat::random(t, c, 1)], [Out::Poison(n, c)])
            .ids(rows)
            .verb(|b: &mut B, g, o| b.gather_rows(o[0].view_mut(), g.i[0], g.ids()))
            .want(&[0.0], move |k| {
                let v = rows.iter().flat_map(|&r| k.i[0].v[r as usize * c..][..c].to_vec()).collect();
                vec![Mat { rows: n, cols: c, v }]
            })
    })
}

pub fn gather_rows_grad<B: Device>(set: Set) -> Cases<B> {
    each(set.of(&TAKEN, &TAKEN_MODEL), |(t, c, rows)| {
        let n = rows.len();
        let dy = Mat::random(n, c, 2);
        let formula = Box::new(move |x: &[Mat]| {
            let v = rows.iter().flat_map(|&r| x[0].v[r as usize * c..][..c].to_vec()).collect();
            Mat { rows: n, cols: c, v }
        });
        let x = vec![Mat::random(t, c, 1)];
        Case::new(format!("{n} of {t}x{c}"), [dy.clone()], [Out::Poison(t, c)])
            .ids(rows)
            .verb(|b: &mut B, g, o| b.gather_rows_grad(o[0].view_mut(), g.i[0], g.ids()))
            .want(&[0.0], move |k| {
                let mut dx = Mat::zeros(t, c);
                for (i, &r) in rows.iter().enumerate() {
                    dx.v[r as usize * c..][..c].copy_from_slice(&k.i[0].v[i * c..][..c]);
                }
                vec![dx]
            })
            .gradient(Gradient { out: 0, from: 0, x, which: 0, dy, formula, bound: 1e-5 })
    })
}

/// Rows of the sum, their length, and how many are added to each.
const SUMS: [(usize, usize, usize); 6] =
    [(1, 1, 1), (3, 33, 2), (17, 5, 8), (5, 300, 3), (129, 64, 2), (0, 4, 2)];

/// Each row is taken once, in a mixed order.
fn places(t: usize, k: usize) -> Vec<Vec<u32>> {
    (0..k).map(|j| (0..t).map(|i| ((i * k + j) * 7919 % (t * k)) as u32).collect()).collect()
}

pub fn sum_rows<B: Device>(set: Set) -> Cases<B> {
    let sizes = set.of(&SUMS, &[(1024, 576, 8)]);
    each(cross(sizes, &[Write::Set, Write::Add]), |((t, c, k), write)| {
        // 7919 is a prime that divides none of these numbers of rows.
        let places = places(t, k);
        let taken = places.clone();
        let name = format!("{k} for each of {t}x{c} {write:?}");
        Case::new(name, [Mat::random(t * k, c, 1)], [held(write, t, c)])
            .verb(move |b: &mut B, g, o| {
                let rows: Vec<B::Ids> = places.iter().map(|rows| b.ids(rows)).collect();
                b.sum_rows(o[0].view_mut(), write, g.i[0], &rows);
            })
            .want(&[1e-6], move |known| {
                let mut out = known.old[0].clone();
                for (t, row) in taken.iter().flat_map(|rows| rows.iter().enumerate()) {
                    let x = &known.i[0].v[*row as usize * c..][..c];
                    out.v[t * c..][..c].iter_mut().zip(x).for_each(|(out, x)| *out += x);
                }
                vec![out]
            })
    })
}

/// Rows and columns.
const SCALED: [(usize, usize); 8] =
    [(0, 5), (1, 1), (3, 33), (17, 64), (5, 300), (129, 10), (6, 257), (2, 1024)];

fn scaled(x: &Mat, scales: &Mat) -> Mat {
    let mut out = x.clone();
    for (i, v) in out.v.iter_mut().enumerate() {
        *v *= scales.v[i / x.cols];
    }
    out
}

pub fn scale_rows<B: Device>(set: Set) -> Cases<B> {
    each(set.of(&SCALED, &[(8192, 768)]), |(n, c)| {
        Case::new(format!("{n}x{c}"), [Mat::random(n, c, 1), Mat::random(n, 1, 2)], [Out::Poison(n, c)])
            .verb(|b: &mut B, g, o| b.scale_rows(o[0].view_mut(), g.i[0], g.i[1]))
            .want(&[1e-7], |k| vec![scaled(&k.i[0], &k.i[1])])
    })
}

pub fn scale_rows_grad<B: Device>(set: Set) -> Cases<B> {
    each(set.of(&SCALED, &[(8192, 768)]), |(n, c)| {
        let (x, scales, dy) = (Mat::random(n, c, 1), Mat::random(n, 1, 2), Mat::random(n, c, 3));
        let gradient = |out, which, bound| Gradient {
            out,
            from: 0,
            x: vec![x.clone(), scales.clone()],
            which,
            dy: dy.clone(),
            formula: Box::new(|x| scaled(&x[0], &x[1])),
            bound,
        };
        let gradients = [gradient(0, 0, 1e-5), gradient(1, 1, 1e-5)];
        let outs = [Out::Holds(dy.clone()), Out::Poison(n, 1)];
        let [of_x, of_scales] = gradients;
        Case::new(format!("{n}x{c}"), [x.clone(), scales.clone()], outs)
            .verb(|b: &mut B, g, o| {
                let [dx, dscales] = o else { unreachable!() };
                b.scale_rows_grad(dx.view_mut(), dscales.view_mut(), g.i[0], g.i[1]);
            })
            .want(&[1e-7, 1e-6], move |k| {
                let (mut dscales, dx) = (Mat::zeros(n, 1), &k.old[0]);
                for (i, v) in dx.v.iter().enumerate() {
                    dscales.v[i / c] += v * k.i[0].v[i];
                }
                vec![scaled(dx, &k.i[1]), dscales]
            })
            .gradient(of_x)
            .gradient(of_scales)
    })
}
