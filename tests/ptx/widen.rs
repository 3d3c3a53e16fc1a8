//! Blocks on the device: every type widens to the bits of `Block::widen`, and products, their gradients and rows of an
//! embedding equal those of the widened matrix.

use crate::bench::{Mat, Out, close, held, run};
use crate::device::{Interpreted, device, device_at, device_with};
use crate::files;
use finetune::backend::cuda::Driver;
use finetune::backend::{Backend, Cuda, Fault, Frozen, TokenRows, Write};
use finetune::numeric::block::{Block, Blocks};
use finetune::numeric::dtype::Dtype;
use finetune::numeric::rng::Stream;

/// Rows of whole blocks with random bytes and finite scales.
fn random(rows: usize, cols: usize, block: Block, key: u64) -> Blocks {
    let mut stream = Stream::new(&[key, rows as u64, cols as u64]);
    let mut bytes: Vec<u8> = Vec::new();
    while bytes.len() < block.size_of(rows * cols) {
        let one: Vec<u8> = (0..block.bytes()).map(|_| (stream.unit() * 256.0) as u8).collect();
        let mut numbers = vec![0.0; block.elements()];
        block.widen(&mut numbers, &one);
        // A moderate size, so that no value dominates or vanishes in sums.
        let largest = numbers.iter().fold(0f32, |m, x| m.max(x.abs()));
        if numbers.iter().all(|x| x.is_finite()) && (1e-3..1e3).contains(&largest) {
            bytes.extend(one);
        }
    }
    Blocks::new((rows, cols), block, bytes.into()).unwrap()
}

fn widened(blocks: &Blocks) -> Vec<f32> {
    let mut numbers = vec![0.0; blocks.rows * blocks.cols];
    blocks.block.widen(&mut numbers, &blocks.bytes);
    numbers
}

/// The matrix, widened before the upload.
fn plain<B: Backend>(device: &mut B, blocks: &Blocks) -> B::Weight {
    let numbers = widened(blocks);
    let bytes = bytemuck::cast_slice(&numbers);
    device.weight(Frozen { rows: blocks.rows, cols: blocks.cols, dtype: Dtype::F32, bytes }).unwrap()
}

fn columns(block: Block) -> usize {
    // More than one block, and a partial tile beside whole ones.
    if block.elements() == 256 { 512 } else { 192 }
}

#[test]
fn every_type_widens_to_its_bits() {
    for &block in Block::ALL {
        let table = random(7, columns(block), block, 1);
        for seed in [0, 1, 7] {
            let mut device = device(seed);
            // Loading compares the first rows; a table's rows come in the order of ids, at an odd address.
            let out = [Out::Poison(17, table.cols)];
            let got = run(block.name(), &mut device, (&[], &out), |d, _, o| {
                let weight = d.weight_of_blocks(&table).unwrap();
                let ids: Vec<u32> = (0..17).map(|i| i * 5 % 7).collect();
                let rows = TokenRows { ids: &ids, bounds: &[0, 17], past: 0, short: u32::MAX };
                let tokens = d.tokens(rows);
                d.embed(o[0].view_mut(), &weight, &tokens, 1.0);
            });
            let want = widened(&table);
            let row = |i: usize| want[i * 5 % 7 * table.cols..][..table.cols].iter();
            let want: Vec<u32> = (0..17).flat_map(row).map(|x| x.to_bits()).collect();
            let got: Vec<u32> = got.unwrap()[0].iter().map(|x| x.to_bits()).collect();
            assert!(got == want, "{}, order {seed}", block.name());
        }
    }
}

/// y and dx of a device.
fn products<B: Backend>(
    name: &str,
    device: &mut B,
    weight: &B::Weight,
    (t, n, k): (usize, usize, usize),
) -> Vec<Vec<f32>> {
    let (x, dy) = (Mat::random(t, k, 4), Mat::random(t, n, 5));
    let outs = [held(Write::Set, t, n), held(Write::Add, t, k)];
    let got = run(name, device, (&[&x, &dy], &outs), |d, i, o| {
        let [y, dx] = o else { unreachable!() };
        d.linear(y.view_mut(), Write::Set, i[0], weight);
        d.linear_grad(dx.view_mut(), Write::Add, i[1], weight);
    });
    got.unwrap()
}

/// A tier on the interpreter, or on a card.
fn tiers() -> Vec<(&'static str, Cuda<Box<dyn Driver>>)> {
    let mut all = vec![("f32", device(1)), ("f16", device(1).f16())];
    match device_at((8, 0), 1).bf16() {
        Ok(device) => all.push(("bf16", device)),
        Err(_) => println!("skipped: no tensor cores for bf16"),
    }
    all
}

#[test]
fn products_of_blocks_are_those_of_the_widened_matrix() {
    for &block in Block::ALL {
        let (t, n, k) = (5, 70, block.elements().max(64));
        let blocks = random(n, k, block, 2);
        for (tier, mut device) in tiers() {
            let name = format!("{} {tier}", block.name());
            let (fast, slow) = (device.weight_of_blocks(&blocks).unwrap(), plain(&mut device, &blocks));
            let fast = products(&name, &mut device, &fast, (t, n, k));
            let slow = products(&name, &mut device, &slow, (t, n, k));
            assert!(fast == slow, "{name}: other bits than those of the widened matrix");
            if tier == "f32" {
                let mut cpu = finetune::backend::Cpu::new(1);
                let weight = plain(&mut cpu, &blocks);
                let want = products(&name, &mut cpu, &weight, (t, n, k));
                fast.iter().zip(&want).for_each(|(got, want)| close(&name, got, want, 1e-4));
            }
        }
    }
}

#[test]
fn a_matrix_of_many_parts_has_the_bits_of_one() {
    let (n, k) = (300, 256);
    let blocks = random(n, k, Block::Q4_0, 3);
    for (tier, device) in tiers() {
        // Three parts forward, two backward.
        let mut device = device.slab(128 * 256);
        let weight = device.weight_of_blocks(&blocks).unwrap();
        let before = device.traffic().dispatches;
        let fast = products(tier, &mut device, &weight, (3, n, k));
        let narrowed = if tier == "bf16" { 2 } else { 0 };
        assert_eq!(device.traffic().dispatches - before, narrowed + 3 * 2 + 2 * 2, "{tier}");
        let weight = plain(&mut device, &blocks);
        assert!(fast == products(tier, &mut device, &weight, (3, n, k)), "{tier}");
    }
}

/// A changed line of an entry, in f32 and in bf16: loading compares rows and refuses the device.
const CHANGES: &[(&str, Block, &str, &str)] = &[
    ("widen_q8_0", Block::Q8_0, "shr.s32 %x, %x, 24", "shr.u32 %x, %x, 24"),
    ("widen_q4_0", Block::Q4_0, "sub.s32 %x, %x, 8", "sub.s32 %x, %x, 7"),
    ("widen_q4_1", Block::Q4_1, "add.rn.f32 %v1, %v1, %m", "add.rn.f32 %v1, %v1, %d"),
    ("widen_q5_0", Block::Q5_0, "0x00204081", "0x00204080"),
    ("widen_q5_1", Block::Q5_1, "[%wide+8]", "[%wide+4]"),
    ("widen_q2_k", Block::Q2_K, "mul.rn.f32 %m, %m, %v0", ""),
    ("widen_q3_k", Block::Q3_K, "sub.s32 %s, %s, 32", "sub.s32 %s, %s, 31"),
    ("widen_q4_k", Block::Q4_K, "setp.lt.u32 %p, %run, 4", "setp.lt.u32 %p, %run, 5"),
    ("widen_q5_k", Block::Q5_K, "shr.u32 %h, %h, %s", ""),
    ("widen_q6_k", Block::Q6_K, "shr.s32 %s, %s, 24", "shr.u32 %s, %s, 24"),
    ("widen_nf4", Block::NF4, "shr.u32 %x, %w, 4", "shr.u32 %x, %w, 0"),
    ("widen_mxfp4", Block::MXFP4, "and.b32 %s, %i, 16", "and.b32 %s, %i, 8"),
    ("widen_mxfp4", Block::MXFP4, "[%wide+4]", "[%wide+5]"),
    ("widen_q4_k", Block::Q4_K, "sub.rn.f32 %v2, %v2, %m", ""),
    ("widen_q6_k", Block::Q6_K, "mad.wide.u32 %ids, %r, 4, %ids", "mad.wide.u32 %ids, %r, 2, %ids"),
    ("widen_q8_0", Block::Q8_0, "mad.wide.u32 %wide, %r, %cols, %wide", "mad.wide.u32 %wide, %r, 32, %wide"),
];

#[test]
fn wrong_widening_is_detected_before_use() {
    for (entry, block, from, to) in CHANGES {
        let text = files::read("widen.ptx").text;
        let start = text.find(&format!(".entry {entry}(")).unwrap();
        let at = start + text[start..].find(from).unwrap_or_else(|| panic!("{entry} has {from}"));
        let end = if to.is_empty() { at + from.len() + 1 } else { at + from.len() };
        let changed = format!("{}{to}{}", &text[..at], &text[end..]);
        let mut device: Cuda<Interpreted> = device_with("widen.ptx", &changed, 0);
        let blocks = random(3, 2 * columns(*block), *block, 6);
        let refused = device.weight_of_blocks(&blocks).err().map(|e| e.to_string());
        // A change that only embed uses is detected by its rows.
        let detected = refused.is_some() || embedded(&mut device, &blocks) != Ok(widened(&blocks));
        assert!(detected, "{entry}: {to:?} for {from:?} is not detected");
        println!("{entry}: {refused:?}");
    }
}

fn embedded(device: &mut Cuda<Interpreted>, blocks: &Blocks) -> Result<Vec<f32>, Fault> {
    let out = [Out::Poison(3, blocks.cols)];
    let rows = run("embed", device, (&[], &out), |d, _, o| {
        let weight = d.weight_of_blocks(blocks).unwrap();
        let tokens = d.tokens(TokenRows { ids: &[0, 1, 2], bounds: &[0, 3], past: 0, short: u32::MAX });
        d.embed(o[0].view_mut(), &weight, &tokens, 1.0);
    });
    rows.map(|mut rows| rows.remove(0))
}
