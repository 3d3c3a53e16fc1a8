// dx (=|+=) inv_rms * (gain*dy - x * inv_rms^2 * mean(gain*dy*x)), one workgroup per group of `size` columns.
struct Params { dx_at: u32, dy_at: u32, x_at: u32, gain_at: u32, inv_at: u32, count: u32, size: u32, add: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> dx: array<f32>;
@group(0) @binding(2) var<storage, read> dy: array<f32>;
@group(0) @binding(3) var<storage, read> x: array<f32>;
@group(0) @binding(4) var<storage, read> gain: array<f32>;
@group(0) @binding(5) var<storage, read> inv_rms: array<f32>;

@compute @workgroup_size(WIDTH)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let g = flat(group, groups);
    if (g >= p.count) {
        return;
    }
    let begin = g * p.size;
    var part = 0.0;
    for (var i = lane; i < p.size; i += WIDTH) {
        part += gain[p.gain_at + i] * dy[p.dy_at + begin + i] * x[p.x_at + begin + i];
    }
    let mean = sum_of_lanes(part, lane) / f32(p.size);
    let inv = inv_rms[p.inv_at + g];
    let pull = mean * inv * inv;
    for (var i = lane; i < p.size; i += WIDTH) {
        var d = inv * (gain[p.gain_at + i] * dy[p.dy_at + begin + i] - x[p.x_at + begin + i] * pull);
        if (p.add == 1u) {
            d += dx[p.dx_at + begin + i];
        }
        dx[p.dx_at + begin + i] = d;
    }
}
