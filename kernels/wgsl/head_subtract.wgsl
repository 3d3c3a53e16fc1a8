// The numbers of blocks are exact products here, so that a driver that fuses them with the subtraction changes no bit.
// dx[n, cols] -= the rows of a frozen matrix that targets name, of those that this part of it, b, holds.
struct Params { dx_at: u32, targets_at: u32, n: u32, cols: u32, first: u32, rows: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> dx: array<f32>;
@group(0) @binding(2) var<storage, read> b: array<u32>;
@group(0) @binding(3) var<storage, read> targets: array<u32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = flat(group, groups) * 256u + lane;
    if (i >= p.n) {
        return;
    }
    let row = targets[p.targets_at + i / p.cols] - p.first;
    if (row < p.rows) {
        dx[p.dx_at + i] -= value_of(row * p.cols + i % p.cols);
    }
}
