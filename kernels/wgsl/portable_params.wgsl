// The arguments of a slice of a product, as in product_params.wgsl; lift is 1. add: 0 sets the output, 1 adds the chain to it, 2
// continues the chain that it holds.
struct Params { out_at: u32, out_stride: u32, a_at: u32, a_row: u32, a_k: u32, b_at: u32, b_k: u32, b_col: u32, m: u32, n: u32, k: u32, scale: f32, add: u32, lift: f32, zero: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<storage, read> a: array<f32>;
@group(0) @binding(3) var<storage, read> b: array<u32>;

fn put(row: u32, col: u32, sum: f32) {
    if (row < p.m && col < p.n) {
        let at = p.out_at + row * p.out_stride + col;
        if (p.add == 1u) {
            out[at] = mad(sum, p.scale, out[at]);
        } else {
            out[at] = sum * p.scale;
        }
    }
}
