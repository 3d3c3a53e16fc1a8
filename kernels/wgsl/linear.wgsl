// y[T, N] (=|+=) x[T, K] w^T over some rows of a frozen weight [N, K].
struct Params { out_at: u32, out_stride: u32, x_at: u32, x_stride: u32, w_at: u32, w_stride: u32, m: u32, n: u32, k: u32, scale: f32, add: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read> b: array<u32>;

const LEFT_ACROSS: u32 = 0u;
const RIGHT_ACROSS: u32 = 0u;

fn left(row: u32, k: u32) -> f32 {
    return x[p.x_at + row * p.x_stride + k];
}

fn right(k: u32, col: u32) -> f32 {
    let at = p.w_at + col * p.w_stride + k;
    return value_of(at);
}
