//! Lossless packing of fixed-point sums: blocks of 64 values, each value with the number of bits that the widest one
//! needs.
//!
//! Packed values are one width byte per block, followed by the blocks, followed by the shifts. A block of width w is w
//! little-endian u64 words; value i is bits i*w .. (i+1)*w, as an unsigned number with 2^(w-1) added. An incomplete last
//! block is padded with zeros. Width 0 is a block of zeros. Where the values of a block are multiples of 2^s, as those of
//! rounded gradients are (`numeric::coarse`), they are divided by 2^s: its width byte has its highest bit set, and s is a
//! byte of the shifts.
//!
//! The input is not trusted: widths, length, range and padding are checked before the first value is read, so that an
//! addition happens completely or not at all, and the input does not control any allocation. All arithmetic wraps: an
//! added value can be subtracted exactly, even from a total that left its range.
//!
//! There is one function per width, unrolled, so that every shift is a constant: this reaches memory speed without
//! vector instructions, of which the oldest x86-64 has few for 64-bit numbers.

/// Values per block.
const BLOCK: usize = 64;

/// The bit of a width byte that says that the block is shifted.
const SHIFTED: u8 = 0x80;

type Block = [i64; BLOCK];

/// The bytes are not a packing of the expected values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// A width byte above 64.
    #[error("block {block} of a packed sum says a width of {width} bits")]
    Width {
        /// Index of the block.
        block: usize,
        /// The width byte.
        width: u8,
    },
    /// A shift that is 0, or that leaves no room for the width.
    #[error("block {block} of a packed sum has {width} bits and is shifted by {shift}")]
    Shift {
        /// Index of the block.
        block: usize,
        /// Its width.
        width: u8,
        /// The shift byte.
        shift: u8,
    },
    /// Bytes are missing or left over.
    #[error("a packed sum has {got} bytes instead of {want}")]
    Length {
        /// Number of bytes received.
        got: usize,
        /// Number of bytes that the widths require (or the number of width bytes, if those are missing).
        want: usize,
    },
    /// A value exceeds the agreed limit, or the padding is not zero.
    #[error("value {index} of a packed sum is {value}, beyond {limit}")]
    Range {
        /// Index of the value.
        index: usize,
        /// The value.
        value: i64,
        /// The largest magnitude allowed at that index.
        limit: i64,
    },
}

/// Appends the packing of `values` to `out`.
pub fn pack(values: &[i64], out: &mut Vec<u8>) {
    let (start, mut shifts) = (out.len(), Vec::new());
    out.reserve(values.len() * 5);
    out.resize(start + values.len().div_ceil(BLOCK), 0);
    let (full, rest) = values.as_chunks::<BLOCK>();
    let mut last = [0; BLOCK];
    last[..rest.len()].copy_from_slice(rest);
    let last = (!rest.is_empty()).then_some(&last);
    let mut bytes = [0u8; 8 * BLOCK];
    for (i, block) in full.iter().chain(last).enumerate() {
        let (mut width, shift) = (width(block), shift(block));
        let divided;
        let block = match shift {
            0 => block,
            shift => {
                divided = block.map(|value| value >> shift);
                width -= usize::from(shift);
                shifts.push(shift);
                &divided
            }
        };
        out[start + i] = width as u8 | if shift > 0 { SHIFTED } else { 0 };
        let bytes = &mut bytes[..8 * width];
        PACK[width](block, bytes);
        out.extend_from_slice(bytes);
    }
    out.extend_from_slice(&shifts);
}

/// Adds packed values to `sum` if no magnitude exceeds `limit`; otherwise `sum` stays unchanged.
pub fn add(packed: &[u8], sum: &mut [i64], limit: i64) -> Result<(), PackError> {
    check(packed, sum.len(), limit)?;
    let (full, rest) = sum.as_chunks_mut::<BLOCK>();
    let mut pieces = pieces(packed, full.len() + usize::from(!rest.is_empty()));
    for (block, piece) in full.iter_mut().zip(&mut pieces) {
        match piece.shift {
            0 => ADD[piece.width](piece.bytes, block),
            _ => block.iter_mut().zip(piece.values()).for_each(|(sum, value)| *sum = sum.wrapping_add(value)),
        }
    }
    for piece in pieces {
        rest.iter_mut().zip(piece.values()).for_each(|(sum, value)| *sum = sum.wrapping_add(value));
    }
    Ok(())
}

/// Replaces `sum` by packed values if no magnitude exceeds `limit`; otherwise `sum` stays unchanged. Old contents are
/// not read, so memory need not be cleared before the first of many additions.
pub fn set(packed: &[u8], sum: &mut [i64], limit: i64) -> Result<(), PackError> {
    check(packed, sum.len(), limit)?;
    let count = sum.len().div_ceil(BLOCK);
    for (block, piece) in sum.chunks_mut(BLOCK).zip(pieces(packed, count)) {
        let values = piece.values();
        block.copy_from_slice(&values[..block.len()]);
    }
    Ok(())
}

/// Subtracts what [`add`] added; equal bytes and limits give an equal result.
pub fn subtract(packed: &[u8], sum: &mut [i64], limit: i64) -> Result<(), PackError> {
    check(packed, sum.len(), limit)?;
    let count = sum.len().div_ceil(BLOCK);
    for (block, piece) in sum.chunks_mut(BLOCK).zip(pieces(packed, count)) {
        block.iter_mut().zip(piece.values()).for_each(|(sum, value)| *sum = sum.wrapping_sub(value));
    }
    Ok(())
}

/// Checks that the bytes are a packing of `len` values with magnitudes of at most `limit`. If the widths imply that,
/// which they do except for sums near the end of the range, no value is unpacked.
pub fn check(packed: &[u8], len: usize, limit: i64) -> Result<(), PackError> {
    let count = len.div_ceil(BLOCK);
    let Some((widths, data)) = packed.split_at_checked(count) else {
        return Err(PackError::Length { got: packed.len(), want: count });
    };
    let bits = |byte: u8| usize::from(byte & !SHIFTED);
    if let Some(block) = widths.iter().position(|&byte| bits(byte) > BLOCK) {
        return Err(PackError::Width { block, width: widths[block] & !SHIFTED });
    }
    let words: usize = widths.iter().map(|&byte| bits(byte)).sum();
    let shifted = widths.iter().filter(|&byte| byte & SHIFTED != 0).count();
    if data.len() != 8 * words + shifted {
        return Err(PackError::Length { got: packed.len(), want: count + 8 * words + shifted });
    }
    let limit = limit.max(0);
    for (b, piece) in pieces(packed, count).enumerate() {
        let (width, shift) = (piece.width, usize::from(piece.shift));
        if widths[b] & SHIFTED != 0 && (shift == 0 || width == 0 || width + shift > BLOCK) {
            return Err(PackError::Shift { block: b, width: width as u8, shift: piece.shift });
        }
        let whole = (b + 1) * BLOCK <= len;
        if whole && (width == 0 || 1u64 << (width + shift - 1) <= limit as u64) {
            continue;
        }
        for (index, value) in (b * BLOCK..).zip(piece.values()) {
            let limit = if index < len { limit } else { 0 };
            if value.unsigned_abs() > limit as u64 {
                return Err(PackError::Range { index, value, limit });
            }
        }
    }
    Ok(())
}

/// The number of bits of the widest value, including its sign. Above the last bit, the bits of v and 2v differ first
/// where the sign extension ends.
fn width(block: &Block) -> usize {
    let differ = block.iter().fold(0, |bits, &v| bits | (v ^ (v << 1)));
    64 - differ.leading_zeros() as usize
}

/// The zero bits below every value of a block that is not zero.
fn shift(block: &Block) -> u8 {
    let any = block.iter().fold(0, |any, value| any | value);
    if any == 0 { 0 } else { any.trailing_zeros() as u8 }
}

/// A packed block.
struct Piece<'a> {
    width: usize,
    shift: u8,
    bytes: &'a [u8],
}

impl Piece<'_> {
    fn values(&self) -> Block {
        let mut block = [0; BLOCK];
        ADD[self.width](self.bytes, &mut block);
        if self.shift > 0 {
            block.iter_mut().for_each(|value| *value = value.wrapping_shl(u32::from(self.shift)));
        }
        block
    }
}

/// Every block; the lengths of `packed` must have passed [`check`].
fn pieces(packed: &[u8], count: usize) -> impl Iterator<Item = Piece<'_>> {
    let (widths, mut data) = packed.split_at(count);
    let words: usize = widths.iter().map(|byte| usize::from(byte & !SHIFTED)).sum();
    let mut shifts = data[8 * words..].iter();
    widths.iter().map(move |&byte| {
        let width = usize::from(byte & !SHIFTED);
        let (bytes, rest) = data.split_at(8 * width);
        data = rest;
        let shift = if byte & SHIFTED != 0 { shifts.next().copied().unwrap_or(0) } else { 0 };
        Piece { width, shift, bytes }
    })
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

/// Functions by width.
static PACK: [fn(&Block, &mut [u8]); BLOCK + 1] = all!(packers);
static ADD: [fn(&[u8], &mut Block); BLOCK + 1] = all!(adders);

/// The number that makes every value of `width` bits non-negative.
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

    /// The format bit by bit, as described at the top of this file.
    fn slow(values: &[i64]) -> Vec<u8> {
        let holds = |w: u32, v: i64| match w {
            0 => v == 0,
            64 => true,
            w => (-(1i64 << (w - 1))..1i64 << (w - 1)).contains(&v),
        };
        let shift = |b: &[i64]| (0..64).rev().find(|s| b.iter().all(|v| v % (1i128 << s) as i64 == 0));
        let shifts: Vec<u32> = values.chunks(64).map(|b| shift(b).filter(|s| *s < 63).unwrap_or(0)).collect();
        let values: Vec<i64> =
            values.chunks(64).zip(&shifts).flat_map(|(b, s)| b.iter().map(move |v| v >> s)).collect();
        let widths: Vec<u32> =
            values.chunks(64).map(|b| (0..=64).find(|&w| b.iter().all(|&v| holds(w, v))).unwrap()).collect();
        let flag = |s: u32| if s > 0 { 0x80 } else { 0 };
        let mut out: Vec<u8> = widths.iter().zip(&shifts).map(|(&w, &s)| w as u8 | flag(s)).collect();
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
        out.extend(shifts.iter().filter(|s| **s > 0).map(|s| *s as u8));
        out
    }

    /// Compares packing with the slow version, and addition and subtraction with plain arithmetic.
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
    fn every_width_and_length_is_packed_and_unpacked() {
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
        fn hostile_bytes_are_rejected_or_valid(
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
        fn truncated_and_extended_bytes_are_rejected(len in 1usize..200, extra in any::<u8>()) {
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
    fn limit_is_checked_at_every_position() {
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

    /// Values that are multiples of a power of two take the bits of what they are multiples of.
    #[test]
    fn shifted_blocks_are_small_and_their_shifts_are_checked() {
        let values: Vec<i64> = (0..64).map(|i| (i - 32) << 30).collect();
        let mut packed = Vec::new();
        pack(&values, &mut packed);
        assert_eq!((packed.len(), packed[0]), (1 + 8 * 6 + 1, 6 | SHIFTED));
        for (width, shift) in [(6, 0), (6, 59), (6, 255), (0, 3)] {
            let mut wrong = packed[..1 + 8 * width].to_vec();
            wrong[0] = width as u8 | SHIFTED;
            wrong.push(shift);
            let got = check(&wrong, 64, i64::MAX);
            assert_eq!(got, Err(PackError::Shift { block: 0, width: width as u8, shift }), "{width} {shift}");
        }
        assert!(check(&packed[..packed.len() - 1], 64, i64::MAX).is_err(), "a shift is missing");
        assert_eq!(check(&packed, 64, 32 << 30), Ok(()));
        assert!(matches!(check(&packed, 64, (32 << 30) - 1), Err(PackError::Range { index: 0, .. })));
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
