//! f32 numbers into blocks, bit for bit as the references do it: Q8_0 as ggml's `quantize_row_q8_0_ref`, NF4 as
//! bitsandbytes' `quantize_4bit` with blocks of 64.

use super::{Block, NF4_LEVELS};
use rayon::prelude::*;

/// Blocks in a task.
const TASK: usize = 1024;

/// The blocks of whole blocks of numbers, on all threads. None for a type that is only read, never made here, and
/// for numbers that are no whole blocks.
pub fn quantise(block: Block, numbers: &[f32]) -> Option<Vec<u8>> {
    let each: fn(&mut [u8], &[f32]) = match block {
        Block::Q8_0 => q8_0,
        Block::NF4 => nf4,
        _ => return None,
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
    // Ties away from zero, as C's roundf.
    out[2..].iter_mut().zip(numbers).for_each(|(o, x)| *o = (x * by).round() as i8 as u8);
}

fn nf4(out: &mut [u8], numbers: &[f32]) {
    let absmax = largest(numbers);
    let by = 1.0 / absmax.max(1e-38);
    let code = |x: f32| {
        let x = (x * by).clamp(-1.0, 1.0);
        // How many of the points between levels lie below it.
        NF4_LEVELS.windows(2).filter(|pair| (pair[0] + pair[1]) / 2.0 < x).count() as u8
    };
    out[..4].copy_from_slice(&absmax.to_le_bytes());
    let pairs = numbers.as_chunks::<2>().0;
    out[4..].iter_mut().zip(pairs).for_each(|(o, &[first, second])| *o = code(first) << 4 | code(second));
}
