// d: f16, 32 x i8: d q.
fn codes(block: u32, quad: u32) -> vec4<f32> {
    let word = vec4<u32>(word_at(block + 2u + quad * 4u));
    return vec4<f32>(bitcast<vec4<i32>>(word << vec4<u32>(24u, 16u, 8u, 0u)) >> vec4<u32>(24u));
}

fn scale(block: u32, half: u32) -> vec2<f32> {
    return vec2<f32>(half_at(block), 0.0);
}
