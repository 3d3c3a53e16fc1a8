//! Nested quantisation of NF4 magnitudes, as in bitsandbytes' `compress_statistics` (Dettmers et al. 2023,
//! arXiv:2305.14314, section 3): minus their mean, in blocks of 256, to the nearest of 256 levels that are denser near
//! 0. Blocks hold f32 here, so they store the dequantised 8-bit values.
//!
//! The mean is rounded once; torch's sum of many magnitudes can differ slightly, because its order depends on the
//! processor. bitsandbytes' CPU kernel rounds a value to one of 65,536 grid points first, which for one value in 600
//! selects the neighbour of the nearest level; its GPU kernel and this code select the nearest level.

use super::{Block, Packed, nf4::Nf4};

/// Number of magnitudes that share a scale.
const SHARED: usize = 256;

/// Quantizes and dequantises the magnitudes in the NF4 blocks of a whole matrix.
pub fn nest(blocks: &mut [u8]) {
    let magnitude = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    let all: Vec<f32> = blocks.chunks_exact(Nf4::BYTES).map(magnitude).collect();
    let mean = (all.iter().map(|&x| f64::from(x)).sum::<f64>() / all.len().max(1) as f64) as f32;
    let levels = levels();
    let shared = blocks.chunks_mut(SHARED * Nf4::BYTES).zip(all.chunks(SHARED));
    for (blocks, magnitudes) in shared {
        let scale = magnitudes.iter().fold(0f32, |most, x| (x - mean).abs().max(most));
        for (block, x) in blocks.chunks_exact_mut(Block::NF4.bytes()).zip(magnitudes) {
            let by = if scale == 0.0 { 0.0 } else { (x - mean) / scale };
            block[..4].copy_from_slice(&(nearest(&levels, by) * scale + mean).to_le_bytes());
        }
    }
}

fn nearest(levels: &[f32], x: f32) -> f32 {
    let above = levels.partition_point(|&level| level < x).clamp(1, levels.len() - 1);
    let (below, above) = (levels[above - 1], levels[above]);
    if above - x < x - below { above } else { below }
}

/// bitsandbytes' `create_dynamic_map()`, ascending: each of seven decades has twice as many levels as the one below, at
/// the midpoints of equally spaced points from 0.1 to 1.
fn levels() -> Vec<f32> {
    let mut levels = vec![0.0, 1.0];
    for decade in 0..7 {
        let (count, scale) = (1usize << decade, 10f64.powi(decade - 6) as f32);
        let step = (1.0 - 0.1f32) / count as f32;
        // torch's linspace computes from both ends to the middle and rounds each point once.
        let point = |i: usize| match i < count.div_ceil(2) {
            true => (f64::from(0.1f32) + f64::from(step) * i as f64) as f32,
            false => (1.0 - f64::from(step) * (count - i) as f64) as f32,
        };
        for i in 0..count {
            let level = scale * ((point(i) + point(i + 1)) / 2.0);
            levels.extend([level, -level]);
        }
    }
    levels.sort_by(f32::total_cmp);
    levels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_of_256_levels_is_selected() {
        let levels = levels();
        assert_eq!((levels.len(), levels[255]), (256, 1.0));
        assert!((levels[0] + 0.992_968_75).abs() < 1e-6);
        for i in 0..2000 {
            let x = i as f32 / 1000.0 - 1.0;
            let best = levels.iter().map(|l| (l - x).abs()).fold(f32::INFINITY, f32::min);
            assert_eq!((nearest(&levels, x) - x).abs(), best, "{x}");
        }
    }

    #[test]
    fn equal_magnitudes_are_unchanged() {
        let mut blocks = [1.5f32.to_le_bytes().as_slice(), &[7; 32]].concat().repeat(300);
        let before = blocks.clone();
        nest(&mut blocks);
        assert_eq!(blocks, before);
        nest(&mut []);
    }
}
