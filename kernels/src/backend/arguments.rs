//! What verbs are given besides views: factors, shapes, integers of a microbatch, and what a forward verb left for its
//! gradient.

use super::{View, ViewMut};
use crate::numeric::dtype::Dtype;

/// What happens to what stood in the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Write {
    /// `=`: whatever stood there (NaN included) is overwritten.
    Set,
    /// `+=`
    Add,
}

/// Which operand of a product is transposed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transpose {
    /// `a b`: [M, K] x [K, N]
    Neither,
    /// `a bᵀ`: [M, K] x [N, K]
    Right,
    /// `aᵀ b`: [K, M] x [K, N]
    Left,
}

/// The factors of a product, `scale * op(a) op(b)`.
#[derive(Debug)]
pub struct Product<'a, M> {
    /// Left factor.
    pub a: View<'a, M>,
    /// Right factor.
    pub b: View<'a, M>,
    /// Which one is transposed.
    pub transpose: Transpose,
    /// Multiplies the product.
    pub scale: f32,
}

impl<M> Product<'_, M> {
    /// How many terms its sums have.
    pub fn inner(&self) -> usize {
        if self.transpose == Transpose::Left { self.a.rows } else { self.a.cols }
    }
}

/// The heads of an attention: H query heads of size D share G key/value heads, H a multiple of G.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Query heads H.
    pub query: usize,
    /// Key/value heads G.
    pub kv: usize,
    /// Head size D; scores are scaled by 1/sqrt(D).
    pub size: usize,
    /// W, the number of keys that a query sees, its own included: query i sees keys j <= i of its row with i - j < W. At
    /// least 1; `None` for all.
    pub window: Option<usize>,
}

impl Heads {
    /// Heads without a window.
    pub const fn new(query: usize, kv: usize, size: usize) -> Heads {
        Heads { query, kv, size, window: None }
    }
}

/// A frozen matrix as stored in a file: row-major [rows, cols]; `bytes` need not be aligned.
#[derive(Debug, Clone, Copy)]
pub struct Frozen<'a> {
    /// N: outputs of a linear layer, or the vocabulary of an embedding.
    pub rows: usize,
    /// K: inputs.
    pub cols: usize,
    /// Encoding of `bytes`.
    pub dtype: Dtype,
    /// rows * cols numbers.
    pub bytes: &'a [u8],
}

/// The integers of one microbatch: packed rows, each of which sees only itself.
#[derive(Debug, Clone, Copy)]
pub struct TokenRows<'a> {
    /// Token ids `[T]`.
    pub ids: &'a [u32],
    /// Where rows begin, then T: row r is `ids[bounds[r]..bounds[r + 1]]`. First 0, ascending.
    pub bounds: &'a [u32],
    /// Position of the first token of every row: 0 but for decoding with cached keys.
    pub past: u32,
    /// Rows of at most this many tokens, past ones included, are rotated by the rows of a table from 0 on, longer ones by
    /// those from this one on. `u32::MAX` where rows of any length have the same angles. No model with convolutions,
    /// for which positions are places in a row, has others.
    pub short: u32,
}

impl TokenRows<'_> {
    /// The row of a table of angles for each token; without longer rows its position.
    pub fn positions(&self) -> impl Iterator<Item = u32> {
        let (past, short) = (self.past, self.short);
        self.bounds.windows(2).flat_map(move |w| {
            let tokens = w[1] - w[0];
            let first = if past + tokens > short { short } else { 0 };
            (0..tokens).map(move |i| first + past + i)
        })
    }
}

/// What keys a dropout mask. The bit of (token, channel) is
/// `mix(hash([seed, step, row id, module, token in row]), channel) >= threshold`.
#[derive(Debug, Clone, Copy)]
pub struct DropoutKey<'a> {
    /// The run's seed.
    pub seed: u64,
    /// Optimizer step, from 1.
    pub step: u64,
    /// Id of each row of the microbatch, in the order of its bounds.
    pub rows: &'a [u64],
    /// Index of the LoRA module in model order.
    pub module: u64,
    /// Probability of dropping, in [0, 1).
    pub p: f32,
}

impl DropoutKey<'_> {
    /// A draw below this drops its element.
    pub fn threshold(&self) -> u32 {
        (f64::from(self.p) * 4_294_967_296.0) as u32
    }

    /// What kept elements are multiplied by, 1 / (1 - p).
    pub fn scale(&self) -> f32 {
        1.0 / (1.0 - self.p)
    }
}

/// What [`super::Backend::rmsnorm`] used and left behind.
#[derive(Debug)]
pub struct Norm<'a, M> {
    /// [1, group]
    pub gain: View<'a, M>,
    /// [T, C / group]
    pub inv_rms: View<'a, M>,
}

/// Inputs of an attention.
#[derive(Debug)]
pub struct Qkv<'a, M> {
    /// [T, H*D]
    pub q: View<'a, M>,
    /// [T, G*D]
    pub k: View<'a, M>,
    /// [T, G*D]
    pub v: View<'a, M>,
}

/// Gradients of an attention's inputs, shaped like them.
#[derive(Debug)]
pub struct QkvGrad<'a, M> {
    /// [T, H*D]
    pub dq: ViewMut<'a, M>,
    /// [T, G*D]
    pub dk: ViewMut<'a, M>,
    /// [T, G*D]
    pub dv: ViewMut<'a, M>,
}

/// Inputs of a causal short convolution.
#[derive(Debug)]
pub struct Gates<'a, M> {
    /// Gate before the convolution [P + T, C].
    pub before: View<'a, M>,
    /// Gate after it [T, C].
    pub after: View<'a, M>,
    /// [P + T, C]
    pub x: View<'a, M>,
}

/// Gradients of a convolution's inputs [T, C].
#[derive(Debug)]
pub struct GatesGrad<'a, M> {
    /// Of the gate before the convolution.
    pub before: ViewMut<'a, M>,
    /// Of the gate after it.
    pub after: ViewMut<'a, M>,
    /// Of x.
    pub x: ViewMut<'a, M>,
}

/// The heads of a gated delta rule: H value heads of size V share G key heads of size K, H a multiple of G.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaHeads {
    /// Value heads H.
    pub values: usize,
    /// Key heads G, those of q and k.
    pub keys: usize,
    /// Size V of a value head.
    pub value_size: usize,
    /// Size K of a key head.
    pub key_size: usize,
}

/// Inputs of a gated delta rule.
#[derive(Debug)]
pub struct Delta<'a, M> {
    /// [T, G*K]
    pub q: View<'a, M>,
    /// [T, G*K]
    pub k: View<'a, M>,
    /// [T, H*V]
    pub v: View<'a, M>,
    /// Before the sigmoid [T, H].
    pub beta: View<'a, M>,
    /// Before the bias and the softplus [T, H].
    pub decay: View<'a, M>,
    /// Rate (negative) and bias of the decay of each value head [2, H].
    pub rates: View<'a, M>,
    /// The heads.
    pub heads: DeltaHeads,
}

/// What a gated delta rule left for its gradient.
#[derive(Debug)]
pub struct DeltaSaved<'a, M> {
    /// The output [T, H*V].
    pub out: View<'a, M>,
    /// [T, H*V]
    pub errors: View<'a, M>,
}

/// Gradients of the inputs of a gated delta rule, shaped like them.
#[derive(Debug)]
pub struct DeltaGrad<'a, M> {
    /// [T, G*K]
    pub dq: ViewMut<'a, M>,
    /// [T, G*K]
    pub dk: ViewMut<'a, M>,
    /// [T, H*V]
    pub dv: ViewMut<'a, M>,
    /// [T, H]
    pub dbeta: ViewMut<'a, M>,
    /// [T, H]
    pub ddecay: ViewMut<'a, M>,
}

/// What an attention's gradient needs of the forward pass.
#[derive(Debug)]
pub struct AttentionSaved<'a, M> {
    /// The inputs.
    pub qkv: Qkv<'a, M>,
    /// The output [T, H*D].
    pub out: View<'a, M>,
    /// [T, H]
    pub logsumexp: View<'a, M>,
}

impl<M> Clone for Qkv<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<M> Copy for Qkv<'_, M> {}
impl<M> Clone for Gates<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<M> Copy for Gates<'_, M> {}
impl<M> Clone for Delta<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<M> Copy for Delta<'_, M> {}
impl<M> Clone for Norm<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<M> Copy for Norm<'_, M> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longer_rows_are_rotated_by_later_rows_of_a_table() {
        let positions = |bounds: &[u32], past, short| {
            TokenRows { ids: &[], bounds, past, short }.positions().collect::<Vec<_>>()
        };
        assert_eq!(positions(&[0, 3, 8], 0, 3), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(positions(&[0, 3, 8], 0, 5), [0, 1, 2, 0, 1, 2, 3, 4]);
        assert_eq!(positions(&[0, 1], 4, 3), [7]);
        assert_eq!(positions(&[0, 1], 4, u32::MAX), [4]);
    }
}
