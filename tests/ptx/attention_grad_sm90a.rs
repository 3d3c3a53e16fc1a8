//! The gradient of attention by wgmma against its reference in f64, launched directly on the interpreter: odd
//! lengths, packed rows, shared heads.

use crate::attention_reference::{Case, Value as Wanted};
use crate::bench::{GUARD, Mat};
use crate::files;
use crate::interpreter::{Kernel, Machine, Shape, TensorMap, Value, read};
use finetune::backend::Heads;
use std::sync::Arc;

pub const FILE: &str = "attention_grad_sm90a.ptx";
/// Rows that a block holds, and rows of a box of every map.
const HELD: usize = 128;
const BOX: u32 = 64;
pub const SIZES: [usize; 2] = [64, 128];
const WORD: f32 = -1234.5;

/// Query heads, key heads, head size.
type Shared = (usize, usize, usize);

/// One microbatch for the gradient.
#[derive(Clone)]
pub struct Problem {
    heads: Heads,
    bounds: Vec<u32>,
    /// q, k, v, dout: numbers that bf16 represents exactly.
    x: [Mat; 4],
    out: Vec<f32>,
    lse: Vec<f32>,
    delta: Vec<f32>,
}

impl Problem {
    pub fn new(shared: Shared, bounds: &[u32]) -> Problem {
        Problem::within(shared, bounds, None)
    }

    /// With a window.
    pub fn within((query, kv, size): Shared, bounds: &[u32], window: Option<usize>) -> Problem {
        let heads = Heads { window, ..Heads::new(query, kv, size) };
        let t = *bounds.last().unwrap() as usize;
        let random = |heads: usize, key| Mat::random(t, heads * size, key);
        let x = [random(query, 1).map(|x| 3.0 * x), random(kv, 2), random(kv, 3), random(query, 4)];
        let x = x.map(|m| m.map(|v| half::bf16::from_f32(v).to_f32()));
        let case = Case { x: &x, heads, bounds, step: HELD };
        let [out, lse] = case.forward().map(|v| v.iter().map(|v| v.value as f32).collect::<Vec<_>>());
        let dot = |(a, b): (&[f32], &[f32])| {
            a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32
        };
        let delta = x[3].v.chunks(size).zip(out.chunks(size)).map(dot).collect();
        Problem { heads, bounds: bounds.to_vec(), x, out, lse, delta }
    }

    /// dq, dk and dv.
    fn wanted(&self) -> [Vec<Wanted>; 3] {
        let case = Case { x: &self.x, heads: self.heads, bounds: &self.bounds, step: HELD };
        case.backward(&self.out, &self.lse)
    }

    /// Blocks of 128 tokens: first, count, and the bounds of their row.
    fn blocks(&self) -> Vec<u32> {
        let rows = self.bounds.windows(2).flat_map(|w| (w[0]..w[1]).step_by(HELD).map(move |at| (at, w)));
        rows.flat_map(|(at, w)| [at, (w[1] - at).min(HELD as u32), w[0], w[1]]).collect()
    }
}

pub fn kernels(text: &str) -> Vec<Arc<Kernel>> {
    read(text).unwrap()
}

fn upload<T: Copy, const N: usize>(m: &mut Machine, values: &[T], bytes: impl Fn(T) -> [u8; N]) -> Value {
    let all: Vec<u8> = values.iter().flat_map(|v| bytes(*v)).collect();
    let at = m.memory.alloc(all.len());
    m.memory.find(at).unwrap().0.put(0, &all);
    Value { bits: at, bytes: 8 }
}

/// The outputs of `q` (dq) or `kv` (dk, dv), which are not finite before the launch and are between `guard` words.
pub fn run(
    kernels: &[Arc<Kernel>],
    which: &str,
    (p, guard, seed): (&Problem, usize, u64),
) -> Result<Vec<Vec<f32>>, String> {
    let mut m = Machine::default();
    m.seed = seed;
    m.load(kernels);
    let Heads { query, kv, size, window } = p.heads;
    let (t, word) = (p.x[0].rows, |bits, bytes| Value { bits, bytes });
    let outs = if which == "q" { vec![query * size] } else { vec![kv * size; 2] };
    let mut args = Vec::new();
    for cols in &outs {
        let guards = vec![WORD; guard];
        let all = [&guards[..], &vec![f32::NAN; t * cols], &guards[..]].concat();
        let mut at = upload(&mut m, &all, f32::to_le_bytes);
        at.bits += 4 * guard as u64;
        args.push(at);
    }
    for x in &p.x {
        let address = upload(&mut m, &x.v, |x| half::bf16::from_f32(x).to_le_bytes()).bits;
        let (rows, cols) = (x.rows as u32, x.cols as u32);
        m.maps.push(TensorMap { address, rows, cols, stride: 2 * u64::from(cols), part: (64, BOX) });
        args.push(word(m.maps.len() as u64 - 1, 128));
    }
    let blocks = p.blocks();
    args.extend([&p.lse, &p.delta].map(|x| upload(&mut m, x, f32::to_le_bytes)));
    args.push(upload(&mut m, &blocks, u32::to_le_bytes));
    let scale = (1.0 / (size as f32).sqrt()).to_bits();
    let window = window.unwrap_or(1 << 30) as u64;
    args.extend([query as u64, kv as u64, u64::from(scale), window].map(|x| word(x, 4)));
    let per = if which == "q" { query } else { kv };
    let shape = Shape {
        grid: [blocks.len() as u32 / 4, per as u32, 1],
        threads: 384,
        shared: files::read(FILE).shared,
    };
    m.launch(&format!("attention_grad_sm90a_{which}_{size}"), shape, &args)?;
    outs.iter().zip(&args).map(|(cols, at)| take(&mut m, at.bits, t * cols, guard)).collect()
}

fn take(m: &mut Machine, at: u64, len: usize, guard: usize) -> Result<Vec<f32>, String> {
    let mut bytes = vec![0; 4 * (len + 2 * guard)];
    m.memory.find(at)?.0.get(0, &mut bytes)?;
    let all: Vec<f32> = bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    let (before, rest) = all.split_at(guard);
    let (inside, after) = rest.split_at(len);
    assert!(before.iter().chain(after).all(|x| *x == WORD), "guard words were written");
    Ok(inside.to_vec())
}

/// Checks that each value is within 1e-4 of the sum of its terms' magnitudes, plus the difference that ties may make.
fn within(name: &str, got: &[f32], want: &[Wanted]) {
    assert_eq!(got.len(), want.len(), "{name}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let off = (f64::from(*g) - w.value).abs();
        let bound = 1e-4 * w.terms + w.ties + 1e-7;
        assert!(off <= bound, "{name}: element {i} is {g}, want {}: off {off:e}, allowed {bound:e}", w.value);
    }
}

/// Less than a tile, edges of tiles, several packed rows, and more tiles than slots.
const CASES: [(Shared, &[u32], Option<usize>); 14] = [
    ((1, 1, 64), &[0, 1], None),
    ((3, 1, 64), &[0, 5, 38], None),
    ((4, 2, 64), &[0, 64, 65], None),
    ((2, 1, 64), &[0, 3, 150, 343], None),
    ((1, 1, 64), &[0, 7, 657], None),
    ((1, 1, 128), &[0, 2, 67], None),
    ((4, 2, 128), &[0, 128, 130], None),
    ((2, 1, 128), &[0, 3, 150, 477], None),
    // Windows of one token, within a tile, of tiles, over several; a warpgroup skips tiles of each of the heads that share.
    ((2, 1, 64), &[0, 3, 343], Some(1)),
    ((2, 1, 64), &[0, 7, 657], Some(128)),
    ((3, 1, 64), &[0, 7, 357], Some(150)),
    ((2, 1, 128), &[0, 3, 343], Some(1)),
    ((3, 1, 128), &[0, 3, 343], Some(64)),
    ((2, 1, 128), &[0, 3, 477], Some(100)),
];

#[test]
fn gradient_by_wgmma_equals_its_reference() {
    let kernels = kernels(&files::read(FILE).text);
    for (i, (heads, bounds, window)) in CASES.into_iter().enumerate() {
        let p = Problem::within(heads, bounds, window);
        let [dq, dk, dv] = p.wanted();
        for (which, want) in [("q", vec![("dq", dq)]), ("kv", vec![("dk", dk), ("dv", dv)])] {
            // Outputs at multiples of 8 bytes are stored in pairs, others not.
            let name = format!("{heads:?} {bounds:?}, window {window:?}");
            let on = |order| {
                let got = run(&kernels, which, (&p, GUARD + i % 2, order));
                got.unwrap_or_else(|e| panic!("{name}, order {order}: {e}"))
            };
            let got = on(0);
            for ((what, want), got) in want.iter().zip(&got) {
                within(&format!("{what} {name}"), got, want);
            }
            assert!(
                [1, 3].into_iter().all(|order| on(order) == got),
                "{name}: the order of warps changes bits"
            );
        }
    }
}

/// A microbatch of two rows, and the index of a number of the second row in q, k, v or dout (0 .. 4).
pub fn beside(size: usize, (what, by): (usize, f32)) -> Problem {
    let mut p = Problem::new((2, 1, size), &[0, 70, 140]);
    let at = 90 * p.x[what].cols + 3;
    p.x[what].v[at] = by;
    p
}

/// A tile extends into neighbouring rows. A non-finite value there makes dq (by k), dk (by q) and dv (by dout) not
/// finite, also in that row itself; the rest of the first row has the bits that it has without that value.
#[test]
fn non_finite_value_in_another_row_stays_visible_there() {
    let kernels = kernels(&files::read(FILE).text);
    for (size, what) in SIZES.into_iter().flat_map(|size| (0..4).map(move |what| (size, what))) {
        let good = Problem::new((2, 1, size), &[0, 70, 140]);
        for by in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            for (which, reached) in [("q", [1, 1]), ("kv", [0, 3])] {
                let on = |p: &Problem| run(&kernels, which, (p, GUARD, 0)).unwrap();
                let outs = on(&beside(size, (what, by))).into_iter().zip(on(&good)).zip(reached);
                for (i, ((got, good), reached)) in outs.enumerate() {
                    let (first, own) = got.split_at(got.len() / 2);
                    let same = first.iter().zip(&good).all(|(a, b)| a == b);
                    let name = format!("{which}, output {i}: {by} in {what}, heads of {size}");
                    assert!(same || what == reached, "{name}: it changes another row");
                    assert!(same || own.iter().any(|x| !x.is_finite()), "{name}: its own row is finite");
                }
            }
        }
    }
}
