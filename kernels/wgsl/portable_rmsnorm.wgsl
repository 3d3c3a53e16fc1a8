// rmsnorm.wgsl with the CPU's bits.
struct Params { out_at: u32, inv_at: u32, x_at: u32, gain_at: u32, count: u32, size: u32, eps: f32, nan: f32, zero: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<storage, read_write> inv_rms: array<f32>;
@group(0) @binding(3) var<storage, read> x: array<f32>;
@group(0) @binding(4) var<storage, read> gain: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let number = flat(group, groups) * 4u + lane / 16u;
    let there = number < p.count;
    let g = min(number, p.count - 1u);
    let begin = p.x_at + g * p.size;
    var part = 0.0;
    for (var i = lane % 16u; i < p.size; i += 16u) {
        part = mad(x[begin + i], x[begin + i], part);
    }
    let mean = divided(sum_of_lanes(part, lane), f32(p.size));
    var inv = divided(1.0, root(mean + p.eps));
    // A sum that overflows would make a clean zero.
    inv = select(inv, p.nan, !(mean < 3.4e38));
    if (there) {
        for (var i = lane % 16u; i < p.size; i += 16u) {
            out[p.out_at + g * p.size + i] = settled(x[begin + i] * inv) * gain[p.gain_at + i];
        }
        if (lane % 16u == 0u) {
            inv_rms[p.inv_at + g] = inv;
        }
    }
}
