// d: f16, 16 bytes of two nibbles, low ones first: d (q - 8).
fn codes(block: u32, quad: u32) -> vec4<f32> {
    let bytes = bytes_of(word_at(block + 2u + quad % 4u * 4u));
    return vec4<f32>((bytes >> vec4<u32>(quad / 4u * 4u)) & vec4<u32>(15u)) - 8.0;
}

fn scale(block: u32, half: u32) -> vec2<f32> {
    return vec2<f32>(half_at(block), 0.0);
}
