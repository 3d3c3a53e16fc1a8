// dscales[n] = sum over c of dx[n, c] * x[n, c], then dx[n, c] *= scales[n], one workgroup per row.
struct Params { dx_at: u32, dscales_at: u32, x_at: u32, scales_at: u32, rows: u32, cols: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> dx: array<f32>;
@group(0) @binding(2) var<storage, read_write> dscales: array<f32>;
@group(0) @binding(3) var<storage, read> x: array<f32>;
@group(0) @binding(4) var<storage, read> scales: array<f32>;

@compute @workgroup_size(WIDTH)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let n = flat(group, groups);
    if (n >= p.rows) {
        return;
    }
    let scale = scales[p.scales_at + n];
    var part = 0.0;
    for (var c = lane; c < p.cols; c += WIDTH) {
        let i = n * p.cols + c;
        let d = dx[p.dx_at + i];
        part += d * x[p.x_at + i];
        dx[p.dx_at + i] = scale * d;
    }
    let sum = sum_of_lanes(part, lane);
    if (lane == 0u) {
        dscales[p.dscales_at + n] = sum;
    }
}
