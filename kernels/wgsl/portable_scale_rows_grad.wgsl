// scale_rows_grad.wgsl with the CPU's bits.
struct Params { dx_at: u32, dscales_at: u32, x_at: u32, scales_at: u32, rows: u32, cols: u32, zero: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> dx: array<f32>;
@group(0) @binding(2) var<storage, read_write> dscales: array<f32>;
@group(0) @binding(3) var<storage, read> x: array<f32>;
@group(0) @binding(4) var<storage, read> scales: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let number = flat(group, groups) * 4u + lane / 16u;
    let there = number < p.rows;
    let n = min(number, p.rows - 1u);
    let scale = scales[p.scales_at + n];
    var part = 0.0;
    for (var c = lane % 16u; c < p.cols; c += 16u) {
        part = mad(dx[p.dx_at + n * p.cols + c], x[p.x_at + n * p.cols + c], part);
    }
    let sum = sum_of_lanes(part, lane);
    if (there) {
        for (var c = lane % 16u; c < p.cols; c += 16u) {
            dx[p.dx_at + n * p.cols + c] *= scale;
        }
        if (lane % 16u == 0u) {
            dscales[p.dscales_at + n] = sum;
        }
    }
}
