//! Block formats: values of a few bits each, with scales that a block shares. A block type is one row of `table!`: its
//! name, its numbers of values and bytes, and the codes and scales of 32 of its values, a *run*. Every computation from
//! blocks, on any device, uses these rows; no second list exists.
//!
//! The value of a code is exact: every product and sum is rounded once and nothing is fused, in the order of operations
//! of ggml and bitsandbytes, so that the bits are equal to theirs (`tests/golden/gguf` and `tests/golden/nf4` contain
//! random blocks of every type).

mod kquant;
mod layout;
mod mxfp4;
mod nested;
mod nf4;
mod plain;
mod quantise;
mod quantise_k;

pub use layout::{Bits, CodeLayout, Scales, Split};
pub use nested::nest;
pub use nf4::LEVELS as NF4_LEVELS;
pub use quantise::quantise;

use super::dtype::Dtype;
use bytes::Bytes;
use kquant::{Q2K, Q3K, Q4K, Q5K, Q6K};
use mxfp4::Mxfp4;
use nf4::Nf4;
use plain::{Q4V0, Q4V1, Q5V0, Q5V1, Q8V0};
use std::ops::Range;

/// Number of values that are unpacked at a time; every block consists of whole runs.
pub const RUN: usize = 32;

/// A block type, for generic code.
pub trait Packed {
    /// Name in ggml.
    const NAME: &'static str;
    /// Number of values in a block.
    const ELEMENTS: usize;
    /// Number of bytes in a block.
    const BYTES: usize;
    /// The values of the codes if a code is an index; None if a code is its own value. A block with levels is an f32
    /// scale followed by two codes per byte, the first one in the upper bits.
    const LEVELS: Option<[f32; 16]> = None;
    /// Layout of the codes, for kernels that load packed codes.
    const LAYOUT: CodeLayout = CodeLayout::Split;
    /// Layout of the scales in a block.
    const SCALES: Scales = Scales::Computed;
    /// The largest code if a finite scale times a code may be infinite, else 1.
    const LARGEST: f32 = 1.0;
    /// The two parts of a run's codes if [`Packed::LAYOUT`] is [`CodeLayout::Split`].
    fn split(_run: usize) -> Split {
        Split::default()
    }
    /// The codes of values `32 run .. 32 run + 32` of a block.
    fn codes(codes: &mut [i8; RUN], block: &[u8], run: usize);
    /// Scale and offset of the first sixteen values of a run and of the other ones. `half` converts f16 to f32; its
    /// implementation is the caller's choice, its result is fixed.
    fn scales(block: &[u8], run: usize, half: impl Fn(u16) -> f32) -> [Scale; 2];

    /// out = the values of a run: level of the code * scale + offset, each operation rounded once.
    #[inline(always)]
    fn unpack(out: &mut [f32; RUN], block: &[u8], run: usize) {
        let mut codes = [0; RUN];
        Self::codes(&mut codes, block, run);
        let scales = Self::scales(block, run, widen_half);
        for (i, (out, &code)) in out.iter_mut().zip(&codes).enumerate() {
            let level = Self::LEVELS.map_or(f32::from(code), |levels| levels[code as usize & 15]);
            *out = level * scales[i / 16].0 + scales[i / 16].1;
        }
    }
}

/// A scale, and the offset that is added to the product.
pub type Scale = (f32, f32);

/// The neutral offset: x + -0.0 has the bits of x, also if x is 0.
const NOTHING: f32 = -0.0;

/// An operation on a block type that is known at run time: [`Block::visit`].
pub trait Visitor {
    /// The result.
    type Result;
    /// Runs the operation for the type P.
    fn visit<P: Packed>(self) -> Self::Result;
}

macro_rules! table {
    ($($(#[$meta:meta])* $block:ident = $packed:ident),* $(,)?) => {
        /// A block type.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(non_camel_case_types)] // ggml's own names
        pub enum Block { $($(#[$meta])* $block),* }

        impl Block {
            /// All types.
            pub const ALL: &[Block] = &[$(Block::$block),*];

            /// Calls the visitor with the type.
            pub fn visit<V: Visitor>(self, visitor: V) -> V::Result {
                match self { $(Block::$block => visitor.visit::<$packed>()),* }
            }

            /// Name in ggml.
            pub fn name(self) -> &'static str {
                match self { $(Block::$block => $packed::NAME),* }
            }

            /// Number of values in a block.
            pub fn elements(self) -> usize {
                match self { $(Block::$block => $packed::ELEMENTS),* }
            }

            /// Number of bytes in a block.
            pub fn bytes(self) -> usize {
                match self { $(Block::$block => $packed::BYTES),* }
            }
        }
    };
}

table! {
    /// 8 bits, a scale per 32 values.
    Q8_0 = Q8V0,
    /// 4 bits around 8, a scale per 32 values.
    Q4_0 = Q4V0,
    /// 4 bits, a scale and a minimum per 32 values.
    Q4_1 = Q4V1,
    /// 5 bits around 16, a scale per 32 values.
    Q5_0 = Q5V0,
    /// 5 bits, a scale and a minimum per 32 values.
    Q5_1 = Q5V1,
    /// 2 bits, 4-bit scales and minima per 16 values.
    Q2_K = Q2K,
    /// 3 bits, 6-bit scales per 16 values.
    Q3_K = Q3K,
    /// 4 bits, 6-bit scales and minima per 32 values.
    Q4_K = Q4K,
    /// 5 bits, 6-bit scales and minima per 32 values.
    Q5_K = Q5K,
    /// 6 bits, 8-bit scales per 16 values.
    Q6_K = Q6K,
    /// 4 bits that select a quantile of the normal distribution, an f32 scale per 64 values (bitsandbytes).
    NF4 = Nf4,
    /// 4-bit floats, a power of two per 32 values (OCP Microscaling).
    MXFP4 = Mxfp4,
}

impl Block {
    /// The type with this name; case is ignored.
    pub fn named(name: &str) -> Option<Block> {
        Block::ALL.iter().copied().find(|b| b.name().eq_ignore_ascii_case(name))
    }

    /// Number of bytes of `elements` values in whole blocks.
    pub fn size_of(self, elements: usize) -> usize {
        elements / self.elements() * self.bytes()
    }

    /// out = the values of whole blocks. This is the reference for every faster implementation.
    pub fn widen(self, out: &mut [f32], blocks: &[u8]) {
        struct Widen<'a>(&'a mut [f32], &'a [u8]);
        impl Visitor for Widen<'_> {
            type Result = ();
            fn visit<P: Packed>(self) {
                for (out, block) in self.0.chunks_exact_mut(P::ELEMENTS).zip(self.1.chunks_exact(P::BYTES)) {
                    for (run, out) in out.as_chunks_mut::<RUN>().0.iter_mut().enumerate() {
                        P::unpack(out, block, run);
                    }
                }
            }
        }
        self.visit(Widen(out, blocks));
    }
}

impl Block {
    /// Whether all values of whole blocks are finite. Checking the scales is sufficient: the largest f16 times the
    /// largest code is far below the limit of f32, and levels are at most 1. Only scales of MXFP4 are larger
    /// ([`Packed::LARGEST`]): a scale that overflows with the largest code counts as infinite, whether or not a block
    /// contains this code.
    pub fn finite(self, blocks: &[u8]) -> bool {
        struct Finite<'a>(&'a [u8]);
        impl Visitor for Finite<'_> {
            type Result = bool;
            fn visit<P: Packed>(self) -> bool {
                self.0.chunks_exact(P::BYTES).all(|block| {
                    (0..P::ELEMENTS / RUN).fold(true, |all, run| {
                        let finite = |(by, plus): Scale| (by * P::LARGEST).is_finite() & plus.is_finite();
                        let [first, second] = P::scales(block, run, widen_half);
                        all & finite(first) & finite(second)
                    })
                })
            }
        }
        self.visit(Finite(blocks))
    }
}

/// The encoding of a tensor's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Encoding {
    /// One value at a time.
    Plain(Dtype),
    /// In blocks along the innermost dimension.
    Blocks(Block),
}

impl Encoding {
    /// Name in ggml.
    pub fn name(self) -> &'static str {
        match self {
            Encoding::Plain(Dtype::F32) => "F32",
            Encoding::Plain(Dtype::F16) => "F16",
            Encoding::Plain(Dtype::Bf16) => "BF16",
            Encoding::Blocks(block) => block.name(),
        }
    }

    /// Number of values that are encoded together.
    pub fn elements(self) -> usize {
        match self {
            Encoding::Plain(_) => 1,
            Encoding::Blocks(block) => block.elements(),
        }
    }

    /// Number of bytes of [`Encoding::elements`] values.
    pub fn bytes(self) -> usize {
        match self {
            Encoding::Plain(dtype) => dtype.size(),
            Encoding::Blocks(block) => block.bytes(),
        }
    }

    /// Number of bytes of `elements` values.
    pub fn size_of(self, elements: usize) -> usize {
        elements / self.elements() * self.bytes()
    }

    /// The first values of `bytes`, widened to f32: the reference for devices.
    pub fn first(self, bytes: &[u8], numbers: usize) -> Vec<f32> {
        let bytes = &bytes[..self.size_of(numbers)];
        match self {
            Encoding::Plain(dtype) => dtype.widen(bytes),
            Encoding::Blocks(block) => {
                let mut values = vec![0.0; numbers];
                block.widen(&mut values, bytes);
                values
            }
        }
    }
}

/// A matrix in blocks, as stored in a file: rows of whole blocks, one after the other. A clone shares the bytes.
#[derive(Debug, Clone)]
pub struct Blocks {
    /// Number of outputs.
    pub rows: usize,
    /// Number of inputs: a multiple of the block's elements.
    pub cols: usize,
    /// Block type.
    pub block: Block,
    /// The `rows * cols` values.
    pub bytes: Bytes,
}

impl Blocks {
    /// A matrix, or None unless the bytes are whole blocks of `rows * cols` values and every row has whole blocks.
    pub fn new((rows, cols): (usize, usize), block: Block, bytes: Bytes) -> Option<Blocks> {
        let whole = cols.is_multiple_of(block.elements());
        let size = rows.checked_mul(cols).map(|n| block.size_of(n));
        (whole && size == Some(bytes.len())).then_some(Blocks { rows, cols, block, bytes })
    }

    /// The matrix whose rows are those of `parts`, one part after the other. A single part keeps its bytes. `None` if
    /// there are no parts, or if their columns or block types differ.
    pub fn joined(mut parts: Vec<Blocks>) -> Option<Blocks> {
        if parts.len() < 2 {
            return parts.pop();
        }
        let Blocks { cols, block, .. } = parts[0];
        if parts.iter().any(|part| (part.cols, part.block) != (cols, block)) {
            return None;
        }
        let bytes = parts.iter().map(|part| &part.bytes[..]).collect::<Vec<_>>().concat();
        Blocks::new((parts.iter().map(|part| part.rows).sum(), cols), block, bytes.into())
    }

    /// Some rows that follow each other, without a copy. Panics if there are fewer.
    pub fn range(&self, rows: Range<usize>) -> Blocks {
        let size = self.block.size_of(self.cols);
        let bytes = self.bytes.slice(rows.start * size..rows.end * size);
        Blocks { rows: rows.len(), bytes, ..*self }
    }

    /// The first `rows` rows, or all if there are fewer, widened to f32.
    pub fn first(&self, rows: usize) -> Vec<f32> {
        Encoding::Blocks(self.block).first(&self.bytes, rows.min(self.rows) * self.cols)
    }

    /// The blocks of row `r`.
    pub fn row(&self, r: usize) -> &[u8] {
        let size = self.block.size_of(self.cols);
        &self.bytes[r * size..][..size]
    }
}

/// The bits of the f16 at byte `at`.
#[inline(always)]
fn bits(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

/// The f16 at byte `at`, widened to f32.
fn half_at(b: &[u8], at: usize) -> f32 {
    widen_half(bits(b, at))
}

/// Writes `x` as f16 at byte `at`.
fn put_half(b: &mut [u8], at: usize, x: f32) {
    b[at..at + 2].copy_from_slice(&half::f16::from_f32(x).to_le_bytes());
}

/// Widens an f16 to f32. The code does not use the `half` crate, which checks the processor on each call, and does not
/// compute with subnormal f32 values, which are slow: subnormal f16 values are normal in f32.
#[inline(always)]
pub fn widen_half(bits: u16) -> f32 {
    const LEAST: u32 = 113 << 23;
    let bits = u32::from(bits);
    let rest = (bits & 0x7fff) << 13;
    let small = (f32::from_bits(LEAST + rest) - f32::from_bits(LEAST)).to_bits();
    let size = match rest >> 23 {
        0 => small,
        31 => rest | 0x7f80_0000,
        _ => rest + (112 << 23),
    };
    f32::from_bits((bits & 0x8000) << 16 | size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_types_have_whole_runs_and_unique_names() {
        for &block in Block::ALL {
            assert_eq!(block.elements() % RUN, 0, "{block:?}");
            assert_eq!(format!("{block:?}"), block.name());
            assert_eq!(Block::named(&block.name().to_lowercase()), Some(block));
        }
        assert_eq!(Block::named("IQ4_NL"), None);
    }

    #[test]
    fn block_is_finite_if_all_its_values_are() {
        for &block in Block::ALL {
            for seed in 0..2000usize {
                let byte = |i: usize| (seed * 7919 + i * 104_729 + (seed * i) % 251) >> 3;
                let mut bytes: Vec<u8> = (0..block.bytes()).map(|i| byte(i) as u8 & 0x7b).collect();
                // Some blocks have infinities and NaN in the scales.
                let size = bytes.len();
                let at = [0, 1, 2, 3, size - 4, size - 3, size - 2, size - 1][seed % 8];
                bytes[at] = [0x7c, 0xff, 0x7f, 0x80, 0x00][seed / 8 % 5];
                let mut numbers = vec![0.0; block.elements()];
                block.widen(&mut numbers, &bytes);
                let want = numbers.iter().all(|x| x.is_finite());
                assert_eq!(block.finite(&bytes), want, "{block:?} {seed}");
            }
        }
    }

    #[test]
    fn every_f16_is_widened_exactly() {
        for bits in 0..=u16::MAX {
            let (got, want) = (widen_half(bits), half::f16::from_bits(bits).to_f32());
            assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{bits:04x}");
        }
    }

    #[test]
    fn incomplete_blocks_are_rejected() {
        let bytes = |n| Bytes::from(vec![0; n]);
        assert!(Blocks::new((3, 64), Block::Q8_0, bytes(3 * 2 * 34)).is_some());
        for (shape, n) in [((3, 64), 3 * 2 * 34 - 1), ((3, 48), 3 * 51), ((usize::MAX, 64), 0)] {
            assert!(Blocks::new(shape, Block::Q8_0, bytes(n)).is_none(), "{shape:?}");
        }
    }
}
