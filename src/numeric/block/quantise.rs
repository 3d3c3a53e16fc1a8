//! f32 numbers into blocks, bit for bit as the references do it: Q8_0 as ggml's `quantize_row_q8_0_ref`, NF4 as
//! bitsandbytes' `quantize_4bit` with blocks of 64.

use super::{Block, NF4_LEVELS};

/// Appends the blocks of whole blocks of numbers. None for a type that is only read, never made here.
pub fn quantise(block: Block, out: &mut Vec<u8>, numbers: &[f32]) -> Option<()> {
    let each: fn(&mut Vec<u8>, &[f32]) = match block {
        Block::Q8_0 => q8_0,
        Block::NF4 => nf4,
        _ => return None,
    };
    numbers.chunks_exact(block.elements()).for_each(|numbers| each(out, numbers));
    Some(())
}

fn largest(numbers: &[f32]) -> f32 {
    numbers.iter().fold(0.0, |most, x| x.abs().max(most))
}

fn q8_0(out: &mut Vec<u8>, numbers: &[f32]) {
    let d = largest(numbers) / 127.0;
    let by = if d == 0.0 { 0.0 } else { 1.0 / d };
    out.extend(half::f16::from_f32(d).to_le_bytes());
    // Ties away from zero, as C's roundf.
    out.extend(numbers.iter().map(|x| (x * by).round() as i8 as u8));
}

fn nf4(out: &mut Vec<u8>, numbers: &[f32]) {
    let absmax = largest(numbers);
    let by = 1.0 / absmax.max(1e-38);
    let code = |x: f32| {
        let x = (x * by).clamp(-1.0, 1.0);
        NF4_LEVELS.windows(2).filter(|pair| (pair[0] + pair[1]) / 2.0 < x).count() as u8
    };
    out.extend(absmax.to_le_bytes());
    out.extend(numbers.as_chunks::<2>().0.iter().map(|&[first, second]| code(first) << 4 | code(second)));
}
