// As Q4_K with 32 bytes of fifth bits before the nibbles.
fn codes(block: u32, quad: u32) -> vec4<f32> {
    let run = quad / 8u;
    let low = bytes_of(word_at(block + 48u + run / 2u * 32u + quad % 8u * 4u)) >> vec4<u32>(run % 2u * 4u);
    let high = bytes_of(word_at(block + 16u + quad % 8u * 4u)) >> vec4<u32>(run);
    return vec4<f32>((low & vec4<u32>(15u)) | ((high & vec4<u32>(1u)) << vec4<u32>(4u)));
}
