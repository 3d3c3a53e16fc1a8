// out[m, n] (=|+=) scale * op(a) op(b); strides say which operand is transposed.
struct Params { out_at: u32, out_stride: u32, a_at: u32, a_row: u32, a_k: u32, b_at: u32, b_k: u32, b_col: u32, m: u32, n: u32, k: u32, scale: f32, add: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<storage, read> a: array<f32>;
@group(0) @binding(3) var<storage, read> b: array<f32>;

fn left(row: u32, k: u32) -> f32 {
    return a[p.a_at + row * p.a_row + k * p.a_k];
}

fn right(k: u32, col: u32) -> f32 {
    return b[p.b_at + k * p.b_k + col * p.b_col];
}
