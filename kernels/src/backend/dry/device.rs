//! The memory of a device without its data: how its pool rounds and reuses buffers, and what its ops take inside. Each
//! backend describes its own device beside its ops (`dry.rs` in its folder), so that a change there is seen there.

use super::Weight;
use crate::backend::{Heads, TokenRows};
use crate::numeric::block::Encoding;

/// The counted memory of one device.
pub trait Device {
    /// Takes a buffer of `words` words of 32 bits. Returns its size, in a unit of this device.
    fn take(&mut self, words: usize) -> usize;
    /// Takes a buffer of that size back.
    fn give(&mut self, size: usize);
    /// The most bytes in use at once since the last call.
    fn peak(&mut self) -> u64;
    /// Bytes in use.
    fn live(&self) -> u64;
    /// Bytes of a buffer of that size.
    fn bytes(&self, size: usize) -> u64 {
        size as u64
    }
    /// Bytes of a frozen matrix of that many numbers.
    fn matrix_bytes(&self, encoding: Encoding, numbers: usize) -> usize;
    /// Whether rows of that many numbers are kept in 16 bits (see [`crate::backend::Backend::short`]).
    fn shortens(&self, cols: usize) -> bool {
        let _ = cols;
        false
    }
    /// Words of a microbatch's integers.
    fn tokens(&mut self, rows: TokenRows) -> usize {
        let _ = rows;
        0
    }
    /// Words of plain integers.
    fn ids(&self, count: usize) -> usize {
        let _ = count;
        0
    }
    /// Most rows of logits at once.
    fn chunk(&self, vocab: usize) -> usize {
        let _ = vocab;
        usize::MAX
    }
    /// The same memory, to return to.
    fn copied(&self) -> Box<dyn Device>;
    /// Takes and gives back what the op takes inside. False where a fused op is a composition of others.
    fn inside(&mut self, op: Op) -> bool;
}

/// A matrix in memory.
#[derive(Debug, Clone, Copy)]
pub struct Matrix {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Whether it is kept in 16 bits.
    pub short: bool,
}

impl Matrix {
    /// Number of values.
    pub fn values(&self) -> usize {
        self.rows * self.cols
    }
}

/// What an adapter adds to a product, and its gradients: T rows.
#[derive(Debug, Clone, Copy)]
pub struct Low {
    /// The input as the adapter reads it.
    pub x: Matrix,
    /// R.
    pub rank: usize,
    /// Factor of its product.
    pub scale: f32,
    /// Whether the adapter reads another input than the frozen product.
    pub masked: bool,
}

/// An op that may take memory inside.
pub enum Op<'a> {
    /// A copy to the host, or from there.
    Copy(Matrix),
    /// A mask on x.
    Dropout(Matrix),
    /// out = a^T b: the output, and the rows of both.
    Columns(Matrix, usize),
    /// out = x w^T, or dx = dy w.
    Frozen(Matrix, Matrix, &'a Weight, Way),
    /// h = x a^T.
    Down(Matrix),
    /// The same with the adapter's part.
    Adapted(Matrix, Matrix, &'a Weight, Low),
    /// The gradients of an adapter, given dy.
    AdapterGrad(Matrix, Low),
    /// The same, and dx.
    AdaptedGrad(Matrix, Matrix, &'a Weight, Low),
    /// Attention; the number of keys, that of each row rounded up to an even one.
    Attention(Heads, usize),
    /// Its gradient; q, k, v and the output.
    AttentionGrad(Heads, usize, [Matrix; 4]),
    /// A delta rule or its gradient, whose factors of updates have this shape.
    DeltaRule(Matrix),
    /// Sums of rows.
    Sum,
    /// Losses of x over a vocabulary, and columns of their gradient: 0 for none.
    HeadLoss(Matrix, usize, usize),
}

/// Which of both products of a frozen matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// x w^T.
    Forward,
    /// dy w.
    Backward,
}
