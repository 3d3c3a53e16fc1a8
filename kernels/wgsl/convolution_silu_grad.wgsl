// dx[t] = the sum over j of taps[j] * (dout * silu'(u))[t + j], as far as token t + j is in the row of token t, where u is the
// sum of convolution_silu.wgsl. `left` is the number of tokens from the first of n / cols on; x has `above` rows above it.
struct Params { dx_at: u32, dout_at: u32, x_at: u32, taps_at: u32, positions_at: u32, n: u32, cols: u32, count: u32, left: u32, above: u32, zero: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> dx: array<f32>;
@group(0) @binding(2) var<storage, read> dout: array<f32>;
@group(0) @binding(3) var<storage, read> x: array<f32>;
@group(0) @binding(4) var<storage, read> taps: array<f32>;
@group(0) @binding(5) var<storage, read> positions: array<u32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = flat(group, groups) * 256u + lane;
    if (i >= p.n) {
        return;
    }
    let t = i / p.cols;
    let c = i % p.cols;
    let end = min(p.count, p.left - t);
    var sum = 0.0;
    for (var j = 0u; j < end; j += 1u) {
        let position = positions[p.positions_at + t + j];
        if (position >= j) {
            var u = 0.0;
            for (var b = 0u; b <= min(p.count - 1u, position); b += 1u) {
                u = mad(taps[p.taps_at + b * p.cols + c], x[p.x_at + (p.above + t + j - b) * p.cols + c], u);
            }
            sum = mad(taps[p.taps_at + j * p.cols + c], settled(dout[p.dout_at + i + j * p.cols] * silu(u).y), sum);
        }
    }
    dx[p.dx_at + i] = sum;
}
