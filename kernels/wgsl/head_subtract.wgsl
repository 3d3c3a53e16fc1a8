// dx[n, cols] -= the rows of a frozen matrix that targets name, of those that this part of it, b, holds. `zero` is 0, which
// the driver does not know: it cannot fuse the product that a number of a block is with the subtraction.
struct Params { dx_at: u32, targets_at: u32, n: u32, cols: u32, first: u32, rows: u32, zero: u32 }
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
        let value = value_of(row * p.cols + i % p.cols);
        dx[p.dx_at + i] -= bitcast<f32>(bitcast<u32>(value) ^ p.zero);
    }
}
