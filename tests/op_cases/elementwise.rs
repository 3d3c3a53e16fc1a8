//! Cases of transport, and of ops on single elements: fill, copy, add, bias, gated, dropout.

use crate::op_cases::*;
use finetune::backend::{Activation, DropoutKey, ViewMut, view_mut};
use finetune::numeric::rng;

const SHAPES: [(usize, usize); 7] = [(0, 5), (1, 1), (3, 7), (5, 255), (17, 300), (129, 300), (17, 1536)];
const MODEL: [(usize, usize); 1] = [(1024, 1536)];

fn name(t: usize, c: usize) -> String {
    format!("{t}x{c}")
}

/// An op that writes `[t, c]`, the sum of what stood there and of a formula of x.
fn moved<B: Device>(
    set: Set,
    (write, bound): (Write, f64),
    verb: impl Fn(&mut B, ViewMut<B::Memory>, View<B::Memory>) + Copy + 'static,
    formula: impl Fn(&Mat) -> Mat + Copy + 'static,
) -> Cases<B> {
    each(set.of(&SHAPES, &MODEL), move |(t, c)| {
        Case::new(name(t, c), [Mat::random(t, c, 1)], [held(write, t, c)])
            .verb(move |b: &mut B, g, o| verb(b, o[0].view_mut(), g.i[0]))
            .want(&[bound], move |k| vec![k.old[0].plus(&formula(&k.i[0]))])
    })
}

pub fn fill<B: Device>(set: Set) -> Cases<B> {
    moved(set, (Write::Set, 0.0), |b: &mut B, out, _| b.fill(out, 2.5), |x| x.map(|_| 2.5))
}

pub fn copy<B: Device>(set: Set) -> Cases<B> {
    moved(set, (Write::Set, 0.0), |b: &mut B, out, x| b.copy(out, x), Mat::clone)
}

pub fn add<B: Device>(set: Set) -> Cases<B> {
    moved(set, (Write::Add, 1e-7), |b: &mut B, out, x| b.add(out, x), Mat::clone)
}

pub fn upload<B: Device>(set: Set) -> Cases<B> {
    each(set.of(&SHAPES, &MODEL), |(t, c)| {
        let x = Mat::random(t, c, 1);
        let values = x.f32s();
        Case::new(name(t, c), [x], [Out::Poison(t, c)])
            .verb(move |b: &mut B, _, o| b.upload(o[0].view_mut(), &values))
            .want(&[0.0], |k| vec![k.i[0].clone()])
    })
}

pub fn read<B: Device>(set: Set) -> Cases<B> {
    let verb = |b: &mut B, out: ViewMut<B::Memory>, x: View<B::Memory>| {
        let mut values = vec![f32::NAN; x.len()];
        b.read(x, &mut values).unwrap();
        b.upload(out, &values);
    };
    moved(set, (Write::Set, 0.0), verb, Mat::clone)
}

/// Some rows of a matrix, no row, and another matrix.
pub fn read_all<B: Device>(set: Set) -> Cases<B> {
    each(set.of(&SHAPES, &MODEL), |(t, c)| {
        let half = t / 2;
        let inputs = [Mat::random(t, c, 1), Mat::random(3, c, 2)];
        Case::new(name(t, c), inputs, [Out::Poison(t - half, c), Out::Poison(3, c)])
            .verb(move |b: &mut B, g, o| {
                let [mut part, mut other] = [t - half, 3].map(|rows| vec![f32::NAN; rows * c]);
                let (x, none) = (g.i[0].rows(half, t - half), g.i[0].rows(0, 0));
                b.read_all(&mut [(x, &mut part), (none, &mut []), (g.i[1], &mut other)]).unwrap();
                b.upload(o[0].view_mut(), &part);
                b.upload(o[1].view_mut(), &other);
            })
            .want(&[0.0; 2], move |k| {
                let v = k.i[0].v[half * c..].to_vec();
                vec![Mat { rows: t - half, cols: c, v }, k.i[1].clone()]
            })
    })
}

pub fn settle<B: Device>(set: Set) -> Cases<B> {
    let verb = |b: &mut B, out: ViewMut<B::Memory>, x: View<B::Memory>| {
        let mut memory = b.memory(x.len());
        b.copy(view_mut(&mut memory, x.rows, x.cols), x);
        let settled = b.settle(memory, x.rows, x.cols);
        let mut values = vec![f32::NAN; x.len()];
        b.read(View { memory: &settled, offset: 0, ..x }, &mut values).unwrap();
        b.upload(out, &values);
    };
    // bf16 numbers, which 16 bits hold.
    let cases: Cases<B> = moved(set, (Write::Set, 0.0), verb, Mat::clone);
    Box::new(cases.map(|case| Case { inputs: case.inputs.iter().map(Mat::coarse).collect(), ..case }))
}

pub fn bias<B: Device>(set: Set) -> Cases<B> {
    let odd = [SHAPES.as_slice(), &[(129, 576), (17, 20_000)]].concat();
    each(set.of(&odd, &MODEL), |(t, n)| {
        Case::new(name(t, n), [Mat::random(1, n, 2)], [Out::Holds(Mat::random(t, n, 1))])
            .verb(|b: &mut B, g, o| b.bias(o[0].view_mut(), g.i[0]))
            .want(&[1e-7], |k| {
                let mut y = k.old[0].clone();
                y.v.iter_mut().zip(k.i[0].v.iter().cycle()).for_each(|(y, b)| *y += b);
                vec![y]
            })
    })
}

/// Rows, columns, and the size of gates.
const GATES: [(usize, usize, f64); 8] = [
    (0, 5, 1.0),
    (1, 1, 20.0),
    (3, 7, 100.0),
    (3, 33, 20.0),
    (5, 255, 100.0),
    (17, 300, 20.0),
    (129, 33, 200.0),
    (17, 1536, 20.0),
];
const GATES_MODEL: [(usize, usize, f64); 1] = [(1024, 1536, 20.0)];

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

const ACTIVATIONS: [Activation; 4] =
    [Activation::SwiGlu, Activation::GeGlu, Activation::Sigmoid, Activation::ClampedSwiGlu];

/// The activation and its derivative.
fn act(activation: Activation, g: f64) -> (f64, f64) {
    match activation {
        Activation::SwiGlu => {
            let s = sigmoid(g);
            (g * s, s * (1.0 + g * (1.0 - s)))
        }
        Activation::Sigmoid => {
            let s = sigmoid(g);
            (s, s * (1.0 - s))
        }
        Activation::GeGlu => {
            let root = (2.0 / std::f64::consts::PI).sqrt();
            let t = (root * (g + 0.044715 * g.powi(3))).tanh();
            let inner = root * (1.0 + 3.0 * 0.044715 * g * g);
            (0.5 * g * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * g * (1.0 - t * t) * inner)
        }
        Activation::ClampedSwiGlu => {
            let (c, inside) = (g.min(7.0), f64::from(u8::from(g <= 7.0)));
            let s = sigmoid(1.702 * c);
            (c * s, inside * s * (1.0 + 1.702 * c * (1.0 - s)))
        }
    }
}

/// The factor that an activation makes of up, and its derivative.
fn factor(activation: Activation, u: f64) -> (f64, f64) {
    match activation {
        Activation::ClampedSwiGlu => (u.clamp(-7.0, 7.0) + 1.0, f64::from(u8::from(u.abs() <= 7.0))),
        _ => (u, 1.0),
    }
}

fn product(i: &[Mat], activation: Activation) -> Mat {
    let of = |(&g, &u): (&f64, &f64)| act(activation, g).0 * factor(activation, u).0;
    let v = i[0].v.iter().zip(&i[1].v).map(of).collect();
    Mat { v, ..i[0] }
}

/// Gates of that size. An activation with limits has values on both sides of them, and none so close to one that a
/// central difference crosses it.
fn gate_and_up((t, c, size): (usize, usize, f64), activation: Activation) -> [Mat; 2] {
    let away = |x: f64| if (x.abs() - 7.0).abs() < 0.1 { x.signum() * 6.5 } else { x };
    let gates = Mat::random(t, c, 1).map(|g| g * size);
    match activation {
        Activation::ClampedSwiGlu => [gates.map(away), Mat::random(t, c, 2).map(|u| away(u * 15.0))],
        _ => [gates, Mat::random(t, c, 2)],
    }
}

pub fn gated<B: Device>(
    set: Set,
    verb: impl Fn(&mut B, ViewMut<B::Memory>, (View<B::Memory>, View<B::Memory>), Activation) + Copy + 'static,
) -> Cases<B> {
    let sized = move |(size, activation): ((usize, usize, f64), Activation)| {
        let name = format!("{} {activation:?}", name(size.0, size.1));
        Case::new(name, gate_and_up(size, activation), [Out::Poison(size.0, size.1)])
            .verb(move |b: &mut B, g, o| verb(b, o[0].view_mut(), (g.i[0], g.i[1]), activation))
            .want(&[1e-6], move |k| vec![product(k.i, activation)])
    };
    let extreme = move |activation| {
        let mut case = sized(((1, 4, 1.0), activation));
        case.inputs = vec![
            Mat { rows: 1, cols: 4, v: vec![-200.0, 200.0, -88.8, 0.0] },
            Mat { rows: 1, cols: 4, v: vec![1.0; 4] },
        ];
        case.name = format!("extremes {activation:?}");
        case
    };
    let sizes = cross(set.of(&GATES, &GATES_MODEL), &ACTIVATIONS);
    Box::new(each(sizes, sized).chain(each(set.of(&ACTIVATIONS, &[]), extreme)))
}

pub fn gated_grad<B: Device>(set: Set) -> Cases<B> {
    each(cross(set.of(&GATES, &GATES_MODEL), &ACTIVATIONS), |(size, activation)| {
        let (t, c, _) = size;
        let (held, dout) = (gate_and_up(size, activation), Mat::random(t, c, 3));
        let gradient = |which| Gradient {
            out: which,
            from: 0,
            x: held.to_vec(),
            which,
            dy: dout.clone(),
            formula: Box::new(move |x| product(x, activation)),
            bound: 1e-5,
        };
        Case::new(format!("{} {activation:?}", name(t, c)), [dout.clone()], held.clone().map(Out::Holds))
            .verb(move |b: &mut B, g, o| {
                let [gate, up] = o else { unreachable!() };
                b.gated_grad(gate.view_mut(), up.view_mut(), g.i[0], activation);
            })
            .want(&[1e-5, 1e-5], move |k| {
                let (mut gate, mut up) = (k.old[0].clone(), k.old[1].clone());
                for (i, dout) in k.i[0].v.iter().enumerate() {
                    let (value, slope) = act(activation, gate.v[i]);
                    let (by, varies) = factor(activation, up.v[i]);
                    gate.v[i] = dout * by * slope;
                    up.v[i] = dout * value * varies;
                }
                vec![gate, up]
            })
            .gradient(gradient(0))
            .gradient(gradient(1))
    })
}

/// Rows, columns, and the probability of a drop.
const DROPS: [(usize, usize, f32); 7] = [
    (0, 5, 0.5),
    (1, 1, 0.5),
    (17, 33, 0.1),
    (9, 300, 0.25),
    (129, 576, 0.25),
    (3, 20, 0.0),
    (3, 20_000, 0.0),
];

/// x as the mask of a key leaves it, by the definition of the mask.
fn masked(x: &Mat, key: DropoutKey, bounds: &[u32]) -> Mat {
    let (mut out, p) = (Mat::zeros(x.rows, x.cols), f64::from(key.p));
    for (row, w) in bounds.windows(2).enumerate() {
        for i in w[0]..w[1] {
            let base = rng::hash(&[key.seed, key.step, key.rows[row], key.module, u64::from(i - w[0])]);
            for j in 0..x.cols {
                if f64::from(rng::mix(base, j as u32)) >= p * 4_294_967_296.0 - 1.0 {
                    *out.at_mut(i as usize, j) = x.at(i as usize, j) / (1.0 - p);
                }
            }
        }
    }
    let (dropped, n) = (out.v.iter().filter(|&&v| v == 0.0).count() as f64, out.v.len() as f64);
    let deviation = (n * p * (1.0 - p)).sqrt();
    assert!(n < 100.0 || (dropped - n * p).abs() <= 6.0 * deviation + 2.0, "{dropped} of {n}");
    out
}

fn key(rows: &[u64], p: f32) -> DropoutKey<'_> {
    DropoutKey { seed: 42, step: 3, rows, module: 5, p }
}

pub fn dropout<B: Device>(set: Set) -> Cases<B> {
    let sizes = set.of(&DROPS, &[(1024, 576, 0.1)]);
    each(cross(sizes, &[Write::Set, Write::Add]), |((t, c, p), write)| {
        let bounds = bounds(t);
        let rows: Vec<u64> = (1..bounds.len() as u64).map(|r| (r << 33) + 1000 - r).collect();
        let (of, marks) = (rows.clone(), bounds.clone());
        Case::new(format!("{t}x{c} {p} {write:?}"), [Mat::random(t, c, 1)], [held(write, t, c)])
            .tokens(&bounds, 0)
            .verb(move |b: &mut B, g, o| b.dropout(o[0].view_mut(), write, g.i[0], key(&rows, p), g.tokens()))
            .want(&[1e-6], move |k| vec![k.old[0].plus(&masked(&k.i[0], key(&of, p), &marks))])
    })
}
