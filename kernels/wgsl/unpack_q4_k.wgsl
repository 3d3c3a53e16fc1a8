// d, dmin, 12 bytes of scales and minima, 128 bytes of nibbles: (d s) q - (dmin m), of 32.
fn codes(block: u32, quad: u32) -> vec4<f32> {
    let run = quad / 8u;
    let bytes = bytes_of(word_at(block + 16u + run / 2u * 32u + quad % 8u * 4u));
    return vec4<f32>((bytes >> vec4<u32>(run % 2u * 4u)) & vec4<u32>(15u));
}
