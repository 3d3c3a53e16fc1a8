// 32 bytes of third bits, 64 bytes of 2-bit numbers, 12 bytes of 6-bit scales, d:
// (d (s - 32)) (q - 4 where the third bit is not set), of 16.
fn codes(block: u32, quad: u32) -> vec4<f32> {
    let run = quad / 8u;
    let low = bytes_of(word_at(block + 32u + run / 4u * 32u + quad % 8u * 4u)) >> vec4<u32>(run % 4u * 2u);
    let high = bytes_of(word_at(block + quad % 8u * 4u)) >> vec4<u32>(run);
    return vec4<f32>((low & vec4<u32>(3u)) | ((high & vec4<u32>(1u)) << vec4<u32>(2u))) - 4.0;
}

fn scale(block: u32, half: u32) -> vec2<f32> {
    let low = (byte_at(block + 96u + half % 8u) >> (half / 8u * 4u)) & 15u;
    let top = (byte_at(block + 104u + half % 4u) >> (half / 4u * 2u)) & 3u;
    return vec2<f32>(half_at(block + 108u) * (f32(low | (top << 4u)) - 32.0), 0.0);
}
