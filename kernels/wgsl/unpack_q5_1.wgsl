// d, m: f16, 32 fifth bits, nibbles as Q4_0: d q + m.
fn codes(block: u32, quad: u32) -> vec4<f32> {
    let bytes = bytes_of(word_at(block + 8u + quad % 4u * 4u));
    let low = (bytes >> vec4<u32>(quad / 4u * 4u)) & vec4<u32>(15u);
    let fifths = vec4<u32>(word_at(block + 4u) >> (quad * 4u)) >> vec4<u32>(0u, 1u, 2u, 3u);
    return vec4<f32>(low | ((fifths & vec4<u32>(1u)) << vec4<u32>(4u)));
}

fn scale(block: u32, half: u32) -> vec2<f32> {
    return vec2<f32>(half_at(block), half_at(block + 2u));
}
