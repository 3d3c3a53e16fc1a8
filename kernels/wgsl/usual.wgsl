// What kernels of both kinds call, as the driver has it: portable.wgsl has the same with the CPU's bits.
fn settled(x: f32) -> f32 {
    return x;
}

fn mad(a: f32, b: f32, c: f32) -> f32 {
    return a * b + c;
}

// silu(x) and its slope.
fn silu(x: f32) -> vec2<f32> {
    let s = 1.0 / (1.0 + exp(-x));
    return vec2<f32>(x / (1.0 + exp(-x)), s * (1.0 + x * (1.0 - s)));
}
