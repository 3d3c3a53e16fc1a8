//! Attention on tensor cores and its gradient: against a reference in f64 that rounds to bf16 where the kernels do,
//! against the CPU backend in f32, and with heads that the baseline computes.

use crate::attention_reference::{Case, Value};
use crate::bench::{Mat, Out, close, run};
use crate::device::device_at;
use crate::op_cases::tokens;
use finetune::backend::cuda::{Driver, Flash};
use finetune::backend::{AttentionSaved, Backend, Cpu, Cuda, Fault, Heads, Qkv, QkvGrad};

/// Query heads, key heads, head size.
type Shared = (usize, usize, usize);

/// Every kernel size, exact and padded; shared heads and others.
const HEADS: [(usize, usize, usize); 8] =
    [(1, 1, 8), (3, 1, 40), (4, 2, 64), (2, 1, 72), (2, 1, 96), (2, 1, 128), (1, 1, 136), (2, 1, 256)];
/// Rows of a microbatch: less than a tile, its edges, several packed rows.
const ROWS: [&[u32]; 4] = [&[0, 1], &[0, 5, 38], &[0, 64, 65], &[0, 3, 150, 167]];
/// Heads, packed rows, windows: of one token, within a tile, of whole tiles, and over several. Blocks begin beyond their
/// first tiles, and warps skip some of a block's.
const WINDOWS: [(Shared, &[u32], &[usize]); 4] = [
    ((2, 1, 64), &[0, 3, 213], &[1, 33, 64, 65]),
    ((1, 1, 72), &[0, 2, 170], &[20, 32]),
    ((2, 1, 128), &[0, 3, 170], &[1, 31, 64]),
    ((2, 1, 256), &[0, 3, 90], &[1, 16, 40]),
];

pub fn inputs(t: usize, heads: Heads) -> [Mat; 4] {
    let (wide, narrow) = (heads.query * heads.size, heads.kv * heads.size);
    let random = |cols, key| Mat::random(t, cols, key);
    [random(wide, 1).map(|x| 3.0 * x), random(narrow, 2), random(narrow, 3), random(wide, 4)]
}

/// out, logsumexp, dq, dk, dv.
pub fn both<B: Backend>(
    b: &mut B,
    x: &[Mat; 4],
    heads: Heads,
    bounds: &[u32],
) -> Result<Vec<Vec<f32>>, Fault> {
    let (t, wide, narrow) = (x[0].rows, heads.query * heads.size, heads.kv * heads.size);
    let outs = [wide, heads.query, wide, narrow, narrow].map(|cols| Out::Poison(t, cols));
    run("attention", b, (&x.each_ref(), &outs), |d, i, o| {
        let [out, lse, dq, dk, dv] = o else { unreachable!() };
        let tokens = tokens(d, bounds);
        let qkv = Qkv { q: i[0], k: i[1], v: i[2] };
        d.attention(out.view_mut(), lse.view_mut(), qkv, heads, &tokens);
        let saved = AttentionSaved { qkv, out: out.view(), logsumexp: lse.view() };
        let grad = QkvGrad { dq: dq.view_mut(), dk: dk.view_mut(), dv: dv.view_mut() };
        d.attention_grad(grad, i[3], saved, heads, &tokens);
    })
}

/// Checks that each value is within 1e-4 of the sum of its terms' magnitudes, plus the difference that ties may make.
pub fn within(name: &str, got: &[f32], want: &[Value]) {
    assert_eq!(got.len(), want.len(), "{name}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let off = (f64::from(*g) - w.value).abs();
        let bound = 1e-4 * w.terms + w.ties + 1e-7;
        assert!(off <= bound, "{name}: element {i} is {g}, want {}: off {off:e}, allowed {bound:e}", w.value);
    }
}

/// Compares a device, for an order of its warps, with the reference, whose keys come in tiles, and with the CPU.
pub fn like_its_reference<B: Backend>(
    what: &str,
    device: impl Fn(u64) -> B,
    (heads, bounds): (Heads, &[u32]),
    step: usize,
) {
    let Heads { query, kv, size, window } = heads;
    let name = format!("{what} {bounds:?} {query}/{kv}x{size}, window {window:?}");
    let x = inputs(*bounds.last().unwrap() as usize, heads);
    let rounded = x.clone().map(|m| m.map(|v| half::bf16::from_f32(v).to_f32()));
    let on = |x: &[Mat; 4], order| both(&mut device(order), x, heads, bounds);
    let got = on(&rounded, 0).unwrap_or_else(|e| panic!("{name}: {e}"));
    for order in [1, 3] {
        assert!(on(&rounded, order).unwrap() == got, "{name}: the order of warps changes bits");
    }
    let case = Case { x: &rounded, heads, bounds, step };
    let forward = case.forward();
    within(&format!("{name} out"), &got[0], &forward[0]);
    within(&format!("{name} logsumexp"), &got[1], &forward[1]);
    let backward = case.backward(&got[0], &got[1]);
    for ((what, got), want) in ["dq", "dk", "dv"].iter().zip(&got[2..]).zip(&backward) {
        within(&format!("{name} {what}"), got, want);
    }
    let want = both(&mut Cpu::new(1), &x, heads, bounds).unwrap();
    for (got, want) in on(&x, 0).unwrap().iter().zip(&want) {
        close(&format!("{name} of f32"), got, want, 1.5e-2);
    }
}

#[test]
fn attention_on_tensor_cores_is_that_of_rounded_inputs() {
    if device_at((8, 0), 0).bf16().is_err() {
        println!("skipped: no tensor cores for bf16");
        return;
    }
    for (query, kv, size) in HEADS {
        for bounds in ROWS {
            let (heads, t) = (Heads::new(query, kv, size), *bounds.last().unwrap() as usize);
            if t > 100 && [72, 136].contains(&size) {
                continue; // the tiles of 96 and 256
            }
            on_sm80((heads, bounds));
        }
    }
}

fn on_sm80((heads, bounds): (Heads, &[u32])) {
    let step = match heads.size {
        0..=64 => 64,
        65..=128 => 32,
        _ => 16,
    };
    let device = |order| device_at((8, 0), order).bf16().unwrap();
    like_its_reference("attention", device, (heads, bounds), step);
}

#[test]
fn windows_on_tensor_cores_are_those_of_rounded_inputs() {
    if device_at((8, 0), 0).bf16().is_err() {
        println!("skipped: no tensor cores for bf16");
        return;
    }
    for ((query, kv, size), bounds, windows) in WINDOWS {
        for w in windows {
            on_sm80((Heads { window: Some(*w), ..Heads::new(query, kv, size) }, bounds));
        }
    }
}

/// Every size of the baseline's kernels, whose op cases with windows are small ones.
#[test]
fn windows_of_the_baseline_are_those_of_the_cpu() {
    for (size, w) in [(64, 1), (64, 33), (100, 16), (128, 45), (130, 1), (256, 9), (256, 20)] {
        let heads = Heads { window: Some(w), ..Heads::new(2, 1, size) };
        let (x, bounds) = (inputs(75, heads), [0, 4, 75]);
        let got = both(&mut device_at((7, 0), 0), &x, heads, &bounds).unwrap();
        for (got, want) in got.iter().zip(&both(&mut Cpu::new(1), &x, heads, &bounds).unwrap()) {
            close(&format!("heads of {size}, a window of {w}"), got, want, 1e-4);
        }
    }
}

/// Opens a device, if its tier is there.
type Open<'a> = dyn Fn() -> Option<Cuda<Box<dyn Driver>>> + 'a;

/// A window that is as long as the row has the bits of none, in every tier.
#[test]
fn a_window_of_the_whole_row_changes_no_bit() {
    let flash = Flash { forward: true, backward: true };
    let opened: [&Open; 3] = [&|| Some(device_at((7, 0), 0)), &|| device_at((8, 0), 0).bf16().ok(), &|| {
        device_at((9, 0), 0).bf16().ok().map(|d| d.attending(flash))
    }];
    let bounds = [0, 3, 80];
    for (size, open) in [64, 128, 256].into_iter().flat_map(|size| opened.iter().map(move |o| (size, o))) {
        let on = |window| {
            let heads = Heads { window, ..Heads::new(2, 1, size) };
            open().map(|mut device| both(&mut device, &inputs(80, heads), heads, &bounds).unwrap())
        };
        let without = on(None);
        for w in [77, usize::MAX] {
            assert!(on(Some(w)) == without, "heads of {size}, a window of {w}");
        }
        assert!(without.is_none() || on(Some(76)) != without, "heads of {size}: the window has no effect");
    }
}

#[test]
fn heads_that_no_tile_fits_stay_with_the_baseline() {
    if device_at((8, 0), 0).bf16().is_err() {
        println!("skipped: no tensor cores for bf16");
        return;
    }
    for size in [6, 20, 130] {
        let heads = Heads::new(2, 1, size);
        let (x, bounds) = (inputs(9, heads), [0, 4, 9]);
        let got = both(&mut device_at((8, 0), 0).bf16().unwrap(), &x, heads, &bounds).unwrap();
        assert!(got == both(&mut device_at((7, 0), 0), &x, heads, &bounds).unwrap(), "{size}: other bits");
    }
}
