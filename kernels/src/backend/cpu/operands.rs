//! What products are made of: factors, outputs, the parts of a tile, and the context in which they are computed.

use super::runtime::isa::Isa;
use super::runtime::threads::{Shared, Threads};
use crate::backend::Write;
use crate::numeric::block::Encoding;
use crate::numeric::dtype::Dtype;

/// What the implementation of a verb needs to know.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// Who works.
    pub threads: &'a Threads,
    /// With which instructions.
    pub isa: Isa,
    /// Which code multiplies.
    pub products: Products,
    /// What factors are rounded to.
    pub precision: Precision,
}

/// Which code multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Products {
    /// Tiles.
    Tiles,
    /// Plain loops, the reference.
    Plain,
}

/// What the factors of a frozen product are rounded to, and which kernel multiplies them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// Nothing is rounded.
    F32,
    /// bf16, by the instruction for it.
    Bf16Dot,
    /// bf16 numbers held as f32, by the f32 kernel: the same bits.
    Bf16Widened,
}

impl Precision {
    /// Bytes of a frozen number.
    pub fn weight_bytes(self, dtype: Dtype) -> usize {
        if self == Precision::F32 { dtype.size() } else { Dtype::Bf16.size() }
    }

    /// Bytes of a frozen matrix of that many numbers.
    pub fn matrix_bytes(self, encoding: Encoding, numbers: usize) -> usize {
        match encoding {
            Encoding::Plain(dtype) => numbers * self.weight_bytes(dtype),
            blocks => blocks.size_of(numbers),
        }
    }
}

/// A factor whose element (i, j) is `data[i * row + j * col]`.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a> {
    /// Its elements, from the first.
    pub data: &'a [f32],
    /// Distance between rows.
    pub row: usize,
    /// Distance between columns.
    pub col: usize,
}

impl<'a> Strided<'a> {
    /// Row-major, `stride` between rows.
    pub fn rows(data: &'a [f32], stride: usize) -> Self {
        Strided { data, row: stride, col: 1 }
    }

    /// The same elements with rows and columns exchanged.
    pub fn transposed(self) -> Self {
        Strided { row: self.col, col: self.row, ..self }
    }

    /// From element (i, j) on.
    pub fn from(self, i: usize, j: usize) -> Self {
        let at = (i * self.row + j * self.col).min(self.data.len());
        Strided { data: &self.data[at..], ..self }
    }

    /// Whether an m x n matrix of these strides fits inside the data.
    pub fn holds(&self, m: usize, n: usize) -> bool {
        m == 0 || n == 0 || (m - 1) * self.row + (n - 1) * self.col < self.data.len()
    }
}

/// Sizes of a product: out is [m, n], the inner dimension k.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// Rows of out.
    pub m: usize,
    /// Columns of out.
    pub n: usize,
    /// Inner dimension.
    pub k: usize,
}

/// What to multiply.
#[derive(Debug, Clone, Copy)]
pub struct Factors<'a> {
    /// [m, k]
    pub a: Strided<'a>,
    /// [k, n]
    pub b: Strided<'a>,
    /// Multiplies the product.
    pub scale: f32,
}

impl Factors<'_> {
    /// Panics where a factor is smaller than the product says.
    pub fn check(&self, s: Sizes) {
        assert!(self.a.holds(s.m, s.k) && self.b.holds(s.k, s.n), "factors are as large as the product says");
    }
}

/// Where a product goes: rows of `stride` words.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    /// The output.
    pub out: &'a Shared<'a>,
    /// Its first element there.
    pub at: usize,
    /// Distance between rows.
    pub stride: usize,
    /// Set or add.
    pub write: Write,
    /// Its words are pairs of bf16 numbers: for tiles of pairs, which set them.
    pub short: bool,
}

impl<'a> Target<'a> {
    /// f32 values, row-major.
    pub fn rows(out: &'a Shared<'a>, stride: usize, write: Write) -> Self {
        Target { out, at: 0, stride, write, short: false }
    }

    /// From element (i, j) on; of pairs, j is even.
    pub fn from(self, i: usize, j: usize) -> Self {
        let j = if self.short { j / 2 } else { j };
        Target { at: self.at + i * self.stride + j, ..self }
    }

    /// The pointer, once it is known that m x n outputs fit.
    pub fn pointer(&self, m: usize, n: usize) -> *mut f32 {
        let n = if self.short { n.div_ceil(2) } else { n };
        assert!(self.at + (m - 1) * self.stride + n <= self.out.len(), "the tile is inside the output");
        self.out.pointer(self.at)
    }
}

/// x [rows, cols].
#[derive(Clone, Copy)]
pub struct Left<'a> {
    /// T
    pub rows: usize,
    /// Inner dimension.
    pub cols: usize,
    /// Its numbers.
    pub side: Side<'a>,
}

/// Layout of the numbers.
#[derive(Clone, Copy)]
pub enum Side<'a> {
    /// One by one.
    Floats(Strided<'a>),
    /// In pairs: words, and how many there are in a row.
    Pairs(&'a [u32], usize),
}

impl<'a> Left<'a> {
    /// f32 numbers, row-major.
    pub fn floats(values: &'a [f32], cols: usize) -> Self {
        let side = Side::Floats(Strided::rows(values, cols));
        Left { rows: values.len() / cols.max(1), cols, side }
    }

    /// Pairs, row-major.
    pub fn pairs(pairs: &'a [u32], (rows, cols): (usize, usize)) -> Self {
        Left { rows, cols, side: Side::Pairs(pairs, cols.div_ceil(2)) }
    }

    /// Whether that many rows and terms are there.
    pub fn holds(&self, rows: usize, k: usize) -> bool {
        match self.side {
            Side::Floats(f) => f.holds(rows, k),
            Side::Pairs(words, stride) => {
                rows == 0 || k == 0 || (rows - 1) * stride + k.div_ceil(2) <= words.len()
            }
        }
    }

    /// Its numbers one by one, which is what they are wherever plain loops multiply.
    pub fn numbers(self) -> Strided<'a> {
        match self.side {
            Side::Floats(numbers) => numbers,
            Side::Pairs(..) => unreachable!("pairs are for tiles"),
        }
    }

    /// From row `row` and term `k` on; k is even.
    pub fn from(self, row: usize, k: usize) -> Self {
        let side = match self.side {
            Side::Floats(f) => Side::Floats(f.from(row, k)),
            Side::Pairs(words, stride) => {
                Side::Pairs(&words[(row * stride + k / 2).min(words.len())..], stride)
            }
        };
        Left { rows: self.rows - row, cols: self.cols - k, side }
    }
}

/// Most rows of a tile.
pub const ROWS: usize = 12;
/// Columns of a tile and of a panel: two vectors.
pub const COLS: usize = 32;

/// Sum over k of a[i * row + k * col] * b[k * stride + j].
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// Terms.
    pub k: usize,
    /// Left factor, read one value at a time.
    pub a: *const f32,
    /// Distance between rows of a.
    pub row: usize,
    /// Distance between columns of a.
    pub col: usize,
    /// Right factor: COLS values in a row, or as many as the tile is wide (see `tile::reads_columns_alone`).
    pub b: *const f32,
    /// Distance between rows of b.
    pub stride: usize,
}

/// Where a tile goes.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// Its first element.
    pub at: *mut f32,
    /// Distance between rows.
    pub stride: usize,
    /// Rows, at most ROWS.
    pub rows: usize,
    /// Columns, at most COLS.
    pub cols: usize,
    /// Multiplies the sum.
    pub scale: f32,
    /// Whether what stands there is added.
    pub add: bool,
    /// Pairs of bf16 numbers go there, in words of which `stride` counts; `add` is not for them.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub short: bool,
}

/// Sum over pairs k of a[i * row + k * col] . b[k * 32 + j].
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub struct Pairs {
    /// Pairs.
    pub k: usize,
    /// Left factor, read one pair at a time.
    pub a: *const u32,
    /// Distance between rows of a.
    pub row: usize,
    /// Distance between columns of a.
    pub col: usize,
    /// Right factor, rows of 32 pairs.
    pub b: *const u32,
}

impl Place {
    /// Asks for `MR` rows of `vectors` cache lines of the output: it is not needed before all terms have been added, and
    /// then at once.
    #[inline(always)]
    pub fn near<const MR: usize>(&self, vectors: usize) {
        #[cfg(target_arch = "x86_64")]
        for i in 0..MR {
            for j in 0..vectors {
                use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
                let at = self.at.wrapping_add(i * self.stride + 16 * j);
                // SAFETY: a hint, which no address can make fault.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
            }
        }
        let _ = vectors;
    }
}
