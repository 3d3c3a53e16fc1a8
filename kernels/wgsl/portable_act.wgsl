// The activation that p.act names and its slope, as in kernels/src/backend/cpu/runtime/math.rs.
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
    if (p.act == 3u) {
        let beyond = x > 7.0;
        let c = select(x, 7.0, beyond);
        let s = sigmoid(settled(1.702 * c));
        let y = settled(c * s);
        return vec2<f32>(y, select(mad(y, settled(1.702 * (1.0 - s)), s), 0.0, beyond));
    }
    return silu(x);
}

// The factor that p.act makes of up, and 1 if it has a gradient.
fn factor(up: f32) -> vec2<f32> {
    if (p.act == 3u) {
        let beyond = up > 7.0 || up < -7.0;
        let v = select(select(up, 7.0, up > 7.0), -7.0, up < -7.0);
        return vec2<f32>(v + 1.0, select(1.0, 0.0, beyond));
    }
    return vec2<f32>(up, 1.0);
}
