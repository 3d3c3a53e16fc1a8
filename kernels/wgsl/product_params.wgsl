// The arguments of every fast product: out[m, n] (=|+=) scale * sum over k of a(row, k) * b(k, col). Strides say which
// factor is transposed; those of b count numbers, also where two of them share a word. lift, a power of two, multiplies a
// before it is rounded (and the sum is divided by it), so that small gradients stay above f16's least number.
// A sum may be cut into `parts` of `terms` (a variant of the tiled kernel): then out holds one matrix after the other.
struct Params { out_at: u32, out_stride: u32, a_at: u32, a_row: u32, a_k: u32, b_at: u32, b_k: u32, b_col: u32, m: u32, n: u32, k: u32, scale: f32, add: u32, lift: f32, parts: u32, terms: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<storage, read> a: array<f32>;
#if VECTOR
@group(0) @binding(3) var<storage, read> b: array<vec4<u32>>;
#else
@group(0) @binding(3) var<storage, read> b: array<u32>;
#end

fn put(row: u32, col: u32, value: f32) {
    if (row < p.m && col < p.n) {
        let at = p.out_at + row * p.out_stride + col;
        if (p.add == 1u) {
            out[at] += value;
        } else {
            out[at] = value;
        }
    }
}
