// e: a byte, 16 bytes of two nibbles, low ones first: 2^(e - 128) level. Blocks have 17 bytes, so they begin anywhere.
// Levels 0, 1, 2, 3, 4, 6, 8, 12, negative if bit 3 is set; integers, so that 0 has no sign.
fn codes(block: u32, quad: u32) -> vec4<f32> {
    let bytes = bytes_of(word_at(block + 1u + quad % 4u * 4u)) >> vec4<u32>(quad / 4u * 4u);
    let size = vec4<i32>(bytes & vec4<u32>(7u));
    let more = select(vec4<i32>(0), vec4<i32>(1), size > vec4<i32>(4)) + select(vec4<i32>(0), vec4<i32>(1), size > vec4<i32>(5));
    let level = size + more + select(vec4<i32>(0), vec4<i32>(3), size > vec4<i32>(6));
    return vec4<f32>(select(level, -level, (bytes & vec4<u32>(8u)) == vec4<u32>(8u)));
}

fn scale(block: u32, half: u32) -> vec2<f32> {
    let e = byte_at(block);
    // Shifts by at most 31.
    let small = 0x200000u << min(e, 1u);
    return vec2<f32>(bitcast<f32>(select((max(e, 1u) - 1u) << 23u, small, e < 2u)), 0.0);
}
