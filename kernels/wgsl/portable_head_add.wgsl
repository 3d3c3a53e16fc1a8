// dx[n, cols] (=|+=) by[n] * x[n, cols], with the CPU's bits.
struct Params { dx_at: u32, x_at: u32, by_at: u32, n: u32, cols: u32, add: u32, zero: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> dx: array<f32>;
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read> by: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = flat(group, groups) * 256u + lane;
    if (i >= p.n) {
        return;
    }
    let factor = by[p.by_at + i / p.cols];
    if (p.add == 1u) {
        dx[p.dx_at + i] = mad(x[p.x_at + i], factor, dx[p.dx_at + i]);
    } else {
        dx[p.dx_at + i] = x[p.x_at + i] * factor;
    }
}
