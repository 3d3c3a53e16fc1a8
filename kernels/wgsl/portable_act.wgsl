// The activation that p.act names and its slope, as in kernels/src/backend/cpu/runtime/math.rs.
fn act(x: f32) -> vec2<f32> {
    let square = settled(x * x);
    let beyond = p.act == 3u && x > 7.0;
    let c = select(x, 7.0, beyond);
    // GELU by the sigmoid of a polynomial; a clamped gate by that of 1.702 times it.
    let steep = select(1.0, 1.702, p.act == 3u);
    var at = settled(steep * c);
    if (p.act == 1u) {
        at = settled(x * mad(0.071354814, square, 1.5957692));
    }
    let s = sigmoid(at);
    let y = settled(c * s);
    if (p.act == 1u) {
        return vec2<f32>(y, mad(settled(y * (1.0 - s)), mad(3.0 * 0.071354814, square, 1.5957692), s));
    }
    if (p.act == 2u) {
        return vec2<f32>(s, settled(s * (1.0 - s)));
    }
    return vec2<f32>(y, select(mad(y, settled(steep * (1.0 - s)), s), 0.0, beyond));
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
