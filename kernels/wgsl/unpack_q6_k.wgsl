// 128 bytes of nibbles, 64 bytes of the upper 2 bits, 16 x i8 scales, d: (d s) (q - 32), of 16. Halves of 128; in each,
// four runs of 32 share 64 bytes of nibbles and 32 of upper bits.
fn codes(block: u32, quad: u32) -> vec4<f32> {
    let part = quad / 32u;
    let run = quad / 8u % 4u;
    let low = bytes_of(word_at(block + part * 64u + run % 2u * 32u + quad % 8u * 4u)) >> vec4<u32>(run / 2u * 4u);
    let high = bytes_of(word_at(block + 128u + part * 32u + quad % 8u * 4u)) >> vec4<u32>(run * 2u);
    return vec4<f32>((low & vec4<u32>(15u)) | ((high & vec4<u32>(3u)) << vec4<u32>(4u))) - 32.0;
}

fn scale(block: u32, half: u32) -> vec2<f32> {
    let s = bitcast<i32>(byte_at(block + 192u + half) << 24u) >> 24u;
    return vec2<f32>(half_at(block + 208u) * f32(s), 0.0);
}
