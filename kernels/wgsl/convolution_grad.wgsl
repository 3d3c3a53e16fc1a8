// s = the sum over j of taps[j] * (dout * after)[t + j], as far as token t + j is in the row of token t;
// dbefore = s * x, dx = s * before. `left` is the number of tokens from the first of n / cols on.
struct Params { dbefore_at: u32, dx_at: u32, dout_at: u32, before_at: u32, after_at: u32, x_at: u32, taps_at: u32, positions_at: u32, n: u32, cols: u32, count: u32, left: u32, zero: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> dbefore: array<f32>;
@group(0) @binding(2) var<storage, read_write> dx: array<f32>;
@group(0) @binding(3) var<storage, read> dout: array<f32>;
@group(0) @binding(4) var<storage, read> before: array<f32>;
@group(0) @binding(5) var<storage, read> after: array<f32>;
@group(0) @binding(6) var<storage, read> x: array<f32>;
@group(0) @binding(7) var<storage, read> taps: array<f32>;
@group(0) @binding(8) var<storage, read> positions: array<u32>;

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
        if (positions[p.positions_at + t + j] >= j) {
            let at = i + j * p.cols;
            sum = mad(taps[p.taps_at + j * p.cols + c], settled(dout[p.dout_at + at] * after[p.after_at + at]), sum);
        }
    }
    dbefore[p.dbefore_at + i] = sum * x[p.x_at + i];
    dx[p.dx_at + i] = sum * before[p.before_at + i];
}
