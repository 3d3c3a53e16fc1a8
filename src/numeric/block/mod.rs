//! Numbers in blocks: a few bits each, with scales that a block shares. A type of block is one row of
//! `table!`: its name, how many numbers and bytes it has, and the codes and the scales of 32 of its numbers, a *run*. Whoever
//! computes from blocks, on whatever device, computes from these rows; there is no second list.
//!
//! What a number of a block is worth is exact: every product and sum is rounded once and nothing is fused, in
//! ggml's and bitsandbytes' own order of operations, so that the bits are theirs (`tests/golden/gguf` and
//! `tests/golden/nf4` hold random blocks of every type).

mod kquant;
mod lie;
mod nested;
mod nf4;
mod plain;
mod quantise;
mod quantise_k;

pub use lie::{Bits, Lie, Scales, Split};
pub use nested::nest;
pub use nf4::LEVELS as NF4_LEVELS;
pub use quantise::quantise;

use super::dtype::Dtype;
use bytes::Bytes;
use kquant::{Q2K, Q3K, Q4K, Q5K, Q6K};
use nf4::Nf4;
use plain::{Q4V0, Q4V1, Q5V0, Q5V1, Q8V0};

/// Numbers that are unpacked at a time; every block is made of whole runs.
pub const RUN: usize = 32;

/// A type of block, for code that is made for each one.
pub trait Packed {
    /// As ggml names it.
    const NAME: &'static str;
    /// Numbers in a block.
    const ELEMENTS: usize;
    /// Bytes of a block.
    const BYTES: usize;
    /// Where a code names a level, what the levels are; elsewhere a code is its own level. Such a block is an f32
    /// scale and then two codes in each byte, the first in the upper bits.
    const LEVELS: Option<[f32; 16]> = None;
    /// How codes lie, for those who take them as they lie.
    const LIE: Lie = Lie::Split;
    /// Where the scales of a whole block stand as they are, at its beginning.
    const SCALES: Scales = Scales::Computed;
    /// Where [`Packed::LIE`] is [`Lie::Split`], how a run's codes are put together.
    fn split(_run: usize) -> Split {
        Split::default()
    }
    /// The codes of numbers `32 run .. 32 run + 32` of a block.
    fn codes(codes: &mut [i8; RUN], block: &[u8], run: usize);
    /// What they are multiplied by and what is added then, the first sixteen and the other ones. `half` widens a
    /// number of half precision: what does it is the caller's choice, what it gives is not.
    fn scales(block: &[u8], run: usize, half: impl Fn(u16) -> f32) -> [Scale; 2];

    /// out = the numbers of a run: level of the code * scale + what is added, each rounded once.
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

/// A scale, and what is added to the product.
pub type Scale = (f32, f32);

/// Added to any number it gives that number, with its sign even where that is 0.
const NOTHING: f32 = -0.0;

/// What is done with a type of block that is only known at run time: [`Block::visit`].
pub trait Visitor {
    /// What comes of it.
    type Result;
    /// For the type P.
    fn visit<P: Packed>(self) -> Self::Result;
}

macro_rules! table {
    ($($(#[$meta:meta])* $block:ident = $packed:ident),* $(,)?) => {
        /// A type of block.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(non_camel_case_types)] // ggml's own names
        pub enum Block { $($(#[$meta])* $block),* }

        impl Block {
            /// Every type.
            pub const ALL: &[Block] = &[$(Block::$block),*];

            /// Calls the visitor with the type.
            pub fn visit<V: Visitor>(self, visitor: V) -> V::Result {
                match self { $(Block::$block => visitor.visit::<$packed>()),* }
            }

            /// As ggml names it.
            pub fn name(self) -> &'static str {
                match self { $(Block::$block => $packed::NAME),* }
            }

            /// Numbers in a block.
            pub fn elements(self) -> usize {
                match self { $(Block::$block => $packed::ELEMENTS),* }
            }

            /// Bytes of a block.
            pub fn bytes(self) -> usize {
                match self { $(Block::$block => $packed::BYTES),* }
            }
        }
    };
}

table! {
    /// 8 bits, a scale for 32.
    Q8_0 = Q8V0,
    /// 4 bits around 8, a scale for 32.
    Q4_0 = Q4V0,
    /// 4 bits, a scale and a minimum for 32.
    Q4_1 = Q4V1,
    /// 5 bits around 16, a scale for 32.
    Q5_0 = Q5V0,
    /// 5 bits, a scale and a minimum for 32.
    Q5_1 = Q5V1,
    /// 2 bits, scales and minima of 4 bits for 16.
    Q2_K = Q2K,
    /// 3 bits, scales of 6 bits for 16.
    Q3_K = Q3K,
    /// 4 bits, scales and minima of 6 bits for 32.
    Q4_K = Q4K,
    /// 5 bits, scales and minima of 6 bits for 32.
    Q5_K = Q5K,
    /// 6 bits, scales of 8 bits for 16.
    Q6_K = Q6K,
    /// 4 bits that name a quantile of the normal distribution, an f32 scale for 64 (bitsandbytes').
    NF4 = Nf4,
}

impl Block {
    /// The type of that name, in any case.
    pub fn named(name: &str) -> Option<Block> {
        Block::ALL.iter().copied().find(|b| b.name().eq_ignore_ascii_case(name))
    }

    /// Bytes of that many numbers in whole blocks.
    pub fn size_of(self, elements: usize) -> usize {
        elements / self.elements() * self.bytes()
    }

    /// out = the numbers of whole blocks: the slow way, which everything faster is compared with.
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
    /// Whether all numbers of whole blocks are finite: they are where their scales are, because the largest half times
    /// the largest code is far from the end of f32, and levels are at most 1.
    pub fn finite(self, blocks: &[u8]) -> bool {
        struct Finite<'a>(&'a [u8]);
        impl Visitor for Finite<'_> {
            type Result = bool;
            fn visit<P: Packed>(self) -> bool {
                self.0.chunks_exact(P::BYTES).all(|block| {
                    (0..P::ELEMENTS / RUN).fold(true, |all, run| {
                        let finite = |(by, plus): Scale| by.is_finite() & plus.is_finite();
                        let [first, second] = P::scales(block, run, widen_half);
                        all & finite(first) & finite(second)
                    })
                })
            }
        }
        self.visit(Finite(blocks))
    }
}

/// How the numbers of a tensor are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Encoding {
    /// One by one.
    Plain(Dtype),
    /// In blocks along the innermost dimension.
    Blocks(Block),
}

impl Encoding {
    /// As ggml names it.
    pub fn name(self) -> &'static str {
        match self {
            Encoding::Plain(Dtype::F32) => "F32",
            Encoding::Plain(Dtype::F16) => "F16",
            Encoding::Plain(Dtype::Bf16) => "BF16",
            Encoding::Blocks(block) => block.name(),
        }
    }

    /// Numbers that are encoded together.
    pub fn elements(self) -> usize {
        match self {
            Encoding::Plain(_) => 1,
            Encoding::Blocks(block) => block.elements(),
        }
    }

    /// Bytes of as many.
    pub fn bytes(self) -> usize {
        match self {
            Encoding::Plain(dtype) => dtype.size(),
            Encoding::Blocks(block) => block.bytes(),
        }
    }

    /// Bytes of that many numbers.
    pub fn size_of(self, elements: usize) -> usize {
        elements / self.elements() * self.bytes()
    }

    /// The first numbers of `bytes`, widened: what a device is compared with.
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

/// A matrix in blocks, as a file has it: rows of whole blocks, one after the other. A copy shares the bytes.
#[derive(Debug, Clone)]
pub struct Blocks {
    /// Outputs.
    pub rows: usize,
    /// Inputs: a multiple of the block's elements.
    pub cols: usize,
    /// The type.
    pub block: Block,
    /// `rows * cols` numbers.
    pub bytes: Bytes,
}

impl Blocks {
    /// None where the bytes are not that many whole blocks in a row.
    pub fn new((rows, cols): (usize, usize), block: Block, bytes: Bytes) -> Option<Blocks> {
        let whole = cols.is_multiple_of(block.elements());
        let size = rows.checked_mul(cols).map(|n| block.size_of(n));
        (whole && size == Some(bytes.len())).then_some(Blocks { rows, cols, block, bytes })
    }

    /// The first rows, or all where there are fewer, widened.
    pub fn first(&self, rows: usize) -> Vec<f32> {
        Encoding::Blocks(self.block).first(&self.bytes, rows.min(self.rows) * self.cols)
    }

    /// The blocks of row `r`.
    pub fn row(&self, r: usize) -> &[u8] {
        let size = self.block.size_of(self.cols);
        &self.bytes[r * size..][..size]
    }
}

/// The half-precision number at byte `at`, as it lies there.
#[inline(always)]
fn bits(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

/// The half-precision number at byte `at`.
fn half_at(b: &[u8], at: usize) -> f32 {
    widen_half(bits(b, at))
}

/// A half-precision number. Spelled out, because the crate asks the processor each time, and without numbers that are
/// not normal, which processors are slow with: those of a half are normal in f32.
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
    fn rows_of_the_table_are_whole_runs_with_their_own_names() {
        for &block in Block::ALL {
            assert_eq!(block.elements() % RUN, 0, "{block:?}");
            assert_eq!(format!("{block:?}"), block.name());
            assert_eq!(Block::named(&block.name().to_lowercase()), Some(block));
        }
        assert_eq!(Block::named("IQ4_NL"), None);
    }

    #[test]
    fn block_is_finite_iff_every_number_is() {
        for &block in Block::ALL {
            for seed in 0..2000usize {
                let byte = |i: usize| (seed * 7919 + i * 104_729 + (seed * i) % 251) >> 3;
                let mut bytes: Vec<u8> = (0..block.bytes()).map(|i| byte(i) as u8 & 0x7b).collect();
                // Infinities and NaN where scales are, in some of them.
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
    fn partial_blocks_are_refused() {
        let bytes = |n| Bytes::from(vec![0; n]);
        assert!(Blocks::new((3, 64), Block::Q8_0, bytes(3 * 2 * 34)).is_some());
        for (shape, n) in [((3, 64), 3 * 2 * 34 - 1), ((3, 48), 3 * 51), ((usize::MAX, 64), 0)] {
            assert!(Blocks::new(shape, Block::Q8_0, bytes(n)).is_none(), "{shape:?}");
        }
    }
}
