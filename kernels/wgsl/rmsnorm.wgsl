// out = x * inv_rms * gain, inv_rms = 1 / sqrt(mean(x^2) + eps), one workgroup per group of `size` columns. Where the
// sum of squares is no number that f32 holds, the result is NaN: a clean zero would hide the overflow.
struct Params { out_at: u32, inv_at: u32, x_at: u32, gain_at: u32, count: u32, size: u32, eps: f32, nan: f32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<storage, read_write> inv_rms: array<f32>;
@group(0) @binding(3) var<storage, read> x: array<f32>;
@group(0) @binding(4) var<storage, read> gain: array<f32>;

@compute @workgroup_size(WIDTH)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let g = flat(group, groups);
    if (g >= p.count) {
        return;
    }
    let begin = g * p.size;
    var part = 0.0;
    for (var i = lane; i < p.size; i += WIDTH) {
        let v = x[p.x_at + begin + i];
        part += v * v;
    }
    let mean = sum_of_lanes(part, lane) / f32(p.size);
    let inv = select(1.0 / sqrt(mean + p.eps), p.nan, !(mean < 3.4e38));
    for (var i = lane; i < p.size; i += WIDTH) {
        out[p.out_at + begin + i] = x[p.x_at + begin + i] * inv * gain[p.gain_at + i];
    }
    if (lane == 0u) {
        inv_rms[p.inv_at + g] = inv;
    }
}
