//! Frozen matrices in blocks: every result equals, bit for bit, the result for the same matrix widened to f32, on every
//! kernel, for every type, in f32 and in bf16. GPUs run cases of every type (tests/op_cases).

use crate::op_cases::{Mat, random_blocks, widened};
use finetune::backend::{
    Backend, Cpu, Frozen, Fused, LmHeadLoss, LoraGrad, LoraPart, TokenRows, Write, view, view_mut, wgpu,
};
use finetune::numeric::block::{Block, Blocks, Encoding};
use finetune::numeric::dtype::Dtype;

fn in_f32<B: Backend>(cpu: &mut B, blocks: &Blocks) -> B::Weight {
    let bytes: Vec<u8> = widened(blocks).iter().flat_map(|v| v.to_le_bytes()).collect();
    cpu.weight(Frozen { rows: blocks.rows, cols: blocks.cols, dtype: Dtype::F32, bytes: &bytes }).unwrap()
}

/// Products, an embedding, a projection with its adapter, and a head's loss, each with its gradient.
fn everything<B: Fused>(cpu: &mut B, w: &B::Weight, t: usize, (n, k): (usize, usize)) -> Vec<Vec<f32>> {
    const RANK: usize = 5;
    let mut values = |rows: usize, cols: usize, key| {
        let mut m = cpu.memory(rows * cols);
        cpu.upload(view_mut(&mut m, rows, cols), &Mat::random(rows, cols, key).f32s());
        m
    };
    let (x, dy, a, b) = (values(t, k, 1), values(t, n, 2), values(RANK, k, 3), values(n, RANK, 4));
    let (mut y, mut dx) = (values(t, n, 5), values(t, k, 6));
    let [mut ly, mut ldx, mut h, mut dab] = [t * n, t * k, t * RANK, RANK * (n + k)].map(|n| cpu.memory(n));
    let [mut embedded, mut losses, mut dhead] = [t * k, t, t * k].map(|n| cpu.memory(n));
    cpu.linear(view_mut(&mut y, t, n), Write::Add, view(&x, t, k), w);
    cpu.linear_grad(view_mut(&mut dx, t, k), Write::Add, view(&dy, t, n), w);
    let ids: Vec<u32> = (0..t as u32).map(|i| i * 31 % n as u32).collect();
    let tokens = cpu.tokens(TokenRows { ids: &ids, bounds: &[0, t as u32], past: 0, short: u32::MAX });
    cpu.embed(view_mut(&mut embedded, t, k), w, &tokens, 1.0);
    let ab = (view(&a, RANK, k), view(&b, n, RANK));
    let part = LoraPart { h: view_mut(&mut h, t, RANK), x: view(&x, t, k), ab, scale: 0.5 };
    cpu.lora_linear((view_mut(&mut ly, t, n), Write::Set), view(&x, t, k), w, part);
    let dab_view = view_mut(&mut dab, 1, RANK * (n + k));
    let grad = LoraGrad {
        dab: dab_view,
        dy: view(&dy, t, n),
        x: view(&x, t, k),
        h: view(&h, t, RANK),
        ab,
        scale: 0.5,
    };
    cpu.lora_linear_grad((view_mut(&mut ldx, t, k), Write::Set), w, grad);
    let head = LmHeadLoss { x: view(&x, t, k), head: w, vocab: n, targets: &ids, chunk: 7 };
    cpu.lm_head_loss(view_mut(&mut losses, t, 1), Some(view_mut(&mut dhead, t, k)), head);
    let all = [(&y, t * n), (&dx, t * k), (&embedded, t * k), (&ly, t * n), (&ldx, t * k), (&losses, t)];
    let mut read = |m, len| {
        let mut out = vec![0.0; len];
        cpu.read(view(m, 1, len), &mut out).unwrap();
        out
    };
    all.into_iter().chain([(&dhead, t * k)]).map(|(m, len)| read(m, len)).collect()
}

/// Tokens, outputs, inputs: few rows and many, odd outputs, one and several slices in both directions.
const SIZES: [(usize, usize, usize); 9] = [
    (1, 70, 256),
    (2, 129, 1024),
    (3, 33, 512),
    (4, 40, 1280),
    (5, 70, 1024),
    (8, 131, 512),
    (13, 64, 256),
    (300, 257, 512),
    (40, 1601, 256),
];

#[test]
fn blocks_give_the_bits_of_the_widened_matrix() {
    type Kernel = (&'static str, fn(usize) -> Cpu);
    let kernels: [Kernel; 6] = [
        ("f32", Cpu::new),
        ("bf16", Cpu::bf16),
        ("the other bf16", |n| Cpu::bf16_reference(n).unwrap_or_else(|| Cpu::bf16(n))),
        ("f32, plain loops", Cpu::reference),
        ("bf16, plain loops", |n| Cpu::bf16(n).spelled()),
        ("f32 on three threads", |n| Cpu::new(n + 1)),
    ];
    for &block in Block::ALL {
        for (t, n, k) in SIZES {
            let blocks = random_blocks(block, n, k);
            for (kernel, open) in kernels {
                let name = format!("{block:?} {t}x{n}x{k} {kernel}");
                let mut cpu = open(2).poisoning();
                let (packed, wide) = (cpu.weight_of_blocks(&blocks).unwrap(), in_f32(&mut cpu, &blocks));
                let got = everything(&mut cpu, &packed, t, (n, k));
                let want = everything(&mut cpu, &wide, t, (n, k));
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    let off = got.iter().zip(want).position(|(g, w)| g.to_bits() != w.to_bits());
                    let at = |i: usize| (i, got[i], want[i]);
                    assert!(off.is_none(), "{name}: result {i} differs: {:?}", off.map(at));
                }
                assert!(want.iter().flatten().all(|v| v.is_finite()), "{name}");
            }
        }
    }
}

#[test]
fn blocks_take_the_same_memory_as_in_the_file() {
    for &block in Block::ALL {
        let bytes = Cpu::new(1).matrix_bytes(Encoding::Blocks(block), 1 << 20);
        assert_eq!(bytes, (1 << 20) / block.elements() * block.bytes(), "{block:?}");
        assert_eq!(wgpu::matrix_bytes(Encoding::Blocks(block), 1 << 20), bytes, "{block:?} on a GPU");
    }
}

/// A product with unit vectors gives the values themselves, also where the power of two is subnormal.
#[test]
fn every_exponent_of_mxfp4_has_the_widened_bits() {
    let (n, k) = (253usize, 32usize);
    let block =
        |e: usize| [e].into_iter().chain((0..16).map(move |j| ((j + e) % 16) | (((7 * j + e) % 16) << 4)));
    let bytes: Vec<u8> = (0..n).flat_map(block).map(|byte| byte as u8).collect();
    let blocks = Blocks::new((n, k), Block::MXFP4, bytes.into()).unwrap();
    let want = widened(&blocks);
    let unit = |first: usize, t: usize, size: usize| -> Vec<f32> {
        (0..t * size).map(|i| if i % size == first + i / size { 1.0 } else { 0.0 }).collect()
    };
    for open in [Cpu::new as fn(usize) -> Cpu, Cpu::reference] {
        let mut cpu = open(2).poisoning();
        let weight = cpu.weight_of_blocks(&blocks).unwrap();
        let (mut x, mut y) = (cpu.memory(n * n), cpu.memory(k * n));
        for (first, t) in (0..k).map(|first| (first, 1)).chain([(5, 3), (0, k)]) {
            cpu.upload(view_mut(&mut x, t, k), &unit(first, t, k));
            cpu.linear(view_mut(&mut y, t, n), Write::Set, view(&x, t, k), &weight);
            let mut got = vec![0.0; t * n];
            cpu.read(view(&y, t, n), &mut got).unwrap();
            for (i, got) in got.iter().enumerate() {
                let (at, exponent) = (first + i / n, i % n);
                assert_eq!(
                    got.to_bits(),
                    want[exponent * k + at].to_bits(),
                    "{t} rows, 2^({exponent} - 128)"
                );
            }
        }
        cpu.upload(view_mut(&mut x, n, n), &unit(0, n, n));
        cpu.linear_grad(view_mut(&mut y, n, k), Write::Set, view(&x, n, n), &weight);
        let mut got = vec![0.0; n * k];
        cpu.read(view(&y, n, k), &mut got).unwrap();
        assert!(got.iter().zip(&want).all(|(g, w)| g.to_bits() == w.to_bits()), "input gradient");
    }
}
