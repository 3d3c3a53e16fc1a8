// absmax: f32, 32 bytes of two codes, the first in the upper bits: level absmax.
fn either(even: f32, odd: f32, codes: vec4<u32>) -> vec4<f32> {
    return select(vec4<f32>(even), vec4<f32>(odd), (codes & vec4<u32>(1u)) == vec4<u32>(1u));
}

// A tree of choices: a table that is indexed by a number of a register is stored in slow memory on many cards.
fn codes(block: u32, quad: u32) -> vec4<f32> {
    let word = b[(block >> 2u) + 1u + quad / 2u] >> (quad % 2u * 16u);
    let pairs = vec4<u32>(word) >> vec4<u32>(4u, 0u, 12u, 8u);
    let codes = pairs & vec4<u32>(15u);
    let two = (codes & vec4<u32>(2u)) == vec4<u32>(2u);
    let four = (codes & vec4<u32>(4u)) == vec4<u32>(4u);
    let eight = (codes & vec4<u32>(8u)) == vec4<u32>(8u);
    let low = select(either(-1.0, -0.6961928, codes), either(-0.52507305, -0.3949175, codes), two);
    let middle = select(either(-0.28444138, -0.18477343, codes), either(-0.091050036, 0.0, codes), two);
    let upper = select(either(0.0795803, 0.1609302, codes), either(0.2461123, 0.33791524, codes), two);
    let high = select(either(0.44070983, 0.562617, codes), either(0.72295684, 1.0, codes), two);
    return select(select(low, middle, four), select(upper, high, four), eight);
}

fn scale(block: u32, half: u32) -> vec2<f32> {
    return vec2<f32>(bitcast<f32>(b[block >> 2u]), 0.0);
}
