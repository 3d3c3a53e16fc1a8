// out[T, C] = scale table[ids[T]], of those ids that this part of the table, b, holds.
struct Params { out_at: u32, ids_at: u32, n: u32, cols: u32, first: u32, rows: u32, scale: f32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<storage, read> b: array<u32>;
@group(0) @binding(3) var<storage, read> ids: array<u32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = flat(group, groups) * 256u + lane;
    if (i >= p.n) {
        return;
    }
    let row = ids[p.ids_at + i / p.cols] - p.first;
    if (row < p.rows) {
        let at = row * p.cols + i % p.cols;
        out[p.out_at + i] = p.scale * value_of(at);
    }
}
