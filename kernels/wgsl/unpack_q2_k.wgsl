// 16 scales (low nibble) and minima (high nibble), 64 bytes of 2-bit numbers, d, dmin: (d s) q - (dmin m), of 16.
fn codes(block: u32, quad: u32) -> vec4<f32> {
    let run = quad / 8u;
    let bytes = bytes_of(word_at(block + 16u + run / 4u * 32u + quad % 8u * 4u));
    return vec4<f32>((bytes >> vec4<u32>(run % 4u * 2u)) & vec4<u32>(3u));
}

fn scale(block: u32, half: u32) -> vec2<f32> {
    let both = byte_at(block + half);
    return vec2<f32>(half_at(block + 80u) * f32(both & 15u), -(half_at(block + 82u) * f32(both >> 4u)));
}
