// Frozen numbers as their file has them: ENCODING 0 is f32, 1 pairs of bf16, 2 pairs of f16, low half first.
fn unpack(word: u32, index: u32) -> f32 {
    if (ENCODING == 0u) {
        return bitcast<f32>(word);
    }
    if (ENCODING == 1u) {
        return bitcast<f32>(select(word << 16u, word & 0xffff0000u, (index & 1u) == 1u));
    }
    let pair = unpack2x16float(word);
    return select(pair.x, pair.y, (index & 1u) == 1u);
}

// The word that holds a number.
fn word_of(index: u32) -> u32 {
    return select(index >> 1u, index, ENCODING == 0u);
}
