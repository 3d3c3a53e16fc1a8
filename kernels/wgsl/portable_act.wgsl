// The activation that p.act names and its slope, as in src/backend/cpu/runtime/math.rs.
fn act(x: f32) -> vec2<f32> {
    if (p.act == 1u) {
        let square = settled(x * x);
        let s = sigmoid(settled(x * mad(0.071354814, square, 1.5957692)));
        let gelu = settled(x * s);
        return vec2<f32>(gelu, mad(settled(gelu * (1.0 - s)), mad(3.0 * 0.071354814, square, 1.5957692), s));
    }
    if (p.act == 2u) {
        let s = sigmoid(x);
        return vec2<f32>(s, settled(s * (1.0 - s)));
    }
    return silu(x);
}
