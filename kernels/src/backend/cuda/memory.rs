//! Contents of device memory: frozen matrices and the integers of a microbatch.

pub use super::pool::Memory;
use crate::numeric::block::Block;

/// The storage format of a frozen matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stored {
    /// 4 bytes.
    F32,
    /// 2 bytes.
    Bf16,
    /// 2 bytes.
    F16,
    /// As in the file.
    Blocks(Block),
}

impl Stored {
    /// The part of an entry's name for kernels that read this format, or the format it is widened to.
    pub fn name(self) -> &'static str {
        match self {
            Stored::F32 | Stored::Blocks(_) => "f32",
            Stored::Bf16 => "bf16",
            Stored::F16 => "f16",
        }
    }
}

/// A frozen matrix [N, K], rows `stride` numbers apart.
#[derive(Debug)]
pub struct Weight {
    pub(super) memory: Memory,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) stride: usize,
    pub(super) stored: Stored,
}

/// The integers of a microbatch, concatenated in one buffer: for every token its id, its position, its row of the
/// microbatch and its place in that row; then blocks of queries for attention.
#[derive(Debug)]
pub struct Tokens {
    pub(super) memory: Memory,
    /// T
    pub(super) count: usize,
    /// Rows of the microbatch.
    pub(super) rows: usize,
    /// For each [`Width`] on this device: where its list of blocks begins, and how many blocks it has.
    pub(super) lists: [(usize, usize); 3],
    /// Where the bounds of the rows begin.
    pub(super) bounds: usize,
    /// Largest id and largest position, which tables must hold.
    pub(super) largest: (u32, u32),
}

/// Tokens of an attention block; kernels with smaller tiles split it.
pub(super) const BLOCK: usize = 32;

/// The kernels that a list of blocks serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Width {
    /// [`BLOCK`] tokens, for the baseline's attention.
    Baseline,
    /// 128, for attention on tensor cores.
    Queries,
    /// 64, for its gradient.
    Gradient,
}

impl Width {
    /// In the order of the lists of a microbatch.
    pub const ALL: [Width; 3] = [Width::Baseline, Width::Queries, Width::Gradient];

    /// Tokens of a block.
    pub fn tokens(self) -> usize {
        match self {
            Width::Baseline => BLOCK,
            Width::Queries => 128,
            Width::Gradient => 64,
        }
    }
}

impl Tokens {
    pub(super) fn ids(&self) -> u64 {
        self.memory.at(0)
    }
    pub(super) fn positions(&self) -> u64 {
        self.memory.at(self.count)
    }
    pub(super) fn row_of(&self) -> u64 {
        self.memory.at(2 * self.count)
    }
    pub(super) fn place_in_row(&self) -> u64 {
        self.memory.at(3 * self.count)
    }
    /// Where rows begin, then T.
    pub(super) fn bounds(&self) -> u64 {
        self.memory.at(self.bounds)
    }
    /// Address and length of the list of these blocks.
    pub(super) fn blocks(&self, width: Width) -> (u64, usize) {
        let (at, blocks) = self.lists[width as usize];
        (self.memory.at(at), blocks)
    }
}

/// Blocks (first token, tokens, first of its row, end of its row) of `width` tokens that cover rows of tokens.
pub(super) fn blocks(bounds: &[u32], width: usize) -> Vec<u32> {
    let of_row = |w: &[u32]| {
        let (from, to) = (w[0], w[1]);
        (from..to).step_by(width).flat_map(move |i| [i, (to - i).min(width as u32), from, to])
    };
    bounds.windows(2).flat_map(of_row).collect()
}

/// Integers on the device.
#[derive(Debug)]
pub struct Ids {
    pub(super) memory: Memory,
    pub(super) count: usize,
    pub(super) largest: u32,
}
