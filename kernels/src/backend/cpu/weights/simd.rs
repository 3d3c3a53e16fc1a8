//! What [`super::decode`] needs of vectors.

use std::arch::x86_64::*;

/// For each of sixteen bytes the index of its source among the same sixteen; a negative index gives 0.
pub type Shuffle = [i8; 16];

/// The same shuffle of the four bytes of every lane; -1 gives 0.
pub const fn in_lanes(from: [i8; 4]) -> Shuffle {
    let (mut bytes, mut i) = ([-1; 16], 0);
    while i < 16 {
        if from[i % 4] >= 0 {
            bytes[i] = (i / 4 * 4) as i8 + from[i % 4];
        }
        i += 1;
    }
    bytes
}

/// Sixteen levels, and byte i of each in shuffle i.
pub struct Levels {
    /// As values.
    pub values: [f32; 16],
    /// By bytes.
    pub bytes: [Shuffle; 4],
}

impl Levels {
    /// The bytes of these values.
    pub const fn new(values: [f32; 16]) -> Self {
        let (mut bytes, mut i) = ([[0; 16]; 4], 0);
        while i < 64 {
            bytes[i / 16][i % 16] = values[i % 16].to_le_bytes()[i / 16] as i8;
            i += 1;
        }
        Levels { values, bytes }
    }
}

/// Sixteen bytes of a row.
#[inline(always)]
pub unsafe fn row(row: *const u8, at: usize) -> __m128i {
    // SAFETY: the caller's promise, here and below.
    unsafe { _mm_loadu_si128(row.add(at).cast()) }
}

/// Four bytes of each of four rows.
#[inline(always)]
pub unsafe fn words(rows: &[*const u8], at: usize) -> __m128i {
    // SAFETY: as above.
    unsafe { _mm_setr_epi32(word(rows[0], at), word(rows[1], at), word(rows[2], at), word(rows[3], at)) }
}

#[inline(always)]
unsafe fn word(row: *const u8, at: usize) -> i32 {
    // SAFETY: as above.
    unsafe { row.add(at).cast::<i32>().read_unaligned() }
}

/// Vectors of f32 values and of 32-bit words, with one lane per output.
///
/// # Safety
/// All functions: the processor has the instructions.
pub trait Simd: Copy {
    /// Lanes of a vector; 32 is a multiple.
    const LANES: usize;
    /// Whether [`Simd::looked_up`] is as fast as a conversion.
    const LOOKS_UP: bool;
    /// f32 values.
    type Floats: Copy;
    /// Words of four bytes.
    type Words: Copy;

    /// Sixteen bytes of every row, from byte `at` on: lane i of vector j has bytes 4 j .. 4 j + 4 of row i.
    unsafe fn transposed(rows: &[*const u8], at: usize) -> [Self::Words; 4];
    /// Four bytes of every row, from byte `at` on.
    unsafe fn gathered(rows: &[*const u8], at: usize) -> Self::Words;
    /// A vector in memory.
    unsafe fn load(from: *const f32) -> Self::Floats;
    /// Into memory.
    unsafe fn store(to: *mut f32, x: Self::Floats);
    /// Into memory.
    unsafe fn store_words(to: *mut u32, x: Self::Words);

    /// The same word in all lanes.
    unsafe fn word(x: i32) -> Self::Words;
    /// a & b
    unsafe fn and(a: Self::Words, b: Self::Words) -> Self::Words;
    /// a | b
    unsafe fn or(a: Self::Words, b: Self::Words) -> Self::Words;
    /// a - b of every byte
    unsafe fn less_bytes(a: Self::Words, b: Self::Words) -> Self::Words;
    /// The smaller of two bytes without sign.
    unsafe fn least_bytes(a: Self::Words, b: Self::Words) -> Self::Words;
    /// x >> by of every lane
    unsafe fn down(x: Self::Words, by: usize) -> Self::Words;
    /// x << by of every lane
    unsafe fn up(x: Self::Words, by: usize) -> Self::Words;
    /// Bytes in another order.
    unsafe fn shuffled(x: Self::Words, shuffle: &Shuffle) -> Self::Words;

    /// The same value in all lanes.
    unsafe fn float(x: f32) -> Self::Floats;
    /// a * b
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// a * b + c, rounded once
    unsafe fn fma(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// -x
    unsafe fn minus(x: Self::Floats) -> Self::Floats;
    /// [`round`](super::super::runtime::bf16::round) of every lane.
    unsafe fn rounded(x: Self::Floats) -> Self::Floats;
    /// Words as the f32 values that they encode.
    unsafe fn floats(x: Self::Words) -> Self::Floats;
    /// Integers as f32 values.
    unsafe fn from_signed(x: Self::Words) -> Self::Floats;
    /// The lower f16 of every lane.
    unsafe fn halves(x: Self::Words) -> Self::Floats;
    /// One f16.
    unsafe fn half(bits: u16) -> f32;
    /// The levels that the four bytes of every lane, each below 16, select.
    unsafe fn looked_up(codes: Self::Words, levels: &Levels) -> [Self::Floats; 4];
    /// Both rounded to bf16, the even one in the upper half; only where products read pairs.
    unsafe fn pairs(_even: Self::Floats, _odd: Self::Floats) -> Self::Words {
        unreachable!("pairs are for AVX-512 BF16");
    }
}

/// Functions of one expression each, of which every call is unsafe.
macro_rules! ops {
    ($($name:ident($($x:ident: $of:ty),*) -> $result:ty = $is:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name($($x: $of),*) -> $result {
            // SAFETY: the trait's promise.
            unsafe { $is }
        }
    )*};
}
pub(crate) use ops;
