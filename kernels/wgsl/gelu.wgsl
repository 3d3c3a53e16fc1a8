// gelu in its tanh form: 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)) with 2 u = 1.5957691216 (x + 0.044715 x^3). Where |x| is
// above 10 the quotient is x or below 1e-37 |x|: x is bounded there, so that no driver's exp overflows.
fn gelu_exp(x: f32) -> f32 {
    let c = clamp(x, -10.0, 10.0);
    return exp(-1.5957691216 * c * (1.0 + 0.044715 * c * c));
}

// The derivative of 2 u.
fn gelu_slope(x: f32) -> f32 {
    let c = clamp(x, -10.0, 10.0);
    return 1.5957691216 * (1.0 + 0.134145 * c * c);
}
