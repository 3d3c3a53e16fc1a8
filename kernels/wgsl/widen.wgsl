// out = some whole rows of a frozen matrix in blocks, b: a lane makes the four neighbours of a quad. For kernels that
// unpack too often where they are used.
struct Params { out_at: u32, first: u32, quads: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<storage, read> b: array<u32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = flat(group, groups) * 256u + lane;
    if (i < p.quads) {
        let four = quad_of(p.first + i * 4u);
        let at = p.out_at + i * 4u;
        out[at] = four.x;
        out[at + 1u] = four.y;
        out[at + 2u] = four.z;
        out[at + 3u] = four.w;
    }
}
