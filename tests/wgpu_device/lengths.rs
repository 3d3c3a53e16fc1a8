//! Microbatches of varying lengths: memory stays within the budget, bind groups within their limit, and splitting the
//! work changes no bit.

use crate::{devices, sizes};
use finetune::backend::wgpu::{Checks, Memory, Options, Variant};
use finetune::backend::{
    AttentionSaved, Backend, Heads, Product, Qkv, QkvGrad, TokenRows, Transpose, Wgpu, Write, view, view_mut,
};
use finetune::numeric::rng::Stream;
use std::ops::Range;

fn random(len: usize, key: u64) -> Vec<f32> {
    let mut draws = Stream::new(&[key]);
    (0..len).map(|_| draws.unit() * 2.0 - 1.0).collect()
}

fn loaded(gpu: &mut Wgpu, values: &[f32]) -> Memory {
    let mut memory = gpu.memory(values.len());
    gpu.upload(view_mut(&mut memory, 1, values.len()), values);
    memory
}

fn read(gpu: &mut Wgpu, memory: Memory) -> Vec<f32> {
    let len = memory.len();
    let mut out = vec![f32::NAN; len];
    gpu.read(view(&memory, 1, len), &mut out).unwrap();
    gpu.recycle(memory);
    out
}

/// As a decoder does: allocates what a block keeps, then frees it.
fn microbatch(gpu: &mut Wgpu, tokens: usize, budget: u64) {
    // 24 KiB a token, in columns that blocks have.
    let kept: Vec<Memory> = [768, 768, 576, 2048, 1536, 448].map(|cols| gpu.memory(tokens * cols)).into();
    for mut memory in kept {
        gpu.fill(view_mut(&mut memory, 1, 8), 1.0);
        assert_eq!(read(gpu, memory)[..8], [1.0; 8], "{tokens} tokens");
        assert!(gpu.held() <= budget, "{tokens} tokens: {} of {budget} bytes are held", gpu.held());
    }
}

#[test]
fn free_buffers_are_released_before_the_budget_is_exceeded() {
    // The longest takes 100 MB; the budget has the quarter more that estimates add, not half as much again.
    let budget = 4096 * 6144 * 4 / 4 * 5;
    for mut gpu in devices(Options { memory: Some(budget), ..Options::default() }) {
        for tokens in [4096, 3000, 4096, 2222, 3500, 4000] {
            microbatch(&mut gpu, tokens, budget);
        }
        assert!(gpu.held() > budget / 2, "what is free is kept as far as it may be");
    }
}

#[test]
fn number_of_bind_groups_is_bounded() {
    for mut gpu in devices(Options { bind_groups: Some(20), ..Options::default() }) {
        for tokens in (1..200).map(|i| i * 97) {
            let mut kept: Vec<Memory> = (1..4).map(|i| gpu.memory(tokens * i)).collect();
            kept.iter_mut().for_each(|m| gpu.fill(view_mut(m, 1, tokens), tokens as f32));
            assert!(gpu.bind_groups() <= 20, "{tokens}: {}", gpu.bind_groups());
            for memory in kept {
                assert_eq!(read(&mut gpu, memory)[..tokens], vec![tokens as f32; tokens]);
            }
        }
    }
}

const HEADS: Heads = Heads::new(2, 1, 32);
const PACKED: [u32; 3] = [0, 100, 300];

/// Attention over packed rows, and its gradient: out, logsumexp, dq, dk, dv. Nothing of the tokens `bad` is a number.
fn attention(gpu: &mut Wgpu, window: Option<usize>, bounds: &[u32], bad: Range<usize>) -> Vec<Vec<f32>> {
    let (t, wide, narrow, heads) = (300, 64, 32, Heads { window, ..HEADS });
    let [q, k, v, dout] = [(wide, 1), (narrow, 2), (narrow, 3), (wide, 4)].map(|(cols, key)| {
        let mut values = random(t * cols, key);
        values[bad.start * cols..bad.end * cols].fill(f32::NAN);
        loaded(gpu, &values)
    });
    let tokens = gpu.tokens(TokenRows { ids: &[0; 300], bounds, past: 0, short: u32::MAX });
    let [mut out, mut lse, mut dq, mut dk, mut dv] =
        [wide, HEADS.query, wide, narrow, narrow].map(|cols| gpu.memory(t * cols));
    let qkv = Qkv { q: view(&q, t, wide), k: view(&k, t, narrow), v: view(&v, t, narrow) };
    let (o, l) = (view_mut(&mut out, t, wide), view_mut(&mut lse, t, HEADS.query));
    gpu.attention(o, l, qkv, heads, &tokens);
    let grad = QkvGrad {
        dq: view_mut(&mut dq, t, wide),
        dk: view_mut(&mut dk, t, narrow),
        dv: view_mut(&mut dv, t, narrow),
    };
    let (out_view, logsumexp) = (view(&out, t, wide), view(&lse, t, HEADS.query));
    let saved = AttentionSaved { qkv, out: out_view, logsumexp };
    gpu.attention_grad(grad, view(&dout, t, wide), saved, heads, &tokens);
    [out, lse, dq, dk, dv].map(|m| read(gpu, m)).into()
}

/// A run has kernels without run-time checks; the op cases (tests/op_verbs) have kernels with them.
#[test]
fn run_time_checks_change_no_bit() {
    for variants in [None, Some(vec![Variant::Half, Variant::Tiled, Variant::Flash])] {
        let open = |checks| devices(Options { checks, variants: variants.clone(), ..Options::default() });
        for (mut with, mut without) in open(Checks::Everywhere).into_iter().zip(open(Checks::WhereNotProved))
        {
            let bits = |gpu: &mut Wgpu| {
                let mut all: Vec<Vec<f32>> = sizes::results(gpu).into();
                [None, Some(70)].iter().for_each(|w| all.extend(attention(gpu, *w, &PACKED, 0..0)));
                all.concat().into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            assert!(bits(&mut with) == bits(&mut without), "{}", with.class());
        }
    }
}

#[test]
fn estimated_speed_changes_no_bit() {
    // One row of queries is more work than such a device is given at once.
    let slow = Options { rate: Some(1.0), ..Options::default() };
    for window in [None, Some(70)] {
        for (mut slow, mut usual) in devices(slow.clone()).into_iter().zip(devices(Options::default())) {
            let before = slow.traffic().dispatches;
            let got = attention(&mut slow, window, &PACKED, 0..0);
            // Five pieces of 64 rows of the first kernel, before the first measurement, and fewer of the others.
            let dispatches = slow.traffic().dispatches - before;
            assert!((8..40).contains(&dispatches), "{dispatches} dispatches: pieces of single rows");
            let want = attention(&mut usual, window, &PACKED, 0..0);
            assert!(got == want, "{} {window:?}: cutting changed bits", slow.class());
        }
    }
}

/// The plain kernels of each device, and its own choice.
fn plain_and_usual() -> Vec<Wgpu> {
    let plain = Options { variants: Some(vec![]), poison: true, ..Options::default() };
    devices(plain).into_iter().chain(devices(Options::default())).collect()
}

#[test]
fn window_that_no_row_exceeds_changes_no_bit() {
    for mut gpu in plain_and_usual() {
        let want = attention(&mut gpu, None, &PACKED, 0..0);
        for window in [200, 4096, usize::MAX] {
            assert!(attention(&mut gpu, Some(window), &PACKED, 0..0) == want, "{} {window}", gpu.class());
        }
        assert!(attention(&mut gpu, Some(199), &PACKED, 0..0) != want, "{}: no window", gpu.class());
    }
}

/// A block of keys or queries outside the windows is skipped: a product by its masked weights of zero would not
/// be finite.
#[test]
fn blocks_outside_a_window_are_not_read() {
    for mut gpu in plain_and_usual() {
        // A tile at the border has bad tokens beside good ones.
        for (bad, good) in [(0..100, 160..300), (200..300, 0..150)] {
            for (i, got) in attention(&mut gpu, Some(8), &[0, 300], bad.clone()).iter().enumerate() {
                let cols = got.len() / 300;
                let finite = |tokens: &Range<usize>| {
                    got[tokens.start * cols..tokens.end * cols].iter().filter(|x| x.is_finite()).count()
                };
                let what = format!("{}: output {i}, bad are {bad:?}", gpu.class());
                assert!(i > 0 || finite(&bad) == 0, "{what}: what is no number stays so");
                assert_eq!(finite(&good), good.len() * cols, "{what}");
            }
        }
    }
}

#[test]
fn empty_sum_is_zero() {
    for mut gpu in devices(Options { poison: true, ..Options::default() }) {
        for transpose in [Transpose::Neither, Transpose::Right, Transpose::Left] {
            let (a, b, mut out) = (gpu.memory(0), gpu.memory(0), gpu.memory(15));
            let (left, right) = match transpose {
                Transpose::Neither => (view(&a, 3, 0), view(&b, 0, 5)),
                Transpose::Right => (view(&a, 3, 0), view(&b, 5, 0)),
                Transpose::Left => (view(&a, 0, 3), view(&b, 0, 5)),
            };
            let product = Product { a: left, b: right, transpose, scale: 1.0 };
            gpu.matmul(view_mut(&mut out, 3, 5), Write::Set, product);
            assert_eq!(read(&mut gpu, out), [0.0; 15], "{transpose:?}");
        }
    }
}

#[test]
fn integers_beyond_one_binding_are_a_fault() {
    for mut gpu in devices(Options { binding_limit: Some(4096), ..Options::default() }) {
        let (t, size) = (1000, 2);
        let (mut x, table) = (gpu.memory(t * size), loaded(&mut gpu, &vec![0.0; t * size]));
        let tokens =
            gpu.tokens(TokenRows { ids: &vec![0; t], bounds: &[0, t as u32], past: 0, short: u32::MAX });
        gpu.rope(view_mut(&mut x, t, size), view(&table, t, size), &tokens);
        let fault = gpu.read(view(&x, 1, 1), &mut [0.0]).unwrap_err().to_string();
        assert!(fault.contains("smaller microbatches fit"), "{fault}");
    }
}
