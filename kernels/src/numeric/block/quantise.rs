//! Quantizes f32 values to blocks, bit-identical to the references: blocks of 32 as in ggml's reference quantisers and
//! the Python `gguf` package, K types as in ggml's reference quantisers, NF4 as in bitsandbytes' `quantize_4bit` with
//! blocks of 64. The caller has checked that all values are finite.

use super::mxfp4;
use super::quantise_k::{q2_k, q3_k, q4_k, q5_k, q6_k};
use super::{Block, NF4_LEVELS, put_half};
use rayon::prelude::*;

/// Number of blocks per task.
const TASK: usize = 1024;

/// The blocks of `numbers`, computed on all threads. None if `numbers` is not a multiple of the block size.
pub fn quantise(block: Block, numbers: &[f32]) -> Option<Vec<u8>> {
    let each: fn(&mut [u8], &[f32]) = match block {
        Block::Q8_0 => q8_0,
        Block::Q4_0 => q4_0,
        Block::Q4_1 => q4_1,
        Block::Q5_0 => q5_0,
        Block::Q5_1 => q5_1,
        Block::Q2_K => q2_k,
        Block::Q3_K => q3_k,
        Block::Q4_K => q4_k,
        Block::Q5_K => q5_k,
        Block::Q6_K => q6_k,
        Block::NF4 => nf4,
        Block::MXFP4 => mxfp4,
    };
    if !numbers.len().is_multiple_of(block.elements()) {
        return None;
    }
    let mut out = vec![0; block.size_of(numbers.len())];
    let tasks = out.par_chunks_mut(TASK * block.bytes()).zip(numbers.par_chunks(TASK * block.elements()));
    tasks.for_each(|(out, numbers)| {
        let blocks = out.chunks_exact_mut(block.bytes()).zip(numbers.chunks_exact(block.elements()));
        blocks.for_each(|(out, numbers)| each(out, numbers));
    });
    Some(out)
}

fn largest(numbers: &[f32]) -> f32 {
    numbers.iter().fold(0.0, |most, x| x.abs().max(most))
}

fn q8_0(out: &mut [u8], numbers: &[f32]) {
    let d = largest(numbers) / 127.0;
    let by = if d == 0.0 { 0.0 } else { 1.0 / d };
    out[..2].copy_from_slice(&half::f16::from_f32(d).to_le_bytes());
    // `round` rounds half away from zero, as C's roundf.
    out[2..].iter_mut().zip(numbers).for_each(|(o, x)| *o = (x * by).round() as i8 as u8);
}

fn nf4(out: &mut [u8], numbers: &[f32]) {
    let absmax = largest(numbers);
    let by = 1.0 / absmax.max(1e-38);
    let code = |x: f32| {
        let x = (x * by).clamp(-1.0, 1.0);
        // The code is the number of midpoints between levels that are below x.
        NF4_LEVELS.windows(2).filter(|pair| (pair[0] + pair[1]) / 2.0 < x).count() as u8
    };
    out[..4].copy_from_slice(&absmax.to_le_bytes());
    let pairs = numbers.as_chunks::<2>().0;
    out[4..].iter_mut().zip(pairs).for_each(|(o, &[first, second])| *o = code(first) << 4 | code(second));
}

/// ggml converts a negative exponent (magnitudes below 2^-125) to a byte, which C leaves undefined; here it becomes 0.
fn mxfp4(out: &mut [u8], numbers: &[f32]) {
    // C's log2f rounds to f32, also up to the next integer.
    let log = (libm::log2(f64::from(largest(numbers))) as f32).floor();
    let e = (log + 125.0) as u8;
    let d = mxfp4::power(e);
    out[0] = e;
    let code = |x: f32| {
        let errors = mxfp4::LEVELS.map(|level| (f32::from(level) * d - x).abs());
        // The first one of equal errors.
        errors.iter().enumerate().fold(0, |best, (i, error)| if *error < errors[best] { i } else { best })
            as u8
    };
    let (first, second) = numbers.split_at(16);
    out[1..].iter_mut().zip(first.iter().zip(second)).for_each(|(o, (&x, &y))| *o = code(x) | code(y) << 4);
}

/// 1 / d, or 0 if d is 0.
fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// The value with the largest magnitude; the first one if several are equal.
fn extreme(x: &[f32]) -> f32 {
    x.iter().fold((0f32, 0f32), |(most, at), &v| if v.abs() > most { (v.abs(), v) } else { (most, at) }).1
}

fn range(x: &[f32]) -> (f32, f32) {
    x.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), &v| (low.min(v), high.max(v)))
}

/// Codes 0..=most of 32 values: trunc((x - least) id + half).
fn numbers(x: &[f32], (least, id): (f32, f32), half: f32, most: f32) -> [u8; 32] {
    let mut q = [0u8; 32];
    q.iter_mut().zip(x).for_each(|(q, &v)| *q = ((v - least) * id + half).trunc().clamp(0.0, most) as u8);
    q
}

/// Packs codes of the first half into the low nibbles and codes of the second half into the high nibbles.
fn nibbles(b: &mut [u8], q: &[u8; 32]) {
    b.iter_mut().enumerate().for_each(|(i, b)| *b = q[i] & 15 | q[i + 16] << 4);
}

/// Packs the fifth bits: bit i belongs to value i.
fn fifths(b: &mut [u8], q: &[u8; 32]) {
    let bits = q.iter().enumerate().fold(0u32, |bits, (i, &q)| bits | u32::from(q >> 4) << i);
    b.copy_from_slice(&bits.to_le_bytes());
}

fn q4_0(b: &mut [u8], x: &[f32]) {
    let d = extreme(x) / -8.0;
    put_half(b, 0, d);
    nibbles(&mut b[2..], &numbers(x, (0.0, inverse(d)), 8.5, 15.0));
}

fn q4_1(b: &mut [u8], x: &[f32]) {
    let (low, high) = range(x);
    let d = (high - low) / 15.0;
    put_half(b, 0, d);
    put_half(b, 2, low);
    nibbles(&mut b[4..], &numbers(x, (low, inverse(d)), 0.5, 15.0));
}

fn q5_0(b: &mut [u8], x: &[f32]) {
    let d = extreme(x) / -16.0;
    put_half(b, 0, d);
    let q = numbers(x, (0.0, inverse(d)), 16.5, 31.0);
    fifths(&mut b[2..6], &q);
    nibbles(&mut b[6..], &q);
}

fn q5_1(b: &mut [u8], x: &[f32]) {
    let (low, high) = range(x);
    let d = (high - low) / 31.0;
    put_half(b, 0, d);
    put_half(b, 2, low);
    let q = numbers(x, (low, inverse(d)), 0.5, 31.0);
    fifths(&mut b[4..8], &q);
    nibbles(&mut b[8..], &q);
}
