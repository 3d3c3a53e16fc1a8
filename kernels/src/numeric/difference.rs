//! Lossless packing of f32 values as differences from others that the receiver has: those of a step's parameters from the
//! step before. The difference of a parameter that changes by a hundredth is about 17 bits wide.
//!
//! The bits of both values are subtracted as u32, with wrapping. A difference d is written as the unsigned number 2d or
//! -2d - 1 (d as i32), so that small ones of both signs have few bits. Packed are one byte for each block of 8 differences, its width w
//! (0 .. 32), then the blocks: number i of a block is bits i*w .. (i+1)*w of w bytes, little-endian. An incomplete last block
//! is padded with zeros.
//!
//! Blocks are small because the largest number sets a block's width, and parameters near zero have large differences. With
//! 64 in a block 3 more bits for each value were needed (docs/journal/2026-11-engines.md).

/// Differences per block.
const BLOCK: usize = 8;

/// Most bytes of a block.
const MOST: usize = 32;

/// Most bytes that `count` packed values take.
pub fn most(count: usize) -> usize {
    count.div_ceil(BLOCK) * (1 + MOST)
}

/// Appends the packing of `new`, values in little-endian bytes, as differences from `old`.
pub fn pack(new: &[u8], old: &[u8], out: &mut Vec<u8>) {
    assert_eq!(new.len(), old.len(), "values of the same parameters");
    let (new, old) = (new.as_chunks::<4>().0, old.as_chunks::<4>().0);
    let start = out.len();
    out.resize(start + new.len().div_ceil(BLOCK), 0);
    out.reserve(new.len() * 3);
    for (index, (new, old)) in new.chunks(BLOCK).zip(old.chunks(BLOCK)).enumerate() {
        let mut block = [0u32; BLOCK];
        for ((to, new), old) in block.iter_mut().zip(new).zip(old) {
            let difference = u32::from_le_bytes(*new).wrapping_sub(u32::from_le_bytes(*old));
            *to = difference << 1 ^ (difference.cast_signed() >> 31).cast_unsigned();
        }
        let width = (u32::BITS - block.iter().fold(0, |all, v| all | v).leading_zeros()) as usize;
        out[start + index] = width as u8;
        let mut bytes = [0; MOST + 16];
        let [low, high] = [0, 4].map(|from| {
            let numbers = block[from..from + 4].iter().rev();
            numbers.fold(0u128, |all, number| all << width | u128::from(*number))
        });
        bytes[..16].copy_from_slice(&low.to_le_bytes());
        // The upper half begins within a byte of the lower one where the width is odd.
        let (at, shift) = (width / 2, 4 * (width % 2));
        let high = high << shift | if shift > 0 { u128::from(bytes[at]) } else { 0 };
        bytes[at..at + 16].copy_from_slice(&high.to_le_bytes());
        out.extend_from_slice(&bytes[..width]);
    }
}

/// Appends the values whose packed differences from `old` these are. The error, one line, is that the bytes are no packing of
/// as many values; `out` is then unchanged.
pub fn unpack(packed: &[u8], old: &[f32], out: &mut Vec<f32>) -> Result<(), String> {
    let blocks = old.len().div_ceil(BLOCK);
    let split = packed.split_at_checked(blocks);
    let (widths, mut rest) = split.ok_or_else(|| format!("{} bytes for {blocks} blocks", packed.len()))?;
    let wide = widths.iter().find(|width| usize::from(**width) > MOST);
    let due: usize = widths.iter().map(|width| usize::from(*width)).sum();
    match wide {
        Some(width) => return Err(format!("a block of {width} bits")),
        None if due != rest.len() => return Err(format!("{} bytes of blocks instead of {due}", rest.len())),
        None => out.reserve(old.len()),
    }
    for (width, old) in widths.iter().zip(old.chunks(BLOCK)) {
        let width = usize::from(*width);
        let (own, others) = rest.split_at(width);
        rest = others;
        let mut bytes = [0; MOST + 16];
        bytes[..width].copy_from_slice(own);
        let half = |at: usize| bytes[at..at + 16].try_into().map_or(0, u128::from_le_bytes);
        let (low, high) = (half(0), half(width / 2) >> (4 * (width % 2)));
        let mask = (1u128 << width) - 1;
        let mut block = [0f32; BLOCK];
        for (index, (to, old)) in block.iter_mut().zip(old).enumerate() {
            let half = if index < 4 { low } else { high };
            let number = (half >> (index % 4 * width) & mask) as u32;
            let difference = number >> 1 ^ (number & 1).wrapping_neg();
            *to = f32::from_bits(old.to_bits().wrapping_add(difference));
        }
        out.extend_from_slice(&block[..old.len()]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numeric::rng::Stream;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    fn packed(new: &[f32], old: &[f32]) -> Vec<u8> {
        let mut out = vec![7];
        pack(&bytes(new), &bytes(old), &mut out);
        assert_eq!(out.remove(0), 7, "bytes before stay");
        out
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|v| v.to_bits()).collect()
    }

    /// Every width, every number of values in the last block, and every kind of number.
    #[test]
    fn unpacked_values_have_the_bits_of_those_packed() {
        let mut draws = Stream::new(&[4]);
        for count in [0, 1, 7, 8, 9, 64, 1003] {
            for width in 0..=32 {
                let any: Vec<u32> = (0..count).map(|_| draws.below(u32::MAX)).collect();
                let differences = (0..count).map(|_| match width {
                    0 => 0,
                    _ => draws.below(u32::MAX) >> (32 - width),
                });
                let new: Vec<f32> = any
                    .iter()
                    .zip(differences)
                    .map(|(bits, d)| f32::from_bits(bits.wrapping_add(d)))
                    .collect();
                let old: Vec<f32> = any.into_iter().map(f32::from_bits).collect();
                let packed = packed(&new, &old);
                assert!(packed.len() <= most(count));
                let mut got = vec![1.5];
                unpack(&packed, &old, &mut got).unwrap();
                assert_eq!(bits(&got[1..]), bits(&new), "{count} values of {width} bits");
            }
        }
    }

    #[test]
    fn ends_of_the_range_are_packed() {
        let odd = [0.0, -0.0, f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e-45, -1e-45];
        for new in odd {
            for old in odd {
                let mut got = Vec::new();
                unpack(&packed(&[new], &[old]), &[old], &mut got).unwrap();
                assert_eq!(bits(&got), bits(&[new]), "{new} {old}");
            }
        }
    }

    /// The example of docs/explain/protocol.md.
    #[test]
    fn blocks_are_as_documented() {
        let old = [1.0f32; 3];
        let new = [0, 1, u32::MAX - 1].map(|d| f32::from_bits(old[0].to_bits().wrapping_add(d)));
        // 0, 2 and 3 in 2 bits each: 0b11_10_00.
        assert_eq!(packed(&new, &old), [2, 0b11_1000, 0]);
        assert_eq!(packed(&old, &old), [0]);
    }

    #[test]
    fn small_changes_take_few_bytes() {
        let mut draws = Stream::new(&[5]);
        let old: Vec<f32> = (0..4096).map(|_| draws.unit() - 0.5).collect();
        let new: Vec<f32> = old.iter().map(|v| v + 1e-3 * (draws.unit() - 0.5)).collect();
        let len = packed(&new, &old).len();
        assert!(len < 3 * 4096, "{len} bytes");
    }

    #[test]
    fn bytes_that_are_no_packing_are_refused() {
        let old = [1.0; 17];
        for wrong in [&[][..], &[0, 0], &[33, 0, 0], &[0, 255, 0], &[0, 0, 0, 9], &[1, 0, 0], &[0, 0, 2, 1]] {
            let mut out = vec![2.5];
            assert!(unpack(wrong, &old, &mut out).is_err(), "{wrong:?}");
            assert_eq!(out, [2.5]);
        }
    }
}
