//! Lossless packing of fixed-point sums: 64 values at a time, each in the bits that the widest of them needs.
//!
//! Packed values are one width byte per block, then the blocks. A block of width w is w little-endian u64 words,
//! in which value i is bits i*w .. (i+1)*w, as an unsigned number that is 2^(w-1) too large. A last block that is
//! not full is filled up with zeros. Width 0 is a block of zeros.
//!
//! Reading believes nothing: widths, length, range and filling are checked before the first value is touched,
//! so an addition happens wholly or not at all, and nothing is allocated for what the bytes say. All arithmetic
//! wraps: whatever was added can be subtracted exactly, even from a total that had left its range.
//!
//! One function per width, unrolled, so that every shift is a constant: that is at memory speed without vector
//! instructions, which the oldest x86-64 hardly has for 64-bit numbers.

/// Values per block.
const BLOCK: usize = 64;

type Block = [i64; BLOCK];

/// Bytes that are not the packing of the values that were expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// A width byte above 64.
    #[error("block {block} of a packed sum says a width of {width} bits")]
    Width {
        /// Its position.
        block: usize,
        /// What it says.
        width: u8,
    },
    /// Bytes are missing or left over.
    #[error("a packed sum has {got} bytes instead of {want}")]
    Length {
        /// Bytes that came.
        got: usize,
        /// Bytes that its widths ask for (or, where those are missing, its widths alone).
        want: usize,
    },
    /// A value beyond what was agreed, or a filling that is not zero.
    #[error("value {index} of a packed sum is {value}, beyond {limit}")]
    Range {
        /// Its position.
        index: usize,
        /// It.
        value: i64,
        /// The largest magnitude allowed there.
        limit: i64,
    },
}

/// Appends the packing of `values` to `out`.
pub fn pack(values: &[i64], out: &mut Vec<u8>) {
    let start = out.len();
    out.reserve(values.len() * 5);
    out.resize(start + values.len().div_ceil(BLOCK), 0);
    let (full, rest) = values.as_chunks::<BLOCK>();
    let mut last = [0; BLOCK];
    last[..rest.len()].copy_from_slice(rest);
    let last = (!rest.is_empty()).then_some(&last);
    let mut bytes = [0u8; 8 * BLOCK];
    for (i, block) in full.iter().chain(last).enumerate() {
        let width = width(block);
        out[start + i] = width as u8;
        let bytes = &mut bytes[..8 * width];
        PACK[width](block, bytes);
        out.extend_from_slice(bytes);
    }
}

/// Adds packed values to `sum`, one to one, if none of them is larger in magnitude than `limit`; else `sum`
/// stays as it is.
pub fn add(packed: &[u8], sum: &mut [i64], limit: i64) -> Result<(), PackError> {
    check(packed, sum.len(), limit)?;
    let (full, rest) = sum.as_chunks_mut::<BLOCK>();
    let mut blocks = blocks(packed, full.len() + usize::from(!rest.is_empty()));
    for (block, (width, bytes)) in full.iter_mut().zip(&mut blocks) {
        ADD[width](bytes, block);
    }
    for (width, bytes) in blocks {
        let last = unpacked(width, bytes);
        rest.iter_mut().zip(last).for_each(|(sum, value)| *sum = sum.wrapping_add(value));
    }
    Ok(())
}

/// Replaces `sum` by packed values, one to one, if none of them is larger in magnitude than `limit`; else `sum` stays
/// as it is. What was there is not read, so memory need not be cleared for the first of many additions.
pub fn set(packed: &[u8], sum: &mut [i64], limit: i64) -> Result<(), PackError> {
    check(packed, sum.len(), limit)?;
    let count = sum.len().div_ceil(BLOCK);
    for (block, (width, bytes)) in sum.chunks_mut(BLOCK).zip(blocks(packed, count)) {
        let values = unpacked(width, bytes);
        block.copy_from_slice(&values[..block.len()]);
    }
    Ok(())
}

/// Takes back what [`add`] added; the same bytes and the same limit have the same outcome.
pub fn subtract(packed: &[u8], sum: &mut [i64], limit: i64) -> Result<(), PackError> {
    check(packed, sum.len(), limit)?;
    let count = sum.len().div_ceil(BLOCK);
    for (block, (width, bytes)) in sum.chunks_mut(BLOCK).zip(blocks(packed, count)) {
        let values = unpacked(width, bytes);
        block.iter_mut().zip(values).for_each(|(sum, value)| *sum = sum.wrapping_sub(value));
    }
    Ok(())
}

/// Whether these bytes are the packing of `len` values, none of them larger in magnitude than `limit`. Where the
/// widths alone say so (they do, short of sums near the end of the range), no value is looked at.
pub fn check(packed: &[u8], len: usize, limit: i64) -> Result<(), PackError> {
    let count = len.div_ceil(BLOCK);
    let Some((widths, data)) = packed.split_at_checked(count) else {
        return Err(PackError::Length { got: packed.len(), want: count });
    };
    if let Some(block) = widths.iter().position(|&width| usize::from(width) > BLOCK) {
        return Err(PackError::Width { block, width: widths[block] });
    }
    let words: usize = widths.iter().map(|&width| usize::from(width)).sum();
    if data.len() != 8 * words {
        return Err(PackError::Length { got: packed.len(), want: count + 8 * words });
    }
    let limit = limit.max(0);
    for (b, (width, bytes)) in blocks(packed, count).enumerate() {
        let whole = (b + 1) * BLOCK <= len;
        if whole && (width == 0 || 1u64 << (width - 1) <= limit as u64) {
            continue;
        }
        for (index, value) in (b * BLOCK..).zip(unpacked(width, bytes)) {
            let limit = if index < len { limit } else { 0 };
            if value.unsigned_abs() > limit as u64 {
                return Err(PackError::Range { index, value, limit });
            }
        }
    }
    Ok(())
}

/// The bits that the widest value needs, its sign included. A number and its double differ, above the last place,
/// first where the sign ends.
fn width(block: &Block) -> usize {
    let differ = block.iter().fold(0, |bits, &v| bits | (v ^ (v << 1)));
    64 - differ.leading_zeros() as usize
}

/// Width and bytes of every block, of bytes that passed [`check`].
fn blocks(packed: &[u8], count: usize) -> impl Iterator<Item = (usize, &[u8])> {
    let (widths, mut data) = packed.split_at(count);
    widths.iter().map(move |&width| {
        let (block, rest) = data.split_at(8 * usize::from(width));
        data = rest;
        (usize::from(width), block)
    })
}

fn unpacked(width: usize, bytes: &[u8]) -> Block {
    let mut block = [0; BLOCK];
    ADD[width](bytes, &mut block);
    block
}

/// Calls a macro with 0 to 63.
macro_rules! all {
    ($macro:ident) => {
        $macro!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
            32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63)
    };
}

macro_rules! packers {
    ($($w:literal)*) => { [$(pack_block::<$w>,)* pack_block::<64>] };
}

macro_rules! adders {
    ($($w:literal)*) => { [$(add_block::<$w>,)* add_block::<64>] };
}

/// By width.
static PACK: [fn(&Block, &mut [u8]); BLOCK + 1] = all!(packers);
static ADD: [fn(&[u8], &mut Block); BLOCK + 1] = all!(adders);

/// What makes every value of W bits non-negative.
const fn bias(width: usize) -> u64 {
    if width == 0 { 0 } else { 1 << (width - 1) }
}

/// `out` has W words.
fn pack_block<const W: usize>(values: &Block, out: &mut [u8]) {
    let Ok(out) = <&mut [[u8; 8]; W]>::try_from(out.as_chunks_mut().0) else { return };
    let mut word = 0u64;
    macro_rules! each {
        ($($i:literal)*) => { $(
            let value = (values[$i] as u64).wrapping_add(bias(W));
            let (k, bit) = ($i * W / 64, $i * W % 64);
            word |= value.wrapping_shl(bit as u32);
            if W > 0 && bit + W >= 64 {
                out[k] = word.to_le_bytes();
                word = if bit + W > 64 { value.wrapping_shr(64 - bit as u32) } else { 0 };
            }
        )* };
    }
    all!(each);
    debug_assert_eq!(word, 0, "64 values of W bits fill W words");
}

/// `bytes` has W words.
fn add_block<const W: usize>(bytes: &[u8], sum: &mut Block) {
    let Ok(words) = <&[[u8; 8]; W]>::try_from(bytes.as_chunks().0) else { return };
    if W == 0 {
        return;
    }
    let mask = u64::MAX.wrapping_shr(64 - W as u32);
    macro_rules! each {
        ($($i:literal)*) => { $(
            let (k, bit) = ($i * W / 64, $i * W % 64);
            let mut value = u64::from_le_bytes(words[k]) >> bit;
            if bit + W > 64 {
                value |= u64::from_le_bytes(words[k + 1]).wrapping_shl(64 - bit as u32);
            }
            sum[$i] = sum[$i].wrapping_add((value & mask).wrapping_sub(bias(W)) as i64);
        )* };
    }
    all!(each);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The format bit by bit, as the head of this file says it.
    fn slow(values: &[i64]) -> Vec<u8> {
        let holds = |w: u32, v: i64| match w {
            0 => v == 0,
            64 => true,
            w => (-(1i64 << (w - 1))..1i64 << (w - 1)).contains(&v),
        };
        let widths: Vec<u32> =
            values.chunks(64).map(|b| (0..=64).find(|&w| b.iter().all(|&v| holds(w, v))).unwrap()).collect();
        let mut out: Vec<u8> = widths.iter().map(|&w| w as u8).collect();
        for (block, &w) in values.chunks(64).zip(&widths).filter(|(_, w)| **w > 0) {
            let mut words = vec![0u64; w as usize];
            for i in 0..64 {
                let value = i128::from(block.get(i).copied().unwrap_or(0)) + (1i128 << (w - 1));
                for bit in 0..w as usize {
                    let at = i * w as usize + bit;
                    words[at / 64] |= u64::from(value >> bit & 1 == 1) << (at % 64);
                }
            }
            out.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        }
        out
    }

    /// Packing is the slow one's, and adding and subtracting give what plain arithmetic gives.
    fn round(values: &[i64], into: &[i64]) {
        let mut packed = vec![9, 9];
        pack(values, &mut packed);
        let packed = &packed[2..];
        assert_eq!(packed, slow(values));
        let mut sum = into.to_vec();
        add(packed, &mut sum, i64::MAX).unwrap_or_else(|e| panic!("{e}"));
        let want: Vec<i64> = values.iter().zip(into).map(|(v, s)| v.wrapping_add(*s)).collect();
        assert_eq!(sum, want);
        subtract(packed, &mut sum, i64::MAX).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(sum, into);
        set(packed, &mut sum, i64::MAX).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(sum, values);
    }

    #[test]
    fn every_width_and_length_round_trips() {
        let mut draws = crate::numeric::rng::Stream::new(&[3]);
        let mut draw = move |bits: u32| {
            let word = u64::from(draws.below(u32::MAX)) << 32 | u64::from(draws.below(u32::MAX));
            if bits == 0 { 0 } else { word as i64 >> (64 - bits) }
        };
        for bits in 0..=64 {
            for len in [0usize, 1, 2, 63, 64, 65, 128, 200] {
                let values: Vec<i64> = (0..len).map(|_| draw(bits).max(-i64::MAX)).collect();
                let into: Vec<i64> = (0..len).map(|_| draw(64)).collect();
                round(&values, &into);
            }
            let ends = if bits == 0 { 0 } else { i64::MAX >> (64 - bits) };
            round(&[ends; 64], &[i64::MAX; 64]);
            round(&[-ends; 65], &[i64::MIN; 65]);
        }
    }

    proptest! {
        #[test]
        fn packing_follows_the_format_and_is_lossless(
            blocks in proptest::collection::vec((0u32..64, proptest::collection::vec(any::<i64>(), 1..=64)), 0..5)
        ) {
            let values: Vec<i64> =
                blocks.iter().flat_map(|(s, b)| b.iter().map(move |v| (v >> s).max(-i64::MAX))).collect();
            round(&values, &vec![17; values.len()]);
        }

        #[test]
        fn hostile_bytes_are_refused_or_decoded(
            bytes in proptest::collection::vec(prop_oneof![0u8..70, any::<u8>()], 0..600),
            len in 0usize..300, limit in any::<i64>(),
        ) {
            let before = vec![5i64; len];
            let mut sum = before.clone();
            match add(&bytes, &mut sum, limit) {
                Err(_) => prop_assert_eq!(sum, before),
                Ok(()) => {
                    let small = |(s, b): (&i64, &i64)| s.wrapping_sub(*b).unsigned_abs() <= limit.max(0) as u64;
                    prop_assert!(sum.iter().zip(&before).all(small));
                    prop_assert_eq!(subtract(&bytes, &mut sum, limit), Ok(()));
                    prop_assert_eq!(sum, before);
                }
            }
        }

        #[test]
        fn truncated_or_trailing_bytes_are_refused(len in 1usize..200, extra in any::<u8>()) {
            let values: Vec<i64> = (0..len as i64).map(|i| i * i - 300).collect();
            let mut packed = Vec::new();
            pack(&values, &mut packed);
            let mut sum = vec![0; len];
            for cut in 0..packed.len() {
                prop_assert!(add(&packed[..cut], &mut sum, i64::MAX).is_err());
            }
            packed.push(extra);
            prop_assert!(add(&packed, &mut sum, i64::MAX).is_err());
            prop_assert!(sum.iter().all(|s| *s == 0));
        }
    }

    #[test]
    fn limit_applies_at_every_position() {
        for (len, at) in [(64, 0), (64, 63), (70, 69), (1, 0), (200, 130)] {
            for limit in [0, 1, 127, 128, 129, 1 << 40, i64::MAX - 1] {
                for sign in [1, -1] {
                    let mut values = vec![0; len];
                    values[at] = sign * limit;
                    let mut packed = Vec::new();
                    pack(&values, &mut packed);
                    assert_eq!(check(&packed, len, limit), Ok(()));
                    values[at] = sign * (limit + 1);
                    let (mut packed, mut sum) = (Vec::new(), vec![1; len]);
                    pack(&values, &mut packed);
                    let beyond = PackError::Range { index: at, value: values[at], limit };
                    assert_eq!(add(&packed, &mut sum, limit), Err(beyond));
                    assert_eq!(sum, vec![1; len]);
                    assert_eq!(set(&packed, &mut sum, limit), Err(beyond));
                    assert_eq!(sum, vec![1; len]);
                }
            }
        }
        let mut packed = Vec::new();
        pack(&[i64::MIN; 3], &mut packed);
        assert!(check(&packed, 3, i64::MAX).is_err());
    }

    #[test]
    fn padding_of_a_block_must_be_zero() {
        let mut packed = Vec::new();
        pack(&[1, 2, 3, 4], &mut packed);
        assert_eq!(check(&packed, 4, 100), Ok(()));
        assert!(matches!(check(&packed, 3, 100), Err(PackError::Range { index: 3, value: 4, limit: 0 })));
        assert!(matches!(check(&[65], 3, 100), Err(PackError::Width { block: 0, width: 65 })));
    }
}
