// dx[rows[n]] = dout[n]; the rows are distinct, and dx was filled with zeros.
struct Params { dx_at: u32, dout_at: u32, n: u32, cols: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> dx: array<f32>;
@group(0) @binding(2) var<storage, read> dout: array<f32>;
@group(0) @binding(3) var<storage, read> rows: array<u32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = flat(group, groups) * 256u + lane;
    if (i < p.n) {
        dx[p.dx_at + rows[i / p.cols] * p.cols + i % p.cols] = dout[p.dout_at + i];
    }
}
