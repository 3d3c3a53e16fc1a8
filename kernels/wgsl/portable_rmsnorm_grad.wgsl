// rmsnorm_grad.wgsl with the CPU's bits.
struct Params { dx_at: u32, dy_at: u32, x_at: u32, gain_at: u32, inv_at: u32, count: u32, size: u32, add: u32, zero: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> dx: array<f32>;
@group(0) @binding(2) var<storage, read> dy: array<f32>;
@group(0) @binding(3) var<storage, read> x: array<f32>;
@group(0) @binding(4) var<storage, read> gain: array<f32>;
@group(0) @binding(5) var<storage, read> inv_rms: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let number = flat(group, groups) * 4u + lane / 16u;
    let there = number < p.count;
    let g = min(number, p.count - 1u);
    let begin = g * p.size;
    var part = 0.0;
    for (var i = lane % 16u; i < p.size; i += 16u) {
        part = mad(settled(gain[p.gain_at + i] * dy[p.dy_at + begin + i]), x[p.x_at + begin + i], part);
    }
    let inv = inv_rms[p.inv_at + g];
    let along = settled(settled(divided(sum_of_lanes(part, lane), f32(p.size)) * inv) * inv);
    if (there) {
        for (var i = lane % 16u; i < p.size; i += 16u) {
            let pull = settled(x[p.x_at + begin + i] * along);
            let d = settled(inv * (settled(gain[p.gain_at + i] * dy[p.dy_at + begin + i]) - pull));
            let old = select(0.0, dx[p.dx_at + begin + i], p.add == 1u);
            dx[p.dx_at + begin + i] = select(d, old + d, p.add == 1u);
        }
    }
}
