//! Quantizes f32 values to the K types: super-blocks of 256, as in ggml's reference quantisers without an importance
//! matrix (`ggml-quants.c`, MIT licence, `quantize_row_*_K_ref`). The algorithm searches a few scales per run of 16 or
//! 32 values. The order of sums is that of ggml, and nothing is fused, so that the bits equal those of ggml built
//! without contraction (`tests/golden/gguf/quantized_k.gguf`).

use super::kquant::scale_min;
use super::{half_at, put_half};

/// A run counts as zero if its largest magnitude is below this.
const TINY: f32 = 1e-15;

/// Rounds half to even, as adding 1.5 * 2^23 does.
fn nearest(x: f32) -> i32 {
    // The low 23 bits of the sum are the rounded number plus 2^22; for NaN and large numbers the result stays within
    // these bits.
    ((x + 12_582_912.0).to_bits() & 0x007f_ffff) as i32 - 0x0040_0000
}

/// The value with the largest magnitude, and that magnitude.
fn extreme(x: &[f32]) -> (f32, f32) {
    x.iter().fold((0f32, 0f32), |(at, most), &v| if v.abs() > most { (v, v.abs()) } else { (at, most) })
}

/// Symmetric codes -most..most (stored in `q` plus most) by least squares weighted with x^2; returns the scale.
fn symmetric(q: &mut [u8], x: &[f32], most: i32) -> f32 {
    let (peak, magnitude) = extreme(x);
    if magnitude < TINY {
        q.fill(0);
        return 0.0;
    }
    let number = |inverse: f32, v: f32| nearest(inverse * v).clamp(-most, most - 1);
    let sums = |inverse: f32| {
        x.iter().fold((0f32, 0f32), |(lx, l2), &v| {
            let (l, w) = (number(inverse, v) as f32, v * v);
            (lx + w * v * l, l2 + w * l * l)
        })
    };
    let put = |q: &mut [u8], inverse: f32| {
        q.iter_mut().zip(x).for_each(|(q, &v)| *q = (number(inverse, v) + most) as u8);
    };
    let first = -(most as f32) / peak;
    put(q, first);
    let (lx, l2) = sums(first);
    let mut scale = if l2 == 0.0 { 0.0 } else { lx / l2 };
    let mut best = scale * lx;
    for step in (-9..=9).filter(|&s| s != 0) {
        let inverse = -(most as f32 + 0.1 * step as f32) / peak;
        let (lx, l2) = sums(inverse);
        if l2 > 0.0 && lx * lx > best * l2 {
            put(q, inverse);
            scale = lx / l2;
            best = scale * lx;
        }
    }
    scale
}

/// Codes -4..4 (stored in `q` plus 4), improved one at a time in up to five passes; returns the scale.
fn symmetric3(q: &mut [u8], x: &[f32]) -> f32 {
    let (peak, magnitude) = extreme(x);
    if magnitude < TINY {
        q.fill(0);
        return 0.0;
    }
    let inverse = -4.0 / peak;
    let mut l = [0i32; 16];
    let (mut lx, mut l2) = (0f32, 0f32);
    for (l, &v) in l.iter_mut().zip(x) {
        *l = nearest(inverse * v).clamp(-4, 3);
        let (w, l) = (v * v, *l as f32);
        lx += w * v * l;
        l2 += w * l * l;
    }
    for _ in 0..5 {
        let mut changed = false;
        for (l, &v) in l.iter_mut().zip(x) {
            let (w, old) = (v * v, *l as f32);
            let mut other_lx = lx - w * v * old;
            if other_lx <= 0.0 {
                continue;
            }
            let mut other_l2 = l2 - w * old * old;
            let new = nearest(v * other_l2 / other_lx).clamp(-4, 3);
            if new == *l {
                continue;
            }
            other_lx += w * v * new as f32;
            other_l2 += w * new as f32 * new as f32;
            if other_l2 > 0.0 && other_lx * other_lx * l2 > lx * lx * other_l2 {
                (*l, lx, l2, changed) = (new, other_lx, other_l2, true);
            }
        }
        if !changed {
            break;
        }
    }
    q.iter_mut().zip(l).for_each(|(q, l)| *q = (l + 4) as u8);
    if l2 > 0.0 { lx / l2 } else { 0.0 }
}

/// Parameters of the search for a scale with a minimum.
struct Search {
    /// Largest code.
    most: i32,
    /// First offset from `most`, and number of further steps of 0.1.
    from: f32,
    steps: i32,
    /// Cost of an error.
    cost: fn(f32) -> f32,
}

/// Codes 0..=most with y = scale q - least; returns (scale, least).
fn with_minimum(q: &mut [u8], x: &[f32], weights: &[f32], s: &Search) -> (f32, f32) {
    let (mut low, mut high) = (x[0], x[0]);
    let (mut sum_w, mut sum_x) = (weights[0], weights[0] * x[0]);
    for (&v, &w) in x.iter().zip(weights).skip(1) {
        low = if v < low { v } else { low };
        high = if v > high { v } else { high };
        sum_w += w;
        sum_x += w * v;
    }
    low = if low > 0.0 { 0.0 } else { low };
    if high == low {
        q.fill(0);
        return (0.0, -low);
    }
    let number = |inverse: f32, low: f32, v: f32| nearest(inverse * (v - low)).clamp(0, s.most) as u8;
    let error = |q: &[u8], scale: f32, low: f32| {
        let each = q.iter().zip(x).zip(weights);
        each.fold(0f32, |sum, ((&q, &v), &w)| sum + w * (s.cost)(scale * f32::from(q) + low - v))
    };
    let inverse = s.most as f32 / (high - low);
    q.iter_mut().zip(x).for_each(|(q, &v)| *q = number(inverse, low, v));
    let mut scale = 1.0 / inverse;
    let mut best = error(q, scale, low);
    let mut tried = [0u8; 32];
    let tried = &mut tried[..x.len()];
    for step in 0..=s.steps {
        let inverse = (s.from + 0.1 * step as f32 + s.most as f32) / (high - low);
        let (mut sum_l, mut sum_l2, mut sum_xl) = (0f32, 0f32, 0f32);
        for ((t, &v), &w) in tried.iter_mut().zip(x).zip(weights) {
            *t = number(inverse, low, v);
            let l = f32::from(*t);
            sum_l += w * l;
            sum_l2 += w * l * l;
            sum_xl += w * l * v;
        }
        let determinant = sum_w * sum_l2 - sum_l * sum_l;
        if determinant > 0.0 {
            let mut this = (sum_w * sum_xl - sum_x * sum_l) / determinant;
            let mut this_low = (sum_l2 * sum_x - sum_l * sum_xl) / determinant;
            if this_low > 0.0 {
                (this, this_low) = (sum_xl / sum_l2, 0.0);
            }
            let now = error(tried, this, this_low);
            if now < best {
                q.copy_from_slice(tried);
                (best, scale, low) = (now, this, this_low);
            }
        }
    }
    (scale, -low)
}

/// Packs the four quarters of 128 codes with two bits each into 32 bytes.
fn pack2(b: &mut [u8], q: &[u8]) {
    for (b, q) in b.chunks_exact_mut(32).zip(q.chunks_exact(128)) {
        b.iter_mut().enumerate().for_each(|(l, b)| {
            *b = q[l] | q[l + 32] << 2 | q[l + 64] << 4 | q[l + 96] << 6;
        });
    }
}

pub(super) fn q2_k(b: &mut [u8], x: &[f32]) {
    let search = Search { most: 3, from: -0.5, steps: 15, cost: f32::abs };
    let mut q = [0u8; 256];
    let (mut scales, mut lows) = ([0f32; 16], [0f32; 16]);
    for (j, (q, x)) in q.chunks_exact_mut(16).zip(x.chunks_exact(16)).enumerate() {
        let mut weights = [0f32; 16];
        weights.iter_mut().zip(x).for_each(|(w, v)| *w = v.abs());
        (scales[j], lows[j]) = with_minimum(q, x, &weights, &search);
    }
    let most = |all: &[f32]| all.iter().fold(0f32, |m, &v| if v > m { v } else { m });
    let packed = |all: &[f32; 16], most: f32| all.map(|v| nearest(15.0 / most * v) as u8);
    let (top, bottom) = (most(&scales), most(&lows));
    let s = if top > 0.0 { packed(&scales, top) } else { [0; 16] };
    let m = if bottom > 0.0 { packed(&lows, bottom) } else { [0; 16] };
    b[..16].iter_mut().zip(s.iter().zip(&m)).for_each(|(b, (s, m))| *b = s | m << 4);
    put_half(b, 80, if top > 0.0 { top / 15.0 } else { 0.0 });
    put_half(b, 82, if bottom > 0.0 { bottom / 15.0 } else { 0.0 });
    let (d, dmin) = (half_at(b, 80), half_at(b, 82));
    for (j, (q, x)) in q.chunks_exact_mut(16).zip(x.chunks_exact(16)).enumerate() {
        again(q, x, (d * f32::from(b[j] & 15), dmin * f32::from(b[j] >> 4)), 3);
    }
    pack2(&mut b[16..80], &q);
}

/// Recomputes the codes for rounded scale and minimum. With scale zero the codes stay unchanged.
fn again(q: &mut [u8], x: &[f32], (d, m): (f32, f32), most: i32) {
    if d != 0.0 {
        q.iter_mut().zip(x).for_each(|(q, &v)| *q = nearest((v + m) / d).clamp(0, most) as u8);
    }
}

/// Recomputes the codes for a rounded scale without minimum; `most` is added to each code.
fn again_symmetric(q: &mut [u8], x: &[f32], d: f32, most: i32) {
    if d != 0.0 {
        q.iter_mut().zip(x).for_each(|(q, &v)| *q = (nearest(v / d).clamp(-most, most - 1) + most) as u8);
    }
}

pub(super) fn q3_k(b: &mut [u8], x: &[f32]) {
    let mut q = [0u8; 256];
    let mut scales = [0f32; 16];
    for ((s, q), x) in scales.iter_mut().zip(q.chunks_exact_mut(16)).zip(x.chunks_exact(16)) {
        *s = symmetric3(q, x);
    }
    let (peak, _) = extreme(&scales);
    let mut d = 0.0;
    b[96..108].fill(0);
    if peak != 0.0 {
        let inverse = -32.0 / peak;
        for (j, &s) in scales.iter().enumerate() {
            // ggml converts to eight bits before the clamp.
            let l = (i32::from(nearest(inverse * s) as i8).clamp(-32, 31) + 32) as u8;
            b[96 + j % 8] |= (l & 15) << (4 * (j / 8));
            b[104 + j % 4] |= (l >> 4) << (2 * (j / 4));
        }
        d = 1.0 / inverse;
    }
    put_half(b, 108, d);
    let d = half_at(b, 108);
    for (j, (q, x)) in q.chunks_exact_mut(16).zip(x.chunks_exact(16)).enumerate() {
        let low = b[96 + j % 8] >> (4 * (j / 8)) & 15;
        let high = b[104 + j % 4] >> (2 * (j / 4)) & 3;
        again_symmetric(q, x, d * f32::from((low | high << 4) as i8 - 32), 4);
    }
    b[..32].fill(0);
    for (j, q) in q.iter_mut().enumerate() {
        if *q > 3 {
            b[j % 32] |= 1 << (j / 32);
            *q -= 4;
        }
    }
    pack2(&mut b[32..96], &q);
}

/// Writes d, dmin and twelve bytes of 6-bit scales and minima of Q4_K and Q5_K; returns the codes.
fn runs_of_32(b: &mut [u8], x: &[f32], search: &Search) -> [u8; 256] {
    let mut q = [0u8; 256];
    let (mut scales, mut lows) = ([0f32; 8], [0f32; 8]);
    for (j, (q, x)) in q.chunks_exact_mut(32).zip(x.chunks_exact(32)).enumerate() {
        let mean = (x.iter().fold(0f32, |sum, v| sum + v * v) / 32.0).sqrt();
        let mut weights = [0f32; 32];
        weights.iter_mut().zip(x).for_each(|(w, v)| *w = mean + v.abs());
        (scales[j], lows[j]) = with_minimum(q, x, &weights, search);
    }
    let most = |all: &[f32]| all.iter().fold(0f32, |m, &v| if v > m { v } else { m });
    let (top, bottom) = (most(&scales), most(&lows));
    let inverse = |most: f32| if most > 0.0 { 63.0 / most } else { 0.0 };
    b[4..16].fill(0);
    let packed = &mut b[4..16];
    for j in 0..8 {
        let s = (nearest(inverse(top) * scales[j]) as u8).min(63);
        let m = (nearest(inverse(bottom) * lows[j]) as u8).min(63);
        if j < 4 {
            (packed[j], packed[j + 4]) = (s, m);
        } else {
            packed[j + 4] = s & 15 | (m & 15) << 4;
            packed[j - 4] |= s >> 4 << 6;
            packed[j] |= m >> 4 << 6;
        }
    }
    put_half(b, 0, top / 63.0);
    put_half(b, 2, bottom / 63.0);
    let (d, dmin) = (half_at(b, 0), half_at(b, 2));
    for (j, (q, x)) in q.chunks_exact_mut(32).zip(x.chunks_exact(32)).enumerate() {
        let (s, m) = scale_min(&b[4..16], j);
        again(q, x, (d * s, dmin * m), search.most);
    }
    q
}

/// Packs the codes of two runs of 32 into the nibbles of 32 bytes.
fn pack4(b: &mut [u8], q: &[u8; 256]) {
    for (b, q) in b.chunks_exact_mut(32).zip(q.chunks_exact(64)) {
        b.iter_mut().enumerate().for_each(|(l, b)| *b = q[l] & 15 | q[l + 32] << 4);
    }
}

pub(super) fn q4_k(b: &mut [u8], x: &[f32]) {
    let q = runs_of_32(b, x, &Search { most: 15, from: -1.0, steps: 20, cost: |e| e * e });
    pack4(&mut b[16..144], &q);
}

pub(super) fn q5_k(b: &mut [u8], x: &[f32]) {
    let q = runs_of_32(b, x, &Search { most: 31, from: -0.5, steps: 15, cost: |e| e * e });
    b[16..48].fill(0);
    q.iter().enumerate().for_each(|(i, q)| b[16 + i % 32] |= (q >> 4) << (i / 32));
    pack4(&mut b[48..176], &q);
}

pub(super) fn q6_k(b: &mut [u8], x: &[f32]) {
    let mut q = [0u8; 256];
    let mut scales = [0f32; 16];
    for ((s, q), x) in scales.iter_mut().zip(q.chunks_exact_mut(16)).zip(x.chunks_exact(16)) {
        *s = symmetric(q, x, 32);
    }
    let (peak, magnitude) = extreme(&scales);
    if magnitude < TINY {
        b.fill(0);
        return;
    }
    let inverse = -128.0 / peak;
    put_half(b, 208, 1.0 / inverse);
    let d = half_at(b, 208);
    for (j, (q, x)) in q.chunks_exact_mut(16).zip(x.chunks_exact(16)).enumerate() {
        b[192 + j] = nearest(inverse * scales[j]).min(127) as i8 as u8;
        again_symmetric(q, x, d * f32::from(b[192 + j] as i8), 32);
    }
    for (half, q) in q.chunks_exact(128).enumerate() {
        for l in 0..32 {
            b[half * 64 + l] = q[l] & 15 | (q[l + 64] & 15) << 4;
            b[half * 64 + l + 32] = q[l + 32] & 15 | (q[l + 96] & 15) << 4;
            b[128 + half * 32 + l] =
                q[l] >> 4 | q[l + 32] >> 4 << 2 | q[l + 64] >> 4 << 4 | q[l + 96] >> 4 << 6;
        }
    }
}
