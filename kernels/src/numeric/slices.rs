//! Where sums are cut, on every backend whose bits are the CPU's: slices of products, parts and blocks of a vocabulary.

/// Most terms of one slice of a product.
pub const SLICE: usize = 768;

/// The slices of an inner dimension: equal parts, in whole 32s, of at most [`SLICE`].
pub fn slices(k: usize) -> impl Iterator<Item = (usize, usize)> {
    let parts = k.div_ceil(SLICE).max(1);
    let size = k.div_ceil(parts).next_multiple_of(32);
    (0..k.max(1)).step_by(size.max(1)).map(move |from| (from, size.min(k - from)))
}

/// Most terms that continue the chain of a frozen product: the rank of an adapter.
pub const RANK: usize = SLICE;

/// Keys of a block of attention, and queries of a block of its gradient.
pub const KEYS: usize = 96;
/// Tokens of a stretch of the gradient of attention: whole blocks, and enough of them that turning queries costs little.
pub const STRETCH: usize = 6 * KEYS;

/// Columns of logits at a time.
pub const BLOCK: usize = 256;
/// Parts of a vocabulary, at most.
const PARTS: usize = 8;

/// Columns of a part of a vocabulary: whole blocks.
pub fn part_of_vocabulary(vocab: usize) -> usize {
    vocab.div_ceil(PARTS).next_multiple_of(BLOCK)
}
