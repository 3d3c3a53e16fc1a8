// out[t] = after[t] * the sum over j of taps[j] * (before * x)[t - j], as far as token t - j is in the row of token t.
// before and x have `above` rows more than the tokens, above them. With dout for after this is the gradient of after.
struct Params { out_at: u32, before_at: u32, after_at: u32, x_at: u32, taps_at: u32, positions_at: u32, n: u32, cols: u32, count: u32, above: u32, zero: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<storage, read> before: array<f32>;
@group(0) @binding(3) var<storage, read> after: array<f32>;
@group(0) @binding(4) var<storage, read> x: array<f32>;
@group(0) @binding(5) var<storage, read> taps: array<f32>;
@group(0) @binding(6) var<storage, read> positions: array<u32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = flat(group, groups) * 256u + lane;
    if (i >= p.n) {
        return;
    }
    let t = i / p.cols;
    let c = i % p.cols;
    let last = min(p.count - 1u, positions[p.positions_at + t]);
    var sum = 0.0;
    for (var j = 0u; j <= last; j += 1u) {
        let at = (p.above + t - j) * p.cols + c;
        sum = mad(taps[p.taps_at + j * p.cols + c], settled(before[p.before_at + at] * x[p.x_at + at]), sum);
    }
    out[p.out_at + i] = after[p.after_at + i] * sum;
}
