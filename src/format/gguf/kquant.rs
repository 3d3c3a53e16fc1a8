//! The K kinds: super-blocks of 256 with small integer scales of their own (ggml's `ggml-quants.c`).
//! The order of operations is the contract, as in [`super::quant`].

use super::quant::half_at;

/// 16 scales (low nibble) and minima (high nibble), 64 bytes of 2-bit numbers, d, dmin:
/// y = (d s) q - (dmin m), in runs of 16.
pub(super) fn q2_k(y: &mut [f32], b: &[u8]) {
    let (scales, qs) = (&b[..16], &b[16..80]);
    let (d, dmin) = (half_at(b, 80), half_at(b, 82));
    for (i, y) in y.iter_mut().enumerate() {
        let q = qs[i / 128 * 32 + i % 32] >> (2 * (i % 128 / 32)) & 3;
        let s = scales[i / 16];
        *y = d * f32::from(s & 15) * f32::from(q) - dmin * f32::from(s >> 4);
    }
}

/// 32 bytes of third bits, 64 bytes of 2-bit numbers, 12 bytes of 6-bit scales, d:
/// y = (d (s - 32)) (q - 4 where the third bit is *not* set).
pub(super) fn q3_k(y: &mut [f32], b: &[u8]) {
    let (high, qs, packed, d) = (&b[..32], &b[32..96], &b[96..108], half_at(b, 108));
    let scale = |j: usize| {
        let low = packed[j % 8] >> (4 * (j / 8)) & 15;
        let top = packed[8 + j % 4] >> (2 * (j / 4)) & 3;
        f32::from((low | top << 4) as i8 - 32)
    };
    for (i, y) in y.iter_mut().enumerate() {
        let q = qs[i / 128 * 32 + i % 32] >> (2 * (i % 128 / 32)) & 3;
        let bit = high[i % 32] >> (i / 32) & 1;
        let q = q as i8 - if bit == 0 { 4 } else { 0 };
        *y = d * scale(i / 16) * f32::from(q);
    }
}

/// Scale and minimum `j` (0..8), 6 bits each, out of 12 bytes.
fn scale_min(packed: &[u8], j: usize) -> (f32, f32) {
    let (s, m) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        let both = packed[j + 4];
        (both & 15 | packed[j - 4] >> 6 << 4, both >> 4 | packed[j] >> 6 << 4)
    };
    (f32::from(s), f32::from(m))
}

/// d, dmin, 12 bytes of scales and minima, 128 bytes of nibbles: y = (d s) q - (dmin m), in runs of 32.
pub(super) fn q4_k(y: &mut [f32], b: &[u8]) {
    let (d, dmin, packed, qs) = (half_at(b, 0), half_at(b, 2), &b[4..16], &b[16..144]);
    for (j, run) in y.chunks_exact_mut(32).enumerate() {
        let (s, m) = scale_min(packed, j);
        let (d, m) = (d * s, dmin * m);
        for (i, y) in run.iter_mut().enumerate() {
            let q = qs[j / 2 * 32 + i] >> (4 * (j % 2)) & 15;
            *y = d * f32::from(q) - m;
        }
    }
}

/// As Q4_K with 32 bytes of fifth bits before the nibbles.
pub(super) fn q5_k(y: &mut [f32], b: &[u8]) {
    let (d, dmin, packed) = (half_at(b, 0), half_at(b, 2), &b[4..16]);
    let (high, qs) = (&b[16..48], &b[48..176]);
    for (j, run) in y.chunks_exact_mut(32).enumerate() {
        let (s, m) = scale_min(packed, j);
        let (d, m) = (d * s, dmin * m);
        for (i, y) in run.iter_mut().enumerate() {
            let q = qs[j / 2 * 32 + i] >> (4 * (j % 2)) & 15 | (high[i] >> j & 1) << 4;
            *y = d * f32::from(q) - m;
        }
    }
}

/// 128 bytes of nibbles, 64 bytes of the upper 2 bits, 16 x i8 scales, d: y = (d s) (q - 32), in runs of 16.
pub(super) fn q6_k(y: &mut [f32], b: &[u8]) {
    let (low, high, scales, d) = (&b[..128], &b[128..192], &b[192..208], half_at(b, 208));
    for (i, y) in y.iter_mut().enumerate() {
        // Halves of 128; in each, four runs of 32 share 64 bytes of nibbles and 32 of upper bits.
        let (half, run, at) = (i / 128, i % 128 / 32, i % 32);
        let nibble = low[half * 64 + run % 2 * 32 + at] >> (4 * (run / 2)) & 15;
        let top = high[half * 32 + at] >> (2 * run) & 3;
        let q = (nibble | top << 4) as i8 - 32;
        *y = d * f32::from(scales[i / 16] as i8) * f32::from(q);
    }
}
