// Scale and minimum of run `run` (0..8), 6 bits each, out of 12 bytes behind d and dmin: d s and -(dmin m).
fn scale(block: u32, half: u32) -> vec2<f32> {
    let run = half / 2u;
    let first = byte_at(block + 4u + run % 4u);
    let second = byte_at(block + 8u + run % 4u);
    let third = byte_at(block + 12u + run % 4u);
    let late = run >= 4u;
    let s = select(first & 63u, (third & 15u) | ((first >> 6u) << 4u), late);
    let m = select(second & 63u, (third >> 4u) | ((second >> 6u) << 4u), late);
    return vec2<f32>(half_at(block) * f32(s), -(half_at(block + 2u) * f32(m)));
}
