// Frozen numbers as their file has them; b is the buffer. ENCODING 0 is f32, 1 pairs of bf16, 2 pairs of f16, low half
// first; from 3 on blocks of ELEMENTS numbers in BYTES bytes, whose own file (unpack_<type>.wgsl) brings
// codes(block, quad): four neighbouring levels, and scale(block, half): what sixteen neighbours are multiplied by, and
// what is added then. Blocks begin at bytes, words are read wherever they begin; the last one has one behind it.
// A number of half precision, spelled out: drivers may lose those that are not normal.
fn half_of(bits: u32) -> f32 {
    let small = f32(bits & 0x3ffu) * 5.9604644775390625e-8;
    let usual = bitcast<f32>(((bits & 0x7fffu) << 13u) + (112u << 23u));
    let size = select(usual, small, (bits & 0x7c00u) == 0u);
    return select(size, -size, bits >= 0x8000u);
}

#if ENCODING < 3
fn unpack(word: u32, index: u32) -> f32 {
    if (ENCODING == 0u) {
        return bitcast<f32>(word);
    }
    if (ENCODING == 1u) {
        return bitcast<f32>(select(word << 16u, word & 0xffff0000u, (index & 1u) == 1u));
    }
    return half_of(select(word & 0xffffu, word >> 16u, (index & 1u) == 1u));
}

// The word that holds a number.
fn word_of(index: u32) -> u32 {
    return select(index >> 1u, index, ENCODING == 0u);
}
#if VECTOR == 0

fn value_of(index: u32) -> f32 {
    return unpack(b[word_of(index)], index);
}
#end
#else
// Four bytes from `at` on.
fn word_at(at: u32) -> u32 {
#if BYTES % 4 == 0
    return b[at >> 2u];
#else
    let shift = (at & 3u) * 8u;
    let word = b[at >> 2u];
    return select((word >> shift) | (b[(at >> 2u) + 1u] << (32u - shift)), word, shift == 0u);
#end
}

fn byte_at(at: u32) -> u32 {
    return (b[at >> 2u] >> ((at & 3u) * 8u)) & 255u;
}

fn bytes_of(word: u32) -> vec4<u32> {
    return (vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(255u);
}

fn half_at(at: u32) -> f32 {
    return half_of((b[at >> 2u] >> ((at & 2u) * 8u)) & 0xffffu);
}

// Four neighbours, the first of which is at a multiple of four.
fn quad_of(index: u32) -> vec4<f32> {
    let block = index / ${ELEMENTS}u * ${BYTES}u;
    let inside = index % ${ELEMENTS}u;
    let by = scale(block, inside / 16u);
    return codes(block, inside / 4u) * by.x + by.y;
}

fn value_of(index: u32) -> f32 {
    return quad_of(index & 0xfffffffcu)[index & 3u];
}
#end
